// Register tiles of attention over f32 panels: QK^T (qk_tile) and the softmax weights times V
// (pv_tile). Each output element has one accumulator of f32 fused multiply-adds, in the order of
// the sequence. Compiled once per tier.
//
// Scores stand transposed, key by key with the query rows side by side in the lanes: softmax then
// goes down the keys lane by lane and needs no horizontal step, and keys need no transposition.
//
// Registers. A tile keeps as many accumulators as registers allow next to the vectors that its loop
// loads, and one for a broadcast. Two fused multiply-adds a cycle with a latency of 4 or 5 cycles
// need 8 to 10 accumulators that do not wait for each other:
//
//                            qk_tile: keys x vectors of rows   pv_tile: rows x vectors of columns
//   scalar, 16 of 4 lanes    4 x 2 + 2 + 1 = 11                2 x 4 + 4 + 1 = 13
//   AVX2, 16 of 8 lanes      4 x 3 + 3 + 1 = 16                6 x 2 + 2 + 1 = 15
//   NEON, 32 of 4 lanes      8 x 3 + 3 + 1 = 28                6 x 4 + 4 + 1 = 29
//   AVX-512, 32 of 16 lanes  8 x 3 + 3 + 1 = 28                12 x 2 + 2 + 1 = 27
#pragma once

#include "attention/attention.h"
#include "simd/vec_math.h"

namespace sgl_kernel {
namespace SGL_TIER {

constexpr int kScoreCols = kQkVecs * kLanes;
constexpr int kTileCols = kPvVecs * kLanes;
static_assert(kKeyBlock % kQkKeys == 0 && kKeyBlock % kLanes == 0, "tiles must cover a block");
static_assert(kQueryTile % kScoreCols == 0 && kQueryTile % kPvRows == 0 && 32 % kTileCols == 0,
              "tiles must cover a query tile");

// Operands of QK^T: keys [.., depth], key_stride floats apart, and a panel of queries [depth,
// columns], where columns are query rows.
struct QkOperands {
  const float* keys;
  int64_t key_stride;
  const float* queries;
  int64_t depth;
  float scale;
};

// scores[kQkKeys, VECS * kLanes] = keys [first_key, first_key + kQkKeys) @ queries times
// scale, the lines of scores kQueryTile apart; raises `row_max` to the largest of them.
template <int VECS>
static inline void qk_tile(const QkOperands& operands, int64_t first_key, float* scores,
                           float* row_max) {
  const int64_t key_stride = operands.key_stride, depth = operands.depth;
  const float* const keys = operands.keys + first_key * key_stride;
  const float* const queries = operands.queries;
  Vec acc[kQkKeys][VECS];
#pragma GCC unroll 16
  for (int k = 0; k < kQkKeys; ++k) {
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) acc[k][v] = zero();
  }
  for (int64_t d = 0; d < depth; ++d) {
    Vec q[VECS];
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) q[v] = load(queries + d * (VECS * kLanes) + v * kLanes);
#pragma GCC unroll 16
    for (int k = 0; k < kQkKeys; ++k) {
      const Vec x = set1(keys[k * key_stride + d]);
#pragma GCC unroll 4
      for (int v = 0; v < VECS; ++v) acc[k][v] = fma(x, q[v], acc[k][v]);
    }
  }
  const Vec factor = set1(operands.scale);
  float* const out = scores + first_key * kQueryTile;
#pragma GCC unroll 4
  for (int v = 0; v < VECS; ++v) {
    Vec largest = load(row_max + v * kLanes);
#pragma GCC unroll 16
    for (int k = 0; k < kQkKeys; ++k) {
      const Vec x = mul(acc[k][v], factor);
      store(out + k * kQueryTile + v * kLanes, x);
      largest = max(largest, x);
    }
    store(row_max + v * kLanes, largest);
  }
}

// The same for 1 to VECS vectors of rows and keys [begin, end), multiples of kQkKeys.
template <int VECS>
static inline void qk_product(int64_t vecs, const QkOperands& operands, int64_t begin, int64_t end,
                              float* scores, float* row_max) {
  if (vecs == VECS) {
    for (int64_t k = begin; k < end; k += kQkKeys) qk_tile<VECS>(operands, k, scores, row_max);
  } else if constexpr (VECS > 1) {
    qk_product<VECS - 1>(vecs, operands, begin, end, scores, row_max);
  }
}

// How what a block adds joins a row's accumulator in online softmax, whose running maximum may have
// risen: accumulator * accumulator_scale + block * block_scale; or, without factors, the block
// replaces it.
struct Rescale {
  const float* accumulator_scale;
  const float* block_scale;
};

SGL_INLINE void add_block(const Vec* acc, Rescale rescale, int row, float* out) {
  if (rescale.accumulator_scale == nullptr) {
#pragma GCC unroll 4
    for (int i = 0; i < kPvVecs; ++i) store(out + i * kLanes, acc[i]);
    return;
  }
  const Vec before = set1(rescale.accumulator_scale[row]);
  const Vec block = set1(rescale.block_scale[row]);
#pragma GCC unroll 4
  for (int i = 0; i < kPvVecs; ++i) {
    store(out + i * kLanes, fma(load(out + i * kLanes), before, mul(acc[i], block)));
  }
}

// Operands of the softmax weights times V: weights [keys, rows] in lines of kQueryTile, values
// [keys, kTileCols], and the accumulators of the rows, out_stride floats apart.
struct PvOperands {
  const float* weights;
  const float* values;
  Rescale rescale;
  float* out;
  int64_t out_stride;
};

