// AVX2 + FMA + F16C: 8 f32 lanes, 16 registers.
#pragma once

#include <immintrin.h>

#include "simd/types.h"

namespace sgl_kernel {
namespace SGL_TIER {

using Vec = __m256;
constexpr int kLanes = 8;
// 6 x 2 (or 4 x 3) accumulators + 2 (3) weight vectors + 1 broadcast: 15 (16) of 16 registers, and
// 12 independent accumulators cover the 4-cycle latency of two FMA units.
constexpr int kMR = 6;
constexpr int kNRVecs = 2;
// The unroll over k pairs: counting then takes fewer of the ports that multiply.
constexpr int kUnrollK = 2;
// Accumulators that leave registers to widen e4m3 to fp16 bits in the same loop.
constexpr int kAccumulatorsWhileWidening = 9;

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
  const __m256i halves = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0xD8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
SGL_INLINE void store_out(fp16_t* p, Vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

SGL_INLINE Vec even_k(Vec pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16));
}
SGL_INLINE Vec odd_k(Vec pairs) {
  return _mm256_and_ps(pairs,
                       _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
}

// Inside each 128-bit lane the even k come first, then the odd ones; the permutation brings those
// of both lanes together.
SGL_INLINE void widen_pairs(const fp16_t* pairs, Vec* even, Vec* odd) {
  const __m256i apart = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  const __m256i halves = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(load32(pairs), apart), 0xD8);
  *even = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  *odd = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
}

// e4m3 s.eeee.mmm with its fields moved to where fp16 has them is the weight times 2^-8, subnormals
// included; only NaN comes out wrong, as 480 * 2^-8. VCVTPH2PS, which widens these bits, knows no
// DAZ.
struct E4m3AsFp16 : fp16_t {};
constexpr float kE4m3AsFp16Scale = 256.f;

// Remembers whether one of the codes it has seen is NaN (0x7F or 0xFF).
class NanWatch {
 public:
  SGL_MEMBER void see(__m256i codes) {
    doubled_max_ = _mm256_max_epu8(doubled_max_, _mm256_add_epi8(codes, codes));
  }
  SGL_MEMBER bool seen() const {
    const __m256i nan = _mm256_cmpeq_epi8(doubled_max_, _mm256_set1_epi8(static_cast<char>(0xFE)));
    return _mm256_movemask_epi8(nan) != 0;
  }

 private:
  __m256i doubled_max_ = _mm256_setzero_si256();
};

// 32 pairs of codes to fp16 bits: 32 even k, then 32 odd k. A multiplication by 128 and 0 (or 0 and
// 128) picks one code of each pair, extends its sign and shifts it, all at once.
SGL_INLINE void e4m3_to_fp16_bits(const e4m3_t* codes, E4m3AsFp16* widened, NanWatch* watch) {
  const __m256i even = _mm256_set1_epi16(0x0080);
  const __m256i odd = _mm256_set1_epi16(static_cast<short>(0x8000));
  const __m256i fields = _mm256_set1_epi16(static_cast<short>(0xBF80));
  const auto store_bits = [&](E4m3AsFp16* to, __m256i shifted) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(to), _mm256_and_si256(shifted, fields));
  };
  for (int i = 0; i < 32; i += 16) {
    const __m256i c = load32(codes + 2 * i);
    watch->see(c);
    store_bits(widened + i, _mm256_maddubs_epi16(even, c));
    store_bits(widened + 32 + i, _mm256_maddubs_epi16(odd, c));
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
