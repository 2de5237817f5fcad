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

bool bit(unsigned word, int index) {
  return ((word >> index) & 1u) != 0;
}

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

CpuFeatures detect_cpu_features() {
  CpuFeatures f;
  const CpuidLeaf basic = cpuid(1, 0);
  const CpuidLeaf extended = cpuid(7, 0);
  const CpuidLeaf extended1 = extended.eax >= 1 ? cpuid(7, 1) : CpuidLeaf{};
  f.fma = bit(basic.ecx, 12);
  f.f16c = bit(basic.ecx, 29);
  f.avx2 = bit(extended.ebx, 5);
  f.avx512f = bit(extended.ebx, 16);
  f.avx512dq = bit(extended.ebx, 17);
  f.avx512bw = bit(extended.ebx, 30);
  f.avx512vl = bit(extended.ebx, 31);
  f.avx512_vbmi = bit(extended.ecx, 1);
  f.amx_bf16 = bit(extended.edx, 22);
  f.amx_tile = bit(extended.edx, 24);
  f.avx512_bf16 = bit(extended1.eax, 5);
  if (bit(basic.ecx, 27)) {  // OSXSAVE: XGETBV may be used
    const uint64_t xcr0 = read_xcr0();
    f.os_avx = (xcr0 & 0x6) == 0x6;
    f.os_avx512 = (xcr0 & 0xE6) == 0xE6;
    f.os_amx = f.amx_tile && (xcr0 & 0x60000) == 0x60000 && request_tile_state();
  }
  return f;
}

#elif defined(__aarch64__)

CpuFeatures detect_cpu_features() {
  CpuFeatures f;
  f.neon = true;  // part of the AArch64 baseline
#if defined(__linux__)
  constexpr unsigned long kHwcap2Bf16 = 1ul << 14;
  f.bf16 = (getauxval(AT_HWCAP2) & kHwcap2Bf16) != 0;
#endif
  return f;
}

#else

CpuFeatures detect_cpu_features() {
  return CpuFeatures();
}

#endif

}  // namespace sgl_kernel
