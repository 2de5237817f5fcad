#include <cstring>

#include "check.h"
#include "dispatch.h"

std::vector<TestCase>& test_cases() {
  static std::vector<TestCase> cases;
  return cases;
}

int& failure_count() {
  static int count = 0;
  return count;
}

static std::vector<std::string>& tiers() {
  static std::vector<std::string> names;
  return names;
}

const std::vector<std::string>& tiers_under_test() {
  return tiers();
}

int main(int argc, char** argv) {
  const sgl_kernel::CpuFeatures features = sgl_kernel::detect_cpu_features();
  if (argc > 1) {
    tiers().push_back(sgl_kernel::tier_name(sgl_kernel::choose_tier(argv[1], features)));
  } else {
    for (const sgl_kernel::Tier tier : sgl_kernel::all_tiers()) {
      if (sgl_kernel::missing_for(tier, features).empty())
        tiers().push_back(sgl_kernel::tier_name(tier));
    }
  }
  for (const std::string& tier : tiers()) std::printf("tier %s\n", tier.c_str());

  int failed = 0;
  for (const TestCase& test : test_cases()) {
    const int before = failure_count();
    test.run();
    const bool ok = failure_count() == before;
    failed += ok ? 0 : 1;
    std::printf("%s %s\n", ok ? "ok    " : "FAILED", test.name);
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed\n", static_cast<int>(test_cases().size()) - failed, failed);
  return failed == 0 ? 0 : 1;
}
