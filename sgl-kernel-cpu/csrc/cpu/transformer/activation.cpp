// SwiGLU's gate. Compiled once per tier.
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

void exp_probe_kernel_impl(const float* x, int64_t n, float* out) {
  const FpEnvGuard fp_env(false);
  for (int64_t i = 0; i < n; ++i) out[i] = exp_scalar(x[i]);
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
