// Attention of a few query rows straight from the cache: keys and values are converted to f32 in
// registers as they are read, instead of in panels. Each output element is summed in the same order
// as in packed_tile.h, so the results have the same bits. Compiled once per tier.
//
// A decode step reads each key and value once, for the rows of one token that share it, so it is
// bandwidth-bound, and writing panels would double the traffic. Rows of the cache lie anywhere
// (paged), so no hardware prefetcher can guess the next one: as the rows of a block are used, those
// of the next block are prefetched.
#pragma once

#include "attention/attention.h"
#include "simd/vec_math.h"

namespace sgl_kernel {
namespace SGL_TIER {

// Rows of keys (or values) of a block: rows[i] + offset is key i. Behind the last key of a block
// the array goes on with rows that exist. next[i] + offset is the same place of the next block.
struct CachedRows {
  const char* const* rows;
  const char* const* next;
  int64_t offset;
  float scale;  // of the cache
};

// Prefetches a row that is read later, all its cache lines.
SGL_INLINE void prefetch_row(const char* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
}

// The most query rows that go without panels: qk_dot keeps an accumulator for each, next to the
// transposed keys. pv_accumulate keeps ROWS x VECS of them, 4 x 2 or 8 x 1 in the 16 registers of
// AVX2, 4 x 4 or 8 x 2 in the 32 of others.
constexpr int kMostDirectRows = 8;

// An element times the cache's scale; only e4m3 has one here.
template <typename T>
SGL_INLINE Vec load_scaled(const T* p, Vec) {
  return load_act(p);
}
SGL_INLINE Vec load_scaled(const e4m3_t* p, Vec factor) {
  return mul(load_act(p), factor);
}

// scores[ROWS, n] = q[ROWS, depth] times n keys, in lines of kKeyBlock. kLanes keys are loaded
// side by side and transposed, so that a lane is a key and nothing is added across lanes.
template <typename T, int ROWS>
static inline void qk_dot(const float* q, const CachedRows& keys, int64_t n, int64_t depth,
                          float* scores) {
  const char* const* const rows = keys.rows;
  const char* const* const next = keys.next;
  const int64_t offset = keys.offset;
  const Vec factor = set1(keys.scale);
  const int64_t bytes = depth * static_cast<int64_t>(sizeof(T));
  for (int64_t column = 0; column < n; column += kLanes) {
    Vec acc[ROWS];
    for (int m = 0; m < ROWS; ++m) acc[m] = zero();
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
          acc[m] = fma(set1(q[m * depth + d + i]), square[i], acc[m]);
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
          acc[m] = fma(set1(q[m * depth + d + i]), square[i], acc[m]);
        }
      }
    }
    for (int m = 0; m < ROWS; ++m) store(scores + m * kKeyBlock + column, acc[m]);
  }
}

// Where weighted values go: rows of `columns` elements, `stride` floats apart. A row is written up
// to a multiple of kLanes.
struct PvOutput {
  float* rows;
  int64_t stride;
  int64_t columns;
};

// Columns of pv_accumulate from `column` on: VECS vectors, or fewer elements where VECS is 1.
template <typename T, int ROWS, int VECS>
static inline void pv_columns(const float* weights, const CachedRows& values, KeyRange keys,
                              int64_t column, const PvOutput& out) {
  const char* const* const rows = values.rows;
  const char* const* const next = values.next;
  const int64_t offset = values.offset, columns = out.columns;
  const Vec factor = set1(values.scale);
  const bool whole = VECS > 1 || column + kLanes <= columns;
  Vec acc[ROWS][VECS];
  for (int m = 0; m < ROWS; ++m) {
    for (int v = 0; v < VECS; ++v) acc[m][v] = zero();
  }
  for (int64_t key = keys.begin; key < keys.end; ++key) {
    const T* row = reinterpret_cast<const T*>(rows[key] + offset) + column;
    // The cache lines that these columns of the next block will read.
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
      const Vec w = set1(weights[m * kKeyBlock + key]);
      for (int v = 0; v < VECS; ++v) acc[m][v] = fma(w, x[v], acc[m][v]);
    }
  }
  for (int m = 0; m < ROWS; ++m) {
    for (int v = 0; v < VECS; ++v) {
      store(out.rows + m * out.stride + column + v * kLanes, acc[m][v]);
    }
  }
}

// out[ROWS, columns] = weights[ROWS, keys], in lines of kKeyBlock, times the values.
template <typename T, int ROWS>
static inline void pv_accumulate(const float* weights, const CachedRows& values, KeyRange keys,
                                 const PvOutput& out) {
  int64_t column = 0;
  constexpr int kVecs = ROWS > 4 ? kDirectPvVecs / 2 : kDirectPvVecs;
  for (; column + kVecs * kLanes <= out.columns; column += kVecs * kLanes) {
    pv_columns<T, ROWS, kVecs>(weights, values, keys, column, out);
  }
  for (; column < out.columns; column += kLanes) {
    pv_columns<T, ROWS, 1>(weights, values, keys, column, out);
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
