// What a tile unit is given to multiply. Part of the GEMM family, compiled per tier.
#pragma once

#include <cstdint>

#include "simd/types.h"

namespace sgl_kernel {
namespace SGL_TIER {

// Where the sums of a panel's product begin and end.
struct SumsFlow {
  bool start;  // they start at zero
  bool held;   // up to kHeldRows of a tile tier: tiles still hold them from the product before
  bool hold;   // and keep them for the next one
};

// What the tile unit multiplies: sums[rows, 32] (+)= a @ panel.
struct TileProduct {
  const float* a;      // rows as Dot::convert_rows leaves them, one group of 16 after the other
  const float* panel;  // [pairs, 32]
  int64_t pairs;       // a multiple of 16
  int64_t rows;
  SumsFlow flow;
  float* sums;  // [rows, 32], with room for whole groups
};

}  // namespace SGL_TIER
}  // namespace sgl_kernel
