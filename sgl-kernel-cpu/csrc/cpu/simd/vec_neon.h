// AArch64 Advanced SIMD (Armv8.0 baseline): 4 f32 lanes, 32 registers. The neon_bf16 tier adds the
// bf16 pair dot product of FEAT_BF16.
#pragma once

#include <arm_neon.h>

#include "simd/e4m3_tables.h"
#include "simd/types.h"

namespace sgl_kernel {
namespace SGL_TIER {

using Vec = float32x4_t;
constexpr int kLanes = 4;
// 6 x 4 accumulators + 4 weight vectors + 1 broadcast = 29 of 32 registers.
constexpr int kMR = 6;
constexpr int kNRVecs = 4;
constexpr int kUnrollK = 1;
constexpr int kAccumulatorsWhileWidening = kMR * kNRVecs;

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

SGL_INLINE Vec even_k(Vec pairs) {
  return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(pairs), 16));
}
SGL_INLINE Vec odd_k(Vec pairs) {
  return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(pairs), vdupq_n_u32(0xFFFF0000u)));
}

SGL_INLINE void widen_pairs(const fp16_t* pairs, Vec* even, Vec* odd) {
  const uint16x4x2_t apart = vld2_u16(&pairs->bits);
  *even = vcvt_f32_f16(vreinterpret_f16_u16(apart.val[0]));
  *odd = vcvt_f32_f16(vreinterpret_f16_u16(apart.val[1]));
}

// As on AVX2: e4m3 fields where fp16 has them, the weight times 2^-8. FCVTL, which widens
// them, heeds neither FZ nor FZ16.
struct E4m3AsFp16 : fp16_t {};
constexpr float kE4m3AsFp16Scale = 256.f;

// Remembers whether one of the codes it has seen is NaN (0x7F or 0xFF).
class NanWatch {
 public:
  SGL_MEMBER void see(uint8x16_t codes) {
    doubled_max_ = vmaxq_u8(doubled_max_, vshlq_n_u8(codes, 1));
  }
  SGL_MEMBER bool seen() const { return vmaxvq_u8(doubled_max_) == 0xFE; }

 private:
  uint8x16_t doubled_max_ = vdupq_n_u8(0);
};

// 32 pairs of codes to fp16 bits: 32 even k, then 32 odd k.
SGL_INLINE void e4m3_to_fp16_bits(const e4m3_t* codes, E4m3AsFp16* widened, NanWatch* watch) {
  const int16x8_t sign_copy = vdupq_n_s16(0x4000);
  const auto store_bits = [&](E4m3AsFp16* to, uint8x16_t bits) {
    const int8x16_t c = vreinterpretq_s8_u8(bits);
    const int16x8_t low = vbicq_s16(vshll_n_s8(vget_low_s8(c), 7), sign_copy);
    const int16x8_t high = vbicq_s16(vshll_high_n_s8(c, 7), sign_copy);
    vst1q_u16(&to[0].bits, vreinterpretq_u16_s16(low));
    vst1q_u16(&to[8].bits, vreinterpretq_u16_s16(high));
    watch->see(bits);
  };
  for (int i = 0; i < 32; i += 16) {
    const uint8x16x2_t pairs = vld2q_u8(&codes[2 * i].bits);
    store_bits(widened + i, pairs.val[0]);
    store_bits(widened + 32 + i, pairs.val[1]);
  }
}

#if defined(SGL_TIER_NEON_BF16)
#define SGL_HAS_BF16_DOT

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
#endif

}  // namespace SGL_TIER
}  // namespace sgl_kernel
