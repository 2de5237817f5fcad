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

#include "simd/dot_f32.h"
#include "simd/tile_product.h"

#if defined(SGL_TIER_DOT)
#include SGL_TIER_DOT
#endif

namespace sgl_kernel {
namespace SGL_TIER {

// By rows of mat1 of scalar_t: the policy of a product, and of a few rows.
#if !defined(SGL_TIER_DOT)
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

}  // namespace SGL_TIER
}  // namespace sgl_kernel
