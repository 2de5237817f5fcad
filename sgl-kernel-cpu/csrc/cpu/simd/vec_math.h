// What the transformer kernels need of a tier's vectors beyond vec.h, and exp.
//
//   sub, div, max              lane by lane; max of a NaN is either operand
//   select_less(a, b, x, y)    a < b ? x : y
//   select_nan(a, x)           a where it is NaN, else x
//   exp_from(p, t, n, x)       p * 2^n, n also the integer in the low mantissa bits of t; 0 where x
//                              is below -87.336, NaN where it is NaN
//   reduce_add, reduce_max     over the lanes
//   add_lanes(Vec[kLanes])     the sum that reduce_add takes of lanes, of vectors; x is used up
//   load_act(const float* | const e4m3_t*)   kLanes elements as f32, exact
//   transpose(Vec[kLanes])     of a square of f32
#pragma once

#include "simd/vec.h"

namespace sgl_kernel {
namespace SGL_TIER {

SGL_INLINE Vec load_act(const float* p) {
  return load(p);
}

#if defined(SGL_TIER_AVX512) || defined(SGL_TIER_AVX512_BF16) || defined(SGL_TIER_AMX)

SGL_INLINE Vec sub(Vec a, Vec b) {
  return _mm512_sub_ps(a, b);
}
SGL_INLINE Vec div(Vec a, Vec b) {
  return _mm512_div_ps(a, b);
}
SGL_INLINE Vec max(Vec a, Vec b) {
  return _mm512_max_ps(a, b);
}
SGL_INLINE Vec select_less(Vec a, Vec b, Vec x, Vec y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
SGL_INLINE Vec select_nan(Vec a, Vec x) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), x, a);
}
SGL_INLINE Vec exp_from(Vec p, Vec, Vec n, Vec x) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, set1(-87.336f), _CMP_NLT_UQ), p, n);
}
SGL_INLINE float reduce_add(Vec v) {
  return _mm512_reduce_add_ps(v);
}
SGL_INLINE float reduce_max(Vec v) {
  return _mm512_reduce_max_ps(v);
}
// Shifted by one place a code is an fp16 number 2^8 too small, subnormals included; only NaN is
// not.
SGL_INLINE Vec load_act(const e4m3_t* p) {
  const __m256i codes = _mm256_slli_epi16(
      _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 8);
  const __m256i magnitude =
      _mm256_srli_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(0x7F00)), 1);
  // magnitude | (codes & 0x8000)
  __m256i half = _mm256_ternarylogic_epi32(magnitude, codes,
                                           _mm256_set1_epi16(static_cast<short>(0x8000)), 0xF8);
  half = _mm256_mask_mov_epi16(half, _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x3F80)),
                               _mm256_set1_epi16(0x7E00));
  return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.f));
}
SGL_INLINE void transpose(Vec* r) {
  Vec a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  const auto low = [](Vec x, Vec y) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
  };
  const auto high = [](Vec x, Vec y) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
  };
  for (int i = 0; i < 16; i += 4) {
    b[i] = low(a[i], a[i + 2]);
    b[i + 1] = high(a[i], a[i + 2]);
    b[i + 2] = low(a[i + 1], a[i + 3]);
    b[i + 3] = high(a[i + 1], a[i + 3]);
  }
  // b[4g + c] holds column c of rows 4g..4g+3 in each 128-bit lane; lane l is column 4l + c.
  for (int c = 0; c < 4; ++c) {
    const Vec x = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88);
    const Vec y = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xDD);
    const Vec z = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88);
    const Vec w = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xDD);
    r[c] = _mm512_shuffle_f32x4(x, z, 0x88);
    r[4 + c] = _mm512_shuffle_f32x4(y, w, 0x88);
    r[8 + c] = _mm512_shuffle_f32x4(x, z, 0xDD);
    r[12 + c] = _mm512_shuffle_f32x4(y, w, 0xDD);
  }
}

#elif defined(SGL_TIER_AVX2)

SGL_INLINE Vec sub(Vec a, Vec b) {
  return _mm256_sub_ps(a, b);
}
SGL_INLINE Vec div(Vec a, Vec b) {
  return _mm256_div_ps(a, b);
}
SGL_INLINE Vec max(Vec a, Vec b) {
  return _mm256_max_ps(a, b);
}
SGL_INLINE Vec select_less(Vec a, Vec b, Vec x, Vec y) {
  return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
SGL_INLINE Vec select_nan(Vec a, Vec x) {
  return _mm256_blendv_ps(x, a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
SGL_INLINE Vec add_exponent(Vec x, Vec t) {
  return _mm256_castsi256_ps(
      _mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
}
SGL_INLINE float reduce_add(Vec v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
SGL_INLINE float reduce_max(Vec v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
// Shifted by one place a code is an fp16 number 2^8 too small, subnormals included; only NaN is
// not.
SGL_INLINE Vec load_act(const e4m3_t* p) {
  const __m128i codes =
      _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))), 8);
  const __m128i magnitude = _mm_srli_epi16(_mm_and_si128(codes, _mm_set1_epi16(0x7F00)), 1);
  const __m128i sign = _mm_and_si128(codes, _mm_set1_epi16(static_cast<short>(0x8000)));
  const __m128i nan =
      _mm_and_si128(_mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x3F80)), _mm_set1_epi16(0x7C00));
  const __m128i half = _mm_or_si128(_mm_or_si128(magnitude, sign), nan);
  return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.f));
}
SGL_INLINE void transpose(Vec* r) {
  Vec a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xEE);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xEE);
  }
  for (int c = 0; c < 4; ++c) {
    r[c] = _mm256_permute2f128_ps(b[c], b[4 + c], 0x20);
    r[4 + c] = _mm256_permute2f128_ps(b[c], b[4 + c], 0x31);
  }
}

