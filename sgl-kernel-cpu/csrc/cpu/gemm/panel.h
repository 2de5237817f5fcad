// A panel: one block of K of 32 columns, widened to what the policy multiplies, for many rows to
// use. Part of the GEMM family, compiled per tier.
#pragma once

#include "gemm/micro_kernel.h"

namespace sgl_kernel {
namespace SGL_TIER {

// K pairs whose panel takes 16 KiB: half of the smallest L1, which leaves room for the rows of mat1
// and their sums.
template <typename Dot>
constexpr int64_t kSmallPanelPairs = 4096 / kPanelPair<Dot>;

// K pairs that a panel takes. Few rows take one of 16 KiB, which stays in L1 for all of them. Many
// rows leave L1 anyway, and to go on with their accumulators in another panel would cost more, so
// they take a whole block of K (32 KiB of f32); so do policies that take long to make a panel.
template <typename Dot>
SGL_INLINE int64_t panel_pairs(int64_t rows) {
  constexpr int64_t kManyRows = 48;
  return Dot::kTakesFp16Bits && rows < kManyRows ? kSmallPanelPairs<Dot> : Dot::kKC / 2;
}

// Widens one k pair into a panel.
template <typename Dot, typename packed_t>
SGL_INLINE void make_pair(const packed_t* packed, int64_t pair, float* panel) {
  Vec w[Dot::kVecs];
  load_pair<Dot>(packed, pair, w);
#pragma GCC unroll 16
  for (int i = 0; i < Dot::kVecs; ++i) store(panel + pair * kPanelPair<Dot> + i * kLanes, w[i]);
}

// Widens e4m3 codes to fp16 bits. A call, so that its constants take no registers from the
// products. The codes are in L2 by now: a few pairs before they are widened is early enough for L1.
static inline __attribute__((noinline)) void widen_e4m3(const e4m3_t* codes, int64_t pairs,
                                                        E4m3AsFp16* widened) {
  constexpr int64_t kPrefetched = 7 * kPairElements;
  E4m3Widener widener(codes, widened);
  for (int64_t p = 0; p < pairs; ++p) {
    __builtin_prefetch(codes + p * kPairElements + kPrefetched, 0, 3);
    widener.widen(p);
  }
  widener.finish(pairs, pairs);
}

// What comes next of the packed weights [pairs, 32, 2]. On tiers with tiles it is made into a panel
// step by step between the products of the panel before it, because the tile unit leaves the vector
// units free. Elsewhere it only waits for its products, which widen it.
template <typename Dot, typename packed_t>
class PanelMaker {
 public:
  // What finish() returns: a panel of floats, or packed weights.
  using Ready = std::conditional_t<Dot::kTiles, float, packed_t>;

  // `panel`: room for one.
  SGL_MEMBER void start(const packed_t* b, int64_t pairs, int64_t padded_pairs, float* panel) {
    b_ = b;
    pairs_ = pairs;
    padded_pairs_ = padded_pairs;
    panel_ = panel;
    done_ = 0;
  }
  // Nothing more to make.
  SGL_MEMBER void stop() { done_ = pairs_; }

  SGL_MEMBER int64_t pairs_left() const { return pairs_ - done_; }
  SGL_MEMBER const packed_t* packed() const { return b_; }

  // Makes a few more pairs of the panel.
  SGL_MEMBER void advance(int64_t count) {
    const int64_t end = min_i64(done_ + count, pairs_);
    if (is_panel()) {
      for (; done_ < end; ++done_) prefetch<3>(b_ + done_ * kPairElements);
    } else {
      for (; done_ < end; ++done_) {
        prefetch<3>(b_ + (done_ + kPrefetchPairsL1) * kPairElements);
        prefetch<2>(b_ + (done_ + kPrefetchPairsL2) * kPairElements);
        make_pair<Dot>(b_, done_, panel_);
      }
    }
  }

  // The rest, and zeros up to `padded_pairs`. Returns the panel; the packed weights where they
  // already are one, or none is made.
  SGL_MEMBER const Ready* finish() {
    if constexpr (Dot::kTiles) {
      if (is_panel()) return reinterpret_cast<const float*>(b_);
      advance(pairs_);
      memset(panel_ + pairs_ * kPanelPair<Dot>, 0,
             (padded_pairs_ - pairs_) * kPanelPair<Dot> * sizeof(float));
      return panel_;
    } else {
      return b_;
    }
  }

 private:
  // K pairs between the one that is widened and those that are prefetched: of e4m3 1 and 8 KiB.
  static constexpr int64_t kPrefetchPairsL1 = 16;
  static constexpr int64_t kPrefetchPairsL2 = 128;

  // Packed bf16 pairs are what tiles multiply.
  SGL_MEMBER bool is_panel() const {
    return std::is_same<packed_t, bf16_t>::value && pairs_ == padded_pairs_;
  }

  // Into L1 (3) or L2 (2).
  template <int LEVEL>
  SGL_INLINE void prefetch(const packed_t* pair) {
    for (size_t byte = 0; byte < kPairElements * sizeof(packed_t); byte += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(pair) + byte, 0, LEVEL);
    }
  }

  const packed_t* b_ = nullptr;
  int64_t pairs_ = 0;
  int64_t padded_pairs_ = 0;
  float* panel_ = nullptr;
  int64_t done_ = 0;
};

}  // namespace SGL_TIER
}  // namespace sgl_kernel
