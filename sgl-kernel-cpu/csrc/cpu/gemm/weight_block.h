// Where a block of weights is: in place, or gathered into scratch. Part of the GEMM family,
// compiled per tier.
#pragma once

#include "gemm/gemm.h"

namespace sgl_kernel {
namespace SGL_TIER {

// A block of weights: columns [n0, n0 + 32) as far as they exist, elements [k0, k0 + depth) of K.
struct WeightBlock {
  int64_t n0;
  int64_t k0;
  int64_t depth;
};

// Element (column, k) of a block in scratch.
SGL_INLINE int64_t gathered_index(int64_t column, int64_t k) {
  return ((k / 2) * kBlockN + column) * 2 + (k & 1);
}

// Of a row-major weight.
template <typename packed_t>
static void gather_rows(const GemmArgs& args, const WeightBlock& block, packed_t* scratch) {
  const packed_t* weight = static_cast<const packed_t*>(args.mat2);
  const int64_t width = min_i64(kBlockN, args.N - block.n0);
  for (int64_t column = 0; column < width; ++column) {
    const packed_t* row = weight + (block.n0 + column) * args.K + block.k0;
    for (int64_t k = 0; k + 1 < block.depth; k += 2) {
      memcpy(scratch + gathered_index(column, k), row + k, 2 * sizeof(packed_t));
    }
    if (block.depth % 2 != 0) {
      scratch[gathered_index(column, block.depth - 1)] = row[block.depth - 1];
    }
  }
}

// Of a packed weight: whole rows of pairs where k0 is even, single elements otherwise.
template <typename packed_t>
static void gather_packed(const GemmArgs& args, const WeightBlock& block, packed_t* scratch) {
  const packed_t* weight = static_cast<const packed_t*>(args.mat2);
  const int64_t width = min_i64(kBlockN, args.N - block.n0);
  const auto place = [&](int64_t column, int64_t k) {
    return packed_index(args.N, args.K, block.n0 + column, block.k0 + k);
  };
  int64_t k = 0;
  if (block.k0 % 2 == 0) {
    for (; k + 1 < block.depth; k += 2) {
      memcpy(scratch + gathered_index(0, k), weight + place(0, k), width * 2 * sizeof(packed_t));
    }
  }
  for (; k < block.depth; ++k) {
    for (int64_t column = 0; column < width; ++column) {
      scratch[gathered_index(column, k)] = weight[place(column, k)];
    }
  }
}

// The block as k pairs [ceil(depth / 2), 32, 2]. Points into the weight where it already stands so;
// ragged columns, odd depths and unpacked weights are gathered into `scratch`, padded with zeros.
template <typename packed_t>
SGL_INLINE const packed_t* weight_block(const GemmArgs& args, const WeightBlock& block,
                                        packed_t* scratch) {
  const bool is_whole = args.N - block.n0 >= kBlockN;
  if (args.is_vnni && is_whole && block.k0 % 2 == 0 && block.depth % 2 == 0) {
    return static_cast<const packed_t*>(args.mat2) + block.n0 * args.K + block.k0 * kBlockN;
  }
  memset(static_cast<void*>(scratch), 0, round_up(block.depth, 2) * kBlockN * sizeof(packed_t));
  if (args.is_vnni) {
    gather_packed(args, block, scratch);
  } else {
    gather_rows(args, block, scratch);
  }
  return scratch;
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
