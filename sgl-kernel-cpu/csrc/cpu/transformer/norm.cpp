// Root mean square layer normalisation of rows. Compiled once per tier.
#include "transformer/norm.h"

#include "dispatch/kernel_list.h"
#include "simd/fp_env.h"
#include "transformer/norm_row.h"

namespace sgl_kernel {
namespace SGL_TIER {

// Where a row is, and scratch for a piece of it and of its residual.
struct NormRow {
  const RmsNormArgs& args;
  const void* input;
  void* residual;  // or null
  void* out;
  float* x;
  float* staged;

  // x = columns [begin, begin + n) of input (+ residual).
  SGL_MEMBER void load(int64_t begin, int64_t n) const {
    load_row(element_at(input, args.input_dtype, begin), args.input_dtype, n, x);
    if (residual == nullptr) return;
    const float* before = row_as_f32(element_at(residual, args.residual_dtype, begin),
                                     args.residual_dtype, n, staged);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      store(x + i, add(SGL_TIER::load(before + i), SGL_TIER::load(x + i)));
    }
    for (; i < n; ++i) x[i] = before[i] + x[i];
  }

  // Those columns of residual and out.
  SGL_MEMBER void finish(int64_t begin, int64_t n, float factor, const float* weight) const {
    if (residual != nullptr) {
      store_row(x, n, args.residual_dtype, element_at(residual, args.residual_dtype, begin));
    }
    scale_by_weight(x, factor, weight, n);
    store_row(x, n, args.out_dtype, element_at(out, args.out_dtype, begin));
  }
};

void rms_norm_kernel_impl(const RmsNormArgs& args, TaskRange rows, void* memory) {
  const FpEnvGuard fp_env(false);
  const int64_t n = args.columns, piece = norm_piece(args);
  const bool whole = n <= piece;
  ScratchLayout layout(memory);
  const RmsNormScratch scratch(args, &layout);
  const float* weight = nullptr;
  if (whole) weight = row_as_f32(args.weight, args.weight_dtype, n, scratch.weight);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const int64_t group = r / args.group_rows, inside = r % args.group_rows;
    void* residual = nullptr;
    if (args.residual != nullptr) {
      residual = element_at(args.residual, args.residual_dtype,
                            group * args.residual_group_stride + inside * args.residual_row_stride);
    }
    const NormRow row{args,
                      element_at(args.input, args.input_dtype,
                                 group * args.input_group_stride + inside * args.input_row_stride),
                      residual,
                      element_at(args.out, args.out_dtype,
                                 group * args.out_group_stride + inside * args.out_row_stride),
                      scratch.x,
                      scratch.residual};
    SquareSum squares;
    for (int64_t i = 0; i < n; i += piece) {
      row.load(i, min_i64(piece, n - i));
      squares.add_piece(row.x, min_i64(piece, n - i));
    }
    const float factor = squares.factor(n, args.eps);
    if (whole) {
      row.finish(0, n, factor, weight);
      continue;
    }
    for (int64_t i = 0; i < n; i += piece) {
      const int64_t count = min_i64(piece, n - i);
      row.load(i, count);
      row.finish(i, count, factor,
                 row_as_f32(element_at(args.weight, args.weight_dtype, i), args.weight_dtype, count,
                            scratch.weight));
    }
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
