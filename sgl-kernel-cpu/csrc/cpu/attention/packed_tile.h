// Register tiles of attention, each output element one chain of f32 fused multiply-adds. Scores
// stand key by key with rows of queries side by side in the lanes, so that softmax needs no
// horizontal step and keys no transposition. Compiled once per tier.
#pragma once

#include "attention/attention.h"
#include "simd/vec_math.h"

namespace sgl_kernel {
namespace SGL_TIER {

// As many accumulators as registers allow next to a panel's vectors and a broadcast: of scores
// kScoreKeys keys times kScoreVecs vectors of rows, of values kTileRows rows times kTileVecs
// vectors of columns.
#if defined(SGL_TIER_SCALAR)
constexpr int kScoreKeys = 4, kScoreVecs = 2;
constexpr int kTileRows = 2, kTileVecs = 4;
#elif defined(SGL_TIER_AVX2)
constexpr int kScoreKeys = 4, kScoreVecs = 3;
constexpr int kTileRows = 6, kTileVecs = 2;
#else
constexpr int kScoreKeys = 8, kScoreVecs = 3;
constexpr int kTileRows = kLanes == 16 ? 12 : 6, kTileVecs = kLanes == 16 ? 2 : 4;
#endif
constexpr int kScoreCols = kScoreVecs * kLanes;
constexpr int kTileCols = kTileVecs * kLanes;
static_assert(kKeyBlock % kScoreKeys == 0 && kKeyBlock % kLanes == 0, "tiles must cover a block");
static_assert(kRowGroup % kScoreCols == 0 && kRowGroup % kTileRows == 0 && 32 % kTileCols == 0,
              "tiles must cover a group");

// scores[KEYS, VECS * kLanes] = keys[KEYS, depth] @ queries[depth, VECS * kLanes] times scale, the
// lines of scores kRowGroup apart; raises `largest`.
template <int VECS>
static inline void score_tile(const float* keys, int64_t key_stride, const float* queries,
                              int64_t depth, float scale, float* scores, float* largest) {
  Vec sums[kScoreKeys][VECS];
#pragma GCC unroll 16
  for (int k = 0; k < kScoreKeys; ++k) {
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) sums[k][v] = zero();
  }
  for (int64_t d = 0; d < depth; ++d) {
    Vec q[VECS];
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) q[v] = load(queries + d * (VECS * kLanes) + v * kLanes);
#pragma GCC unroll 16
    for (int k = 0; k < kScoreKeys; ++k) {
      const Vec x = set1(keys[k * key_stride + d]);
#pragma GCC unroll 4
      for (int v = 0; v < VECS; ++v) sums[k][v] = fma(x, q[v], sums[k][v]);
    }
  }
  const Vec factor = set1(scale);
#pragma GCC unroll 4
  for (int v = 0; v < VECS; ++v) {
    Vec greatest = load(largest + v * kLanes);
#pragma GCC unroll 16
    for (int k = 0; k < kScoreKeys; ++k) {
      const Vec x = mul(sums[k][v], factor);
      store(scores + k * kRowGroup + v * kLanes, x);
      greatest = max(greatest, x);
    }
    store(largest + v * kLanes, greatest);
  }
}

// The same for 1 to VECS vectors of rows and keys [begin, end), multiples of kScoreKeys.
template <int VECS>
static inline void score_keys(int64_t vecs, const float* keys, int64_t key_stride, int64_t begin,
                              int64_t end, const float* queries, int64_t depth, float scale,
                              float* scores, float* largest) {
  if (vecs == VECS) {
    for (int64_t k = begin; k < end; k += kScoreKeys) {
      score_tile<VECS>(keys + k * key_stride, key_stride, queries, depth, scale,
                       scores + k * kRowGroup, largest);
    }
  } else if constexpr (VECS > 1) {
    score_keys<VECS - 1>(vecs, keys, key_stride, begin, end, queries, depth, scale, scores,
                         largest);
  }
}

// How a block's weighted values join a row's total: total * keep + block * take; or, without
// factors, replace it.
struct Factors {
  const float* keep;
  const float* take;
};

SGL_INLINE void add_block(const Vec* sums, Factors factors, int row, float* out) {
  if (factors.keep == nullptr) {
#pragma GCC unroll 4
    for (int i = 0; i < kTileVecs; ++i) store(out + i * kLanes, sums[i]);
    return;
  }
  const Vec keep = set1(factors.keep[row]), take = set1(factors.take[row]);
#pragma GCC unroll 4
  for (int i = 0; i < kTileVecs; ++i) {
    store(out + i * kLanes, fma(load(out + i * kLanes), keep, mul(sums[i], take)));
  }
}

