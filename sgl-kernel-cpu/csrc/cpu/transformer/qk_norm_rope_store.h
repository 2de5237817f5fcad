// What happens to the heads of queries, keys and values between their projection and attention: a
// norm of each head (Qwen3), rotary position embedding (Su et al., 2021), the KV cache.
#pragma once

#include "simd/dtype.h"
#include "simd/int_math.h"

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
  float eps = 0.f;

  // Of rotated groups: pairs (i, i + rotary_dim / 2) when neox, else (2i, 2i + 1), for
  // i < rotary_dim / 2; elements from rotary_dim on stay as they are.
  const int64_t* positions = nullptr;  // [tokens]
  const void* cos_sin = nullptr;       // [position, rotary_dim]: cosines, then sines
  DType cos_sin_dtype = DType::f32;
  int64_t cos_sin_stride = 0;
  int64_t rotary_dim = 0;
  bool is_neox = true;
};

// The longest head, so that scratch is bounded.
constexpr int64_t kMostHeadDim = int64_t{1} << 20;

// Floats of scratch that a thread needs.
SGL_INLINE int64_t heads_scratch(const HeadsArgs& args) {
  int64_t floats = round_up(args.rotary_dim, 16);
  int64_t longest = 0;
  for (int64_t g = 0; g < args.group_count; ++g) {
    const int64_t room = round_up(args.groups[g].head_dim, 16);
    longest = max_i64(longest, room);
    floats += room;
  }
  return floats + longest;
}

}  // namespace sgl_kernel
