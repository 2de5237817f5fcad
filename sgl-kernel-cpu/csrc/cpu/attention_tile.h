// Register tiles of attention: rows times a panel, each output element one chain of f32 fused
// multiply-adds that continues what it finds in memory. Compiled once per tier.
#pragma once

#include "packing.h"
#include "vec_math.h"

namespace sgl_kernel {
namespace SGL_TIER {

// As many accumulators as registers allow next to a panel's vectors and a broadcast.
constexpr int kTileVecs = kLanes >= 8 ? 2 : 4;
#if defined(SGL_TIER_SCALAR)
constexpr int kTileRows = 2;
#else
constexpr int kTileRows = kLanes == 16 ? 12 : 6;
#endif
constexpr int kTileCols = kTileVecs * kLanes;

// c[ROWS, kTileCols] += a[ROWS, steps] @ panel[steps, kTileCols]
template <int ROWS>
static inline void multiply_tile(const float* a, int64_t a_stride, const float* panel,
                                 int64_t steps, float* c, int64_t c_stride) {
  Vec sums[ROWS][kTileVecs];
  for (int m = 0; m < ROWS; ++m) {
    for (int i = 0; i < kTileVecs; ++i) sums[m][i] = load(c + m * c_stride + i * kLanes);
  }
  for (int64_t s = 0; s < steps; ++s) {
    Vec b[kTileVecs];
    for (int i = 0; i < kTileVecs; ++i) b[i] = load(panel + s * kTileCols + i * kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) {
      const Vec x = set1(a[m * a_stride + s]);
#pragma GCC unroll 4
      for (int i = 0; i < kTileVecs; ++i) sums[m][i] = fma(x, b[i], sums[m][i]);
    }
  }
  for (int m = 0; m < ROWS; ++m) {
    for (int i = 0; i < kTileVecs; ++i) store(c + m * c_stride + i * kLanes, sums[m][i]);
  }
}

// The same for 1 to ROWS rows.
template <int ROWS>
static inline void multiply_tile_rows(int64_t rows, const float* a, int64_t a_stride,
                                      const float* panel, int64_t steps, float* c,
                                      int64_t c_stride) {
  if (rows == ROWS) {
    multiply_tile<ROWS>(a, a_stride, panel, steps, c, c_stride);
  } else if constexpr (ROWS > 1) {
    multiply_tile_rows<ROWS - 1>(rows, a, a_stride, panel, steps, c, c_stride);
  }
}

// c[rows, columns] += a[rows, steps] @ panel, rows <= kTileRows. The panel is cut into parts of
// kTileCols columns, each [part_steps, kTileCols] of which the first `steps` are used; columns are
// a multiple of kTileCols.
SGL_INLINE void multiply_parts(int64_t rows, const float* a, int64_t a_stride, const float* panel,
                               int64_t part_steps, int64_t steps, int64_t columns, float* c,
                               int64_t c_stride) {
  for (int64_t column = 0; column < columns; column += kTileCols) {
    multiply_tile_rows<kTileRows>(rows, a, a_stride, panel + column * part_steps, steps, c + column,
                                  c_stride);
  }
}

// Asks for the cache lines of a row that is read later: cached rows lie anywhere, so hardware
// cannot guess the next one.
SGL_INLINE void prefetch_row(const char* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
}

// A panel of n columns: `rows` are n rows of `depth` elements, their elements become the panel's
// steps. Columns up to the next multiple of kLanes become 0.
template <typename T>
static inline void transpose_panel(const void* const* rows, int64_t n, int64_t depth, float scale,
                                   float* panel) {
  const Vec factor = set1(scale);
  for (int64_t column = 0; column < n; column += kLanes) {
    const int64_t count = min_i64(kLanes, n - column);
    float* part = panel + column / kTileCols * kTileCols * depth + column % kTileCols;
    for (int64_t d = 0; d < depth; d += kLanes) {
      const int64_t width = min_i64(kLanes, depth - d);
      Vec square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        square[i] = zero();
        if (i >= count) continue;
        const T* row = static_cast<const T*>(rows[column + i]) + d;
        square[i] = mul(width == kLanes ? load_act(row) : load_first(row, width), factor);
      }
      transpose(square);
      for (int i = 0; i < kLanes; ++i) {
        if (i < width) store(part + (d + i) * kTileCols, square[i]);
      }
    }
  }
}

// `rows` are n rows of `columns` elements, which become the panel's steps 0 to n - 1; columns from
// there to padded_columns become 0.
template <typename T>
static inline void copy_panel(const void* const* rows, int64_t n, int64_t columns,
                              int64_t padded_columns, float scale, float* panel) {
  const Vec factor = set1(scale);
  for (int64_t step = 0; step < n; ++step) {
    const T* row = static_cast<const T*>(rows[step]);
    for (int64_t c = 0; c < padded_columns; c += kLanes) {
      const int64_t width = columns - c;
      const Vec v = width >= kLanes ? load_act(row + c)
                    : width > 0     ? load_first(row + c, width)
                                    : zero();
      store(panel + c / kTileCols * kTileCols * kKeyBlock + step * kTileCols + c % kTileCols,
            mul(v, factor));
    }
  }
}

// Few rows of queries: keys and values are converted in registers instead of in panels. Sums run in
// the same order, so the results are those of the panels bit for bit.
//
// rows[i] + offset is a key's (or value's) row; behind the last one the array goes on with rows
// that exist. As each is used, next[i] + offset is asked for.

constexpr int kFewRows = 4;
#if defined(SGL_TIER_AVX2)
constexpr int kFewVecs = 2;  // 4 x 2 sums in 16 registers
#else
constexpr int kFewVecs = 4;
#endif

// An element times the cache's scale; only e4m3 has one here.
template <typename T>
SGL_INLINE Vec load_scaled(const T* p, Vec) {
  return load_act(p);
}
SGL_INLINE Vec load_scaled(const e4m3_t* p, Vec factor) {
  return mul(load_act(p), factor);
}

// scores[ROWS, n] = q[ROWS, depth] times the keys.
template <typename T, int ROWS>
static inline void score_few(const float* q, const char* const* rows, const char* const* next,
                             int64_t offset, int64_t n, int64_t depth, float scale, float* scores,
                             int64_t scores_stride) {
  const Vec factor = set1(scale);
  const int64_t bytes = depth * static_cast<int64_t>(sizeof(T));
  for (int64_t column = 0; column < n; column += kLanes) {
    Vec sums[ROWS];
    for (int m = 0; m < ROWS; ++m) sums[m] = zero();
    for (int i = 0; i < kLanes; ++i) prefetch_row(next[column + i] + offset, bytes);
    int64_t d = 0;
    for (; d + kLanes <= depth; d += kLanes) {
      Vec square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        square[i] = load_scaled(reinterpret_cast<const T*>(rows[column + i] + offset) + d, factor);
      }
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        for (int m = 0; m < ROWS; ++m) {
          sums[m] = fma(set1(q[m * depth + d + i]), square[i], sums[m]);
        }
      }
    }
    if (d < depth) {
      Vec square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        T lanes[kLanes] = {};
        memcpy(static_cast<void*>(lanes), reinterpret_cast<const T*>(rows[column + i] + offset) + d,
               static_cast<size_t>(depth - d) * sizeof(T));
        square[i] = load_scaled(lanes, factor);
      }
      transpose(square);
      for (int i = 0; d + i < depth; ++i) {
        for (int m = 0; m < ROWS; ++m) {
          sums[m] = fma(set1(q[m * depth + d + i]), square[i], sums[m]);
        }
      }
    }
    for (int m = 0; m < ROWS; ++m) store(scores + m * scores_stride + column, sums[m]);
  }
}

