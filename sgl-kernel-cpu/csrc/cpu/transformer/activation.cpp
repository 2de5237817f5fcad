#include "transformer/activation.h"

#include "dispatch/kernel_list.h"
#include "simd/fp_env.h"
#include "simd/row_convert.h"

namespace sgl_kernel {
namespace SGL_TIER {

template <typename in_t, typename out_t>
static void silu_and_mul_row(const in_t* gate, const in_t* up, int64_t n, out_t* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    store_out(out + i, mul(silu(load_act(gate + i)), load_act(up + i)));
  }
  if (i < n) {
    const Vec v = mul(silu(load_first(gate + i, n - i)), load_first(up + i, n - i));
    store_first(out + i, v, n - i);
  }
}

template <typename in_t, typename out_t>
static void silu_and_mul_rows(const SiluAndMulArgs& args, TaskRange rows) {
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const in_t* gate = static_cast<const in_t*>(args.input) + r * args.input_stride;
    silu_and_mul_row(gate, gate + args.columns, args.columns,
                     static_cast<out_t*>(args.out) + r * args.columns);
  }
}

template <typename in_t>
static void silu_and_mul_of(const SiluAndMulArgs& args, TaskRange rows) {
  switch (args.out_dtype) {
    case DType::bf16:
      return silu_and_mul_rows<in_t, bf16_t>(args, rows);
    case DType::fp16:
      return silu_and_mul_rows<in_t, fp16_t>(args, rows);
    default:
      return silu_and_mul_rows<in_t, float>(args, rows);
  }
}

void silu_and_mul_kernel_impl(const SiluAndMulArgs& args, TaskRange rows) {
  const FpEnvGuard fp_env(false);
  switch (args.input_dtype) {
    case DType::bf16:
      return silu_and_mul_of<bf16_t>(args, rows);
    case DType::fp16:
      return silu_and_mul_of<fp16_t>(args, rows);
    default:
      return silu_and_mul_of<float>(args, rows);
  }
}

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

void topk_softmax_kernel_impl(const TopkSoftmaxArgs& args, TaskRange rows, float* scratch) {
  const FpEnvGuard fp_env(false);
  constexpr float kTaken = -1.f;  // below every probability
  const int64_t room = round_up(args.experts, 16);
  float* choice = args.bias == nullptr ? scratch : scratch + room;  // what the largest is taken of
  const float* bias = nullptr;
  if (args.bias != nullptr) {
    bias = row_as_f32(args.bias, args.bias_dtype, args.experts, scratch + 2 * room);
  }
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    load_row(element_at(args.gating, args.gating_dtype, r * args.gating_stride), args.gating_dtype,
             args.experts, scratch);
    const float sum = softmax_row(scratch, args.experts);
    if (bias != nullptr) {
      for (int64_t e = 0; e < args.experts; ++e) choice[e] = scratch[e] / sum + bias[e];
    }
    float* weights = args.weights + r * args.topk;
    int32_t* ids = args.ids + r * args.topk;
    float kept = 0.f;
    for (int64_t k = 0; k < args.topk; ++k) {
      int64_t best = -1;
      for (int64_t e = 0; e < args.experts; ++e) {
        // A NaN is not taken and never compares: then the first expert that is left.
        if (scratch[e] == kTaken) continue;
        if (best < 0 || choice[e] > choice[best]) best = e;
      }
      ids[k] = static_cast<int32_t>(best);
      weights[k] = scratch[best] / sum;
      kept += weights[k];
      scratch[best] = kTaken;
    }
    if (args.renormalize) {
      for (int64_t k = 0; k < args.topk; ++k) weights[k] /= kept;
    }
  }
}

void exp_probe_kernel_impl(const float* x, int64_t n, float* out) {
  const FpEnvGuard fp_env(false);
  for (int64_t i = 0; i < n; ++i) out[i] = exp_scalar(x[i]);
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
