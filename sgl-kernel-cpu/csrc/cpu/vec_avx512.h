// AVX-512 (F, BW, VL, DQ): 16 f32 lanes, 32 registers. The avx512_bf16 tier adds the bf16 pair dot
// product, the amx tier decodes with VBMI byte tables.
#pragma once

#include <immintrin.h>

#include "e4m3_tables.h"
#include "types.h"

namespace sgl_kernel {
namespace SGL_TIER {

using Vec = __m512;
constexpr int kLanes = 16;
// 12 x 2 accumulators + 2 weight vectors, activations broadcast from memory: 26 of 32 registers.
constexpr int kMicroRows = 12;
constexpr int kMicroVecs = 2;
#if defined(SGL_TIER_AMX)
constexpr int kGroupVecs = 2;
#else
constexpr int kGroupVecs = 1;
#endif

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
  const __m512i words = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FC0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(words));
}
SGL_INLINE void store_out(fp16_t* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

// k pairs of kGroupVecs x 16 columns as bf16; the even k is the low half of each 32-bit lane.
SGL_INLINE void pairs_of(const bf16_t* p, __m512i* pairs) {
  for (int i = 0; i < kGroupVecs; ++i) pairs[i] = _mm512_loadu_si512(p + 32 * i);
}

#if defined(SGL_TIER_AMX)

SGL_INLINE __m512i byte_table(const uint8_t* table) {
  return _mm512_load_si512(table);
}

// 64 codes (32 columns x 2 k) to bf16: two 128-entry byte lookups give the magnitude, the code
// gives the sign. Exact for every code and independent of FTZ and DAZ.
SGL_INLINE void pairs_of(const e4m3_t* p, __m512i* pairs) {
  // The unpacks below work inside 128-bit lanes; this order of quarters makes their results
  // consecutive columns.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const __m512i codes = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(p));
  const __m512i low = _mm512_permutex2var_epi8(byte_table(kMagnitudeBytes.low), codes,
                                               byte_table(kMagnitudeBytes.low + 64));
  const __m512i magnitude = _mm512_permutex2var_epi8(byte_table(kMagnitudeBytes.high), codes,
                                                     byte_table(kMagnitudeBytes.high + 64));
  // magnitude | (codes & 0x80)
  const __m512i high =
      _mm512_ternarylogic_epi32(magnitude, codes, _mm512_set1_epi8(static_cast<char>(0x80)), 0xF8);
  pairs[0] = _mm512_unpacklo_epi8(low, high);
  pairs[1] = _mm512_unpackhi_epi8(low, high);
}

#else

// 32 codes (16 columns x 2 k) to bf16 in 16-bit lanes: normals by shift and add, subnormals by a
// table in a register, NaN by a mask. Exact for every code and independent of FTZ and DAZ.
SGL_INLINE void pairs_of(const e4m3_t* p, __m512i* pairs) {
  const __m512i codes = _mm512_cvtepu8_epi16(load32(p));
  const __m512i magnitude = _mm512_and_si512(codes, _mm512_set1_epi16(0x7F));
  const __m512i subnormals = _mm512_castsi128_si512(
      _mm_setr_epi16(0x0000, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60));
  __m512i bits = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(0x3C00));
  bits = _mm512_mask_permutexvar_epi16(
      bits, _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8)), magnitude, subnormals);
  bits = _mm512_mask_mov_epi16(bits, _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7F)),
                               _mm512_set1_epi16(0x7FF0));
  // bits | ((codes << 8) & 0x8000)
  pairs[0] = _mm512_ternarylogic_epi32(bits, _mm512_slli_epi16(codes, 8),
                                       _mm512_set1_epi16(static_cast<short>(0x8000)), 0xF8);
}

#endif

template <typename packed_t>
SGL_INLINE void decode_pairs(const packed_t* p, Vec* even, Vec* odd) {
  __m512i pairs[kGroupVecs];
  pairs_of(p, pairs);
  for (int i = 0; i < kGroupVecs; ++i) {
    even[i] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs[i], 16));
    odd[i] = _mm512_castsi512_ps(
        _mm512_and_si512(pairs[i], _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
  }
}

// The same as bf16 pairs: a Vec here carries 16 of them, moved as bits.
template <typename packed_t>
SGL_INLINE void decode_pairs_bf16(const packed_t* p, Vec* out) {
  __m512i pairs[kGroupVecs];
  pairs_of(p, pairs);
  for (int i = 0; i < kGroupVecs; ++i) out[i] = _mm512_castsi512_ps(pairs[i]);
}

#if defined(SGL_TIER_AVX512_BF16)
#define SGL_HAS_BF16_DOT
SGL_INLINE Vec dot_bf16(Vec a, Vec b, Vec c) {
  return _mm512_dpbf16_ps(c, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
}
#endif

}  // namespace SGL_TIER
}  // namespace sgl_kernel
