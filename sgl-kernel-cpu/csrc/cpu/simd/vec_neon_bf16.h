// The neon_bf16 tier: Advanced SIMD with BFDOT of FEAT_BF16, the bf16 pair dot product.
#pragma once

#include "simd/e4m3_tables.h"
#include "simd/vec_neon.h"

#define SGL_TIER_DOT "simd/dot_bf16.h"

namespace sgl_kernel {
namespace SGL_TIER {

// A k pair of 32 columns as bf16 pairs, the even k in the low half of each 32-bit lane. A Vec here
// carries 4 of them, moved as bits.
constexpr int kPairVecs = 8;

SGL_INLINE void load_pairs(const bf16_t* weights, Vec* pairs) {
  for (int i = 0; i < kPairVecs; ++i) {
    pairs[i] = vreinterpretq_f32_u16(vld1q_u16(&weights[8 * i].bits));
  }
}

// By nibble lookups: exact for every code, and no float instruction that FZ could touch.
SGL_INLINE void load_pairs(const e4m3_t* codes, Vec* pairs) {
  const uint8x16_t magnitude_mask = vdupq_n_u8(0x7F);
  for (int i = 0; i < kPairVecs; i += 2) {
    const uint8x16_t c = vld1q_u8(&codes[8 * i].bits);
    const uint8x16_t magnitude = vandq_u8(c, magnitude_mask);
    const uint8x16_t nan = vceqq_u8(magnitude, magnitude_mask);
    // A lookup gives 0 for an index of 16 or more: for every code with eee != 0.
    const uint8x16_t tiny_high = vqtbl1q_u8(vld1q_u8(kHighByLowNibble), magnitude);
    const uint8x16_t tiny_fix = vqtbl1q_u8(vld1q_u8(kLowFixByLowNibble), magnitude);
    uint8x16_t high = vqtbl1q_u8(vld1q_u8(kHighByHighNibble), vshrq_n_u8(c, 4));
    high = vorrq_u8(vorrq_u8(high, tiny_high), nan);
    // The code's low nibble moves to the top of the low byte.
    const uint8x16_t low = veorq_u8(vshlq_n_u8(c, 4), tiny_fix);
    pairs[i] = vreinterpretq_f32_u8(vzip1q_u8(low, high));
    pairs[i + 1] = vreinterpretq_f32_u8(vzip2q_u8(low, high));
  }
}

SGL_INLINE Vec dot_bf16(Vec a, Vec b, Vec c) {
  return vbfdotq_f32(c, vreinterpretq_bf16_f32(a), vreinterpretq_bf16_f32(b));
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