#elif defined(SGL_TIER_NEON) || defined(SGL_TIER_NEON_BF16)

SGL_INLINE Vec sub(Vec a, Vec b) {
  return vsubq_f32(a, b);
}
SGL_INLINE Vec div(Vec a, Vec b) {
  return vdivq_f32(a, b);
}
SGL_INLINE Vec max(Vec a, Vec b) {
  return vmaxq_f32(a, b);
}
SGL_INLINE Vec select_less(Vec a, Vec b, Vec x, Vec y) {
  return vbslq_f32(vcltq_f32(a, b), x, y);
}
SGL_INLINE Vec select_nan(Vec a, Vec x) {
  return vbslq_f32(vceqq_f32(a, a), x, a);
}
SGL_INLINE Vec add_exponent(Vec x, Vec t) {
  return vreinterpretq_f32_s32(
      vaddq_s32(vreinterpretq_s32_f32(x), vshlq_n_s32(vreinterpretq_s32_f32(t), 23)));
}
SGL_INLINE float reduce_add(Vec v) {
  return vaddvq_f32(v);
}
SGL_INLINE float reduce_max(Vec v) {
  return vmaxvq_f32(v);
}
SGL_INLINE Vec load_act(const e4m3_t* p) {
  uint32_t word;
  memcpy(&word, p, sizeof(word));
  const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(word));
  const uint32x4_t codes = vmovl_u16(vget_low_u16(vmovl_u8(bytes)));
  const uint32x4_t magnitude = vandq_u32(codes, vdupq_n_u32(0x7F));
  uint32x4_t bits = vaddq_u32(vshlq_n_u32(magnitude, 20), vdupq_n_u32(0x3C000000));
  const uint32x4_t tiny =
      vreinterpretq_u32_f32(vmulq_f32(vcvtq_f32_u32(magnitude), vdupq_n_f32(0x1p-9f)));
  bits = vbslq_u32(vcltq_u32(magnitude, vdupq_n_u32(8)), tiny, bits);
  bits = vbslq_u32(vceqq_u32(magnitude, vdupq_n_u32(0x7F)), vdupq_n_u32(0x7FF00000), bits);
  const uint32x4_t sign = vshlq_n_u32(veorq_u32(codes, magnitude), 24);
  return vreinterpretq_f32_u32(vorrq_u32(bits, sign));
}
SGL_INLINE void transpose(Vec* r) {
  const Vec a = vtrn1q_f32(r[0], r[1]), b = vtrn2q_f32(r[0], r[1]);
  const Vec c = vtrn1q_f32(r[2], r[3]), d = vtrn2q_f32(r[2], r[3]);
  r[0] = vcombine_f32(vget_low_f32(a), vget_low_f32(c));
  r[1] = vcombine_f32(vget_low_f32(b), vget_low_f32(d));
  r[2] = vcombine_f32(vget_high_f32(a), vget_high_f32(c));
  r[3] = vcombine_f32(vget_high_f32(b), vget_high_f32(d));
}

#else

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
SGL_INLINE Vec add_exponent(Vec x, Vec t) {
  typedef uint32_t Bits __attribute__((vector_size(16)));
  Bits a, b;
  memcpy(&a, &x, sizeof(a));
  memcpy(&b, &t, sizeof(b));
  a += b << 23;
  memcpy(&x, &a, sizeof(x));
  return x;
}
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

#endif

#if !defined(SGL_TIER_AVX512) && !defined(SGL_TIER_AVX512_BF16) && !defined(SGL_TIER_AMX)
SGL_INLINE Vec exp_from(Vec p, Vec t, Vec, Vec x) {
  return select_nan(x, select_less(x, set1(-87.336f), zero(), add_exponent(p, t)));
}
#endif

#if defined(SGL_TIER_NEON) || defined(SGL_TIER_NEON_BF16)
SGL_INLINE Vec add_lanes(Vec* x) {
  return add(add(x[0], x[1]), add(x[2], x[3]));
}
#else
SGL_INLINE Vec add_lanes(Vec* x) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] = add(x[i], x[i + half]);
  }
  return x[0];
}
#endif

// e^x with a relative error of at most 3 * 2^-24; NaN stays NaN.
//
// x = n ln 2 + r with |r| <= ln 2 / 2. n ln2_high is exact (9 bits times at most 8), and the Taylor
// polynomial of degree 7 leaves r^8 / 8! < 2^-27. Below -87.336 the result would be subnormal and
// is 0; above 88.722 it is infinite.
// Here x is not above 88.722.
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
  return exp_from(p, t, n, x);
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
