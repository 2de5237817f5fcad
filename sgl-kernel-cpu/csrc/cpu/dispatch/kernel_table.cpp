#include "dispatch/kernel_table.h"

#include <stdexcept>

// cmake/tiers.cmake defines SGL_BUILT_TIERS as SGL_BUILT(scalar) SGL_BUILT(avx2) ...
#define SGL_BUILT(tier)                   \
  namespace tier {                        \
  SGL_FOR_EACH_KERNEL(SGL_DECLARE_KERNEL) \
  }
namespace sgl_kernel {
SGL_BUILT_TIERS
}  // namespace sgl_kernel
#undef SGL_BUILT

namespace sgl_kernel {

const KernelTable* built_kernel_table(Tier tier) {
#define SGL_BUILT(name)                                                \
  if (tier == Tier::name) {                                            \
    using namespace name;                                              \
    static const KernelTable table = {SGL_FOR_EACH_KERNEL(SGL_ENTRY)}; \
    return &table;                                                     \
  }
#define SGL_ENTRY(kernel, result, parameters) &kernel##_kernel_impl,
  SGL_BUILT_TIERS
#undef SGL_ENTRY
#undef SGL_BUILT
  return nullptr;
}

const KernelTable& kernel_table(Tier tier) {
  const KernelTable* table = built_kernel_table(tier);
  if (table != nullptr) return *table;
  throw std::logic_error(std::string("no kernels for tier ") + tier_name(tier));
}

}  // namespace sgl_kernel
