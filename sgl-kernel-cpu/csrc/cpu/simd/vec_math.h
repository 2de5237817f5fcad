// Vector functions that are written in terms of a tier's own (vec.h): sums over lanes of vectors,
// exp, silu, and the first elements of a vector.
#pragma once

#include "simd/vec.h"

namespace sgl_kernel {
namespace SGL_TIER {

SGL_INLINE Vec load_act(const float* p) {
  return load(p);
}

// The sum that reduce_add takes of lanes, of kLanes vectors; x is used up. In the order of
// reduce_add: neighbours first, or halves first.
SGL_INLINE Vec add_lanes(Vec* x) {
  for (int left = kLanes / 2; left > 0; left /= 2) {
    for (int i = 0; i < left; ++i) {
      x[i] = kReducesNeighbours ? add(x[2 * i], x[2 * i + 1]) : add(x[i], x[i + left]);
    }
  }
  return x[0];
}

// e^x with a relative error of at most 3 * 2^-24; NaN stays NaN.
//
// x = n ln 2 + r with |r| <= ln 2 / 2. n ln2_high is exact (9 bits times at most 8), and the Taylor
// polynomial of degree 7 leaves r^8 / 8! < 2^-27. Below -87.336 the result would be subnormal and
// is 0; above 88.722 it is infinite, which exp_of_negative leaves out: its x is not above that.
SGL_INLINE Vec exp_of_negative(Vec x) {
  const Vec shifter = set1(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec t = fma(x, set1(1.44269504f), shifter);
  const Vec n = sub(t, shifter);
  Vec r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  Vec p = fma(set1(1.f / 5040), r, set1(1.f / 720));
  p = fma(p, r, set1(1.f / 120));
  p = fma(p, r, set1(1.f / 24));
  p = fma(p, r, set1(1.f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.f));
  p = fma(p, r, set1(1.f));
  return exp_from(p, t, n, x, set1(-87.336f));
}
SGL_INLINE Vec exp(Vec x) {
  return select_less(set1(88.722f), x, set1(bits_float(0x7F800000u)), exp_of_negative(x));
}

// The same in one lane, for what is not worth a vector.
SGL_INLINE float exp_scalar(float x) {
  float lanes[kLanes];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

// x / (1 + e^-x)
SGL_INLINE Vec silu(Vec x) {
  return div(x, add(set1(1.f), exp(sub(zero(), x))));
}

// The first n elements of a vector, zeros behind them; reads nothing beyond them.
template <typename T>
SGL_INLINE Vec load_first(const T* p, int64_t n) {
  T lanes[kLanes] = {};
  memcpy(static_cast<void*>(lanes), p, static_cast<size_t>(n) * sizeof(T));
  return load_act(lanes);
}
template <typename T>
SGL_INLINE void store_first(T* p, Vec v, int64_t n) {
  T lanes[kLanes];
  store_out(lanes, v);
  memcpy(static_cast<void*>(p), lanes, static_cast<size_t>(n) * sizeof(T));
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
