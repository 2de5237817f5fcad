// The router of a mixture of experts: which experts a token goes to, and with what weights.
#pragma once

#include "runtime/scratch.h"
#include "simd/dtype.h"

namespace sgl_kernel {

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

// What a thread needs besides its arguments.
struct TopkSoftmaxScratch {
  float* exponentials;  // [experts] e^(x - max); those of experts that are taken become negative
  float* choice;        // [experts] what the largest are taken of, where there is a bias
  float* bias;          // [experts] as f32, where it is of another type

  SGL_MEMBER TopkSoftmaxScratch(const TopkSoftmaxArgs& args, ScratchLayout* layout) {
    exponentials = layout->take<float>(args.experts);
    choice = layout->take<float>(args.bias == nullptr ? 0 : args.experts);
    bias = layout->take<float>(args.bias == nullptr ? 0 : args.experts);
  }
};

}  // namespace sgl_kernel
