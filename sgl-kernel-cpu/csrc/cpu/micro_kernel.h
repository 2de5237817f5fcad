// The innermost loop: the sums of a few rows and some vectors of a k pair stay in registers. Part
// of the GEMM family, compiled per tier.
#pragma once

#include "dot.h"

namespace sgl_kernel {
namespace SGL_TIER {

// Vectors of a k pair whose sums `rows` rows keep in registers: groups of as many as fit, and as
// large as each other.
template <typename Dot>
constexpr int group_vecs(int rows) {
  const int most = kMicroRows * kMicroVecs / rows;
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

// Where the sums of chains go: sums[rows, 32] (+)= them, times the rows' factors.
struct RowSums {
  const float* factors;
  float* sums;
  bool start;
};

template <typename Dot>
SGL_INLINE void add_row_sums(const Vec* chains, const RowSums& out, int64_t row) {
  const Vec factor = set1(out.factors[row]);
#pragma GCC unroll 16
  for (int i = 0; i < kColumnVecs; ++i) {
    float* to = out.sums + row * kBlockN + i * kLanes;
    const Vec sum = sum_of_chains<Dot>(chains + i);
    store(to, add(out.start ? zero() : load(to), mul(sum, factor)));
  }
}

// chains[ROWS, kVecs] (+)= a[ROWS, pairs] * weights[pairs, 32], group by group from vector FIRST
// on. KEEP: the weights become a panel on the way. `ahead.fetch<group>(pair)` asks for what comes
// next; spread over the products, requests do not queue up.
// `out`: where chains end instead that are all in registers.
template <typename Dot, int ROWS, bool KEEP, int FIRST = 0, typename weight_t, typename Ahead>
SGL_INLINE void micro_kernel(const float* a, int64_t a_stride, const weight_t* weights,
                             int64_t pairs, bool start, float* chains, float* panel,
                             const Ahead& ahead, const RowSums* out = nullptr) {
  constexpr int kCount =
      group_vecs<Dot>(ROWS) < Dot::kVecs - FIRST ? group_vecs<Dot>(ROWS) : Dot::kVecs - FIRST;
  Vec sums[ROWS][kCount];
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m) {
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
      sums[m][i] = start ? zero() : load(chains + m * kPanelPair<Dot> + (FIRST + i) * kLanes);
    }
  }
  // Unrolled, it spills sums, and short loops ask for all lines at once.
#pragma GCC unroll 1
  for (int64_t p = 0; p < pairs; ++p) {
    ahead.template fetch<FIRST / group_vecs<Dot>(ROWS)>(p);
    Vec w[Dot::kVecs];
    load_pair<Dot>(weights, p, w);
    if constexpr (KEEP) {
#pragma GCC unroll 16
      for (int i = FIRST; i < FIRST + kCount; ++i) {
        store(panel + p * kPanelPair<Dot> + i * kLanes, w[i]);
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) {
      const float* x = a + m * a_stride + p * Dot::kChains;
#pragma GCC unroll 16
      for (int i = 0; i < kCount; ++i) {
        const int vec = FIRST + i;
        sums[m][i] = Dot::dot(set1(x[vec / kColumnVecs]), w[vec], sums[m][i]);
      }
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
