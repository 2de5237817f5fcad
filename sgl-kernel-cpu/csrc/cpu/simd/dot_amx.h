// The dot policies of the amx tier: tiles, and the same order of sums in AVX-512 for few rows.
// dot.h says what a policy is.
//
// Register plan of the 2x2 kernel: tiles 0-3 sums (16 x 16 f32 each), 4-5 rows of mat1 (16 rows x
// 32 k bf16), 6-7 weights (16 k pairs x 16 columns). Each loaded tile is used twice.
#pragma once

#include <type_traits>

#include "simd/bf16_pairs.h"
#include "simd/dot_f32.h"
#include "simd/int_math.h"
#include "simd/tile_product.h"

namespace sgl_kernel {
namespace SGL_TIER {

// Tile configuration of the calling thread, held for one range of tasks.
class AmxTileState {
 public:
  SGL_MEMBER AmxTileState() {
    struct alignas(64) Config {
      uint8_t palette = 1;
      uint8_t start_row = 0;
      uint8_t reserved[14] = {};
      uint16_t bytes_per_row[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) {
      config.bytes_per_row[tile] = 64;
      config.rows[tile] = 16;
    }
    // GCC's intrinsic declares that it reads 8 of the 64 bytes; without this, the others may stay
    // unwritten.
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  SGL_MEMBER ~AmxTileState() { _tile_release(); }
  AmxTileState(const AmxTileState&) = delete;
  AmxTileState& operator=(const AmxTileState&) = delete;
};

constexpr int64_t kTileFloats = 16 * 16;

// Tiles 0 and 1 (and 2 and 3 of 16 more rows) for 32 columns: a step takes 32 k.
template <int SPLITS, bool BOTH>
SGL_INLINE void multiply_step(const float* a, int64_t group, const float* panel) {
  constexpr int64_t kRowBytes = kBlockN * 4;
  _tile_loadd(6, panel, kRowBytes);
  _tile_loadd(7, panel + 16, kRowBytes);
#pragma GCC unroll 2
  for (int split = 0; split < SPLITS; ++split) {
    _tile_loadd(4, a + split * kTileFloats, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (BOTH) {
      _tile_loadd(5, a + group + split * kTileFloats, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// A product of one group of 16 rows, or of two. In each step `pairs_per_step` pairs of the next
// panel are made.
template <int SPLITS, bool BOTH, typename Next>
SGL_INLINE void multiply_group(const TileProduct& of, int64_t pairs_per_step, Next& next) {
  constexpr int64_t kRowBytes = kBlockN * 4;
  float* sums = of.sums;
  float* lower = sums + 16 * kBlockN;
  if (of.flow.start) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (BOTH) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else if (!of.flow.held) {
    _tile_loadd(0, sums, kRowBytes);
    _tile_loadd(1, sums + 16, kRowBytes);
    if constexpr (BOTH) {
      _tile_loadd(2, lower, kRowBytes);
      _tile_loadd(3, lower + 16, kRowBytes);
    }
  }
  const int64_t steps = of.pairs / 16;
  const int64_t group = steps * SPLITS * kTileFloats;
  for (int64_t s = 0; s < steps; ++s) {
    next.advance(pairs_per_step);
    multiply_step<SPLITS, BOTH>(of.a + s * SPLITS * kTileFloats, group,
                                of.panel + s * 16 * kBlockN);
  }
  if (of.flow.hold) return;
  _tile_stored(0, sums, kRowBytes);
  _tile_stored(1, sums + 16, kRowBytes);
  if constexpr (BOTH) {
    _tile_stored(2, lower, kRowBytes);
    _tile_stored(3, lower + 16, kRowBytes);
  }
}

// Up to this many rows take all of K with their sums in tiles. Stored and loaded again at once,
// they would wait for each other.
constexpr int64_t kHeldRows = 32;

// All groups of a product. Between the tile multiplications, as evenly as it goes, the next panel
// is made. finish(m, count) follows what is stored.
template <int SPLITS, typename Next, typename Finish>
static void multiply_tiles(TileProduct product, Next& next, const Finish& finish) {
  const int64_t rows = product.rows;
  const int64_t pairs_per_step = div_up(next.pairs_left(), div_up(rows, 32) * (product.pairs / 16));
  if (rows > kHeldRows) product.flow.held = product.flow.hold = false;
  for (int64_t m = 0; m < rows; m += 32) {
    const int64_t count = min_i64(32, rows - m);
    if (count > 16) {
      multiply_group<SPLITS, true>(product, pairs_per_step, next);
    } else {
      multiply_group<SPLITS, false>(product, pairs_per_step, next);
    }
    if (!product.flow.hold) finish(m, count);
    product.a += 32 * product.pairs * SPLITS;
    product.sums += 32 * kBlockN;
  }
}

// The high and low bf16 split of an fp16 value: 11 significant bits are 8 and 3. Infinities and NaN
// are all high part.
SGL_INLINE void split_fp16(Vec x, Vec* high, Vec* low) {
  const Vec top = _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
  const __mmask16 finite =
      _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(bits_float(0x7F800000u)), _CMP_LT_OQ);
  *high = top;
  *low = _mm512_maskz_sub_ps(finite, x, top);
}

// kLanes fp16 values from p, as f32; zeros from `count` on.
SGL_INLINE Vec load_fp16_part(const fp16_t* p, int64_t count) {
  if (count >= kLanes) return load_act(p);
  fp16_t part[kLanes] = {};
  if (count > 0) memcpy(part, p, count * sizeof(fp16_t));
  return load_act(part);
}

template <typename scalar_t>
struct DotTile : Bf16Pairs {
  static constexpr int kSplits = std::is_same<scalar_t, fp16_t>::value ? 2 : 1;
  // Two panels of up to 12 KiB: with longer ones, what was decoded has left L1 when tiles load it.
  static constexpr int64_t kKC = 192;
  static constexpr int64_t kPadPairs = 16;
  static constexpr int64_t kPadRows = 16;
  static constexpr bool kTiles = true;
  static constexpr bool kFlushSubnormals = true;
  using TileState = AmxTileState;

  // Up to 16 rows of `k` elements as tiles [pairs / 16][splits], each [16 rows][16 pairs], padded
  // with zeros. In the order of the tiles, so that each is written from end to end.
  SGL_INLINE void convert_rows(const scalar_t* mat1, int64_t stride, int64_t rows, int64_t k,
                               int64_t pairs, float* tiles) {
    for (int64_t k0 = 0; k0 < 2 * pairs; k0 += kTileK) {
      const scalar_t* row = mat1 + k0;
      if (k - k0 >= kTileK) {
        for (int64_t m = 0; m < rows; ++m, row += stride) convert_line(row, tiles + m * kLanes);
      } else {
        for (int64_t m = 0; m < rows; ++m, row += stride) {
          alignas(64) scalar_t part[kTileK] = {};
          memcpy(static_cast<void*>(part), row, max_i64(0, k - k0) * sizeof(scalar_t));
          convert_line(part, tiles + m * kLanes);
        }
      }
      for (int split = 0; split < kSplits; ++split, tiles += kTileFloats) {
        for (int64_t m = rows; m < 16; ++m) store(tiles + m * kLanes, zero());
      }
    }
  }

  template <typename Next, typename Finish>
  SGL_INLINE void multiply(const TileProduct& product, Next& next, const Finish& finish) {
    multiply_tiles<kSplits>(product, next, finish);
  }

  // For benchmarks: as many multiplications as the tile unit can do, four tiles of sums from two
  // tiles of rows and two of columns, as the kernel has them. Returns how many multiply-adds.
  SGL_INLINE int64_t repeat_multiplication(int64_t steps) {
    const AmxTileState state;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (int64_t s = 0; s < steps; ++s) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    return steps * 4 * 16 * 16 * 32;
  }

 private:
  static constexpr int64_t kTileK = 32;

  SGL_INLINE void convert_line(const bf16_t* row, float* line) {
    store(line, load(reinterpret_cast<const float*>(row)));
  }
  SGL_INLINE void convert_line(const fp16_t* row, float* line) {
    // The pack below works inside 128-bit lanes; this order of quarters makes its result
    // consecutive.
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    const __m512i x = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(row));
    Vec high[2], low[2];
    split_fp16(_mm512_cvtph_ps(_mm512_castsi512_si256(x)), &high[0], &low[0]);
    split_fp16(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1)), &high[1], &low[1]);
    store(line, top_halves(high));
    store(line + kTileFloats, top_halves(low));
  }
  SGL_INLINE Vec top_halves(const Vec* v) {
    return _mm512_castsi512_ps(
        _mm512_packus_epi32(_mm512_srli_epi32(_mm512_castps_si512(v[0]), 16),
                            _mm512_srli_epi32(_mm512_castps_si512(v[1]), 16)));
  }
};

// Byte lookups decode e4m3 here: from memory they are as fast as fp16 bits or faster, and tiles
// have no kE4m3AsFp16Scale, whose bits could differ near f32's end.
template <typename scalar_t>
struct DotTileOrder : DotF32 {
  static constexpr int kSplits = DotTile<scalar_t>::kSplits;
  static constexpr int64_t kAccumulatedPairs = DotTile<scalar_t>::kPadPairs;
  static constexpr int64_t kMostRows = 2 / kSplits;  // three are as fast in a tile
  static constexpr bool kTakesFp16Bits = false;

  using DotF32::load_weights;
  SGL_INLINE void load_weights(const e4m3_t* codes, Vec* weights) {
    Vec pairs[kPairVecs];
    load_pairs(codes, pairs);
    for (int i = 0; i < kPairVecs; ++i) {
      weights[i] = even_k(pairs[i]);
      weights[kPairVecs + i] = odd_k(pairs[i]);
    }
  }

  using DotF32::convert_row;
  SGL_INLINE void convert_row(const fp16_t* src, int64_t k, int64_t padded_k, float scale,
                              float* dst, int64_t split_stride) {
    for (int64_t i = 0; i < padded_k; i += kLanes) {
      Vec high, low;
      split_fp16(load_fp16_part(src + i, k - i), &high, &low);
      store(dst + i, mul(high, set1(scale)));
      store(dst + split_stride + i, mul(low, set1(scale)));
    }
  }
};

template <typename scalar_t>
using ActDotFor = DotTile<scalar_t>;
template <typename scalar_t>
using TinyActDotFor = DotTileOrder<scalar_t>;

}  // namespace SGL_TIER
}  // namespace sgl_kernel
