// What the processor offers and the operating system lets programs use. Compiled without ISA flags.
#pragma once

// X(feature, tier, reason, detected): each feature of this architecture, once.
//   tier       the lowest tier that needs it; those above it in tiers.h need it too
//   reason     why that tier cannot run without it; what is missing first in this order is told
//   detected   an expression in detect_cpu_features(), which may use the features before it
#if defined(__x86_64__)
#define SGL_FOR_EACH_CPU_FEATURE(X)                                                       \
  X(avx2, avx2, "the CPU lacks AVX2", bit(leaf7.ebx, 5))                                  \
  X(fma, avx2, "the CPU lacks FMA", bit(leaf1.ecx, 12))                                   \
  X(f16c, avx2, "the CPU lacks F16C", bit(leaf1.ecx, 29))                                 \
  X(avx512f, avx512, "the CPU lacks AVX512F", bit(leaf7.ebx, 16))                         \
  X(avx512bw, avx512, "the CPU lacks AVX512BW", bit(leaf7.ebx, 30))                       \
  X(avx512vl, avx512, "the CPU lacks AVX512VL", bit(leaf7.ebx, 31))                       \
  X(avx512dq, avx512, "the CPU lacks AVX512DQ", bit(leaf7.ebx, 17))                       \
  X(avx512_bf16, avx512_bf16, "the CPU lacks AVX512_BF16", bit(leaf7_1.eax, 5))           \
  X(avx512_vbmi, amx, "the CPU lacks AVX512_VBMI", bit(leaf7.ecx, 1))                     \
  X(amx_tile, amx, "the CPU lacks AMX-TILE", bit(leaf7.edx, 24))                          \
  X(amx_bf16, amx, "the CPU lacks AMX-BF16", bit(leaf7.edx, 22))                          \
  X(os_avx, avx2, "the operating system does not save AVX registers", saved(kXmm | kYmm)) \
  X(os_avx512, avx512, "the operating system does not save AVX-512 registers",            \
    saved(kXmm | kYmm | kOpmaskAndZmm))                                                   \
  X(os_amx, amx, "the operating system does not grant AMX tile state", tiles_granted())
#elif defined(__aarch64__)
#define SGL_FOR_EACH_CPU_FEATURE(X)                                                     \
  X(neon, neon, "the CPU lacks Advanced SIMD", true) /* part of the AArch64 baseline */ \
  X(bf16, neon_bf16, "the CPU lacks BF16", (hwcap2 & kHwcap2Bf16) != 0)
#else
#define SGL_FOR_EACH_CPU_FEATURE(X)
#endif

namespace sgl_kernel {

struct CpuFeatures {
#define SGL_X(feature, tier, reason, detected) bool feature = false;
  SGL_FOR_EACH_CPU_FEATURE(SGL_X)
#undef SGL_X
};

CpuFeatures detect_cpu_features();

}  // namespace sgl_kernel
