// AArch64 Advanced SIMD (Armv8.0 baseline): 4 f32 lanes, 32 registers. The neon_bf16 tier adds the
// bf16 pair dot product of FEAT_BF16.
#pragma once

#include <arm_neon.h>

#include "e4m3_tables.h"
#include "types.h"

namespace sgl_kernel {
namespace SGL_TIER {

using Vec = float32x4_t;
constexpr int kLanes = 4;
// 6 x 4 accumulators + 4 weight vectors + 1 broadcast = 29 of 32 registers.
constexpr int kMicroRows = 6;
constexpr int kMicroVecs = 4;
constexpr int kGroupVecs = 2;

SGL_INLINE Vec zero() {
  return vdupq_n_f32(0.f);
}
SGL_INLINE Vec set1(float x) {
  return vdupq_n_f32(x);
}
SGL_INLINE Vec load(const float* p) {
  return vld1q_f32(p);
}
SGL_INLINE void store(float* p, Vec v) {
  vst1q_f32(p, v);
}
SGL_INLINE Vec add(Vec a, Vec b) {
  return vaddq_f32(a, b);
}
SGL_INLINE Vec mul(Vec a, Vec b) {
  return vmulq_f32(a, b);
}
SGL_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return vfmaq_f32(c, a, b);
}

SGL_INLINE uint16x4_t load_u16(const void* p) {
  return vld1_u16(static_cast<const uint16_t*>(p));
}

SGL_INLINE Vec load_act(const bf16_t* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(load_u16(p), 16));
}
SGL_INLINE Vec load_act(const fp16_t* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(load_u16(p)));
}

SGL_INLINE void store_out(float* p, Vec v) {
  store(p, v);
}
SGL_INLINE void store_out(bf16_t* p, Vec v) {
  const uint32x4_t u = vreinterpretq_u32_f32(v);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7FFF))), 16);
  const uint32x4_t number = vceqq_f32(v, v);
  vst1_u16(&p->bits, vmovn_u32(vbslq_u32(number, rounded, vdupq_n_u32(0x7FC0))));
}
SGL_INLINE void store_out(fp16_t* p, Vec v) {
  vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(v)));
}

// k pairs of 8 columns as bf16; the even k is the low half of each 32-bit lane.
SGL_INLINE void pairs_of(const bf16_t* p, uint16x8_t* pairs) {
  pairs[0] = vld1q_u16(&p[0].bits);
  pairs[1] = vld1q_u16(&p[8].bits);
}

// 16 codes (8 columns x 2 k) to bf16 by nibble lookups, as on AVX2.
SGL_INLINE void pairs_of(const e4m3_t* p, uint16x8_t* pairs) {
  const uint8x16_t codes = vld1q_u8(&p->bits);
  const uint8x16_t low_nibble = vandq_u8(codes, vdupq_n_u8(0x0F));
  const uint8x16_t high_nibble = vshrq_n_u8(codes, 4);
  const uint8x16_t magnitude_mask = vdupq_n_u8(0x7F);
  const uint8x16_t magnitude = vandq_u8(codes, magnitude_mask);
  const uint8x16_t nan = vceqq_u8(magnitude, magnitude_mask);

  // A lookup gives 0 for an index of 16 or more: for every code with eee != 0.
  const uint8x16_t tiny_high = vqtbl1q_u8(vld1q_u8(kHighByLowNibble), magnitude);
  const uint8x16_t tiny_fix = vqtbl1q_u8(vld1q_u8(kLowFixByLowNibble), magnitude);
  uint8x16_t high = vqtbl1q_u8(vld1q_u8(kHighByHighNibble), high_nibble);
  high = vorrq_u8(vorrq_u8(high, tiny_high), nan);
  const uint8x16_t low = veorq_u8(vqtbl1q_u8(vld1q_u8(kLowByLowNibble), low_nibble), tiny_fix);

  pairs[0] = vreinterpretq_u16_u8(vzip1q_u8(low, high));
  pairs[1] = vreinterpretq_u16_u8(vzip2q_u8(low, high));
}

template <typename packed_t>
SGL_INLINE void decode_pairs(const packed_t* p, Vec* even, Vec* odd) {
  uint16x8_t pairs[kGroupVecs];
  pairs_of(p, pairs);
  for (int i = 0; i < kGroupVecs; ++i) {
    const uint32x4_t lanes = vreinterpretq_u32_u16(pairs[i]);
    even[i] = vreinterpretq_f32_u32(vshlq_n_u32(lanes, 16));
    odd[i] = vreinterpretq_f32_u32(vandq_u32(lanes, vdupq_n_u32(0xFFFF0000u)));
  }
}

#if defined(SGL_TIER_NEON_BF16)
#define SGL_HAS_BF16_DOT

// The same as bf16 pairs: a Vec here carries 4 of them, moved as bits.
template <typename packed_t>
SGL_INLINE void decode_pairs_bf16(const packed_t* p, Vec* out) {
  uint16x8_t pairs[kGroupVecs];
  pairs_of(p, pairs);
  for (int i = 0; i < kGroupVecs; ++i) out[i] = vreinterpretq_f32_u16(pairs[i]);
}

SGL_INLINE Vec dot_bf16(Vec a, Vec b, Vec c) {
  return vbfdotq_f32(c, vreinterpretq_bf16_f32(a), vreinterpretq_bf16_f32(b));
}
#endif

}  // namespace SGL_TIER
}  // namespace sgl_kernel
