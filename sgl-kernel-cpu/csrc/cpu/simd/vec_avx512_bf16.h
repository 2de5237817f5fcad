// The avx512_bf16 tier: AVX-512 with VDPBF16PS, the bf16 pair dot product.
#pragma once

#include "simd/vec_avx512.h"

#define SGL_TIER_DOT "simd/dot_bf16.h"

namespace sgl_kernel {
namespace SGL_TIER {

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

SGL_INLINE Vec dot_bf16(Vec a, Vec b, Vec c) {
  return _mm512_dpbf16_ps(c, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
