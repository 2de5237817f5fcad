// What the dot policies share that multiply bf16 pairs.
#pragma once

#include "simd/vec.h"

namespace sgl_kernel {
namespace SGL_TIER {

// Weights and mat1 as bf16 pairs, one 32-bit element a pair.
struct Bf16Pairs {
  static constexpr int kAccumulators = 1;
  static constexpr int kVecs = kPairVecs;
  static constexpr bool kTakesFp16Bits = false;

  template <typename packed_t>
  SGL_INLINE void load_weights(const packed_t* packed, Vec* weights) {
    load_pairs(packed, weights);
  }
  // k elements of a row as they are, then zeros up to padded_k.
  SGL_INLINE void convert_row(const bf16_t* src, int64_t k, int64_t padded_k, float, float* dst,
                              int64_t) {
    bf16_t* row = reinterpret_cast<bf16_t*>(dst);
    memcpy(row, src, k * sizeof(bf16_t));
    memset(static_cast<void*>(row + k), 0, (padded_k - k) * sizeof(bf16_t));
  }
};

}  // namespace SGL_TIER
}  // namespace sgl_kernel
