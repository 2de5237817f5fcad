// How a tier multiplies: the dot policies of the GEMM family.
//
// A step multiplies one 32-bit element of mat1 (an f32, or a bf16 pair) with one vector of 32-bit
// weight elements. A policy says how weights and mat1 become such elements and in which order one
// output element is summed:
//
//   DotF32        one chain of f32 fused multiply-adds over k; products are exact, so the tiers
//   that
//                 use it agree bit for bit
//   DotBf16       VDPBF16PS, BFDOT: a chain of bf16 pair dot products
//   DotTile       TDPBF16PS (AMX): 32 k at a time, two f32 chains (even k, odd k) that start at
//   zero,
//                 their sum added to the total
//   DotTileOrder  the same order in AVX-512 f32 FMA, for few rows, where a tile would be mostly
//   empty
//
// DotTile and DotTileOrder give the same bits: products are exact, and both flush subnormals (AMX
// always does). So a row does not change when the batch grows past kTinyRows.
#pragma once

#include <type_traits>

#include "gemm.h"
#include "vec.h"

namespace sgl_kernel {
namespace SGL_TIER {

constexpr int kGroupCols = kGroupVecs * kLanes;

// Tiers without tiles have no tile state.
struct NoTileState {
  SGL_MEMBER NoTileState() {}
};

struct DotF32 {
  static constexpr int kStepsPerPair = 2;
  static constexpr int64_t kFlushPairs = int64_t{1} << 40;  // never
  static constexpr int64_t kPadK = 2;
  static constexpr int64_t kPadRows = 1;
  static constexpr bool kTiles = false;
  static constexpr bool kFlushSubnormals = false;
  using TileState = NoTileState;

  template <typename packed_t>
  SGL_INLINE void decode_group(const packed_t* p, Vec (*steps)[kGroupVecs]) {
    decode_pairs(p, steps[0], steps[1]);
  }
  SGL_INLINE Vec dot(Vec a, Vec b, Vec c) { return fma(a, b, c); }

  struct Sum {
    Vec chain;
    SGL_MEMBER void start() { chain = zero(); }
    SGL_MEMBER void step(int, Vec a, Vec b) { chain = fma(a, b, chain); }
    SGL_MEMBER void flush() {}
    SGL_MEMBER Vec value() const { return chain; }
  };

  // k elements of a row of mat1 as f32, then zeros up to padded_k.
  template <typename scalar_t>
  SGL_INLINE void convert_row(const scalar_t* src, int64_t k, int64_t padded_k, float* dst) {
    int64_t i = 0;
    for (; i + kLanes <= k; i += kLanes) store(dst + i, load_act(src + i));
    for (; i < k; ++i) dst[i] = to_float(src[i]);
    for (; i < padded_k; ++i) dst[i] = 0.f;
  }
};

#if defined(SGL_HAS_BF16_DOT) || defined(SGL_TIER_AMX)
// k elements of a row of mat1 as they are, then zeros up to padded_k.
SGL_INLINE void copy_bf16_row(const bf16_t* src, int64_t k, int64_t padded_k, float* dst) {
  bf16_t* row = reinterpret_cast<bf16_t*>(dst);
  memcpy(row, src, k * sizeof(bf16_t));
  memset(static_cast<void*>(row + k), 0, (padded_k - k) * sizeof(bf16_t));
}
#endif

#if defined(SGL_TIER_AMX)

#include "tile_amx.inc"

template <typename scalar_t>
using DotFor = std::conditional_t<std::is_same<scalar_t, bf16_t>::value, DotTile, DotF32>;
template <typename scalar_t>
using TinyDotFor = std::conditional_t<std::is_same<scalar_t, bf16_t>::value, DotTileOrder, DotF32>;

#elif defined(SGL_HAS_BF16_DOT)

struct DotBf16 : DotF32 {
  static constexpr int kStepsPerPair = 1;

  template <typename packed_t>
  SGL_INLINE void decode_group(const packed_t* p, Vec (*steps)[kGroupVecs]) {
    decode_pairs_bf16(p, steps[0]);
  }
  SGL_INLINE Vec dot(Vec a, Vec b, Vec c) { return dot_bf16(a, b, c); }

  struct Sum : DotF32::Sum {
    SGL_MEMBER void step(int, Vec a, Vec b) { chain = dot_bf16(a, b, chain); }
  };

  SGL_INLINE void convert_row(const bf16_t* src, int64_t k, int64_t padded_k, float* dst) {
    copy_bf16_row(src, k, padded_k, dst);
  }
};
template <typename scalar_t>
using DotFor = std::conditional_t<std::is_same<scalar_t, bf16_t>::value, DotBf16, DotF32>;
template <typename scalar_t>
using TinyDotFor = DotFor<scalar_t>;

#else

template <typename scalar_t>
using DotFor = DotF32;
template <typename scalar_t>
using TinyDotFor = DotF32;

#endif

// multiply_panel instantiates this name on every tier; only tile tiers call it.
#if !defined(SGL_TIER_AMX)
void multiply_tiles(const float* a, int64_t a_stride, const float* panel, int64_t steps,
                    int64_t rows, bool start, float* sums);
#endif

}  // namespace SGL_TIER
}  // namespace sgl_kernel
