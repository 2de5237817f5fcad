// Rotary position embedding (Su et al., 2021): which angles a token's heads are rotated by.
#pragma once

#include "simd/dtype.h"

namespace sgl_kernel {

// Pairs (i, i + rotary_dim / 2) of a head are rotated when neox, else pairs (2i, 2i + 1), for
// i < rotary_dim / 2; elements from rotary_dim on stay as they are.
struct RotaryArgs {
  const int64_t* positions = nullptr;  // [tokens]; null: nothing is rotated
  const void* cos_sin = nullptr;       // [position, rotary_dim]: cosines, then sines
  DType cos_sin_dtype = DType::f32;
  int64_t cos_sin_stride = 0;
  int64_t rotary_dim = 0;
  bool is_neox = true;
};

}  // namespace sgl_kernel
