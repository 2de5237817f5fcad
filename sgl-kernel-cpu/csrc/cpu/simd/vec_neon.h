// AArch64 Advanced SIMD (Armv8.0 baseline): 4 f32 lanes, 32 registers.
#pragma once

#include <arm_neon.h>

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

// Attention: 8 x 3 accumulators + 3 vectors of queries + 1 broadcast: 28 of 32 registers; 6 x 4 + 4
// + 1: 29.
constexpr int kQkKeys = 8, kQkVecs = 3;
constexpr int kPvRows = 6, kPvVecs = 4;
constexpr int kDirectPvVecs = 4;

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

SGL_INLINE Vec sub(Vec a, Vec b) {
  return vsubq_f32(a, b);
}
SGL_INLINE Vec div(Vec a, Vec b) {
  return vdivq_f32(a, b);
}
SGL_INLINE Vec max(Vec a, Vec b) {
  return vmaxq_f32(a, b);
}
SGL_INLINE Vec select_less(Vec a, Vec b, Vec x, Vec y) {
  return vbslq_f32(vcltq_f32(a, b), x, y);
}
SGL_INLINE Vec select_nan(Vec a, Vec x) {
  return vbslq_f32(vceqq_f32(a, a), x, a);
}
// x * 2^n, where n is in the low mantissa bits of t and neither x nor the result is subnormal.
SGL_INLINE Vec add_exponent(Vec x, Vec t) {
  return vreinterpretq_f32_s32(
      vaddq_s32(vreinterpretq_s32_f32(x), vshlq_n_s32(vreinterpretq_s32_f32(t), 23)));
}
SGL_INLINE Vec exp_from(Vec p, Vec t, Vec, Vec x, Vec least) {
  return select_nan(x, select_less(x, least, zero(), add_exponent(p, t)));
}
constexpr bool kReducesNeighbours = true;
SGL_INLINE float reduce_add(Vec v) {
  return vaddvq_f32(v);
}
SGL_INLINE float reduce_max(Vec v) {
  return vmaxvq_f32(v);
}
SGL_INLINE Vec load_act(const e4m3_t* p) {
  uint32_t word;
  memcpy(&word, p, sizeof(word));
  const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(word));
  const uint32x4_t codes = vmovl_u16(vget_low_u16(vmovl_u8(bytes)));
  const uint32x4_t magnitude = vandq_u32(codes, vdupq_n_u32(0x7F));
  uint32x4_t bits = vaddq_u32(vshlq_n_u32(magnitude, 20), vdupq_n_u32(0x3C000000));
  const uint32x4_t tiny =
      vreinterpretq_u32_f32(vmulq_f32(vcvtq_f32_u32(magnitude), vdupq_n_f32(0x1p-9f)));
  bits = vbslq_u32(vcltq_u32(magnitude, vdupq_n_u32(8)), tiny, bits);
  bits = vbslq_u32(vceqq_u32(magnitude, vdupq_n_u32(0x7F)), vdupq_n_u32(0x7FF00000), bits);
  const uint32x4_t sign = vshlq_n_u32(veorq_u32(codes, magnitude), 24);
  return vreinterpretq_f32_u32(vorrq_u32(bits, sign));
}
SGL_INLINE void transpose(Vec* r) {
  const Vec a = vtrn1q_f32(r[0], r[1]), b = vtrn2q_f32(r[0], r[1]);
  const Vec c = vtrn1q_f32(r[2], r[3]), d = vtrn2q_f32(r[2], r[3]);
  r[0] = vcombine_f32(vget_low_f32(a), vget_low_f32(c));
  r[1] = vcombine_f32(vget_low_f32(b), vget_low_f32(d));
  r[2] = vcombine_f32(vget_high_f32(a), vget_high_f32(c));
  r[3] = vcombine_f32(vget_high_f32(b), vget_high_f32(d));
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
