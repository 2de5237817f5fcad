#include "norm.h"

#include "fp_env.h"
#include "row_convert.h"
#include "transformer_tiers.h"

namespace sgl_kernel {
namespace SGL_TIER {

void rms_norm_kernel_impl(const RmsNormArgs& args, TaskRange rows, float* scratch) {
  const FpEnvGuard fp_env(false);
  const int64_t n = args.columns;
  float* x = scratch;
  float* other = x + round_up(n, 16);
  const float* weight = row_as_f32(args.weight, args.weight_type, n, other + round_up(n, 16));
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const int64_t group = r / args.group_rows, inside = r % args.group_rows;
    load_row(element_at(args.input, args.input_type,
                        group * args.input_group_stride + inside * args.input_row_stride),
             args.input_type, n, x);
    if (args.residual != nullptr) {
      void* residual =
          element_at(args.residual, args.residual_type,
                     group * args.residual_group_stride + inside * args.residual_row_stride);
      const float* before = row_as_f32(residual, args.residual_type, n, other);
      int64_t i = 0;
      for (; i + kLanes <= n; i += kLanes) store(x + i, add(load(before + i), load(x + i)));
      for (; i < n; ++i) x[i] = before[i] + x[i];
      store_row(x, n, args.residual_type, residual);
    }
    rms_norm_row(x, weight, n, args.eps);
    store_row(x, n, args.out_type,
              element_at(args.out, args.out_type,
                         group * args.out_group_stride + inside * args.out_row_stride));
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
