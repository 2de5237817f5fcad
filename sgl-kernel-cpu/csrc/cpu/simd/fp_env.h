// Kernels run in a floating-point environment of their own, whatever the calling thread has set:
// round to nearest, subnormals kept (or flushed, where a tier's instructions do so anyway). The
// thread's own settings come back when the guard goes.
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
  using Word = unsigned int;
  static constexpr Word kDefault = 0x1F80;  // all exceptions masked, FTZ and DAZ clear
  static constexpr Word kFlush = 0x9FC0;    // the same with FTZ and DAZ set
  static Word read() { return _mm_getcsr(); }
  static void write(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kDefault = 0;
  static constexpr Word kFlush = uint64_t{1} << 24;  // FZ
  static Word read() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void write(Word word) { asm volatile("msr fpcr, %0" : : "r"(word)); }
#else
  using Word = int;
  static constexpr Word kDefault = 0;
  static constexpr Word kFlush = 0;
  static Word read() { return 0; }
  static void write(Word) {}
#endif

  Word saved_;
};

}  // namespace
}  // namespace sgl_kernel
