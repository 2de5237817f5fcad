#include "dispatch/tiers.h"

namespace sgl_kernel {

const std::vector<Tier>& all_tiers() {
#define SGL_X(tier, below) Tier::tier,
  static const std::vector<Tier> tiers = {SGL_FOR_EACH_TIER(SGL_X)};
#undef SGL_X
  return tiers;
}

const char* tier_name(Tier tier) {
#define SGL_X(name, below) \
  if (tier == Tier::name) return #name;
  SGL_FOR_EACH_TIER(SGL_X)
#undef SGL_X
  return "";
}

Tier tier_below(Tier tier) {
#define SGL_X(name, below) \
  if (tier == Tier::name) return Tier::below;
  SGL_FOR_EACH_TIER(SGL_X)
#undef SGL_X
  return Tier::scalar;
}

}  // namespace sgl_kernel
