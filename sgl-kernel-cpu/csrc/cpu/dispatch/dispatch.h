// Which tier runs: the best one the machine has, or a lower one asked for by name.
#pragma once

#include <string>

#include "dispatch/cpu_features.h"
#include "dispatch/tiers.h"

namespace sgl_kernel {

// Empty when a machine with these features can run the tier, else the reason why it cannot.
// `tier` belongs to the architecture that this library was built for.
std::string missing_for(Tier tier, const CpuFeatures& features);

// The highest tier built into this library that `features` can run.
Tier best_tier(const CpuFeatures& features);

// The tier to use: `requested` when it names one that can run, the best when it is null or empty.
// Throws std::runtime_error that names SGL_KERNEL_ISA, the value, what is possible and why.
Tier choose_tier(const char* requested, const CpuFeatures& features);

// The tier in use. Decided at first use from the machine and the environment variable
// SGL_KERNEL_ISA.
Tier active_tier();
void set_active_tier(const char* requested);

// JSON object: tier, tiers_available, tiers_unavailable {tier: reason}, features, version.
std::string cpu_info_json();

}  // namespace sgl_kernel
