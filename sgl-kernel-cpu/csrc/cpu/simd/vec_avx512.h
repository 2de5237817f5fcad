// AVX-512 (F, BW, VL, DQ): 16 f32 lanes, 32 registers.
#pragma once

#include <immintrin.h>

#include "simd/types.h"

namespace sgl_kernel {
namespace SGL_TIER {

using Vec = __m512;
constexpr int kLanes = 16;
// 6 x 4 accumulators + 4 weight vectors + 2 broadcasts: 30 of 32 registers.
constexpr int kMR = 6;
constexpr int kNRVecs = 4;
constexpr int kUnrollK = 1;
constexpr int kAccumulatorsWhileWidening = kMR * kNRVecs;

// Attention: 8 x 3 accumulators + 3 vectors of queries + 1 broadcast: 28 of 32 registers; 12 x 2 +
// 2 + 1: 27.
constexpr int kQkKeys = 8, kQkVecs = 3;
constexpr int kPvRows = 12, kPvVecs = 2;
constexpr int kDirectPvVecs = 4;

SGL_INLINE Vec zero() {
  return _mm512_setzero_ps();
}
SGL_INLINE Vec set1(float x) {
  return _mm512_set1_ps(x);
}
SGL_INLINE Vec load(const float* p) {
  return _mm512_loadu_ps(p);
}
SGL_INLINE void store(float* p, Vec v) {
  _mm512_storeu_ps(p, v);
}
SGL_INLINE Vec add(Vec a, Vec b) {
  return _mm512_add_ps(a, b);
}
SGL_INLINE Vec mul(Vec a, Vec b) {
  return _mm512_mul_ps(a, b);
}
SGL_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return _mm512_fmadd_ps(a, b, c);
}

SGL_INLINE __m256i load32(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

SGL_INLINE Vec load_act(const bf16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load32(p)), 16));
}
SGL_INLINE Vec load_act(const fp16_t* p) {
  return _mm512_cvtph_ps(load32(p));
}

SGL_INLINE void store_out(float* p, Vec v) {
  store(p, v);
}
// Not VCVTNEPS2BF16: that instruction flushes subnormals, and all tiers round alike.
SGL_INLINE void store_out(bf16_t* p, Vec v) {
  const __m512i u = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i halves = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FC0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(halves));
}
SGL_INLINE void store_out(fp16_t* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

SGL_INLINE Vec even_k(Vec pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16));
}
SGL_INLINE Vec odd_k(Vec pairs) {
  return _mm512_and_ps(pairs,
                       _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
}

SGL_INLINE void widen_pairs(const fp16_t* pairs, Vec* even, Vec* odd) {
  const __m512i apart = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1,
                                         30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i halves = _mm512_permutexvar_epi16(apart, _mm512_loadu_si512(pairs));
  *even = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
  *odd = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
}

// As on AVX2: e4m3 fields where fp16 has them, the weight times 2^-8; even k, then odd k.
struct E4m3AsFp16 : fp16_t {};
constexpr float kE4m3AsFp16Scale = 256.f;

// Remembers whether one of the codes it has seen is NaN (0x7F or 0xFF).
class NanWatch {
 public:
  SGL_MEMBER void see(__m512i codes) {
    doubled_max_ = _mm512_max_epu8(doubled_max_, _mm512_add_epi8(codes, codes));
  }
  SGL_MEMBER bool seen() const {
    return _mm512_cmpeq_epi8_mask(doubled_max_, _mm512_set1_epi8(static_cast<char>(0xFE))) != 0;
  }

 private:
  __m512i doubled_max_ = _mm512_setzero_si512();
};

SGL_INLINE void e4m3_to_fp16_bits(const e4m3_t* codes, E4m3AsFp16* widened, NanWatch* watch) {
  const __m512i c = _mm512_loadu_si512(codes);
  const __m512i even = _mm512_maddubs_epi16(_mm512_set1_epi16(0x0080), c);
  const __m512i odd = _mm512_maddubs_epi16(_mm512_set1_epi16(static_cast<short>(0x8000)), c);
  const __m512i fields = _mm512_set1_epi16(static_cast<short>(0xBF80));
  watch->see(c);
  _mm512_store_si512(widened, _mm512_and_si512(even, fields));
  _mm512_store_si512(widened + 32, _mm512_and_si512(odd, fields));
}

// A k pair of 32 columns as bf16 pairs, the even k in the low half of each 32-bit lane. A Vec here
// carries 16 of them, moved as bits.
constexpr int kPairVecs = 2;

SGL_INLINE void load_pairs(const bf16_t* weights, Vec* pairs) {
  for (int i = 0; i < kPairVecs; ++i)
    pairs[i] = load(reinterpret_cast<const float*>(weights) + 16 * i);
}

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
SGL_INLINE Vec exp_from(Vec p, Vec, Vec n, Vec x, Vec least) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), p, n);
}
constexpr bool kReducesNeighbours = false;
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

}  // namespace SGL_TIER
}  // namespace sgl_kernel
