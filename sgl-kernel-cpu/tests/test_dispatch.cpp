// Which tier is chosen for which processor, including processors this machine is not.
#include <stdexcept>

#include "check.h"
#include "dispatch/dispatch.h"

using namespace sgl_kernel;

#if defined(__x86_64__)

static CpuFeatures haswell() {
  CpuFeatures f;
  f.avx2 = f.fma = f.f16c = f.os_avx = true;
  return f;
}

static CpuFeatures skylake_server() {
  CpuFeatures f = haswell();
  f.avx512f = f.avx512bw = f.avx512vl = f.avx512dq = f.os_avx512 = true;
  return f;
}

static CpuFeatures cooper_lake() {
  CpuFeatures f = skylake_server();
  f.avx512_bf16 = true;
  return f;
}

static CpuFeatures sapphire_rapids() {
  CpuFeatures f = cooper_lake();
  f.avx512_vbmi = f.amx_tile = f.amx_bf16 = f.os_amx = true;
  return f;
}

TEST(best_tier_by_processor) {
  CHECK(best_tier(CpuFeatures()) == Tier::scalar, "no features");
  CHECK(best_tier(haswell()) == Tier::avx2, "Haswell");
  CHECK(best_tier(skylake_server()) == Tier::avx512, "Skylake server");
  CHECK(best_tier(cooper_lake()) == Tier::avx512_bf16, "Cooper Lake");
  CHECK(best_tier(sapphire_rapids()) == Tier::amx, "Sapphire Rapids");
}

TEST(every_single_missing_feature_lowers_the_tier) {
  bool CpuFeatures::* const avx2_needs[] = {&CpuFeatures::avx2, &CpuFeatures::fma,
                                            &CpuFeatures::f16c, &CpuFeatures::os_avx};
  for (const auto feature : avx2_needs) {
    CpuFeatures f = cooper_lake();
    f.*feature = false;
    CHECK(best_tier(f) == Tier::scalar, "without an AVX2 requirement: %s", tier_name(best_tier(f)));
  }
  bool CpuFeatures::* const avx512_needs[] = {&CpuFeatures::avx512f, &CpuFeatures::avx512bw,
                                              &CpuFeatures::avx512vl, &CpuFeatures::avx512dq,
                                              &CpuFeatures::os_avx512};
  for (const auto feature : avx512_needs) {
    CpuFeatures f = cooper_lake();
    f.*feature = false;
    CHECK(best_tier(f) == Tier::avx2, "without an AVX-512 requirement: %s",
          tier_name(best_tier(f)));
  }
}

TEST(amx_needs_the_processor_and_the_operating_system) {
  bool CpuFeatures::* const amx_needs[] = {&CpuFeatures::avx512_vbmi, &CpuFeatures::amx_tile,
                                           &CpuFeatures::amx_bf16, &CpuFeatures::os_amx};
  for (const auto feature : amx_needs) {
    CpuFeatures f = sapphire_rapids();
    f.*feature = false;
    CHECK(best_tier(f) == Tier::avx512_bf16, "without an AMX requirement: %s",
          tier_name(best_tier(f)));
  }
  CpuFeatures refused = sapphire_rapids();
  refused.os_amx = false;
  CHECK(missing_for(Tier::amx, refused) == "the operating system does not grant AMX tile state",
        "%s", missing_for(Tier::amx, refused).c_str());
}

TEST(requested_tier_lowers_and_never_raises) {
  for (const char* name : {"scalar", "avx2", "avx512", "avx512_bf16", "amx"}) {
    CHECK(std::string(tier_name(choose_tier(name, sapphire_rapids()))) == name, "%s", name);
  }
  const struct {
    const char* requested;
    const char* part_of_message;
  } refused[] = {
      {"avx512", "SGL_KERNEL_ISA=avx512: the CPU lacks AVX512F; this machine can run scalar, avx2"},
      {"neon", "not part of the library built for this architecture"},
      {"AVX2", "SGL_KERNEL_ISA=AVX2: no such tier; this machine can run scalar, avx2"},
  };
  for (const auto& c : refused) {
    std::string message;
    try {
      choose_tier(c.requested, haswell());
    } catch (const std::runtime_error& e) {
      message = e.what();
    }
    CHECK(message.find(c.part_of_message) != std::string::npos, "%s: '%s'", c.requested,
          message.c_str());
  }
}

#elif defined(__aarch64__)

TEST(best_tier_by_processor) {
  CpuFeatures cortex_a72;
  cortex_a72.neon = true;
  CpuFeatures neoverse_v1 = cortex_a72;
  neoverse_v1.bf16 = true;
  CHECK(best_tier(cortex_a72) == Tier::neon, "Cortex-A72");
  CHECK(best_tier(neoverse_v1) == Tier::neon_bf16, "Neoverse V1");
  CHECK(missing_for(Tier::neon_bf16, cortex_a72) == "the CPU lacks BF16", "%s",
        missing_for(Tier::neon_bf16, cortex_a72).c_str());
}

#endif
