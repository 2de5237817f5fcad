#include "dispatch/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "dispatch/kernel_table.h"

namespace sgl_kernel {
namespace {

// Empty, or the first feature on the way up from `scalar` to the tier that is missing.
std::string missing_feature(Tier tier, const CpuFeatures& features) {
  if (tier == Tier::scalar) return "";
  const std::string lower = missing_feature(tier_below(tier), features);
  if (!lower.empty()) return lower;
#define SGL_X(feature, needed_by, reason, detected) \
  if (tier == Tier::needed_by && !features.feature) return reason;
  SGL_FOR_EACH_CPU_FEATURE(SGL_X)
#undef SGL_X
  return "";
}

std::string runnable_names(const CpuFeatures& features) {
  std::string names;
  for (const Tier tier : all_tiers()) {
    if (!missing_for(tier, features).empty()) continue;
    if (!names.empty()) names += ", ";
    names += tier_name(tier);
  }
  return names;
}

std::atomic<Tier>& active_tier_slot() {
  static std::atomic<Tier> slot(choose_tier(std::getenv("SGL_KERNEL_ISA"), detect_cpu_features()));
  return slot;
}

}  // namespace

std::string missing_for(Tier tier, const CpuFeatures& features) {
  if (built_kernel_table(tier) == nullptr) {
    return "not part of the library built for this architecture";
  }
  return missing_feature(tier, features);
}

Tier best_tier(const CpuFeatures& features) {
  Tier best = Tier::scalar;
  for (const Tier tier : all_tiers()) {
    if (missing_for(tier, features).empty()) best = tier;
  }
  return best;
}

Tier choose_tier(const char* requested, const CpuFeatures& features) {
  if (requested == nullptr || requested[0] == '\0') return best_tier(features);
  const std::string name = requested;
  for (const Tier tier : all_tiers()) {
    if (name != tier_name(tier)) continue;
    const std::string reason = missing_for(tier, features);
    if (reason.empty()) return tier;
    throw std::runtime_error("SGL_KERNEL_ISA=" + name + ": " + reason + "; this machine can run " +
                             runnable_names(features));
  }
  throw std::runtime_error("SGL_KERNEL_ISA=" + name + ": no such tier; this machine can run " +
                           runnable_names(features));
}

Tier active_tier() {
  return active_tier_slot().load(std::memory_order_relaxed);
}

void set_active_tier(const char* requested) {
  active_tier_slot().store(choose_tier(requested, detect_cpu_features()),
                           std::memory_order_relaxed);
}

std::string cpu_info_json() {
  const CpuFeatures f = detect_cpu_features();
  std::string available, unavailable;
  for (const Tier tier : all_tiers()) {
    const std::string reason = missing_for(tier, f);
    const std::string quoted = std::string("\"") + tier_name(tier) + "\"";
    if (reason.empty()) {
      available += (available.empty() ? "" : ", ") + quoted;
    } else {
      unavailable += (unavailable.empty() ? "" : ", ") + quoted + ": \"" + reason + "\"";
    }
  }
  std::string features;
  const auto feature = [&features](const char* name, bool value) {
    features +=
        (features.empty() ? "\"" : ", \"") + std::string(name) + (value ? "\": true" : "\": false");
  };
#define SGL_X(name, needed_by, reason, detected) feature(#name, f.name);
  SGL_FOR_EACH_CPU_FEATURE(SGL_X)
#undef SGL_X
  return std::string("{\"version\": \"") + SGL_KERNEL_VERSION + "\", \"tier\": \"" +
         tier_name(active_tier()) + "\", \"tiers_available\": [" + available +
         "], \"tiers_unavailable\": {" + unavailable + "}, \"features\": {" + features + "}}";
}

}  // namespace sgl_kernel
