// The root mean square norm of one row, which norm.cpp takes of hidden states and
// qk_norm_rope_store.cpp of heads. Compiled once per tier.
#pragma once

#include "simd/row_convert.h"

namespace sgl_kernel {
namespace SGL_TIER {

// The sum of squares of a row that comes in pieces, all but the last of a multiple of 64 elements.
// Four accumulators, since one would wait for the latency of each multiply-add.
class SquareSum {
 public:
  SGL_MEMBER void add_piece(const float* x, int64_t n) {
    int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
      for (int j = 0; j < 4; ++j) {
        const Vec v = load(x + i + j * kLanes);
        sums_[j] = fma(v, v, sums_[j]);
      }
    }
    for (; i + kLanes <= n; i += kLanes) {
      const Vec v = load(x + i);
      sums_[0] = fma(v, v, sums_[0]);
    }
    if (i < n) {
      const Vec v = load_first(x + i, n - i);
      sums_[1] = fma(v, v, sums_[1]);
    }
  }

  // 1 / sqrt(mean + eps) over n elements; each step rounded to f32.
  SGL_MEMBER float factor(int64_t n, float eps) const {
    const float sum = reduce_add(add(add(sums_[0], sums_[1]), add(sums_[2], sums_[3])));
    return 1.f / __builtin_sqrtf(sum / static_cast<float>(n) + eps);
  }

 private:
  Vec sums_[4] = {zero(), zero(), zero(), zero()};
};

// x * factor * weight in place; both products rounded to f32.
static inline void scale_by_weight(float* x, float factor, const float* weight, int64_t n) {
  const Vec f = set1(factor);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    store(x + i, mul(mul(load(x + i), f), load(weight + i)));
  }
  if (i < n) {
    const Vec v = mul(mul(load_first(x + i, n - i), f), load_first(weight + i, n - i));
    store_first(x + i, v, n - i);
  }
}

// x * (1 / sqrt(mean(x^2) + eps)) * weight in place.
static inline void rms_norm_row(float* x, const float* weight, int64_t n, float eps) {
  SquareSum squares;
  squares.add_piece(x, n);
  scale_by_weight(x, squares.factor(n, eps), weight, n);
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
