// e4m3 weights as fp16 bits, on the way to f32. Compiled once per tier.
//
// An e4m3 code is s.eeee.mmm, an fp16 number s.eeeee.mmmmmmmmmm. Sign, exponent and mantissa moved
// to where fp16 has them give the weight times 2^-8, because e4m3's exponent has a bias of 7 and
// fp16's one of 15; subnormal codes become subnormal fp16 numbers and are exact, too. That costs
// two instructions for a vector of fp16 bits, and one more widens it to f32. (The scalar tier,
// which has no such instruction, takes bf16 bits from a table.)
//
// The factor kE4m3AsFp16Scale = 2^8 that the weights lack goes into the rows of mat1. A power of
// two changes no bit of a product, unless the row leaves f32's range by it; see row_scale.
//
// fp16 has its NaN elsewhere: e4m3's NaN comes out as 480 * 2^-8. So codes are watched on the way,
// and in the rare case that there was a NaN the bits are gone through again.
#pragma once

#include <type_traits>

#include "simd/vec.h"
#include "simd/weight_pairs.h"

namespace sgl_kernel {
namespace SGL_TIER {

// Makes NaN of what NaN codes have become, with either sign.
static inline void mark_nans(int64_t count, E4m3AsFp16* widened) {
  constexpr uint16_t k480 = 0x3F80;  // 480 / kE4m3AsFp16Scale in fp16
  for (int64_t i = 0; i < count; ++i) {
    if ((widened[i].bits & 0x7FFF) == k480) widened[i].bits |= 0x7FFF;
  }
}

// Widens k pairs of a block of columns, [pairs, 32, 2] codes, to [pairs, 2, 32] fp16 bits: even k
// first, then odd k.
class E4m3Widener {
 public:
  SGL_MEMBER E4m3Widener(const e4m3_t* codes, E4m3AsFp16* widened)
      : codes_(codes), widened_(widened) {}
  SGL_MEMBER void widen(int64_t pair) {
    e4m3_to_fp16_bits(codes_ + pair * kPairElements, widened_ + pair * kPairElements, &watch_);
  }
  // The rest of `pairs`, of which the first `done` have been widened.
  SGL_MEMBER void finish(int64_t done, int64_t pairs) {
    for (; done < pairs; ++done) widen(done);
    if (__builtin_expect(watch_.seen(), 0)) mark_nans(pairs * kPairElements, widened_);
  }

 private:
  const e4m3_t* codes_;
  E4m3AsFp16* widened_;
  NanWatch watch_;
};

// The power of two by which a row of mat1 is multiplied: kE4m3AsFp16Scale, or 1 where the row has
// an element so large that it would leave f32's range. fp16 numbers are never so large.
SGL_INLINE float row_scale(const fp16_t*, int64_t) {
  return kE4m3AsFp16Scale;
}
SGL_INLINE float row_scale(const bf16_t* row, int64_t k) {
  if (kE4m3AsFp16Scale == 1.f) return 1.f;
  constexpr uint16_t kLimit = 0x7B80;  // 2^120 in bf16
  uint16_t largest = 0;
  for (int64_t i = 0; i < k; ++i) {
    const uint16_t magnitude = row[i].bits & 0x7FFF;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest < kLimit ? kE4m3AsFp16Scale : 1.f;
}

// Whether the policy Dot multiplies weights of packed_t by way of fp16 bits.
template <typename Dot, typename packed_t>
constexpr bool kByFp16Bits = Dot::kTakesFp16Bits && std::is_same<packed_t, e4m3_t>::value;

// The scale of a row, 1 where weights do not go by way of fp16 bits, and the factor of its sums:
// what the scale has left out of kE4m3AsFp16Scale.
template <typename Dot, typename packed_t, typename scalar_t>
SGL_INLINE float scale_of_row(const scalar_t* row, int64_t k) {
  return kByFp16Bits<Dot, packed_t> ? row_scale(row, k) : 1.f;
}
template <typename Dot, typename packed_t>
SGL_INLINE float factor_of_row(float scale) {
  return kByFp16Bits<Dot, packed_t> ? kE4m3AsFp16Scale / scale : 1.f;
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
