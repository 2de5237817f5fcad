// What one ISA tier provides: a pointer to each kernel of the list. Compiled without ISA flags.
#pragma once

#include "dispatch/kernel_list.h"
#include "dispatch/tiers.h"

namespace sgl_kernel {

struct KernelTable {
#define SGL_X(name, result, parameters) result(*name) parameters;
  SGL_FOR_EACH_KERNEL(SGL_X)
#undef SGL_X
};

// Null for a tier that is not built into this library.
const KernelTable* built_kernel_table(Tier tier);

// Throws std::logic_error for such a tier.
const KernelTable& kernel_table(Tier tier);

}  // namespace sgl_kernel
