// AVX-512 (F, BW, VL, DQ): 16 f32 lanes, 32 registers. The avx512_bf16 tier adds the bf16 pair dot
// product, the amx tier decodes with VBMI byte tables.
#pragma once

#include <immintrin.h>

#include "simd/e4m3_tables.h"
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

#if defined(SGL_TIER_AVX512_BF16) || defined(SGL_TIER_AMX)
// A k pair of 32 columns as bf16 pairs, the even k in the low half of each 32-bit lane. A Vec here
// carries 16 of them, moved as bits.
constexpr int kPairVecs = 2;

SGL_INLINE void load_pairs(const bf16_t* weights, Vec* pairs) {
  for (int i = 0; i < kPairVecs; ++i)
    pairs[i] = load(reinterpret_cast<const float*>(weights) + 16 * i);
}
#endif

#if defined(SGL_TIER_AMX)

// By two 128-entry byte lookups (VBMI) for the magnitude; the code gives the sign. Exact for every
// code and independent of FTZ and DAZ.
SGL_INLINE void load_pairs(const e4m3_t* codes, Vec* pairs) {
  const auto table = [](const uint8_t* bytes) { return _mm512_load_si512(bytes); };
  // The unpacks below work inside 128-bit lanes; this order of quarters makes their results
  // consecutive columns.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const __m512i c = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(codes));
  const __m512i low =
      _mm512_permutex2var_epi8(table(kMagnitudeBytes.low), c, table(kMagnitudeBytes.low + 64));
  const __m512i magnitude =
      _mm512_permutex2var_epi8(table(kMagnitudeBytes.high), c, table(kMagnitudeBytes.high + 64));
  // magnitude | (c & 0x80)
  const __m512i high =
      _mm512_ternarylogic_epi32(magnitude, c, _mm512_set1_epi8(static_cast<char>(0x80)), 0xF8);
  pairs[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi8(low, high));
  pairs[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi8(low, high));
}

#elif defined(SGL_TIER_AVX512_BF16)

// In 16-bit lanes: normals by shift and add, subnormals by a table in a register, NaN by a mask.
// Exact for every code and independent of FTZ and DAZ.
SGL_INLINE void load_pairs(const e4m3_t* codes, Vec* pairs) {
  const __m512i subnormals = _mm512_castsi128_si512(
      _mm_setr_epi16(0x0000, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60));
  for (int i = 0; i < kPairVecs; ++i) {
    const __m512i c = _mm512_cvtepu8_epi16(load32(codes + 32 * i));
    const __m512i magnitude = _mm512_and_si512(c, _mm512_set1_epi16(0x7F));
    __m512i bits = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(0x3C00));
    bits = _mm512_mask_permutexvar_epi16(
        bits, _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8)), magnitude, subnormals);
    bits = _mm512_mask_mov_epi16(bits, _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7F)),
                                 _mm512_set1_epi16(0x7FF0));
    // bits | ((c << 8) & 0x8000)
    pairs[i] = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
        bits, _mm512_slli_epi16(c, 8), _mm512_set1_epi16(static_cast<short>(0x8000)), 0xF8));
  }
}

#endif
#if defined(SGL_TIER_AVX512_BF16)
#define SGL_HAS_BF16_DOT
SGL_INLINE Vec dot_bf16(Vec a, Vec b, Vec c) {
  return _mm512_dpbf16_ps(c, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
}
#endif

}  // namespace SGL_TIER
}  // namespace sgl_kernel
