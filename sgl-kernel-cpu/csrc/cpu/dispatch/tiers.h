// The ISA tiers: a tier is a set of compiler flags under which every kernel is compiled once more.
// The flags are in cmake/tiers.cmake, which also says which tiers a library is built with.
#pragma once

#include <vector>

// X(tier, below): every tier the project has, built into this library or not, in rising order on
// its architecture. A tier needs what the tier `below` it needs, and the features that
// cpu_features.h says are its own; `scalar` needs nothing.
#define SGL_FOR_EACH_TIER(X) \
  X(scalar, scalar)          \
  X(neon, scalar)            \
  X(neon_bf16, neon)         \
  X(avx2, scalar)            \
  X(avx512, avx2)            \
  X(avx512_bf16, avx512)     \
  X(amx, avx512)

namespace sgl_kernel {

enum class Tier {
#define SGL_X(tier, below) tier,
  SGL_FOR_EACH_TIER(SGL_X)
#undef SGL_X
};

// All of them, in the order of the list.
const std::vector<Tier>& all_tiers();

const char* tier_name(Tier tier);

// The tier whose needs `tier` has too; of `scalar`, itself.
Tier tier_below(Tier tier);

}  // namespace sgl_kernel
