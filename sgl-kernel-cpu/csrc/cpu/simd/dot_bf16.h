// The dot policies of tiers with a bf16 pair dot product: VDPBF16PS, BFDOT. dot.h says what a
// policy is.
#pragma once

#include <type_traits>

#include "simd/bf16_pairs.h"
#include "simd/dot_f32.h"

namespace sgl_kernel {
namespace SGL_TIER {

struct DotBf16 : Bf16Pairs {
  static constexpr int kSplits = 1;
  static constexpr int64_t kKC = 512;
  static constexpr int64_t kAccumulatedPairs = kKC / 2;
  static constexpr int64_t kMostRows = 4;
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

}  // namespace SGL_TIER
}  // namespace sgl_kernel
