// SwiGLU's gate (Shazeer, 2020) and the router of a mixture of experts.
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

// Softmax over a row's experts, then the topk largest with their indices, largest first; of equal
// ones the lower index first. renormalize divides them by their sum. With a bias, what is largest
// is decided by the probability plus the expert's bias; weights are probabilities all the same.
struct TopkSoftmaxArgs {
  int64_t rows = 0;
  int64_t experts = 0;
  int64_t topk = 0;
  bool renormalize = false;

  const void* gating = nullptr;  // [rows, experts]
  DType gating_dtype = DType::f32;
  int64_t gating_stride = 0;

  const void* bias = nullptr;  // [experts] or null
  DType bias_dtype = DType::f32;

  float* weights = nullptr;  // [rows, topk]
  int32_t* ids = nullptr;    // [rows, topk]
};

// Bounds the scratch, and the numbers of experts, which are int32.
constexpr int64_t kMostExperts = int64_t{1} << 20;

// Floats of scratch that a thread needs.
SGL_INLINE int64_t topk_softmax_scratch(const TopkSoftmaxArgs& args) {
  return 3 * round_up(args.experts, 16);
}

}  // namespace sgl_kernel
