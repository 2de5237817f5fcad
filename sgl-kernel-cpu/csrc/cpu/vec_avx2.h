// AVX2 + FMA + F16C: 8 f32 lanes, 16 registers.
#pragma once

#include <immintrin.h>

#include "e4m3_tables.h"
#include "types.h"

namespace sgl_kernel {
namespace SGL_TIER {

using Vec = __m256;
constexpr int kLanes = 8;
// 6 x 2 accumulators + 2 weight vectors + 1 broadcast = 15 of 16 registers, and 12 independent
// chains cover the 4-cycle latency of two FMA units.
constexpr int kMicroRows = 6;
constexpr int kMicroVecs = 2;
constexpr int kGroupVecs = 2;

SGL_INLINE Vec zero() {
  return _mm256_setzero_ps();
}
SGL_INLINE Vec set1(float x) {
  return _mm256_set1_ps(x);
}
SGL_INLINE Vec load(const float* p) {
  return _mm256_loadu_ps(p);
}
SGL_INLINE void store(float* p, Vec v) {
  _mm256_storeu_ps(p, v);
}
SGL_INLINE Vec add(Vec a, Vec b) {
  return _mm256_add_ps(a, b);
}
SGL_INLINE Vec mul(Vec a, Vec b) {
  return _mm256_mul_ps(a, b);
}
SGL_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return _mm256_fmadd_ps(a, b, c);
}

SGL_INLINE __m128i load16(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
SGL_INLINE __m256i load32(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

SGL_INLINE Vec load_act(const bf16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(p)), 16));
}
SGL_INLINE Vec load_act(const fp16_t* p) {
  return _mm256_cvtph_ps(load16(p));
}

SGL_INLINE void store_out(float* p, Vec v) {
  store(p, v);
}
SGL_INLINE void store_out(bf16_t* p, Vec v) {
  const __m256i u = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0xD8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
SGL_INLINE void store_out(fp16_t* p, Vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

// A register of k pairs as bf16: the even k is the low half of each 32-bit lane, the odd k the high
// half.
SGL_INLINE Vec even_half(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}
SGL_INLINE Vec odd_half(__m256i pairs) {
  return _mm256_castsi256_ps(
      _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
}

SGL_INLINE void decode_pairs(const bf16_t* p, Vec* even, Vec* odd) {
  for (int i = 0; i < kGroupVecs; ++i) {
    const __m256i pairs = load32(p + 16 * i);
    even[i] = even_half(pairs);
    odd[i] = odd_half(pairs);
  }
}

SGL_INLINE __m256i nibble_table(const uint8_t* table) {
  return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
}

// 32 codes (16 columns x 2 k) to bf16 by nibble lookups: exact for every code, and no float
// instruction that FTZ or DAZ could touch.
SGL_INLINE void decode_pairs(const e4m3_t* p, Vec* even, Vec* odd) {
  // The unpacks below work inside 128-bit lanes; swapping the middle quarters first keeps column
  // order.
  const __m256i codes = _mm256_permute4x64_epi64(load32(p), 0xD8);
  const __m256i magnitude_mask = _mm256_set1_epi8(0x7F);
  const __m256i magnitude = _mm256_and_si256(codes, magnitude_mask);
  const __m256i high_nibble = _mm256_and_si256(_mm256_srli_epi16(codes, 4), _mm256_set1_epi8(0x0F));
  // The shuffle reads the low nibble of its index, and gives 0 where the top bit is set: with 0x70
  // added that is wherever eee != 0.
  const __m256i tiny_index = _mm256_add_epi8(magnitude, _mm256_set1_epi8(0x70));
  const __m256i nan = _mm256_cmpeq_epi8(magnitude, magnitude_mask);

  __m256i high = _mm256_shuffle_epi8(nibble_table(kHighByHighNibble), high_nibble);
  high = _mm256_or_si256(high, _mm256_shuffle_epi8(nibble_table(kHighByLowNibble), tiny_index));
  high = _mm256_or_si256(high, nan);
  const __m256i low =
      _mm256_xor_si256(_mm256_shuffle_epi8(nibble_table(kLowByLowNibble), magnitude),
                       _mm256_shuffle_epi8(nibble_table(kLowFixByLowNibble), tiny_index));

  const __m256i first = _mm256_unpacklo_epi8(low, high);
  const __m256i second = _mm256_unpackhi_epi8(low, high);
  even[0] = even_half(first);
  odd[0] = odd_half(first);
  even[1] = even_half(second);
  odd[1] = odd_half(second);
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
