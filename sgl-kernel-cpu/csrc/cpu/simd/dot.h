// How a tier multiplies: the dot policies of the GEMM family.
//
// A policy says how weights and mat1 become vectors, what one step (one k pair) computes, and in
// which order the products of one output element are summed:
//
//   DotF32        even and odd k in two accumulators of f32 fused multiply-adds; products are
//                 exact, so the tiers that use it agree bit for bit
//   DotBf16       VDPBF16PS, BFDOT: one accumulator of bf16 pair dot products
//   DotTile       TDPBF16PS (AMX): even and odd k in two f32 accumulators, 32 k at a time
//   DotTileOrder  the same order in AVX-512 f32 FMA, for few rows, where a tile would be mostly
//                 empty
//
// Accumulators start at +0 every kAccumulatedPairs pairs, and their sum is then added to a total.
// DotTile and DotTileOrder give the same bits: products are exact, and both flush subnormals (AMX
// always does). So a row does not change when the batch grows past the few rows that DotTileOrder
// takes.
//
// With fp16 weights it is DotF32 on every tier.
//
// AMX knows bf16 only. An fp16 value is exactly the sum of two bf16 values, so on that tier fp16
// rows are multiplied as a split in two, high parts and low parts, added to the total in that
// order.
#pragma once

#include <type_traits>

#include "gemm/blocking.h"
#include "simd/e4m3_fp16_bits.h"
#include "simd/vec.h"

namespace sgl_kernel {
namespace SGL_TIER {

// Tiers without tiles have no tile state.
struct NoTileState {
  SGL_MEMBER NoTileState() {}
};

// Where the sums of a panel's product begin and end.
struct SumsFlow {
  bool start;  // they start at zero
  bool held;   // up to kHeldRows of a tile tier: tiles still hold them from the product before
  bool hold;   // and keep them for the next one
};

// What the tile unit multiplies: sums[rows, 32] (+)= a @ panel.
struct TileProduct {
  const float* a;      // rows as Dot::convert_rows leaves them, one group of 16 after the other
  const float* panel;  // [pairs, 32]
  int64_t pairs;       // a multiple of 16
  int64_t rows;
  SumsFlow flow;
  float* sums;  // [rows, 32], with room for whole groups
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
  static constexpr int64_t kMostRows = kTinyRows;  // that tinygemm_kernel2 takes
  static constexpr int64_t kPadPairs = 1;          // pairs of mat1 and of a panel come in multiples
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

#if defined(SGL_HAS_BF16_DOT) || defined(SGL_TIER_AMX)
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
#endif

#if defined(SGL_TIER_AMX)

#include "simd/tile_amx.inc"

template <typename scalar_t>
using ActDotFor = DotTile<scalar_t>;
template <typename scalar_t>
using TinyActDotFor = DotTileOrder<scalar_t>;

#elif defined(SGL_HAS_BF16_DOT)

struct DotBf16 : Bf16Pairs {
  static constexpr int kSplits = 1;
  static constexpr int64_t kKC = kMaxKC;
  static constexpr int64_t kAccumulatedPairs = kKC / 2;
  static constexpr int64_t kMostRows = kTinyRows;
  static constexpr int64_t kPadPairs = 1;
  static constexpr int64_t kPadRows = 1;
  static constexpr bool kTiles = false;
  static constexpr bool kFlushSubnormals = false;
  using TileState = NoTileState;

  SGL_INLINE Vec dot(Vec a, Vec b, Vec c) { return dot_bf16(a, b, c); }
};
template <typename scalar_t>
using ActDotFor = std::conditional_t<std::is_same<scalar_t, bf16_t>::value, DotBf16, DotF32>;
template <typename scalar_t>
using TinyActDotFor = ActDotFor<scalar_t>;

#else

template <typename scalar_t>
using ActDotFor = DotF32;
template <typename scalar_t>
using TinyActDotFor = DotF32;

#endif

// The policy of a product, and of a few rows. An fp16 weight is no bf16 number: all tiers multiply
// it in f32, and so agree bit for bit.
template <typename scalar_t, typename packed_t>
using DotFor =
    std::conditional_t<std::is_same<packed_t, fp16_t>::value, DotF32, ActDotFor<scalar_t>>;
template <typename scalar_t, typename packed_t>
using TinyDotFor =
    std::conditional_t<std::is_same<packed_t, fp16_t>::value, DotF32, TinyActDotFor<scalar_t>>;

// The sum of the accumulators of one vector of columns, which stand kColumnVecs vectors apart.
template <typename Dot>
SGL_INLINE Vec sum_accumulators(const Vec* acc) {
  Vec sum = acc[0];
  for (int c = 1; c < Dot::kAccumulators; ++c) sum = add(sum, acc[c * kColumnVecs]);
  return sum;
}
template <typename Dot>
SGL_INLINE Vec sum_accumulators(const float* acc) {
  Vec sum = load(acc);
  for (int c = 1; c < Dot::kAccumulators; ++c) sum = add(sum, load(acc + c * kBlockN));
  return sum;
}

// panel_product.h instantiates this name on every tier; only tile tiers call it.
#if !defined(SGL_TIER_AMX)
template <int SPLITS, typename Next, typename Finish>
void multiply_tiles(TileProduct product, Next& next, const Finish& finish);
#endif

}  // namespace SGL_TIER
}  // namespace sgl_kernel
