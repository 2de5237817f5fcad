// The unit in which kernels read weights: one k pair of a block of 32 output columns, as
// gemm/packing.h lays it out.
#pragma once

#include <cstdint>

namespace sgl_kernel {

constexpr int64_t kBlockN = 32;
constexpr int64_t kPairElements = 2 * kBlockN;  // of one k pair of a whole block

}  // namespace sgl_kernel
