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

}  // namespace SGL_TIER
}  // namespace sgl_kernel
