// The packed (VNNI) weight layout, defined in this one place.
//
// A row-major weight [N, K] is cut into blocks of 32 output columns. Inside a block of width w
// (32, or N % 32 in the last one) the elements stand as [K/2, w, 2]: two consecutive k of one
// column side by side, columns next, so that one load brings 32 columns of a k pair. With an odd K
// the last k follows as [w]. The packed weight therefore has exactly the N*K elements of its
// source, for every N and K, and for N % 32 == 0 and even K it is the layout of SGLang's
// `convert_weight_packed`.
#pragma once

#include <cstdint>

#include "simd/int_math.h"
#include "simd/weight_pairs.h"

namespace sgl_kernel {

// Index of element (n, k) inside a packed [N, K] weight.
SGL_INLINE int64_t packed_index(int64_t N, int64_t K, int64_t n, int64_t k) {
  const int64_t n0 = n / kBlockN * kBlockN;
  const int64_t width = min_i64(kBlockN, N - n0);
  const int64_t column = n - n0;
  const int64_t even_k = K & ~int64_t{1};
  const int64_t inside =
      k < even_k ? ((k / 2) * width + column) * 2 + (k & 1) : even_k * width + column;
  return n0 * K + inside;
}

// A contiguous row-major weight and the memory for its packed form, which do not overlap.
struct PackArgs {
  const void* src = nullptr;  // [N, K]
  void* dst = nullptr;        // N * K elements
  int64_t element_bytes = 0;  // 1 or 2
  int64_t N = 0;
  int64_t K = 0;
};

// Packs the blocks of columns [block_begin, block_end), of ceil(N / 32).
void pack_weight_blocks(const PackArgs& args, int64_t block_begin, int64_t block_end);

}  // namespace sgl_kernel
