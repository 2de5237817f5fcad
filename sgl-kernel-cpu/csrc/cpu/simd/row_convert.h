// Rows of any element type to f32 and back, with one rounding; compiled once per tier.
#pragma once

#include "simd/dtype.h"
#include "simd/vec_math.h"

namespace sgl_kernel {
namespace SGL_TIER {

template <typename T>
static inline void load_row_of(const T* src, int64_t n, float* dst) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(dst + i, load_act(src + i));
  if (i < n) store_first(dst + i, load_first(src + i, n - i), n - i);
}

static inline void load_row(const void* src, DType type, int64_t n, float* dst) {
  switch (type) {
    case DType::f32:
      memcpy(dst, src, static_cast<size_t>(n) * sizeof(float));
      return;
    case DType::bf16:
      return load_row_of(static_cast<const bf16_t*>(src), n, dst);
    case DType::fp16:
      return load_row_of(static_cast<const fp16_t*>(src), n, dst);
    case DType::e4m3:
      return load_row_of(static_cast<const e4m3_t*>(src), n, dst);
  }
}

static inline float load_element(const void* data, DType type, int64_t index) {
  float value;
  load_row(element_at(data, type, index), type, 1, &value);
  return value;
}

template <typename T>
static inline void store_row_of(const float* src, int64_t n, T* dst) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store_out(dst + i, load(src + i));
  if (i < n) store_first(dst + i, load_first(src + i, n - i), n - i);
}

static inline void store_row(const float* src, int64_t n, DType type, void* dst) {
  switch (type) {
    case DType::f32:
      memcpy(dst, src, static_cast<size_t>(n) * sizeof(float));
      return;
    case DType::bf16:
      return store_row_of(src, n, static_cast<bf16_t*>(dst));
    case DType::fp16:
      return store_row_of(src, n, static_cast<fp16_t*>(dst));
    case DType::e4m3: {
      uint8_t* codes = static_cast<uint8_t*>(dst);
      for (int64_t i = 0; i < n; ++i) codes[i] = e4m3_code(src[i]);
      return;
    }
  }
}

// f32 pointer to a row: the row itself where it is f32, else converted into `room`.
SGL_INLINE const float* row_as_f32(const void* src, DType type, int64_t n, float* room) {
  if (type == DType::f32) return static_cast<const float*>(src);
  load_row(src, type, n, room);
  return room;
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
