// Every kernel, once. To add one: a line here, and a source in SGL_TIER_SOURCES of
// cmake/tiers.cmake that defines NAME_kernel_impl in namespace SGL_TIER. The declarations of every
// tier, the table through which the ops call (kernel_table.h) and the tests come from this list.
#pragma once

#include <cstdint>

#include "attention/attention.h"
#include "attention/split_kv.h"
#include "gemm/gemm.h"
#include "transformer/activation.h"
#include "transformer/norm.h"
#include "transformer/qk_norm_rope_store.h"
#include "transformer/routing.h"

// X(name, result, parameters). Ranges of tasks are
//   of gemm/         blocks of rows times blocks of columns (gemm.h)
//   of transformer/  rows of a norm, an activation or a router, tokens of heads
//   of attention/    tasks of extend, splits of decode, pairs request * num_kv_heads + kv_head of
//                    combine_splits
// and `scratch` is the thread's own, as large as the family's header says.
#define SGL_FOR_EACH_KERNEL(X)                                                                    \
  /* gemm/: products with e4m3, bf16 and fp16 weights, and GemmArgs::row_block where there are */ \
  /* rows and columns enough for all threads. */                                                  \
  X(fp8_scaled_mm, void, (const GemmArgs& args, TaskRange tasks, void* scratch))                  \
  X(weight_packed_linear, void, (const GemmArgs& args, TaskRange tasks, void* scratch))           \
  X(fp16_packed_linear, void, (const GemmArgs& args, TaskRange tasks, void* scratch))             \
  X(gemm_row_block, int64_t, ())                                                                  \
  /* transformer/ */                                                                              \
  X(rms_norm, void, (const RmsNormArgs& args, TaskRange rows, void* scratch))                     \
  X(silu_and_mul, void, (const SiluAndMulArgs& args, TaskRange rows))                             \
  X(topk_softmax, void, (const TopkSoftmaxArgs& args, TaskRange rows, void* scratch))             \
  X(qk_norm_rope_store, void, (const HeadsArgs& args, TaskRange tokens, void* scratch))           \
  X(exp_probe, void, (const float* x, int64_t n, float* out)) /* for tests of its accuracy */     \
  /* attention/ */                                                                                \
  X(extend_attention, void, (const AttentionArgs& args, ExtendTask task, void* scratch))          \
  X(decode_attention, void,                                                                       \
    (const AttentionArgs& args, const DecodePlan& plan, TaskRange splits, void* scratch))         \
  X(combine_splits, void,                                                                         \
    (const AttentionArgs& args, const DecodePlan& plan, TaskRange pairs, void* scratch))          \
  /* For benchmarks: reads all of `data` at the speed of its memory. */                           \
  X(read_probe, float, (const float* data, int64_t count))                                        \
  /* For benchmarks: independent multiply-adds in registers, f32 or (where the tier has the */    \
  /* instruction) bf16 pairs; returns how many. `sink`: two floats, so that the compiler keeps */ \
  /* them. */                                                                                     \
  X(multiply_probe, int64_t, (bool bf16, int64_t steps, float* sink))

#define SGL_DECLARE_KERNEL(name, result, parameters) result name##_kernel_impl parameters;

// Those of the tier that this file is compiled for.
#if defined(SGL_TIER)
namespace sgl_kernel {
namespace SGL_TIER {
SGL_FOR_EACH_KERNEL(SGL_DECLARE_KERNEL)
}  // namespace SGL_TIER
}  // namespace sgl_kernel
#endif
