// Storage types of the kernels and their exact scalar conversions.
//
// Everything here has internal linkage on purpose: this header is compiled once per ISA tier, and a
// weak symbol built with AVX-512 flags must never be the copy that the linker keeps for `scalar`.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
// Instrumented code that is all inlined takes minutes to compile, and nobody times it.
#define SGL_INLINE static inline
#define SGL_MEMBER inline
#elif defined(__GNUC__)
#define SGL_INLINE static inline __attribute__((always_inline))
#define SGL_MEMBER inline __attribute__((always_inline))
#else
#error "sgl-kernel-cpu needs GCC or Clang"
#endif

namespace sgl_kernel {

struct bf16_t {
  uint16_t bits;
};
struct fp16_t {
  uint16_t bits;
};
// OCP 8-bit floating point E4M3 "fn" variant: bias 7, no infinities, S.1111.111 is NaN.
struct e4m3_t {
  uint8_t bits;
};

SGL_INLINE uint32_t float_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof(u));
  return u;
}

SGL_INLINE float bits_float(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof(x));
  return x;
}

SGL_INLINE float to_float(float x) {
  return x;
}

SGL_INLINE float to_float(bf16_t x) {
  return bits_float(static_cast<uint32_t>(x.bits) << 16);
}

// Integer arithmetic only, so that subnormal halves survive whatever DAZ says.
static inline float to_float(fp16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  uint32_t exponent = (x.bits >> 10) & 0x1Fu;
  uint32_t mantissa = x.bits & 0x3FFu;
  if (exponent == 0x1F) return bits_float(sign | 0x7F800000u | (mantissa << 13));
  if (exponent == 0) {
    if (mantissa == 0) return bits_float(sign);
    exponent = 1;
    while ((mantissa & 0x400u) == 0) {
      mantissa <<= 1;
      --exponent;  // wraps below zero; the bias added below brings it back
    }
    mantissa &= 0x3FFu;
  }
  return bits_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

// The e4m3 code as a bf16 bit pattern: 3 mantissa bits and exponents -9..8 fit exactly.
SGL_INLINE constexpr uint16_t e4m3_to_bf16_bits(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 8;
  const uint32_t magnitude = code & 0x7Fu;
  if (magnitude == 0x7F) return static_cast<uint16_t>(sign | 0x7FF0u);  // quiet NaN
  if (magnitude >= 8) return static_cast<uint16_t>(sign | ((magnitude << 4) + 0x3C00u));
  if (magnitude == 0) return static_cast<uint16_t>(sign);
  // Subnormal m * 2^-9: normalise so that the leading one becomes the implicit bit.
  const uint32_t top = magnitude >= 4 ? 2 : magnitude >= 2 ? 1 : 0;
  const uint32_t fraction = (magnitude << (7 - top)) & 0x7Fu;
  return static_cast<uint16_t>(sign | ((118u + top) << 7) | fraction);
}

struct E4m3Table {
  uint16_t bf16_bits[256];
  constexpr E4m3Table() : bf16_bits() {
    for (int code = 0; code < 256; ++code) {
      bf16_bits[code] = e4m3_to_bf16_bits(static_cast<uint8_t>(code));
    }
  }
};
static constexpr E4m3Table kE4m3Table;

SGL_INLINE float to_float(e4m3_t x) {
  return bits_float(static_cast<uint32_t>(kE4m3Table.bf16_bits[x.bits]) << 16);
}

SGL_INLINE void from_float(float x, float* out) {
  *out = x;
}

// Round to nearest, ties to even; a NaN becomes the quiet NaN that Torch writes.
SGL_INLINE void from_float(float x, bf16_t* out) {
  const uint32_t u = float_bits(x);
  out->bits = (u & 0x7FFFFFFFu) > 0x7F800000u
                  ? static_cast<uint16_t>(0x7FC0u)
                  : static_cast<uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

static inline void from_float(float x, fp16_t* out) {
  const uint32_t u = float_bits(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t magnitude = u & 0x7FFFFFFFu;
  if (magnitude >
      0x7F800000u) {  // NaN: keep the payload's top bits and make it quiet, as VCVTPS2PH does
    out->bits = static_cast<uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
  } else if (magnitude >= 0x477FF000u) {  // rounds to 2^16 or more
    out->bits = static_cast<uint16_t>(sign | 0x7C00u);
  } else if (magnitude >= 0x38800000u) {  // normal half
    const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
    out->bits = static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
  } else if (magnitude < 0x33000000u) {  // below half of the smallest subnormal
    out->bits = static_cast<uint16_t>(sign);
  } else {
    const uint32_t exponent = magnitude >> 23;
    const uint32_t significand = (magnitude & 0x7FFFFFu) | 0x800000u;
    const uint32_t shift = 126u - exponent;
    const uint32_t kept = significand >> shift;
    const uint32_t rest = significand & ((1u << shift) - 1u);
    const uint32_t half = 1u << (shift - 1u);
    const uint32_t up = (rest > half || (rest == half && (kept & 1u))) ? 1u : 0u;
    out->bits = static_cast<uint16_t>(sign | (kept + up));
  }
}

// Nearest e4m3 code, ties to even. Finite numbers beyond 448 saturate; infinities and NaN become
// NaN, so that an overflow upstream still shows. Written without branches: compilers vectorise it.
SGL_INLINE uint8_t e4m3_code(float x) {
  const uint32_t u = float_bits(x);
  const uint32_t magnitude = u & 0x7FFFFFFFu;
  // Below 2^-6 codes are multiples of 2^-9: adding 2^14, whose last bit is worth 2^-9, rounds
  // there.
  const uint32_t tiny =
      float_bits(bits_float(magnitude < 0x3C800000u ? magnitude : 0u) + 16384.f) - 0x46800000u;
  const uint32_t rounded = magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u);
  const uint32_t normal = (rounded - 0x3C000000u) >> 20;
  const uint32_t saturated = rounded >= 0x43F00000u ? 0x7Eu : normal;
  const uint32_t finite = magnitude < 0x3C800000u ? tiny : saturated;
  const uint32_t code = magnitude >= 0x7F800000u ? 0x7Fu : finite;
  return static_cast<uint8_t>(code | ((u >> 24) & 0x80u));
}

SGL_INLINE void from_float(float x, e4m3_t* out) {
  out->bits = e4m3_code(x);
}

}  // namespace sgl_kernel
