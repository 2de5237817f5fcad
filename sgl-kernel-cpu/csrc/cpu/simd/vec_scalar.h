// The portable tier: plain C++ over a 4-lane vector extension type, no ISA flag. The compiler
// lowers it to whatever the baseline has (SSE2, or nothing). Multiply and add stay separate
// instructions, and that is still bit-equal to the FMA tiers: see "exact products" in
// docs/numerics.md.
#pragma once

#include "simd/types.h"

namespace sgl_kernel {
namespace SGL_TIER {

typedef float Vec __attribute__((vector_size(16)));
constexpr int kLanes = 4;
constexpr int kMR = 2;
constexpr int kNRVecs = 4;
constexpr int kUnrollK = 1;
constexpr int kAccumulatorsWhileWidening = kMR * kNRVecs;

// Attention: 4 x 2 accumulators + 2 vectors of queries + 1 broadcast: 11 of 16 registers; 2 x 4 + 4
// + 1: 13.
constexpr int kQkKeys = 4, kQkVecs = 2;
constexpr int kPvRows = 2, kPvVecs = 4;
constexpr int kDirectPvVecs = 4;

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

typedef uint32_t Bits __attribute__((vector_size(16)));

// fp16 codes in the low halves of the lanes as f32. Subnormal ones are exact differences of normal
// numbers, so that FTZ and DAZ do not matter.
SGL_INLINE Vec widen_halves(Bits codes) {
  const Bits magnitude = (codes & 0x7FFFu) << 13;
  Bits number = magnitude + (112u << 23);
  number += reinterpret_cast<Bits>(magnitude >= 0x0F800000u) & (112u << 23);  // infinity, NaN
  const float smallest = bits_float(113u << 23);                              // normal fp16
  const Bits subnormal = reinterpret_cast<Bits>(reinterpret_cast<Vec>(magnitude + (113u << 23)) -
                                                Vec{smallest, smallest, smallest, smallest});
  const Bits is_subnormal = reinterpret_cast<Bits>(magnitude < 0x00800000u);
  number = (subnormal & is_subnormal) | (number & ~is_subnormal);
  return reinterpret_cast<Vec>(number | (codes & 0x8000u) << 16);
}
SGL_INLINE void widen_pairs(const fp16_t* pairs, Vec* even, Vec* odd) {
  Bits bits;
  memcpy(&bits, pairs, sizeof(bits));
  *even = widen_halves(bits & 0xFFFFu);
  *odd = widen_halves(bits >> 16);
}

template <typename act_t>
SGL_INLINE Vec load_act(const act_t* p) {
  return Vec{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
}

template <typename out_t>
SGL_INLINE void store_out(out_t* p, Vec v) {
  for (int i = 0; i < kLanes; ++i) from_float(v[i], p + i);
}

SGL_INLINE Vec even_k(Vec pairs) {
  return reinterpret_cast<Vec>(reinterpret_cast<Bits>(pairs) << 16);
}
SGL_INLINE Vec odd_k(Vec pairs) {
  return reinterpret_cast<Vec>(reinterpret_cast<Bits>(pairs) & 0xFFFF0000u);
}

// e4m3 weights as 16-bit floats. Without an instruction that widens fp16 this tier takes the bits
// of bf16, from a table, and needs no scale.
struct E4m3AsFp16 : bf16_t {};
constexpr float kE4m3AsFp16Scale = 1.f;

// The table holds NaN: there is nothing to watch for.
class NanWatch {
 public:
  SGL_MEMBER bool seen() const { return false; }
};

// 32 pairs of codes to 16 bits: 32 even k, then 32 odd k.
SGL_INLINE void e4m3_to_fp16_bits(const e4m3_t* codes, E4m3AsFp16* widened, NanWatch*) {
  for (int i = 0; i < 32; ++i) {
    widened[i].bits = kE4m3Table.bf16_bits[codes[2 * i].bits];
    widened[32 + i].bits = kE4m3Table.bf16_bits[codes[2 * i + 1].bits];
  }
}

SGL_INLINE Vec sub(Vec a, Vec b) {
  return a - b;
}
SGL_INLINE Vec div(Vec a, Vec b) {
  return a / b;
}
SGL_INLINE Vec max(Vec a, Vec b) {
  return a > b ? a : b;
}
SGL_INLINE Vec select_less(Vec a, Vec b, Vec x, Vec y) {
  return a < b ? x : y;
}
SGL_INLINE Vec select_nan(Vec a, Vec x) {
  return a == a ? x : a;
}
// x * 2^n, where n is in the low mantissa bits of t and neither x nor the result is subnormal.
SGL_INLINE Vec add_exponent(Vec x, Vec t) {
  Bits a, b;
  memcpy(&a, &x, sizeof(a));
  memcpy(&b, &t, sizeof(b));
  a += b << 23;
  memcpy(&x, &a, sizeof(x));
  return x;
}
SGL_INLINE Vec exp_from(Vec p, Vec t, Vec, Vec x, Vec least) {
  return select_nan(x, select_less(x, least, zero(), add_exponent(p, t)));
}
constexpr bool kReducesNeighbours = false;
SGL_INLINE float reduce_add(Vec v) {
  return (v[0] + v[2]) + (v[1] + v[3]);
}
SGL_INLINE float reduce_max(Vec v) {
  const float a = v[0] > v[2] ? v[0] : v[2];
  const float b = v[1] > v[3] ? v[1] : v[3];
  return a > b ? a : b;
}
SGL_INLINE void transpose(Vec* r) {
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < i; ++j) {
      const float x = r[i][j];
      r[i][j] = r[j][i];
      r[j][i] = x;
    }
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
