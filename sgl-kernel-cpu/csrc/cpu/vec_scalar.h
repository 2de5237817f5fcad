// The portable tier: plain C++ over a 4-lane vector extension type, no ISA flag. The compiler
// lowers it to whatever the baseline has (SSE2, or nothing). Multiply and add stay separate
// instructions, and that is still bit-equal to the FMA tiers: see "exact products" in
// docs/numerics.md.
#pragma once

#include "types.h"

namespace sgl_kernel {
namespace SGL_TIER {

typedef float Vec __attribute__((vector_size(16)));
constexpr int kLanes = 4;
constexpr int kMicroRows = 2;
constexpr int kMicroVecs = 4;
constexpr int kGroupVecs = 1;

SGL_INLINE Vec zero() {
  return Vec{0.f, 0.f, 0.f, 0.f};
}
SGL_INLINE Vec set1(float x) {
  return Vec{x, x, x, x};
}
SGL_INLINE Vec load(const float* p) {
  Vec v;
  memcpy(&v, p, sizeof(v));
  return v;
}
SGL_INLINE void store(float* p, Vec v) {
  memcpy(p, &v, sizeof(v));
}
SGL_INLINE Vec add(Vec a, Vec b) {
  return a + b;
}
SGL_INLINE Vec mul(Vec a, Vec b) {
  return a * b;
}
SGL_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return a * b + c;
}

template <typename act_t>
SGL_INLINE Vec load_act(const act_t* p) {
  return Vec{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
}

template <typename out_t>
SGL_INLINE void store_out(out_t* p, Vec v) {
  for (int i = 0; i < kLanes; ++i) from_float(v[i], p + i);
}

template <typename packed_t>
SGL_INLINE void decode_pairs(const packed_t* p, Vec* even, Vec* odd) {
  even[0] = Vec{to_float(p[0]), to_float(p[2]), to_float(p[4]), to_float(p[6])};
  odd[0] = Vec{to_float(p[1]), to_float(p[3]), to_float(p[5]), to_float(p[7])};
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
