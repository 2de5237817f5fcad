// The tables of kernels, by address: what is compared needs not run on this machine.
#include <map>
#include <string>

#include "check.h"
#include "dispatch/kernel_table.h"

using namespace sgl_kernel;

TEST(every_kernel_of_every_tier_is_code_of_its_own) {
  int tiers = 0;
  std::map<const void*, std::string> owners;
  for (const Tier tier : all_tiers()) {
    const KernelTable* table = built_kernel_table(tier);
    if (table == nullptr) continue;
    ++tiers;
    const auto check = [&](const void* address, const char* kernel) {
      const std::string name = std::string(tier_name(tier)) + "::" + kernel;
      CHECK(address != nullptr, "%s is null", name.c_str());
      const auto [owner, is_new] = owners.emplace(address, name);
      CHECK(is_new, "%s is %s", name.c_str(), owner->second.c_str());
    };
#define SGL_X(kernel, result, parameters) \
  check(reinterpret_cast<const void*>(table->kernel), #kernel);
    SGL_FOR_EACH_KERNEL(SGL_X)
#undef SGL_X
  }
  CHECK(tiers >= static_cast<int>(tiers_under_test().size()), "%d tiers are built", tiers);
}
