#include "dispatch/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "dispatch/tiers.h"

namespace sgl_kernel {
namespace {

struct Requirement {
  bool met;
  const char* reason;
};

std::string first_unmet(std::initializer_list<Requirement> requirements) {
  for (const Requirement& r : requirements) {
    if (!r.met) return r.reason;
  }
  return "";
}

bool built_in(Tier tier) {
#define SGL_IS_TIER(name) \
  if (tier == Tier::name) return true;
  SGL_FOR_EACH_TIER(SGL_IS_TIER)
#undef SGL_IS_TIER
  return false;
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

const std::vector<Tier>& all_tiers() {
  static const std::vector<Tier> tiers = {Tier::scalar, Tier::neon,   Tier::neon_bf16,
                                          Tier::avx2,   Tier::avx512, Tier::avx512_bf16,
                                          Tier::amx};
  return tiers;
}

const char* tier_name(Tier tier) {
  switch (tier) {
    case Tier::scalar:
      return "scalar";
    case Tier::neon:
      return "neon";
    case Tier::neon_bf16:
      return "neon_bf16";
    case Tier::avx2:
      return "avx2";
    case Tier::avx512:
      return "avx512";
    case Tier::avx512_bf16:
      return "avx512_bf16";
    case Tier::amx:
      return "amx";
  }
  return "";
}

std::string missing_for(Tier tier, const CpuFeatures& f) {
  if (!built_in(tier)) return "not part of the library built for this architecture";
  switch (tier) {
    case Tier::scalar:
      return "";
    case Tier::neon:
      return first_unmet({{f.neon, "the CPU lacks Advanced SIMD"}});
    case Tier::neon_bf16:
      return first_unmet({{f.neon, "the CPU lacks Advanced SIMD"}, {f.bf16, "the CPU lacks BF16"}});
    case Tier::avx2:
      return first_unmet({{f.avx2, "the CPU lacks AVX2"},
                          {f.fma, "the CPU lacks FMA"},
                          {f.f16c, "the CPU lacks F16C"},
                          {f.os_avx, "the operating system does not save AVX registers"}});
    case Tier::avx512: {
      const std::string lower = missing_for(Tier::avx2, f);
      if (!lower.empty()) return lower;
      return first_unmet({{f.avx512f, "the CPU lacks AVX512F"},
                          {f.avx512bw, "the CPU lacks AVX512BW"},
                          {f.avx512vl, "the CPU lacks AVX512VL"},
                          {f.avx512dq, "the CPU lacks AVX512DQ"},
                          {f.os_avx512, "the operating system does not save AVX-512 registers"}});
    }
    case Tier::avx512_bf16: {
      const std::string lower = missing_for(Tier::avx512, f);
      if (!lower.empty()) return lower;
      return first_unmet({{f.avx512_bf16, "the CPU lacks AVX512_BF16"}});
    }
    case Tier::amx: {
      const std::string lower = missing_for(Tier::avx512, f);
      if (!lower.empty()) return lower;
      return first_unmet({{f.avx512_vbmi, "the CPU lacks AVX512_VBMI"},
                          {f.amx_tile, "the CPU lacks AMX-TILE"},
                          {f.amx_bf16, "the CPU lacks AMX-BF16"},
                          {f.os_amx, "the operating system does not grant AMX tile state"}});
    }
  }
  return "unknown tier";
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

const KernelTable& kernel_table(Tier tier) {
#define SGL_TABLE_OF(name)                                                     \
  if (tier == Tier::name) {                                                    \
    static const KernelTable table = {&name::fp8_scaled_mm_kernel_impl,        \
                                      &name::weight_packed_linear_kernel_impl, \
                                      &name::fp16_packed_linear_kernel_impl,   \
                                      name::kRowBlock,                         \
                                      &name::read_probe,                       \
                                      &name::multiply_probe};                  \
    return table;                                                              \
  }
  SGL_FOR_EACH_TIER(SGL_TABLE_OF)
#undef SGL_TABLE_OF
  throw std::logic_error(std::string("no kernels for tier ") + tier_name(tier));
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
#if defined(__x86_64__)
  feature("avx2", f.avx2);
  feature("fma", f.fma);
  feature("f16c", f.f16c);
  feature("avx512f", f.avx512f);
  feature("avx512bw", f.avx512bw);
  feature("avx512vl", f.avx512vl);
  feature("avx512dq", f.avx512dq);
  feature("avx512_bf16", f.avx512_bf16);
  feature("avx512_vbmi", f.avx512_vbmi);
  feature("amx_tile", f.amx_tile);
  feature("amx_bf16", f.amx_bf16);
  feature("os_avx", f.os_avx);
  feature("os_avx512", f.os_avx512);
  feature("os_amx", f.os_amx);
#elif defined(__aarch64__)
  feature("neon", f.neon);
  feature("bf16", f.bf16);
#endif
  return std::string("{\"version\": \"") + SGL_KERNEL_VERSION + "\", \"tier\": \"" +
         tier_name(active_tier()) + "\", \"tiers_available\": [" + available +
         "], \"tiers_unavailable\": {" + unavailable + "}, \"features\": {" + features + "}}";
}

}  // namespace sgl_kernel
