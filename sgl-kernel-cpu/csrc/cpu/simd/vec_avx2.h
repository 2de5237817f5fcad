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

// Attention: 4 x 3 accumulators + 3 vectors of queries + 1 broadcast: 16 of 16 registers; 6 x 2 + 2
// + 1: 15.
constexpr int kQkKeys = 4, kQkVecs = 3;
constexpr int kPvRows = 6, kPvVecs = 2;
constexpr int kDirectPvVecs = 2;

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
// x * 2^n, where n is in the low mantissa bits of t and neither x nor the result is subnormal.
SGL_INLINE Vec add_exponent(Vec x, Vec t) {
  return _mm256_castsi256_ps(
      _mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
}
SGL_INLINE Vec exp_from(Vec p, Vec t, Vec, Vec x, Vec least) {
  return select_nan(x, select_less(x, least, zero(), add_exponent(p, t)));
}
constexpr bool kReducesNeighbours = false;
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

}  // namespace SGL_TIER
}  // namespace sgl_kernel