// out[ROWS, kTileCols] from weights[steps, ROWS] of kRowGroup and values[steps, kTileCols].
template <int ROWS>
static inline void value_tile(const float* weights, const float* values, int64_t steps,
                              Factors factors, float* out, int64_t out_stride) {
  Vec sums[ROWS][kTileVecs];
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m) {
#pragma GCC unroll 4
    for (int i = 0; i < kTileVecs; ++i) sums[m][i] = zero();
  }
  for (int64_t s = 0; s < steps; ++s) {
    Vec b[kTileVecs];
#pragma GCC unroll 4
    for (int i = 0; i < kTileVecs; ++i) b[i] = load(values + s * kTileCols + i * kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) {
      const Vec x = set1(weights[s * kRowGroup + m]);
#pragma GCC unroll 4
      for (int i = 0; i < kTileVecs; ++i) sums[m][i] = fma(x, b[i], sums[m][i]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m) add_block(sums[m], factors, m, out + m * out_stride);
}

template <int ROWS>
static inline void value_tile_rows(int64_t rows, const float* weights, const float* values,
                                   int64_t steps, Factors factors, float* out, int64_t out_stride) {
  if (rows == ROWS) {
    value_tile<ROWS>(weights, values, steps, factors, out, out_stride);
  } else if constexpr (ROWS > 1) {
    value_tile_rows<ROWS - 1>(rows, weights, values, steps, factors, out, out_stride);
  }
}

// The same where row m sees keys [begin[m], end[m]) only, both rising with the row. What a row does
// not see is left out, not multiplied by zero, so that a NaN in a value stays with those who see
// it; a row that sees nothing keeps its total. Rows behind the last have begin = end = 0.
static inline void value_edge_tile(const float* weights, const float* values, const int32_t* begin,
                                   const int32_t* end, int64_t rows, Factors factors, float* out,
                                   int64_t out_stride) {
  Vec sums[kTileRows][kTileVecs];
#pragma GCC unroll 16
  for (int m = 0; m < kTileRows; ++m) {
#pragma GCC unroll 4
    for (int i = 0; i < kTileVecs; ++i) sums[m][i] = zero();
  }
  const auto multiply = [&](int32_t from, int32_t to, bool all) {
    for (int32_t s = from; s < to; ++s) {
      Vec b[kTileVecs];
#pragma GCC unroll 4
      for (int i = 0; i < kTileVecs; ++i) b[i] = load(values + s * kTileCols + i * kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < kTileRows; ++m) {
        if (!all && (s < begin[m] || s >= end[m])) continue;
        const Vec x = set1(weights[s * kRowGroup + m]);
#pragma GCC unroll 4
        for (int i = 0; i < kTileVecs; ++i) sums[m][i] = fma(x, b[i], sums[m][i]);
      }
    }
  };
  const int32_t first = begin[0], last = end[rows - 1];
  int32_t middle_begin = begin[rows - 1], middle_end = end[0];
  if (middle_begin > middle_end) middle_begin = middle_end = last;
  multiply(first, middle_begin, false);
  multiply(middle_begin, middle_end, true);
  multiply(middle_end, last, false);
#pragma GCC unroll 16
  for (int m = 0; m < kTileRows; ++m) {
    if (begin[m] < end[m]) add_block(sums[m], factors, m, out + m * out_stride);
  }
}

// Columns [0, kLanes) of part[depth, stride]: `rows` are `count` rows of `depth` elements, behind
// which come zeros.
template <typename T>
static inline void transpose_rows(const void* const* rows, int64_t count, int64_t depth,
                                  float* part, int64_t stride) {
  int64_t d = 0;
  if (count == kLanes) {
    for (; d + kLanes <= depth; d += kLanes) {
      Vec square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) square[i] = load_act(static_cast<const T*>(rows[i]) + d);
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(part + (d + i) * stride, square[i]);
    }
  }
  for (; d < depth; d += kLanes) {
    const int64_t width = min_i64(kLanes, depth - d);
    Vec square[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      square[i] = i < count ? load_first(static_cast<const T*>(rows[i]) + d, width) : zero();
    }
    transpose(square);
    for (int i = 0; i < width; ++i) store(part + (d + i) * stride, square[i]);
  }
}

// Queries side by side: `rows` are n rows of `depth` elements. Every kScoreCols of them become a
// panel [depth, columns], of fewer columns where there are fewer, rounded up to kLanes with zeros.
template <typename T>
static inline void transpose_queries(const void* const* rows, int64_t n, int64_t depth,
                                     float* panels) {
  for (int64_t first = 0; first < n; first += kScoreCols) {
    const int64_t stride = min_i64(kScoreCols, round_up(n - first, kLanes));
    for (int64_t column = 0; column < stride; column += kLanes) {
      transpose_rows<T>(rows + first + column, min_i64(kLanes, n - first - column), depth,
                        panels + first * depth + column, stride);
    }
  }
}

// `rows` are n rows of `columns` elements, times scale; columns from there to padded_columns become
// 0. The panel is cut into parts [kKeyBlock, part] of part columns.
template <typename T>
static inline void copy_panel(const void* const* rows, int64_t n, int64_t columns,
                              int64_t padded_columns, int64_t part, float scale, float* panel) {
  const Vec factor = set1(scale);
  for (int64_t first = 0; first < padded_columns; first += part) {
    for (int64_t c = first; c < first + part; c += kLanes) {
      float* out = panel + first * kKeyBlock + c - first;
      if (c + kLanes <= columns && scale == 1.f) {
        for (int64_t i = 0; i < n; ++i) {
          store(out + i * part, load_act(static_cast<const T*>(rows[i]) + c));
        }
      } else if (c + kLanes <= columns) {
        for (int64_t i = 0; i < n; ++i) {
          store(out + i * part, mul(load_act(static_cast<const T*>(rows[i]) + c), factor));
        }
      } else {
        const int64_t width = max_i64(0, columns - c);
        for (int64_t i = 0; i < n; ++i) {
          store(out + i * part, mul(load_first(static_cast<const T*>(rows[i]) + c, width), factor));
        }
      }
    }
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
