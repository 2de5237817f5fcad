// Elements and rows of the transformer kernels: plain pointers whose type is known at run time.
#pragma once

#include <cstdint>

#include "simd/types.h"

namespace sgl_kernel {

enum class ElementType : uint8_t { f32, bf16, fp16, e4m3 };

SGL_INLINE int64_t element_size(ElementType type) {
  return type == ElementType::f32 ? 4 : type == ElementType::e4m3 ? 1 : 2;
}

SGL_INLINE const void* element_at(const void* data, ElementType type, int64_t index) {
  return static_cast<const char*>(data) + index * element_size(type);
}
SGL_INLINE void* element_at(void* data, ElementType type, int64_t index) {
  return static_cast<char*>(data) + index * element_size(type);
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