// out[ROWS, kTileCols] from keys [begin, end).
template <int ROWS>
static inline void pv_tile(const PvOperands& operands, int64_t begin, int64_t end) {
  const float* const weights = operands.weights + begin * kQueryTile;
  const float* const values = operands.values + begin * kTileCols;
  const int64_t keys = end - begin;
  Vec acc[ROWS][kPvVecs];
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m) {
#pragma GCC unroll 4
    for (int i = 0; i < kPvVecs; ++i) acc[m][i] = zero();
  }
  for (int64_t s = 0; s < keys; ++s) {
    Vec b[kPvVecs];
#pragma GCC unroll 4
    for (int i = 0; i < kPvVecs; ++i) b[i] = load(values + s * kTileCols + i * kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) {
      const Vec x = set1(weights[s * kQueryTile + m]);
#pragma GCC unroll 4
      for (int i = 0; i < kPvVecs; ++i) acc[m][i] = fma(x, b[i], acc[m][i]);
    }
  }
  const Rescale rescale = operands.rescale;
  float* const out = operands.out;
  const int64_t out_stride = operands.out_stride;
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m) add_block(acc[m], rescale, m, out + m * out_stride);
}

// The same for 1 to ROWS rows.
template <int ROWS>
static inline void pv_product(int64_t rows, const PvOperands& operands, int64_t begin,
                              int64_t end) {
  if (rows == ROWS) {
    pv_tile<ROWS>(operands, begin, end);
  } else if constexpr (ROWS > 1) {
    pv_product<ROWS - 1>(rows, operands, begin, end);
  }
}

// The same where row m sees keys [begin[m], end[m]) only, both rising with the row. What a row does
// not see is left out, not multiplied by zero, so that a NaN in a value stays with those who see
// it; a row that sees nothing keeps its accumulator. Rows behind the last have begin = end = 0.
static inline void pv_masked_tile(const PvOperands& operands, const int32_t* begin,
                                  const int32_t* end, int64_t rows) {
  const float* const weights = operands.weights;
  const float* const values = operands.values;
  Vec acc[kPvRows][kPvVecs];
#pragma GCC unroll 16
  for (int m = 0; m < kPvRows; ++m) {
#pragma GCC unroll 4
    for (int i = 0; i < kPvVecs; ++i) acc[m][i] = zero();
  }
  const auto multiply = [&](int32_t from, int32_t to, bool all) {
    for (int32_t s = from; s < to; ++s) {
      Vec b[kPvVecs];
#pragma GCC unroll 4
      for (int i = 0; i < kPvVecs; ++i) b[i] = load(values + s * kTileCols + i * kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < kPvRows; ++m) {
        if (!all && (s < begin[m] || s >= end[m])) continue;
        const Vec x = set1(weights[s * kQueryTile + m]);
#pragma GCC unroll 4
        for (int i = 0; i < kPvVecs; ++i) acc[m][i] = fma(x, b[i], acc[m][i]);
      }
    }
  };
  const int32_t first = begin[0], last = end[rows - 1];
  // Keys that all rows see need no test.
  int32_t middle_begin = begin[rows - 1], middle_end = end[0];
  if (middle_begin > middle_end) middle_begin = middle_end = last;
  multiply(first, middle_begin, false);
  multiply(middle_begin, middle_end, true);
  multiply(middle_end, last, false);
#pragma GCC unroll 16
  for (int m = 0; m < kPvRows; ++m) {
    if (begin[m] < end[m]) {
      add_block(acc[m], operands.rescale, m, operands.out + m * operands.out_stride);
    }
  }
}

// Columns [0, kLanes) of panel[depth, stride]: `rows` are `count` rows of `depth` elements, behind
// which come zeros.
template <typename T>
static inline void transpose_rows(const void* const* rows, int64_t count, int64_t depth,
                                  float* panel, int64_t stride) {
  int64_t d = 0;
  if (count == kLanes) {
    for (; d + kLanes <= depth; d += kLanes) {
      Vec square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) square[i] = load_act(static_cast<const T*>(rows[i]) + d);
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(panel + (d + i) * stride, square[i]);
    }
  }
  for (; d < depth; d += kLanes) {
    const int64_t width = min_i64(kLanes, depth - d);
    Vec square[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      square[i] = i < count ? load_first(static_cast<const T*>(rows[i]) + d, width) : zero();
    }
    transpose(square);
    for (int i = 0; i < width; ++i) store(panel + (d + i) * stride, square[i]);
  }
}

// Queries side by side: `rows` are n rows of `depth` elements. Every kScoreCols of them become a
// panel [depth, columns], of fewer columns where there are fewer, rounded up to kLanes with zeros.
template <typename T>
static inline void pack_queries(const void* const* rows, int64_t n, int64_t depth, float* panels) {
  for (int64_t first = 0; first < n; first += kScoreCols) {
    const int64_t stride = min_i64(kScoreCols, round_up(n - first, kLanes));
    for (int64_t column = 0; column < stride; column += kLanes) {
      transpose_rows<T>(rows + first + column, min_i64(kLanes, n - first - column), depth,
                        panels + first * depth + column, stride);
    }
  }
}

// `count` rows that go into a panel, times scale.
struct PackedRows {
  const void* const* rows;
  int64_t count;
  float scale;
};

// Columns of the rows, then zeros up to padded_columns. The panel is cut into parts [kKeyBlock,
// part_columns].
struct PanelShape {
  int64_t columns;
  int64_t padded_columns;
  int64_t part_columns;
};

template <typename T>
static inline void pack_panel(const PackedRows& packed, PanelShape shape, float* panel) {
  const void* const* const rows = packed.rows;
  const int64_t n = packed.count, columns = shape.columns, part = shape.part_columns;
  const float scale = packed.scale;
  const Vec factor = set1(scale);
  for (int64_t first = 0; first < shape.padded_columns; first += part) {
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
