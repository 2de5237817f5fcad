// Whether two strided views of memory share a byte. Kernels read what they need while they write:
// an output that lies in an input gives wrong numbers, silently. The ops ask here first.
#pragma once

#include <cstdint>

namespace sgl_kernel {

// A tensor's memory. Strides in elements, 0 or more.
struct MemoryView {
  const void* data;
  int64_t element_bytes;
  int64_t dims;
  const int64_t* sizes;
  const int64_t* strides;
};

// From the first byte to one behind the last; equal where there are no elements.
struct ByteRange {
  uintptr_t begin;
  uintptr_t end;
};
ByteRange byte_range(const MemoryView& view);

// Whether two elements of a view share a byte. Exact where strides nest (each is at least as long
// as all that lies inside); others, which transposing and slicing never make, count as overlapping.
bool overlaps_itself(const MemoryView& view);

// Whether a byte belongs to both. Exact: slices of one tensor that interleave do not overlap. Only
// where strides are so odd that looking takes more than some ten microseconds it says yes unseen.
bool overlap(const MemoryView& a, const MemoryView& b);

}  // namespace sgl_kernel
