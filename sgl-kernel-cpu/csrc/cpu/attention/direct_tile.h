// Decode of few rows of queries: keys and values are converted in registers instead of in panels.
// Sums run in the same order, so the results are those of packed_tile.h bit for bit. Compiled
// once per tier.
//
// rows[i] + offset is a key's (or value's) row; behind the last one the array goes on with rows
// that exist. As each is used, next[i] + offset is asked for.
#pragma once

#include "simd/int_math.h"
#include "simd/vec_math.h"

namespace sgl_kernel {
namespace SGL_TIER {

// Asks for the cache lines of a row that is read later: cached rows lie anywhere, so hardware
// cannot guess the next one.
SGL_INLINE void prefetch_row(const char* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
}

constexpr int kFewRows = 8;
#if defined(SGL_TIER_AVX2)
constexpr int kFewVecs = 2;  // 4 x 2 or 8 x 1 sums in 16 registers
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
  constexpr int kVecs = ROWS > 4 ? kFewVecs / 2 : kFewVecs;
  for (; column + kVecs * kLanes <= columns; column += kVecs * kLanes) {
    weigh_few_columns<T, ROWS, kVecs>(weights, weights_stride, rows, next, offset, begin, end,
                                      column, columns, scale, out, out_stride);
  }
  for (; column < columns; column += kLanes) {
    weigh_few_columns<T, ROWS, 1>(weights, weights_stride, rows, next, offset, begin, end, column,
                                  columns, scale, out, out_stride);
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
