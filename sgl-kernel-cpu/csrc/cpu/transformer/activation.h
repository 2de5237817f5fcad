// SwiGLU's gate (Shazeer, 2020).
#pragma once

#include "simd/dtype.h"
#include "simd/int_math.h"

namespace sgl_kernel {

// out[m, n] = silu(input[m, n]) * input[m, columns + n], in f32 with one rounding.
struct SiluAndMulArgs {
  int64_t rows = 0;
  int64_t columns = 0;  // of out

  const void* input = nullptr;  // [rows, 2 * columns]
  DType input_dtype = DType::f32;
  int64_t input_stride = 0;

  void* out = nullptr;  // [rows, columns], contiguous
  DType out_dtype = DType::f32;
};

}  // namespace sgl_kernel
