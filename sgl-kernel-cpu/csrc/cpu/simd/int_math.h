// Arithmetic of sizes and positions: the only home of ceil-divisions and round-ups.
#pragma once

#include <cstdint>

#include "simd/types.h"

namespace sgl_kernel {

SGL_INLINE constexpr int64_t min_i64(int64_t a, int64_t b) {
  return a < b ? a : b;
}
SGL_INLINE constexpr int64_t max_i64(int64_t a, int64_t b) {
  return a > b ? a : b;
}
// a / b rounded up, for a >= 0 and b > 0.
SGL_INLINE constexpr int64_t div_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
// The smallest multiple of b that is not below a.
SGL_INLINE constexpr int64_t round_up(int64_t a, int64_t b) {
  return div_up(a, b) * b;
}

}  // namespace sgl_kernel
