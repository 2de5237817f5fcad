// The amx tier: AVX-512 with tiles for bf16 products, and VBMI byte tables that decode e4m3.
#pragma once

#include "simd/e4m3_tables.h"
#include "simd/vec_avx512.h"

#define SGL_TIER_DOT "simd/dot_amx.h"

namespace sgl_kernel {
namespace SGL_TIER {

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

}  // namespace SGL_TIER
}  // namespace sgl_kernel
