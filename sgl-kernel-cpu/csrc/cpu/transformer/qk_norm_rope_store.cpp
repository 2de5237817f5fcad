// Head norms, rotary position embedding and the store to the KV cache. Compiled once per tier.
#include "transformer/qk_norm_rope_store.h"

#include "dispatch/kernel_list.h"
#include "simd/fp_env.h"
#include "transformer/norm_row.h"
#include "transformer/rotary_row.h"

namespace sgl_kernel {
namespace SGL_TIER {

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

// A head goes to its place as it is, byte for byte.
static bool is_copied(const HeadGroup& group) {
  return group.weight == nullptr && !group.rotate && group.position_scale == nullptr &&
         group.dst_scale == 1.f && group.src_dtype == group.dst_dtype;
}

void qk_norm_rope_store_kernel_impl(const HeadsArgs& args, TaskRange tokens, void* memory) {
  const FpEnvGuard fp_env(false);
  const RotaryArgs& rotary = args.rotary;
  ScratchLayout layout(memory);
  const HeadsScratch scratch(args, &layout);
  const float* weights[3] = {};
  for (int64_t g = 0; g < args.group_count; ++g) {
    const HeadGroup& group = args.groups[g];
    if (group.weight == nullptr) continue;
    weights[g] = row_as_f32(group.weight, group.weight_dtype, group.head_dim, scratch.weights[g]);
  }
  float* const x = scratch.x;
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    const float* cos_sin = nullptr;
    if (rotary.positions != nullptr) cos_sin = cos_sin_of(rotary, t, scratch.angles);
    for (int64_t g = 0; g < args.group_count; ++g) {
      const HeadGroup& group = args.groups[g];
      const int64_t place = group.dst_slots == nullptr ? t : group.dst_slots[t];
      for (int64_t h = 0; h < group.heads; ++h) {
        const void* src = element_at(group.src, group.src_dtype,
                                     t * group.src_token_stride + h * group.src_head_stride);
        void* dst = element_at(group.dst, group.dst_dtype,
                               place * group.dst_token_stride + h * group.dst_head_stride);
        if (is_copied(group)) {
          memmove(dst, src, static_cast<size_t>(group.head_dim * dtype_bytes(group.src_dtype)));
          continue;
        }
        load_row(src, group.src_dtype, group.head_dim, x);
        if (weights[g] != nullptr) rms_norm_row(x, weights[g], group.head_dim, args.eps);
        if (group.rotate) rotate(rotary, cos_sin, x);
        if (group.position_scale != nullptr) {
          scale_row(x, group.head_dim, group.position_scale[rotary.positions[t]]);
        }
        if (group.dst_scale != 1.f) divide_row(x, group.head_dim, group.dst_scale);
        store_row(x, group.head_dim, group.dst_dtype, dst);
      }
    }
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
