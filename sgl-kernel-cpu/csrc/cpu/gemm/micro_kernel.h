// The innermost loop: the sums of a few rows and some vectors of a k pair stay in registers. Part
// of the GEMM family, compiled per tier.
#pragma once

#include "simd/dot.h"

namespace sgl_kernel {
namespace SGL_TIER {

constexpr int kMicroSums = kMicroRows * kMicroVecs;

// Vectors of a k pair whose sums `rows` rows keep in registers, `sums` in all: groups of as many as
// fit, and as large as each other.
template <typename Dot>
constexpr int group_vecs(int rows, int sums = kMicroSums) {
  const int most = sums / rows;
  const int groups = (Dot::kVecs + most - 1) / most;
  return (Dot::kVecs + groups - 1) / groups;
}
template <typename Dot>
constexpr int group_count(int rows) {
  return (Dot::kVecs + group_vecs<Dot>(rows) - 1) / group_vecs<Dot>(rows);
}

// A k pair of weights as Dot multiplies it: kPanelPair floats of a panel, or packed weights.
template <typename Dot>
constexpr int64_t kPanelPair = Dot::kVecs * kLanes;

template <typename Dot>
SGL_INLINE void load_pair(const float* panel, int64_t pair, Vec* weights) {
#pragma GCC unroll 16
  for (int i = 0; i < Dot::kVecs; ++i) {
    weights[i] = load(panel + pair * kPanelPair<Dot> + i * kLanes);
  }
}
template <typename Dot, typename weight_t>
SGL_INLINE void load_pair(const weight_t* packed, int64_t pair, Vec* weights) {
  Dot::load_weights(packed + pair * kPairElements, weights);
}

// One vector of it, of weights whose vectors can be loaded alone.
template <typename Dot>
SGL_INLINE Vec load_vec(const float* panel, int64_t pair, int i) {
  return load(panel + pair * kPanelPair<Dot> + i * kLanes);
}
template <typename Dot>
SGL_INLINE Vec load_vec(const Word* words, int64_t pair, int i) {
  return load_act(words + pair * kPairElements + i * kLanes);
}
template <typename weight_t>
constexpr bool kVecsAlone =
    std::is_same<weight_t, float>::value || std::is_same<weight_t, Word>::value;

// Where the sums of chains go: sums[rows, 32] (+)= them, times the rows' factors and, unless it is
// null, the columns' scale.
struct RowSums {
  const float* factors;
  const float* scale;
  float* sums;
  bool start;
};

template <typename Dot>
SGL_INLINE void add_row_sums(const Vec* chains, const RowSums& out, int64_t row) {
  const Vec factor = set1(out.factors[row]);
#pragma GCC unroll 16
  for (int i = 0; i < kColumnVecs; ++i) {
    float* to = out.sums + row * kBlockN + i * kLanes;
    Vec sum = mul(sum_of_chains<Dot>(chains + i), factor);
    if (out.scale != nullptr) sum = mul(sum, load(out.scale + i * kLanes));
    store(to, add(out.start ? zero() : load(to), sum));
  }
}

// sums[ROWS][COUNT] += a k pair's products, its vectors from FIRST on. Where the weights would take
// the last registers, the rows' elements, which are fewer, wait in registers instead. KEEP: the
// weights become a panel.
template <typename Dot, int ROWS, int FIRST, int COUNT, bool KEEP, typename weight_t>
SGL_INLINE void multiply_pair(const float* a, int64_t a_stride, const weight_t* weights,
                              int64_t pair, float* panel, Vec (*sums)[COUNT]) {
  a += pair * Dot::kChains;
  if constexpr (KEEP) panel += pair * kPanelPair<Dot>;
  constexpr bool kCrowded = ROWS * COUNT + COUNT >= kMicroSums;
  if constexpr (kVecsAlone<weight_t> && kCrowded && ROWS < COUNT) {
    Vec x[ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; ++i) {
      const int vec = FIRST + i;
      if (i == 0 || vec % kColumnVecs == 0) {
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; ++m) x[m] = set1(a[m * a_stride + vec / kColumnVecs]);
      }
      const Vec w = load_vec<Dot>(weights, pair, vec);
      if constexpr (KEEP) store(panel + vec * kLanes, w);
#pragma GCC unroll 16
      for (int m = 0; m < ROWS; ++m) sums[m][i] = Dot::dot(x[m], w, sums[m][i]);
    }
  } else {
    Vec w[Dot::kVecs];
    load_pair<Dot>(weights, pair, w);
    if constexpr (KEEP) {
#pragma GCC unroll 16
      for (int i = FIRST; i < FIRST + COUNT; ++i) store(panel + i * kLanes, w[i]);
    }
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) {
#pragma GCC unroll 16
      for (int i = 0; i < COUNT; ++i) {
        const Vec x = set1(a[m * a_stride + (FIRST + i) / kColumnVecs]);
        sums[m][i] = Dot::dot(x, w[FIRST + i], sums[m][i]);
      }
    }
  }
}

// chains[ROWS, kVecs] (+)= a[ROWS, pairs] * weights[pairs, 32], group by group from vector FIRST
// on. KEEP: the weights become a panel on the way. `ahead->work<group>(pair)` does something for
// what comes next between the products: idle units have work.
// Ahead::kSums: accumulators that it leaves; kUnroll: pairs of a pass of the loop, 1 or 2. `out`:
// where chains end instead that are all in registers.
template <typename Dot, int ROWS, bool KEEP, int FIRST = 0, typename weight_t, typename Ahead>
SGL_INLINE void micro_kernel(const float* a, int64_t a_stride, const weight_t* weights,
                             int64_t pairs, bool start, float* chains, float* panel, Ahead* ahead,
                             const RowSums* out = nullptr) {
  constexpr int kGroup = group_vecs<Dot>(ROWS, Ahead::kSums);
  constexpr int kCount = kGroup < Dot::kVecs - FIRST ? kGroup : Dot::kVecs - FIRST;
  Vec sums[ROWS][kCount];
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m) {
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
      sums[m][i] = start ? zero() : load(chains + m * kPanelPair<Dot> + (FIRST + i) * kLanes);
    }
  }
  // A pragma takes no template's constant. Unrolled further, the loop spills sums.
  static_assert(Ahead::kUnroll == 1 || Ahead::kUnroll == 2, "one loop for each");
  if constexpr (Ahead::kUnroll == 2) {
#pragma GCC unroll 2
    for (int64_t p = 0; p < pairs; ++p) {
      ahead->template work<FIRST / kGroup>(p);
      multiply_pair<Dot, ROWS, FIRST, kCount, KEEP>(a, a_stride, weights, p, panel, sums);
    }
  } else {
#pragma GCC unroll 1
    for (int64_t p = 0; p < pairs; ++p) {
      ahead->template work<FIRST / kGroup>(p);
      multiply_pair<Dot, ROWS, FIRST, kCount, KEEP>(a, a_stride, weights, p, panel, sums);
    }
  }
  if constexpr (kCount == Dot::kVecs) {
    if (out != nullptr) {
#pragma GCC unroll 16
      for (int m = 0; m < ROWS; ++m) add_row_sums<Dot>(sums[m], *out, m);
      return;
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m) {
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
      store(chains + m * kPanelPair<Dot> + (FIRST + i) * kLanes, sums[m][i]);
    }
  }
  if constexpr (FIRST + kCount < Dot::kVecs) {
    micro_kernel<Dot, ROWS, KEEP, FIRST + kCount>(a, a_stride, weights, pairs, start, chains, panel,
                                                  ahead);
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
