// What happens to the heads of queries, keys and values between their projection and attention, in
// one pass over them: a norm of each head (QK norm, as in Qwen3), rotary position embedding, the
// store to the KV cache. Each step is optional, so the ops of one step are this kernel, too.
#pragma once

#include "runtime/scratch.h"
#include "simd/dtype.h"
#include "simd/int_math.h"
#include "transformer/rotary.h"

namespace sgl_kernel {

// Heads that go the same way, from a strided place to another; one rounding at its end. Strides in
// elements, head elements stand side by side.
struct HeadGroup {
  int64_t heads = 0;
  int64_t head_dim = 0;

  const void* src = nullptr;
  DType src_dtype = DType::f32;
  int64_t src_token_stride = 0;
  int64_t src_head_stride = 0;

  void* dst = nullptr;  // may be src
  DType dst_dtype = DType::f32;
  int64_t dst_token_stride = 0;
  int64_t dst_head_stride = 0;
  const int64_t* dst_slots = nullptr;  // [tokens] places in dst, or null: token t goes to place t
  float dst_scale = 1.f;               // what is stored is the number divided by this

  const void* weight = nullptr;  // [head_dim] of the norm, or null: no norm
  DType weight_dtype = DType::f32;
  bool rotate = false;
  const float* position_scale = nullptr;  // [position] factors after the rotation, or null: none
};

struct HeadsArgs {
  int64_t tokens = 0;
  HeadGroup groups[3];
  int64_t group_count = 0;
  float eps = 0.f;    // of the norms
  RotaryArgs rotary;  // of groups with `rotate`; its positions are those of position_scale, too
};

// The longest head, so that scratch is bounded.
constexpr int64_t kMostHeadDim = int64_t{1} << 20;

// What a thread needs besides its arguments.
struct HeadsScratch {
  float* weights[3];  // [head_dim] of a group's norm as f32, where it is of another type
  float* angles;      // [rotary_dim] cosines and sines of a token, likewise
  float* x;           // [head_dim] a head

  SGL_MEMBER HeadsScratch(const HeadsArgs& args, ScratchLayout* layout) {
    int64_t longest = 0;
    for (int64_t g = 0; g < args.group_count; ++g) {
      const HeadGroup& group = args.groups[g];
      weights[g] = layout->take<float>(group.weight == nullptr ? 0 : group.head_dim);
      longest = max_i64(longest, group.head_dim);
    }
    angles = layout->take<float>(args.rotary.rotary_dim);
    x = layout->take<float>(longest);
  }
};

}  // namespace sgl_kernel
