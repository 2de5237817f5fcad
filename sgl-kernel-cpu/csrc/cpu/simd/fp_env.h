// Kernels run in a floating-point environment of their own, whatever the calling thread has set:
// round to nearest, subnormals kept (or flushed, where a tier's instructions do so anyway). The
// thread's own settings come back when the guard goes. The control register is the architecture's,
// not a tier's: `scalar` is a tier of all of them.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "simd/types.h"

namespace sgl_kernel {
namespace {

class FpEnvGuard {
 public:
  explicit FpEnvGuard(bool flush_subnormals) : saved_(read()) {
    write(flush_subnormals ? kFlush : kDefault);
  }
  ~FpEnvGuard() { write(saved_); }
  FpEnvGuard(const FpEnvGuard&) = delete;
  FpEnvGuard& operator=(const FpEnvGuard&) = delete;

 private:
#if defined(__x86_64__)
  using Control = unsigned int;
  static constexpr Control kDefault = 0x1F80;  // all exceptions masked, FTZ and DAZ clear
  static constexpr Control kFlush = 0x9FC0;    // the same with FTZ and DAZ set
  static Control read() { return _mm_getcsr(); }
  static void write(Control control) { _mm_setcsr(control); }
#elif defined(__aarch64__)
  using Control = uint64_t;
  static constexpr Control kDefault = 0;
  static constexpr Control kFlush = uint64_t{1} << 24;  // FZ
  static Control read() {
    Control control;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    return control;
  }
  static void write(Control control) { asm volatile("msr fpcr, %0" : : "r"(control)); }
#else
  using Control = int;
  static constexpr Control kDefault = 0;
  static constexpr Control kFlush = 0;
  static Control read() { return 0; }
  static void write(Control) {}
#endif

  Control saved_;
};

}  // namespace
}  // namespace sgl_kernel
