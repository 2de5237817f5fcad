// Products of a few rows and packed weights, which are widened in registers or, from e4m3 codes, by
// way of words. Part of the GEMM family, compiled per tier.
#pragma once

#include "gemm/micro_kernel.h"

namespace sgl_kernel {
namespace SGL_TIER {

// Some k pairs of a block of columns.
template <typename packed_t>
struct PairRun {
  const packed_t* b;
  int64_t pairs;
};

// Asks for the packed weights that far ahead.
template <typename packed_t>
struct PackedAhead {
  const packed_t* b;
  static constexpr int kSums = kMicroSums;
  static constexpr int kUnroll = 1;
  template <int GROUP>
  SGL_MEMBER void work(int64_t pair) const {
    if constexpr (GROUP == 0) prefetch_pair(b + pair * kPairElements);
  }
};

// chains[ROWS, kVecs] = a[ROWS, pairs] * now, which are widened in registers.
template <typename Dot, int ROWS, typename packed_t>
SGL_INLINE void multiply_packed(const float* a, int64_t a_stride, PairRun<packed_t> now,
                                float* chains) {
  // Few enough pairs to stay in L1 for all groups of vectors.
  constexpr int64_t kPairs = 32;
  for (int64_t p = 0; p < now.pairs; p += kPairs) {
    PackedAhead<packed_t> ahead{now.b + p * kPairElements};
    micro_kernel<Dot, ROWS, false>(a + p * Dot::kChains, a_stride, ahead.b,
                                   min_i64(kPairs, now.pairs - p), p == 0, chains, nullptr, &ahead);
  }
}
// The same as a call, so that the compiler has all registers for it.
template <typename Dot, int ROWS, typename packed_t>
static __attribute__((noinline)) void multiply_packed_call(const float* a, int64_t a_stride,
                                                           PairRun<packed_t> now, float* chains) {
  multiply_packed<Dot, ROWS>(a, a_stride, now, chains);
}

// Pairs of a chunk of words, and two of them: one is multiplied while the other is made.
constexpr int64_t kWordPairs = 16;
struct WordChunks {
  alignas(64) Word words[2][kWordPairs * kPairElements];
  int odd = 0;         // which of them comes first,
  bool ready = false;  // and whether it has been made
};

// Makes `pairs` pairs of words, one with each pair of the products. FULL: as many as the products
// have.
template <bool FULL>
struct WordsAhead {
  const e4m3_t* codes;
  int64_t pairs;
  WordMaker maker;
  static constexpr int kSums = kSumsBesideWords;
  static constexpr int kUnroll = kMicroUnroll;
  template <int GROUP>
  SGL_MEMBER void work(int64_t pair) {
    if constexpr (GROUP == 0) {
      prefetch_pair(codes + pair * kPairElements);
      if (FULL || pair < pairs) maker.make(pair);
    }
  }
};

// chains[ROWS, kVecs] (+)= a[ROWS, pairs] * words; meanwhile `next` becomes words.
template <typename Dot, int ROWS, bool FULL>
SGL_INLINE void multiply_word_chunk(const float* a, int64_t a_stride, const Word* words,
                                    int64_t pairs, bool start, PairRun<e4m3_t> next,
                                    Word* next_words, float* chains) {
  WordsAhead<FULL> ahead{next.b, next.pairs, WordMaker(next.b, next_words)};
  micro_kernel<Dot, ROWS, false>(a, a_stride, words, pairs, start, chains, nullptr, &ahead);
  ahead.maker.finish(pairs, next.pairs);
}

// chains[ROWS, kVecs] = a[ROWS, pairs] * now, chunk by chunk. A call, as above.
template <typename Dot, int ROWS>
static __attribute__((noinline)) void multiply_word_chunks(const float* a, int64_t a_stride,
                                                           PairRun<e4m3_t> now,
                                                           PairRun<e4m3_t> next, float* chains,
                                                           WordChunks* chunks) {
  int odd = chunks->odd;
  if (!chunks->ready) {
    WordMaker(now.b, chunks->words[odd]).finish(0, min_i64(kWordPairs, now.pairs));
  }
  for (int64_t p = 0; p < now.pairs; p += kWordPairs, odd = 1 - odd) {
    const int64_t left = now.pairs - p - kWordPairs;
    PairRun<e4m3_t> then = next;
    if (left > 0) then = {now.b + (p + kWordPairs) * kPairElements, left};
    then.pairs = min_i64(kWordPairs, then.pairs);
    const float* x = a + p * Dot::kChains;
    const Word* words = chunks->words[odd];
    Word* next_words = chunks->words[1 - odd];
    if (left >= 0 && then.pairs == kWordPairs) {
      multiply_word_chunk<Dot, ROWS, true>(x, a_stride, words, kWordPairs, p == 0,
                                           {then.b, kWordPairs}, next_words, chains);
    } else {
      multiply_word_chunk<Dot, ROWS, false>(x, a_stride, words, min_i64(kWordPairs, now.pairs - p),
                                            p == 0, then, next_words, chains);
    }
  }
  chunks->odd = odd;
  chunks->ready = next.pairs > 0;
}

// chains[ROWS, kVecs] = a[ROWS, pairs] * now, a call after the other. `next`: what the next one
// multiplies, or no pairs.
template <typename Dot, int ROWS, typename packed_t>
class TinyProducts {
 public:
  SGL_MEMBER void multiply(const float* a, int64_t a_stride, PairRun<packed_t> now,
                           PairRun<packed_t> next, float* chains) {
    if constexpr (kInWords) {
      multiply_word_chunks<Dot, ROWS>(a, a_stride, now, next, chains, &state_);
    } else if constexpr (kShort || (Dot::kWords && ROWS == 1)) {
      multiply_packed<Dot, ROWS>(a, a_stride, now, chains);
    } else {
      multiply_packed_call<Dot, ROWS>(a, a_stride, now, chains);
    }
  }

 private:
  static constexpr bool kInWords = Dot::kWords && std::is_same<packed_t, e4m3_t>::value;
  // A call would load its tables anew for every few pairs.
  static constexpr bool kShort = Dot::kFlushPairs <= 16;
  struct Nothing {};
  std::conditional_t<kInWords, WordChunks, Nothing> state_;
};

}  // namespace SGL_TIER
}  // namespace sgl_kernel
