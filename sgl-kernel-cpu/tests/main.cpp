#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "check.h"
#include "dispatch/dispatch.h"

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

// Chooses tiers and tests; throws std::runtime_error for arguments that make no sense or do not
// hold.
static void apply_arguments(int argc, char** argv) {
  const sgl_kernel::CpuFeatures features = sgl_kernel::detect_cpu_features();
  const char* tier = nullptr;
  const char* name_part = nullptr;
  bool best = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--best") {
      best = true;
    } else if (argument[0] == '-' || name_part != nullptr) {
      throw std::runtime_error("usage: sgl_kernel_tests [[--best] TIER [TEST]], not '" + argument +
                               "'");
    } else {
      (tier == nullptr ? tier : name_part) = argv[i];
    }
  }
  if (tier != nullptr) {
    tiers().push_back(sgl_kernel::tier_name(sgl_kernel::choose_tier(tier, features)));
  } else {
    for (const sgl_kernel::Tier t : sgl_kernel::all_tiers()) {
      if (sgl_kernel::missing_for(t, features).empty()) tiers().push_back(sgl_kernel::tier_name(t));
    }
  }
  const std::string chosen = sgl_kernel::tier_name(sgl_kernel::best_tier(features));
  if (best && (tier == nullptr || chosen != tier))
    throw std::runtime_error("this machine chooses the tier " + chosen);

  std::vector<TestCase>& tests = test_cases();
  const auto is_unnamed = [name_part](const TestCase& test) {
    return name_part != nullptr && std::strstr(test.name, name_part) == nullptr;
  };
  tests.erase(std::remove_if(tests.begin(), tests.end(), is_unnamed), tests.end());
  if (tests.empty()) throw std::runtime_error(std::string("no test's name has ") + name_part);
}

// sgl_kernel_tests              every test on every tier that this machine runs
// sgl_kernel_tests TIER         on one of them
// sgl_kernel_tests TIER TEST    only the tests with TEST in their name
// --best                        fails unless TIER is the one that this machine chooses by itself
// --list-tiers                  runs no test: those that this machine runs, as a list of CMake's
int main(int argc, char** argv) {
  const bool lists = argc == 2 && std::strcmp(argv[1], "--list-tiers") == 0;
  try {
    apply_arguments(lists ? 1 : argc, argv);
  } catch (const std::runtime_error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 2;
  }
  if (lists) {
    std::string names;
    for (const std::string& tier : tiers()) names += (names.empty() ? "" : ";") + tier;
    std::printf("%s\n", names.c_str());
    return 0;
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
