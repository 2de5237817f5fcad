// The micro-kernel: the innermost loop over K. Part of the GEMM family, compiled per tier.
//
// It multiplies MR rows by the 32 columns of a block, and keeps its accumulators in registers while
// it walks over k pairs. An output element has Dot::kAccumulators of them (even k and odd k apart,
// or one), so a row of 32 columns needs Dot::kVecs vectors: 8 on AVX2 (2 x 32 floats in vectors of
// 8). All rows at once seldom fit, so the vectors are taken in groups, one loop over K for each
// group: as many as the registers hold. On AVX2, with 12 registers for accumulators, 6 rows take
// groups of 2 vectors, 4 rows groups of 3, 1 row all 8 at once.
//
// What a step of the loop costs: for each of `count` vectors of weights and `rows` rows one
// multiply-add; beside them `count` loads of weights and, for each row and parity, one broadcast of
// its element. With 6 rows and 2 vectors that is 12 multiply-adds for 2 + 6 loads, so the two
// multiply units, not the two load ports, set the pace; with 12 accumulators in flight each unit
// may start one in every cycle although a result takes 4 or 5.
#pragma once

#include "simd/dot.h"
#include "simd/int_math.h"

namespace sgl_kernel {
namespace SGL_TIER {

// Registers that hold accumulators: the tile of MR rows and kNRVecs vectors.
constexpr int kMicroAccumulators = kMR * kNRVecs;

// Vectors in a group: as many as `rows` rows can keep in `registers` accumulators, and groups as
// large as each other.
template <typename Dot>
constexpr int group_vecs(int rows, int registers = kMicroAccumulators) {
  const int64_t groups = div_up(Dot::kVecs, registers / rows);
  return static_cast<int>(div_up(Dot::kVecs, groups));
}
template <typename Dot>
constexpr int group_count(int rows) {
  return static_cast<int>(div_up(Dot::kVecs, group_vecs<Dot>(rows)));
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
SGL_INLINE Vec load_vec(const E4m3AsFp16* widened, int64_t pair, int i) {
  return load_act(widened + pair * kPairElements + i * kLanes);
}
template <typename weight_t>
constexpr bool kVecsAlone =
    std::is_same<weight_t, float>::value || std::is_same<weight_t, E4m3AsFp16>::value;

// Where accumulators end: sums[rows, 32] (+)= even k plus odd k, times the rows' factors and,
// unless it is null, the columns' scale.
struct RowSums {
  const float* factors;  // [rows], see factor_of_row in e4m3_fp16_bits.h
  const float* scale;    // [32] or null
  float* sums;
  bool start;  // they are set, not added to
};

// `acc`: the kVecs accumulators of a row.
template <typename Dot>
SGL_INLINE void add_row_sums(const Vec* acc, const RowSums& out, int64_t row) {
  const Vec factor = set1(out.factors[row]);
#pragma GCC unroll 16
  for (int i = 0; i < kColumnVecs; ++i) {
    float* to = out.sums + row * kBlockN + i * kLanes;
    Vec sum = mul(sum_accumulators<Dot>(acc + i), factor);
    if (out.scale != nullptr) sum = mul(sum, load(out.scale + i * kLanes));
    store(to, add(out.start ? zero() : load(to), sum));
  }
}

// What the micro-kernel multiplies, and where its accumulators wait between two calls.
template <typename weight_t>
struct MicroOperands {
  const float* a;           // rows as Dot::convert_row leaves them
  int64_t a_stride;         // floats from row to row
  const weight_t* weights;  // k pairs of 32 columns: of a panel, as fp16 bits or packed
  int64_t pairs;
  bool start;    // accumulators begin at +0, else as `acc` has them
  float* acc;    // [rows, kVecs vectors]
  float* panel;  // where KEEP stores the weights
};

// acc[ROWS][COUNT] += the products of one k pair, whose vectors from FIRST on are multiplied. KEEP:
// what has been loaded of the weights is stored as a panel, too.
//
// Usually all vectors of weights are loaded and then, row by row, one broadcast element is
// multiplied by each. Where the group's weights would take the last registers and the rows are
// fewer than the vectors, it goes the other way round: the rows' elements wait in registers, and
// one vector of weights at a time passes by.
template <typename Dot, int ROWS, int FIRST, int COUNT, bool KEEP, typename weight_t>
SGL_INLINE void multiply_pair(const MicroOperands<weight_t>& of, int64_t pair, Vec (*acc)[COUNT]) {
  const float* a = of.a + pair * Dot::kAccumulators;
  float* panel = of.panel;
  if constexpr (KEEP) panel += pair * kPanelPair<Dot>;
  constexpr bool kCrowded = ROWS * COUNT + COUNT >= kMicroAccumulators;
  if constexpr (kVecsAlone<weight_t> && kCrowded && ROWS < COUNT) {
    Vec x[ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; ++i) {
      const int vec = FIRST + i;
      if (i == 0 || vec % kColumnVecs == 0) {
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; ++m) x[m] = set1(a[m * of.a_stride + vec / kColumnVecs]);
      }
      const Vec w = load_vec<Dot>(of.weights, pair, vec);
      if constexpr (KEEP) store(panel + vec * kLanes, w);
#pragma GCC unroll 16
      for (int m = 0; m < ROWS; ++m) acc[m][i] = Dot::dot(x[m], w, acc[m][i]);
    }
  } else {
    Vec w[Dot::kVecs];
    load_pair<Dot>(of.weights, pair, w);
    if constexpr (KEEP) {
#pragma GCC unroll 16
      for (int i = FIRST; i < FIRST + COUNT; ++i) store(panel + i * kLanes, w[i]);
    }
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) {
#pragma GCC unroll 16
      for (int i = 0; i < COUNT; ++i) {
        const Vec x = set1(a[m * of.a_stride + (FIRST + i) / kColumnVecs]);
        acc[m][i] = Dot::dot(x, w[FIRST + i], acc[m][i]);
      }
    }
  }
}

// of.acc[ROWS, kVecs] (+)= a[ROWS, pairs] * weights[pairs, 32], group by group from vector FIRST
// on. KEEP: the weights become a panel on the way. `out`: where the accumulators end instead, if
// all of them are in registers.
//
// Between the products `prefetcher->work<group>(pair)` does something for the weights that come
// next, because loads and shuffles have free ports there. A prefetcher says how many registers it
// leaves for accumulators (kMostAccumulators) and the unroll of the loop over k pairs (kUnroll, 1
// or 2).
//
// The operands come by value, so that the compiler keeps them in registers across stores.
template <typename Dot, int ROWS, bool KEEP, int FIRST = 0, typename weight_t, typename Prefetcher>
SGL_INLINE void micro_kernel(MicroOperands<weight_t> of, Prefetcher* prefetcher,
                             const RowSums* out = nullptr) {
  constexpr int kGroup = group_vecs<Dot>(ROWS, Prefetcher::kMostAccumulators);
  constexpr int kCount = kGroup < Dot::kVecs - FIRST ? kGroup : Dot::kVecs - FIRST;
  Vec acc[ROWS][kCount];
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m) {
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
      acc[m][i] = of.start ? zero() : load(of.acc + m * kPanelPair<Dot> + (FIRST + i) * kLanes);
    }
  }
  // Two loops, because a pragma takes no template's constant. Unrolled further, they spill
  // accumulators.
  static_assert(Prefetcher::kUnroll == 1 || Prefetcher::kUnroll == 2, "one loop for each");
  if constexpr (Prefetcher::kUnroll == 2) {
#pragma GCC unroll 2
    for (int64_t p = 0; p < of.pairs; ++p) {
      prefetcher->template work<FIRST / kGroup>(p);
      multiply_pair<Dot, ROWS, FIRST, kCount, KEEP>(of, p, acc);
    }
  } else {
#pragma GCC unroll 1
    for (int64_t p = 0; p < of.pairs; ++p) {
      prefetcher->template work<FIRST / kGroup>(p);
      multiply_pair<Dot, ROWS, FIRST, kCount, KEEP>(of, p, acc);
    }
  }
  if constexpr (kCount == Dot::kVecs) {
    if (out != nullptr) {
#pragma GCC unroll 16
      for (int m = 0; m < ROWS; ++m) add_row_sums<Dot>(acc[m], *out, m);
      return;
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m) {
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
      store(of.acc + m * kPanelPair<Dot> + (FIRST + i) * kLanes, acc[m][i]);
    }
  }
  if constexpr (FIRST + kCount < Dot::kVecs) {
    micro_kernel<Dot, ROWS, KEEP, FIRST + kCount>(of, prefetcher);
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
