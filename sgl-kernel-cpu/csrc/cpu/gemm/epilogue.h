// From f32 sums to the output: scales, bias, rounding. Part of the GEMM family, compiled per tier.
#pragma once

#include "gemm/gemm.h"
#include "simd/vec.h"

namespace sgl_kernel {
namespace SGL_TIER {

// The scales of segment `segment` for the 32 columns at n0, as far as they exist.
SGL_INLINE void load_scales(const GemmArgs& args, int64_t n0, int64_t segment, float* scale) {
  if (args.scales == nullptr) {
    for (int64_t i = 0; i < kBlockN; ++i) scale[i] = 1.f;
    return;
  }
  const int64_t width = min_i64(kBlockN, args.N - n0);
  const int64_t row_stride = div_up(args.K, args.block_k);
  const int64_t row = n0 / args.block_n;
  int64_t left = (row + 1) * args.block_n - n0;  // columns of this row of blocks still to come
  const float* from = args.scales + row * row_stride + segment;
  if (left >= width) {
    for (int64_t i = 0; i < kBlockN; i += kLanes) store(scale + i, set1(*from));
    return;
  }
  for (int64_t i = 0; i < kBlockN; ++i) {
    if (left == 0 && i < width) {
      from += row_stride;
      left = args.block_n;
    }
    --left;
    scale[i] = *from;
  }
}

template <typename bias_t>
SGL_INLINE void load_bias_as(const GemmArgs& args, int64_t n0, float* bias) {
  const bias_t* source = static_cast<const bias_t*>(args.bias) + n0;
  const int64_t width = min_i64(kBlockN, args.N - n0);
  for (int64_t i = 0; i < kBlockN; ++i) bias[i] = i < width ? to_float(source[i]) : 0.f;
}

// The bias of the 32 columns at n0 in f32, as far as it exists.
SGL_INLINE void load_bias(const GemmArgs& args, int64_t n0, float* bias) {
  switch (args.bias_dtype) {
    case DType::f32:
      return load_bias_as<float>(args, n0, bias);
    case DType::bf16:
      return load_bias_as<bf16_t>(args, n0, bias);
    case DType::fp16:
      return load_bias_as<fp16_t>(args, n0, bias);
    case DType::e4m3:
      break;  // no op takes it
  }
}

// total[rows, 32] (+)= sums[rows, 32] * scale[32]; multiplied and added in two roundings on every
// tier.
SGL_INLINE void copy_mul_add_stub(const float* sums, const float* scale, bool first, int64_t rows,
                                  float* total) {
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t i = m * kBlockN; i < (m + 1) * kBlockN; i += kLanes) {
      Vec v = mul(load(sums + i), load(scale + i - m * kBlockN));
      if (!first) v = add(load(total + i), v);
      store(total + i, v);
    }
  }
}

// Sums of the last segment, and where they go on from.
struct LastSegment {
  const float* sums;   // [rows, 32]
  const float* scale;  // [32]
  const float* total;  // [rows, 32] of the segments before, or null
};

template <typename out_t, bool has_bias>
SGL_INLINE void copy_add_rows(const GemmArgs& args, LastSegment last, int64_t m0, int64_t rows,
                              int64_t n0) {
  alignas(64) float bias[kBlockN];
  if (has_bias) load_bias(args, n0, bias);
  const int64_t width = min_i64(kBlockN, args.N - n0);
  for (int64_t m = 0; m < rows; ++m) {
    out_t* out = static_cast<out_t*>(args.out) + (m0 + m) * args.out_stride + n0;
    for (int64_t i = 0; i < width; i += kLanes) {
      Vec v = mul(load(last.sums + m * kBlockN + i), load(last.scale + i));
      if (last.total != nullptr) v = add(load(last.total + m * kBlockN + i), v);
      if (has_bias) v = add(v, load(bias + i));
      if (i + kLanes <= width) {
        store_out(out + i, v);
      } else {
        out_t tail[kLanes];
        store_out(tail, v);
        memcpy(out + i, tail, (width - i) * sizeof(out_t));
      }
    }
  }
}

// out[m0 .. m0 + rows, n0 .. n0 + 32] = total + sums * scale (+ bias), rounded once; clipped to N.
template <bool has_bias>
SGL_INLINE void copy_add_stub(const GemmArgs& args, LastSegment last, int64_t m0, int64_t rows,
                              int64_t n0) {
  switch (args.out_dtype) {
    case DType::f32:
      return copy_add_rows<float, has_bias>(args, last, m0, rows, n0);
    case DType::bf16:
      return copy_add_rows<bf16_t, has_bias>(args, last, m0, rows, n0);
    case DType::fp16:
      return copy_add_rows<fp16_t, has_bias>(args, last, m0, rows, n0);
    case DType::e4m3:
      break;  // no op gives it
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
