// Root mean square layer normalisation (Zhang and Sennrich, 2019), with an optional addition to the
// residual stream before it.
#pragma once

#include "runtime/scratch.h"
#include "simd/dtype.h"
#include "simd/int_math.h"

namespace sgl_kernel {

// x = input (+ residual, and residual = x); out = x / sqrt(mean(x^2) + eps) * weight, in f32 with
// one rounding into residual and one into out. out may be input.
//
// Rows come in groups: row r is at (r / group_rows) * group_stride + (r % group_rows) * row_stride.
struct RmsNormArgs {
  int64_t rows = 0;
  int64_t columns = 0;
  float eps = 0.f;

  const void* input = nullptr;
  DType input_dtype = DType::f32;
  int64_t input_group_stride = 0;
  int64_t input_row_stride = 0;

  void* residual = nullptr;  // or null
  DType residual_dtype = DType::f32;
  int64_t residual_group_stride = 0;
  int64_t residual_row_stride = 0;

  const void* weight = nullptr;  // [columns]
  DType weight_dtype = DType::f32;

  void* out = nullptr;
  DType out_dtype = DType::f32;
  int64_t out_group_stride = 0;
  int64_t out_row_stride = 0;

  int64_t group_rows = 1;
};

// Columns that are looked at in one piece, a multiple of 64 (SquareSum); longer rows go by twice.
constexpr int64_t kNormPiece = 16384;

SGL_INLINE int64_t norm_piece(const RmsNormArgs& args) {
  return min_i64(args.columns, kNormPiece);
}

// What a thread needs besides its arguments.
struct RmsNormScratch {
  float* x;         // [norm_piece] a piece of the row
  float* residual;  // [norm_piece] of the residual as f32, where it is of another type
  float* weight;    // [norm_piece] likewise

  SGL_MEMBER RmsNormScratch(const RmsNormArgs& args, ScratchLayout* layout) {
    const int64_t piece = norm_piece(args);
    x = layout->take<float>(piece);
    residual = layout->take<float>(args.residual == nullptr ? 0 : piece);
    weight = layout->take<float>(piece);
  }
};

}  // namespace sgl_kernel
