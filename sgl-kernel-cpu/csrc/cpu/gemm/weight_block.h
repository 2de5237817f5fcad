// Where a block of weights is: in place, or gathered into scratch. Part of the GEMM family,
// compiled per tier.
#pragma once

#include "gemm/gemm.h"

namespace sgl_kernel {
namespace SGL_TIER {

// Element (column, k) of a block in scratch.
SGL_INLINE int64_t gathered_index(int64_t column, int64_t k) {
  return ((k / 2) * kBlockN + column) * 2 + (k & 1);
}

// Columns [n0, n0 + width) of a row-major weight.
template <typename packed_t>
static void gather_rows(const packed_t* weight, int64_t K, int64_t n0, int64_t width, int64_t k0,
                        int64_t depth, packed_t* scratch) {
  for (int64_t column = 0; column < width; ++column) {
    const packed_t* row = weight + (n0 + column) * K + k0;
    for (int64_t k = 0; k + 1 < depth; k += 2) {
      memcpy(scratch + gathered_index(column, k), row + k, 2 * sizeof(packed_t));
    }
    if (depth % 2 != 0) scratch[gathered_index(column, depth - 1)] = row[depth - 1];
  }
}

// The same of a packed weight: whole rows of pairs where k0 is even, single elements otherwise.
template <typename packed_t>
static void gather_packed(const packed_t* weight, int64_t N, int64_t K, int64_t n0, int64_t width,
                          int64_t k0, int64_t depth, packed_t* scratch) {
  int64_t k = 0;
  if (k0 % 2 == 0) {
    for (; k + 1 < depth; k += 2) {
      memcpy(scratch + gathered_index(0, k), weight + packed_index(N, K, n0, k0 + k),
             width * 2 * sizeof(packed_t));
    }
  }
  for (; k < depth; ++k) {
    for (int64_t column = 0; column < width; ++column) {
      scratch[gathered_index(column, k)] = weight[packed_index(N, K, n0 + column, k0 + k)];
    }
  }
}

// The k pairs [k0, k0 + depth) of column block n0 as [ceil(depth / 2), 32, 2]. Points into the
// weight where it already stands so; ragged columns, odd depths and unpacked weights are gathered
// into `scratch`, padded with zeros.
template <typename packed_t>
SGL_INLINE const packed_t* weight_block(const GemmArgs& args, int64_t n0, int64_t k0, int64_t depth,
                                        packed_t* scratch) {
  const packed_t* weight = static_cast<const packed_t*>(args.mat2);
  const int64_t width = min_i64(kBlockN, args.N - n0);
  if (args.is_vnni && width == kBlockN && k0 % 2 == 0 && depth % 2 == 0) {
    return weight + n0 * args.K + k0 * kBlockN;
  }
  memset(static_cast<void*>(scratch), 0, round_up(depth, 2) * kBlockN * sizeof(packed_t));
  if (args.is_vnni) {
    gather_packed(weight, args.N, args.K, n0, width, k0, depth, scratch);
  } else {
    gather_rows(weight, args.K, n0, width, k0, depth, scratch);
  }
  return scratch;
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
