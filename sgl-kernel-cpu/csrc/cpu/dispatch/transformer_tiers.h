// The transformer kernels of every tier, and the table from which the ops take them.
#pragma once

#include "attention/attention.h"
#include "dispatch/dispatch.h"
#include "dispatch/tiers.h"
#include "transformer/activation.h"
#include "transformer/heads.h"
#include "transformer/norm.h"

namespace sgl_kernel {

// Ranges are rows of a norm, an activation or a router, tokens of heads, tasks of decode and pairs
// request * num_kv_heads + kv_head of merge.
struct TransformerKernels {
  void (*rms_norm)(const RmsNormArgs& args, TaskRange rows, float* scratch);
  void (*silu_and_mul)(const SiluAndMulArgs& args, TaskRange rows);
  void (*topk_softmax)(const TopkSoftmaxArgs& args, TaskRange rows, float* scratch);
  void (*heads)(const HeadsArgs& args, TaskRange tokens, float* scratch);
  void (*extend_attention)(const AttentionArgs& args, ExtendTask task, float* scratch);
  void (*decode_attention)(const AttentionArgs& args, const DecodePlan& plan, TaskRange tasks,
                           float* scratch);
  void (*merge_attention)(const AttentionArgs& args, const DecodePlan& plan, TaskRange pairs,
                          float* scratch);
  void (*exp_probe)(const float* x, int64_t n, float* out);  // for tests of its accuracy
};

const TransformerKernels& transformer_kernels(Tier tier);

}  // namespace sgl_kernel

#define SGL_DECLARE_TRANSFORMER_TIER(tier)                                                       \
  namespace sgl_kernel {                                                                         \
  namespace tier {                                                                               \
  void rms_norm_kernel_impl(const RmsNormArgs& args, TaskRange rows, float* scratch);            \
  void silu_and_mul_kernel_impl(const SiluAndMulArgs& args, TaskRange rows);                     \
  void topk_softmax_kernel_impl(const TopkSoftmaxArgs& args, TaskRange rows, float* scratch);    \
  void heads_kernel_impl(const HeadsArgs& args, TaskRange tokens, float* scratch);               \
  void extend_attention_kernel_impl(const AttentionArgs& args, ExtendTask task, float* scratch); \
  void decode_attention_kernel_impl(const AttentionArgs& args, const DecodePlan& plan,           \
                                    TaskRange tasks, float* scratch);                            \
  void merge_attention_kernel_impl(const AttentionArgs& args, const DecodePlan& plan,            \
                                   TaskRange pairs, float* scratch);                             \
  void exp_probe(const float* x, int64_t n, float* out);                                         \
  }                                                                                              \
  }
SGL_FOR_EACH_TIER(SGL_DECLARE_TRANSFORMER_TIER)
#undef SGL_DECLARE_TRANSFORMER_TIER
