#include "transformer/qk_norm_rope_store.h"

#include "dispatch/kernel_list.h"
#include "simd/fp_env.h"
#include "simd/row_convert.h"

namespace sgl_kernel {
namespace SGL_TIER {

// Multiplications and additions stay apart, so that all tiers give the same bits.
static void rotate_neox(float* x, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(x + i, sub(mul(a, c), mul(b, s)));
    store(x + half + i, add(mul(b, c), mul(a, s)));
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[i] + a * sin[i];
  }
}

static void rotate_interleaved(float* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cos[i] - b * sin[i];
    x[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

static void scale_row(float* x, int64_t n, float factor) {
  const Vec f = set1(factor);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, mul(load(x + i), f));
  for (; i < n; ++i) x[i] *= factor;
}

static void divide_row(float* x, int64_t n, float divisor) {
  const Vec d = set1(divisor);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, div(load(x + i), d));
  for (; i < n; ++i) x[i] /= divisor;
}

void heads_kernel_impl(const HeadsArgs& args, TaskRange tokens, float* scratch) {
  const FpEnvGuard fp_env(false);
  const float* weights[3] = {};
  float* room = scratch;
  for (int64_t g = 0; g < args.group_count; ++g) {
    const HeadGroup& group = args.groups[g];
    if (group.weight == nullptr) continue;
    weights[g] = row_as_f32(group.weight, group.weight_dtype, group.head_dim, room);
    room += round_up(group.head_dim, 16);
  }
  float* angles = room;
  float* x = angles + round_up(args.rotary_dim, 16);
  const int64_t half = args.rotary_dim / 2;

  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    const float* cos = nullptr;
    if (args.positions != nullptr) {
      const void* row =
          element_at(args.cos_sin, args.cos_sin_dtype, args.positions[t] * args.cos_sin_stride);
      cos = row_as_f32(row, args.cos_sin_dtype, args.rotary_dim, angles);
    }
    for (int64_t g = 0; g < args.group_count; ++g) {
      const HeadGroup& group = args.groups[g];
      const int64_t place = group.dst_slots == nullptr ? t : group.dst_slots[t];
      for (int64_t h = 0; h < group.heads; ++h) {
        const void* src = element_at(group.src, group.src_dtype,
                                     t * group.src_token_stride + h * group.src_head_stride);
        void* dst = element_at(group.dst, group.dst_dtype,
                               place * group.dst_token_stride + h * group.dst_head_stride);
        const bool copies = weights[g] == nullptr && !group.rotate && group.dst_scale == 1.f &&
                            group.position_scale == nullptr;
        if (copies && group.src_dtype == group.dst_dtype) {
          memmove(dst, src, static_cast<size_t>(group.head_dim * dtype_bytes(group.src_dtype)));
          continue;
        }
        load_row(src, group.src_dtype, group.head_dim, x);
        if (weights[g] != nullptr) rms_norm_row(x, weights[g], group.head_dim, args.eps);
        if (group.rotate) {
          (args.is_neox ? rotate_neox : rotate_interleaved)(x, cos, cos + half, half);
        }
        if (group.position_scale != nullptr) {
          scale_row(x, group.head_dim, group.position_scale[args.positions[t]]);
        }
        if (group.dst_scale != 1.f) divide_row(x, group.head_dim, group.dst_scale);
        store_row(x, group.head_dim, group.dst_dtype, dst);
      }
    }
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
