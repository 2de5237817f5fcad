// The router: softmax over experts and the topk largest. Compiled once per tier.
#include "transformer/routing.h"

#include "dispatch/kernel_list.h"
#include "simd/fp_env.h"
#include "simd/row_convert.h"

namespace sgl_kernel {
namespace SGL_TIER {

// A row's exponentials e^(x - max) in place; returns their sum.
static float softmax_row(float* x, int64_t n) {
  float largest = x[0];
  for (int64_t i = 1; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
  const Vec shift = set1(largest);
  Vec sums = zero();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec e = exp(sub(load(x + i), shift));
    store(x + i, e);
    sums = add(sums, e);
  }
  float sum = reduce_add(sums);
  for (; i < n; ++i) sum += x[i] = exp_scalar(x[i] - largest);
  return sum;
}

void topk_softmax_kernel_impl(const TopkSoftmaxArgs& args, TaskRange rows, void* memory) {
  const FpEnvGuard fp_env(false);
  constexpr float kTaken = -1.f;  // below every exponential
  ScratchLayout layout(memory);
  const TopkSoftmaxScratch scratch(args, &layout);
  float* const exponentials = scratch.exponentials;
  float* const choice = args.bias == nullptr ? exponentials : scratch.choice;
  const float* bias = nullptr;
  if (args.bias != nullptr) {
    bias = row_as_f32(args.bias, args.bias_dtype, args.experts, scratch.bias);
  }
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    load_row(element_at(args.gating, args.gating_dtype, r * args.gating_stride), args.gating_dtype,
             args.experts, exponentials);
    const float sum = softmax_row(exponentials, args.experts);
    if (bias != nullptr) {
      for (int64_t e = 0; e < args.experts; ++e) choice[e] = exponentials[e] / sum + bias[e];
    }
    float* weights = args.weights + r * args.topk;
    int32_t* ids = args.ids + r * args.topk;
    float kept = 0.f;
    for (int64_t k = 0; k < args.topk; ++k) {
      int64_t best = -1;
      for (int64_t e = 0; e < args.experts; ++e) {
        // A NaN is not taken and never compares: then the first expert that is left.
        if (exponentials[e] == kTaken) continue;
        if (best < 0 || choice[e] > choice[best]) best = e;
      }
      ids[k] = static_cast<int32_t>(best);
      weights[k] = exponentials[best] / sum;
      kept += weights[k];
      exponentials[best] = kTaken;
    }
    if (args.renormalize) {
      for (int64_t k = 0; k < args.topk; ++k) weights[k] /= kept;
    }
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
