// What the processor offers and the operating system lets programs use. Compiled without ISA flags.
#pragma once

namespace sgl_kernel {

struct CpuFeatures {
  // x86-64
  bool avx2 = false;
  bool fma = false;
  bool f16c = false;
  bool avx512f = false;
  bool avx512bw = false;
  bool avx512vl = false;
  bool avx512dq = false;
  bool avx512_bf16 = false;
  bool avx512_vbmi = false;
  bool amx_tile = false;
  bool amx_bf16 = false;
  bool os_avx = false;     // XCR0: XMM and YMM state saved
  bool os_avx512 = false;  // XCR0: opmask and ZMM state saved
  bool os_amx = false;     // XCR0: tile state saved, and this process may use it
  // AArch64
  bool neon = false;
  bool bf16 = false;
};

CpuFeatures detect_cpu_features();

}  // namespace sgl_kernel
