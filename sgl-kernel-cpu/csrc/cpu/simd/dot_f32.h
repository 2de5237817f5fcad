// The dot policy that every tier has: f32 fused multiply-adds. dot.h says what a policy is.
#pragma once

#include "simd/e4m3_fp16_bits.h"
#include "simd/vec.h"
#include "simd/weight_pairs.h"

namespace sgl_kernel {
namespace SGL_TIER {

// Tiers without tiles have no tile state.
struct NoTileState {
  SGL_MEMBER NoTileState() {}
};

constexpr int kColumnVecs = static_cast<int>(kBlockN) / kLanes;

struct DotF32 {
  // Accumulators of an output element: even k and odd k. A k pair is that many 32-bit elements of
  // mat1, and kVecs vectors of weights: the columns of the first accumulator, then those of the
  // second.
  static constexpr int kAccumulators = 2;
  static constexpr int kVecs = kAccumulators * kColumnVecs;
  static constexpr int kSplits = 1;  // rows that one row of mat1 becomes
  static constexpr int64_t kKC = 256;
  static constexpr int64_t kAccumulatedPairs = kKC / 2;
  static constexpr int64_t kMostRows = 4;  // that tinygemm_kernel2 takes
  static constexpr int64_t kPadPairs = 1;  // pairs of mat1 and of a panel come in multiples
  static constexpr int64_t kPadRows = 1;
  static constexpr bool kTiles = false;
  static constexpr bool kFlushSubnormals = false;
  static constexpr bool kTakesFp16Bits = true;  // e4m3 weights come as fp16 bits
  using TileState = NoTileState;

  // One k pair of 32 columns: e4m3 as fp16 bits, or packed bf16 or fp16.
  SGL_INLINE void load_weights(const E4m3AsFp16* widened, Vec* weights) {
#pragma GCC unroll 16
    for (int i = 0; i < kVecs; ++i) weights[i] = load_act(widened + i * kLanes);
  }
  SGL_INLINE void load_weights(const bf16_t* packed, Vec* weights) {
#pragma GCC unroll 16
    for (int i = 0; i < kColumnVecs; ++i) {
      const Vec pairs = load(reinterpret_cast<const float*>(packed) + i * kLanes);
      weights[i] = even_k(pairs);
      weights[kColumnVecs + i] = odd_k(pairs);
    }
  }
  SGL_INLINE void load_weights(const fp16_t* packed, Vec* weights) {
#pragma GCC unroll 16
    for (int i = 0; i < kColumnVecs; ++i) {
      widen_pairs(packed + 2 * i * kLanes, &weights[i], &weights[kColumnVecs + i]);
    }
  }
  // c + a * b
  SGL_INLINE Vec dot(Vec a, Vec b, Vec c) { return fma(a, b, c); }

  // k elements of a row of mat1 as f32 times `scale`, then zeros up to padded_k.
  template <typename scalar_t>
  SGL_INLINE void convert_row(const scalar_t* src, int64_t k, int64_t padded_k, float scale,
                              float* dst, int64_t) {
    int64_t i = 0;
    for (; i + kLanes <= k; i += kLanes) store(dst + i, mul(load_act(src + i), set1(scale)));
    for (; i < k; ++i) dst[i] = to_float(src[i]) * scale;
    for (; i < padded_k; ++i) dst[i] = 0.f;
  }
};

}  // namespace SGL_TIER
}  // namespace sgl_kernel
