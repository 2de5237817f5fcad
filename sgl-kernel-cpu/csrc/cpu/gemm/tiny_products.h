// A few rows times packed weights, without a panel: the weights are widened in registers or, e4m3
// on tiers that multiply f32, by way of fp16 bits. Part of the GEMM family, compiled per tier.
#pragma once

#include "gemm/micro_kernel.h"

namespace sgl_kernel {
namespace SGL_TIER {

// Consecutive k pairs of a block of columns.
template <typename packed_t>
struct PairRun {
  const packed_t* b;
  int64_t pairs;
};

// Hardware prefetchers stop at page borders and start anew behind them, and do not get far enough
// in front. A line is prefetched twice: early into L2, where many requests can wait, then into L1.
// Distances into L2 that are multiples of 1 KiB read a tenth slower, measured.
constexpr int64_t kPrefetchL1 = 1024;
constexpr int64_t kPrefetchL2 = 4608;

// Prefetches the k pairs that many bytes behind this one. May point past the weight: a prefetch
// reads nothing and cannot fault.
template <typename packed_t>
SGL_INLINE void prefetch_pair(const packed_t* pair) {
  const char* line = reinterpret_cast<const char*>(pair);
  for (size_t byte = 0; byte < kPairElements * sizeof(packed_t); byte += 64) {
    __builtin_prefetch(line + byte + kPrefetchL1, 0, 3);
    __builtin_prefetch(line + byte + kPrefetchL2, 0, 2);
  }
}

// Prefetches packed weights, kPrefetchL2 and then kPrefetchL1 bytes before they are multiplied.
template <typename packed_t>
struct PackedPrefetcher {
  const packed_t* b;
  static constexpr int kMostAccumulators = kMicroAccumulators;
  static constexpr int kUnroll = 1;
  template <int GROUP>
  SGL_MEMBER void work(int64_t pair) const {
    if constexpr (GROUP == 0) prefetch_pair(b + pair * kPairElements);
  }
};

// acc[ROWS, kVecs] = a[ROWS, pairs] * now, widened in registers.
template <typename Dot, int ROWS, typename packed_t>
SGL_INLINE void multiply_packed(const float* a, int64_t a_stride, PairRun<packed_t> now,
                                float* acc) {
  // Each group of vectors reads the weights again. 32 k pairs of two bytes an element are 4 KiB, so
  // the second group finds in L1 what the first has brought.
  constexpr int64_t kPairs = 32;
  for (int64_t p = 0; p < now.pairs; p += kPairs) {
    PackedPrefetcher<packed_t> prefetcher{now.b + p * kPairElements};
    const int64_t pairs = min_i64(kPairs, now.pairs - p);
    micro_kernel<Dot, ROWS, false>(
        MicroOperands<packed_t>{a + p * Dot::kAccumulators, a_stride, prefetcher.b, pairs, p == 0,
                                acc, nullptr},
        &prefetcher);
  }
}
// The same as a call, so that the compiler has all registers for it.
template <typename Dot, int ROWS, typename packed_t>
static __attribute__((noinline)) void multiply_packed_call(const float* a, int64_t a_stride,
                                                           PairRun<packed_t> now, float* acc) {
  multiply_packed<Dot, ROWS>(a, a_stride, now, acc);
}

// e4m3 weights as fp16 bits, 16 k pairs at a time (a chunk, 2 KiB). Two chunks alternate: one is
// multiplied while the other is widened, so that the widening, which needs shuffle and logic units,
// goes on beside the multiply-adds and its stores have long reached L1 when they are loaded.
constexpr int64_t kChunkPairs = 16;
struct WidenedChunks {
  alignas(64) E4m3AsFp16 widened[2][kChunkPairs * kPairElements];
  int odd = 0;         // which of them comes first,
  bool ready = false;  // and whether it has been widened
};

// Prefetches, and widens `pairs` k pairs, one with each pair of the products. FULL: the products
// have as many, so that the loop asks nothing.
template <bool FULL>
struct WideningPrefetcher {
  const e4m3_t* codes;
  int64_t pairs;
  E4m3Widener widener;
  static constexpr int kMostAccumulators = kAccumulatorsWhileWidening;
  static constexpr int kUnroll = kUnrollK;
  template <int GROUP>
  SGL_MEMBER void work(int64_t pair) {
    if constexpr (GROUP == 0) {
      prefetch_pair(codes + pair * kPairElements);
      if (FULL || pair < pairs) widener.widen(pair);
    }
  }
};

// One chunk of products; meanwhile `next` becomes `next_widened`.
template <typename Dot, int ROWS, bool FULL>
SGL_INLINE void multiply_chunk(const MicroOperands<E4m3AsFp16>& chunk, PairRun<e4m3_t> next,
                               E4m3AsFp16* next_widened) {
  WideningPrefetcher<FULL> prefetcher{next.b, next.pairs, E4m3Widener(next.b, next_widened)};
  micro_kernel<Dot, ROWS, false>(chunk, &prefetcher);
  prefetcher.widener.finish(chunk.pairs, next.pairs);
}

// acc[ROWS, kVecs] = a[ROWS, pairs] * now, chunk by chunk. A call, as above.
template <typename Dot, int ROWS>
static __attribute__((noinline)) void multiply_chunks(const float* a, int64_t a_stride,
                                                      PairRun<e4m3_t> now, PairRun<e4m3_t> next,
                                                      float* acc, WidenedChunks* chunks) {
  int odd = chunks->odd;
  if (!chunks->ready) {
    E4m3Widener(now.b, chunks->widened[odd]).finish(0, min_i64(kChunkPairs, now.pairs));
  }
  for (int64_t p = 0; p < now.pairs; p += kChunkPairs, odd = 1 - odd) {
    const int64_t left = now.pairs - p - kChunkPairs;
    PairRun<e4m3_t> then = next;
    if (left > 0) then = {now.b + (p + kChunkPairs) * kPairElements, left};
    then.pairs = min_i64(kChunkPairs, then.pairs);
    MicroOperands<E4m3AsFp16> chunk{a + p * Dot::kAccumulators,
                                    a_stride,
                                    chunks->widened[odd],
                                    kChunkPairs,
                                    p == 0,
                                    acc,
                                    nullptr};
    E4m3AsFp16* next_widened = chunks->widened[1 - odd];
    if (left >= 0 && then.pairs == kChunkPairs) {
      multiply_chunk<Dot, ROWS, true>(chunk, {then.b, kChunkPairs}, next_widened);
    } else {
      chunk.pairs = min_i64(kChunkPairs, now.pairs - p);
      multiply_chunk<Dot, ROWS, false>(chunk, then, next_widened);
    }
  }
  chunks->odd = odd;
  chunks->ready = next.pairs > 0;
}

// acc[ROWS, kVecs] = a[ROWS, pairs] * now, one call after the other. `next`: what the next call
// multiplies, or no pairs.
template <typename Dot, int ROWS, typename packed_t>
class TinyProducts {
 public:
  SGL_MEMBER void multiply(const float* a, int64_t a_stride, PairRun<packed_t> now,
                           PairRun<packed_t> next, float* acc) {
    if constexpr (kByFp16Bits<Dot, packed_t>) {
      multiply_chunks<Dot, ROWS>(a, a_stride, now, next, acc, &state_);
    } else if constexpr (kShort || (Dot::kTakesFp16Bits && ROWS == 1)) {
      multiply_packed<Dot, ROWS>(a, a_stride, now, acc);
    } else {
      multiply_packed_call<Dot, ROWS>(a, a_stride, now, acc);
    }
  }

 private:
  // A call would load its tables anew for every few pairs.
  static constexpr bool kShort = Dot::kAccumulatedPairs <= 16;
  struct Nothing {};
  std::conditional_t<kByFp16Bits<Dot, packed_t>, WidenedChunks, Nothing> state_;
};

}  // namespace SGL_TIER
}  // namespace sgl_kernel
