// A few macros are enough here: the binary must build statically and run under emulators.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

struct TestCase {
  const char* name;
  void (*run)();
};

std::vector<TestCase>& test_cases();
int& failure_count();
// Tiers the kernel tests walk: all that this machine runs, or the one named on the command line.
const std::vector<std::string>& tiers_under_test();

#define TEST(name)                           \
  static void name();                        \
  static const bool name##_registered = [] { \
    test_cases().push_back({#name, &name});  \
    return true;                             \
  }();                                       \
  static void name()

// Prints the condition and the message once per failure; the first twenty are enough to see a
// pattern.
#define CHECK(condition, ...)                                                   \
  do {                                                                          \
    if (!(condition) && ++failure_count() <= 20) {                              \
      std::printf("%s:%d: CHECK(%s) failed: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                                 \
      std::printf("\n");                                                        \
    }                                                                           \
  } while (0)