// out[ROWS, columns] from `column` on = weights[ROWS, begin..end) times the values: VECS vectors,
// or fewer elements where VECS is 1.
template <typename T, int ROWS, int VECS>
static inline void weigh_few_columns(const float* weights, int64_t weights_stride,
                                     const char* const* rows, const char* const* next,
                                     int64_t offset, int64_t begin, int64_t end, int64_t column,
                                     int64_t columns, float scale, float* out, int64_t out_stride) {
  const Vec factor = set1(scale);
  const bool whole = VECS > 1 || column + kLanes <= columns;
  Vec sums[ROWS][VECS];
  for (int m = 0; m < ROWS; ++m) {
    for (int v = 0; v < VECS; ++v) sums[m][v] = zero();
  }
  for (int64_t key = begin; key < end; ++key) {
    const T* row = reinterpret_cast<const T*>(rows[key] + offset) + column;
    // Each pass asks for the lines that the next block's same pass will read.
    prefetch_row(next[key] + offset + column * static_cast<int64_t>(sizeof(T)),
                 VECS * kLanes * static_cast<int64_t>(sizeof(T)));
    Vec x[VECS];
    if (whole) {
      for (int v = 0; v < VECS; ++v) x[v] = load_scaled(row + v * kLanes, factor);
    } else {
      T lanes[kLanes] = {};
      memcpy(static_cast<void*>(lanes), row, static_cast<size_t>(columns - column) * sizeof(T));
      x[0] = load_scaled(lanes, factor);
    }
    for (int m = 0; m < ROWS; ++m) {
      const Vec w = set1(weights[m * weights_stride + key]);
      for (int v = 0; v < VECS; ++v) sums[m][v] = fma(w, x[v], sums[m][v]);
    }
  }
  for (int m = 0; m < ROWS; ++m) {
    for (int v = 0; v < VECS; ++v) store(out + m * out_stride + column + v * kLanes, sums[m][v]);
  }
}

template <typename T, int ROWS>
static inline void weigh_few(const float* weights, int64_t weights_stride, const char* const* rows,
                             const char* const* next, int64_t offset, int64_t begin, int64_t end,
                             int64_t columns, float scale, float* out, int64_t out_stride) {
  int64_t column = 0;
  for (; column + kFewVecs * kLanes <= columns; column += kFewVecs * kLanes) {
    weigh_few_columns<T, ROWS, kFewVecs>(weights, weights_stride, rows, next, offset, begin, end,
                                         column, columns, scale, out, out_stride);
  }
  for (; column < columns; column += kLanes) {
    weigh_few_columns<T, ROWS, 1>(weights, weights_stride, rows, next, offset, begin, end, column,
                                  columns, scale, out, out_stride);
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
