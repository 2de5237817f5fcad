// The element type of an array where it is known at run time: one enum for every operand of every
// kernel, with its sizes. The storage types that it stands for are in types.h.
#pragma once

#include <cstdint>

#include "simd/types.h"

namespace sgl_kernel {

enum class DType : uint8_t { f32, bf16, fp16, e4m3 };

// Bytes of an element.
SGL_INLINE constexpr int64_t dtype_bytes(DType dtype) {
  return dtype == DType::f32 ? 4 : dtype == DType::e4m3 ? 1 : 2;
}

// The DType of a storage type: dtype_of<bf16_t> is DType::bf16.
template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct DTypeOf<bf16_t> {
  static constexpr DType value = DType::bf16;
};
template <>
struct DTypeOf<fp16_t> {
  static constexpr DType value = DType::fp16;
};
template <>
struct DTypeOf<e4m3_t> {
  static constexpr DType value = DType::e4m3;
};
template <typename T>
static constexpr DType dtype_of = DTypeOf<T>::value;

// The address of element `index` of an array.
SGL_INLINE const void* element_at(const void* data, DType dtype, int64_t index) {
  return static_cast<const char*>(data) + index * dtype_bytes(dtype);
}
SGL_INLINE void* element_at(void* data, DType dtype, int64_t index) {
  return static_cast<char*>(data) + index * dtype_bytes(dtype);
}

}  // namespace sgl_kernel
