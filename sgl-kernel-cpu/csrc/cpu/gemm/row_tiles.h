// Tiles of rows times a panel, on tiers without a tile unit: how rows are cut into tiles of at most
// MR, and the calls of the micro-kernel. Part of the GEMM family, compiled per tier.
#pragma once

#include "gemm/micro_kernel.h"

namespace sgl_kernel {
namespace SGL_TIER {

// MR, the most rows of a tile; a multiple of kMR where a k pair has so few vectors that kMR rows
// leave registers free (the bf16 dot product of AVX-512: 2 vectors, 12 rows).
template <typename Dot>
constexpr int kTileRows = kMR * (kNRVecs > Dot::kVecs ? kNRVecs / Dot::kVecs : 1);

// Whether a tile of rows keeps all accumulators in registers.
template <typename Dot>
constexpr bool kAccumulatorsInRegisters = group_count<Dot>(kTileRows<Dot>) == 1;

// Rows cut into tiles as tall as each other: a low one would wait for its multiply-adds. The first
// `taller` tiles have one row more.
struct RowTiles {
  int64_t count;
  int64_t height;
  int64_t taller;
  int64_t prefetch_bytes;  // a tile's share of each pair of the weights that come next
};
template <typename Dot, typename packed_t>
SGL_INLINE RowTiles row_tiles(int64_t rows) {
  const int64_t count = div_up(rows, kTileRows<Dot>);
  return {count, rows / count, rows % count, div_up(kPairElements * sizeof(packed_t), count)};
}

// Prefetches packed weights that the next products need: `step` bytes with each pair of the first
// GROUPS groups of vectors. A prefetch takes the place of a load, and what comes into L1 that of
// the panel, so usually the first group prefetches alone, and into L2.
template <int GROUPS>
struct PanelPrefetcher {
  const char* from;
  int64_t step;
  int64_t pairs;
  static constexpr int kMostAccumulators = kMicroAccumulators;
  static constexpr int kUnroll = kUnrollK;
  template <int GROUP>
  SGL_MEMBER void work(int64_t pair) const {
    if constexpr (GROUP < GROUPS) {
      __builtin_prefetch(from + (GROUP * pairs + pair) * step, 0, GROUPS == 1 ? 2 : 3);
    }
  }
};

// From this many bytes a pair on a tile is bandwidth-bound: one group's prefetches would queue up,
// so all groups prefetch, into L1. Measured on AVX2, where that is e4m3 for one tile of rows (64
// bytes a pair) and bf16 for up to three (128, 64, 43).
constexpr int64_t kBandwidthBoundBytes = 40;

// What a tile of rows is multiplied by.
struct PanelStep {
  int64_t a_stride;
  int64_t pairs;
  bool start;              // accumulators begin at +0
  float* panel;            // where the weights are kept
  const char* prefetched;  // packed weights to prefetch meanwhile,
  int64_t prefetch_bytes;  // so much of them with each pair
};

template <typename Dot, int ROWS, bool KEEP, typename weight_t, typename Prefetcher>
SGL_INLINE void multiply_tile(const float* a, const weight_t* weights, const PanelStep& step,
                              Prefetcher prefetcher, float* acc, const RowSums* out) {
  const MicroOperands<weight_t> of{a,          step.a_stride, weights,   step.pairs,
                                   step.start, acc,           step.panel};
  micro_kernel<Dot, ROWS, KEEP>(of, &prefetcher, out);
}
// The same as a call: inlined into one function, loops spill their pointers where accumulators take
// most of 16 registers. With 32 the call only costs.
constexpr bool kTilesAreCalls = kMicroAccumulators < 16;
template <typename Dot, int ROWS, bool KEEP, typename weight_t, typename Prefetcher>
static __attribute__((noinline)) void multiply_tile_call(const float* a, const weight_t* weights,
                                                         const PanelStep& step,
                                                         Prefetcher prefetcher, float* acc,
                                                         const RowSums* out) {
  multiply_tile<Dot, ROWS, KEEP>(a, weights, step, prefetcher, acc, out);
}

// Prefetches with GROUPS groups of vectors.
template <typename Dot, int ROWS, bool KEEP, int GROUPS, typename weight_t>
SGL_INLINE void multiply_prefetching(const float* a, const weight_t* weights, const PanelStep& step,
                                     float* acc, const RowSums* out) {
  const PanelPrefetcher<GROUPS> prefetcher{step.prefetched, div_up(step.prefetch_bytes, GROUPS),
                                           step.pairs};
  if constexpr (kTilesAreCalls) {
    multiply_tile_call<Dot, ROWS, KEEP>(a, weights, step, prefetcher, acc, out);
  } else {
    multiply_tile<Dot, ROWS, KEEP>(a, weights, step, prefetcher, acc, out);
  }
}

// A tile of 1..ROWS rows.
template <typename Dot, int ROWS, bool KEEP, typename weight_t>
SGL_INLINE void multiply_rows(int64_t rows, const float* a, const weight_t* weights,
                              const PanelStep& step, float* acc, const RowSums* out) {
  if (rows == ROWS) {
    constexpr int kGroups = group_count<Dot>(ROWS);
    if (kGroups > 1 && step.prefetch_bytes >= kBandwidthBoundBytes) {
      multiply_prefetching<Dot, ROWS, KEEP, kGroups>(a, weights, step, acc, out);
    } else {
      multiply_prefetching<Dot, ROWS, KEEP, 1>(a, weights, step, acc, out);
    }
  } else if constexpr (ROWS > 1) {
    multiply_rows<Dot, ROWS - 1, KEEP>(rows, a, weights, step, acc, out);
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
