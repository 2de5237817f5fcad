// The list of ISA tiers, in rising order: declarations, dispatch and tests all come from it.
#pragma once

#include "gemm/gemm.h"

#if defined(__x86_64__)
#define SGL_FOR_EACH_TIER(X) X(scalar) X(avx2) X(avx512) X(avx512_bf16) X(amx)
#elif defined(__aarch64__)
#define SGL_FOR_EACH_TIER(X) X(scalar) X(neon) X(neon_bf16)
#else
#define SGL_FOR_EACH_TIER(X) X(scalar)
#endif

#define SGL_DECLARE_TIER(tier)                                                                 \
  namespace sgl_kernel {                                                                       \
  namespace tier {                                                                             \
  void fp8_scaled_mm_kernel_impl(const GemmArgs& args, TaskRange tasks, void* scratch);        \
  void weight_packed_linear_kernel_impl(const GemmArgs& args, TaskRange tasks, void* scratch); \
  void fp16_packed_linear_kernel_impl(const GemmArgs& args, TaskRange tasks, void* scratch);   \
  float read_probe(const float* data, int64_t count);                                          \
  int64_t multiply_probe(bool bf16, int64_t steps, float* sink);                               \
  extern const int64_t kRowBlock;                                                              \
  }                                                                                            \
  }
SGL_FOR_EACH_TIER(SGL_DECLARE_TIER)
#undef SGL_DECLARE_TIER
