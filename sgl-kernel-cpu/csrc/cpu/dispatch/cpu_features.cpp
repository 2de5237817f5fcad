#include "dispatch/cpu_features.h"

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace sgl_kernel {

#if defined(__x86_64__)

namespace {

struct CpuidLeaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuidLeaf cpuid(unsigned leaf, unsigned subleaf) {
  CpuidLeaf r;
  // Fails, and leaves zeros, when the processor does not know the leaf.
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

bool bit(unsigned value, int index) {
  return ((value >> index) & 1u) != 0;
}

// Register states that the operating system saves, as bits of XCR0.
constexpr uint64_t kXmm = 0x2, kYmm = 0x4, kOpmaskAndZmm = 0xE0, kTiles = 0x60000;

uint64_t read_xcr0() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// Linux gives a process tile state only when it asks (Documentation/arch/x86/xstate.rst).
bool request_tile_state() {
#if defined(__linux__)
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr long kXfeatureXtiledata = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
#else
  return false;
#endif
}

}  // namespace

#endif

CpuFeatures detect_cpu_features() {
  CpuFeatures f;
#if defined(__x86_64__)
  const CpuidLeaf leaf1 = cpuid(1, 0);
  const CpuidLeaf leaf7 = cpuid(7, 0);
  const CpuidLeaf leaf7_1 = leaf7.eax >= 1 ? cpuid(7, 1) : CpuidLeaf{};
  const bool has_xgetbv = bit(leaf1.ecx, 27);  // OSXSAVE
  const uint64_t xcr0 = has_xgetbv ? read_xcr0() : 0;
  const auto saved = [xcr0](uint64_t states) { return (xcr0 & states) == states; };
  const auto tiles_granted = [&] { return f.amx_tile && saved(kTiles) && request_tile_state(); };
#elif defined(__aarch64__)
  constexpr unsigned long kHwcap2Bf16 = 1ul << 14;
#if defined(__linux__)
  const unsigned long hwcap2 = getauxval(AT_HWCAP2);
#else
  const unsigned long hwcap2 = 0;
#endif
#endif

#define SGL_X(feature, tier, reason, detected) f.feature = detected;
  SGL_FOR_EACH_CPU_FEATURE(SGL_X)
#undef SGL_X
  return f;
}

}  // namespace sgl_kernel
