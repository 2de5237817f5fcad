// The rotation of one head. Compiled once per tier.
#pragma once

#include "simd/row_convert.h"
#include "transformer/rotary.h"

namespace sgl_kernel {
namespace SGL_TIER {

// Multiplications and additions stay apart, so that all tiers give the same bits.
static inline void rotate_neox(float* x, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(x + i, sub(mul(a, c), mul(b, s)));
    store(x + half + i, add(mul(b, c), mul(a, s)));
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[i] + a * sin[i];
  }
}

static inline void rotate_interleaved(float* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cos[i] - b * sin[i];
    x[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

// Cosines, then sines, of a token; through `angles`, [rotary_dim], where they are not f32.
SGL_INLINE const float* cos_sin_of(const RotaryArgs& args, int64_t token, float* angles) {
  const void* row =
      element_at(args.cos_sin, args.cos_sin_dtype, args.positions[token] * args.cos_sin_stride);
  return row_as_f32(row, args.cos_sin_dtype, args.rotary_dim, angles);
}

SGL_INLINE void rotate(const RotaryArgs& args, const float* cos_sin, float* x) {
  const int64_t half = args.rotary_dim / 2;
  (args.is_neox ? rotate_neox : rotate_interleaved)(x, cos_sin, cos_sin + half, half);
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
