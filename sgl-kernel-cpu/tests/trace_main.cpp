// Runs one GEMM of one tier and writes the address of every instruction that it executes.
//
//   sgl_kernel_trace TIER M N K bf16|fp16 FILE
//
// FILE gets 64-bit addresses, linked addresses because the program is not relocated. On x86-64 the
// processor's trap flag steps through the kernel. Elsewhere the program only runs the kernel
// between trace_begin() and trace_end(): run it under qemu, which logs addresses itself; FILE stays
// away.
//
// benchmark/account.py counts and simulates what this writes.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "dispatch/dispatch.h"
#include "dispatch/kernel_table.h"
#include "gemm/gemm.h"

#if defined(__x86_64__)
#include <signal.h>
#include <ucontext.h>
#include <x86intrin.h>
#endif

namespace {

std::vector<uint64_t> trace;
size_t traced = 0;

#if defined(__x86_64__)
constexpr unsigned long long kTrapFlag = 0x100;

uint64_t previous = 0;

void on_trap(int, siginfo_t*, void* context) {
  const uint64_t address =
      static_cast<uint64_t>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
  if (address == previous) return;  // a repeated string instruction traps at each turn
  previous = address;
  if (traced < trace.size()) trace[traced] = address;
  ++traced;
}
#endif

}  // namespace

// Names that a log of addresses can be searched for.
extern "C" __attribute__((noinline)) void trace_begin() {
#if defined(__x86_64__)
  __writeeflags(__readeflags() | kTrapFlag);
#else
  asm volatile("" ::: "memory");
#endif
}

extern "C" __attribute__((noinline)) void trace_end() {
#if defined(__x86_64__)
  __writeeflags(__readeflags() & ~kTrapFlag);
#else
  asm volatile("" ::: "memory");
#endif
}

int main(int argc, char** argv) {
  using namespace sgl_kernel;
  if (argc != 7) {
    std::fprintf(stderr, "usage: sgl_kernel_trace TIER M N K bf16|fp16 FILE\n");
    return 2;
  }
  GemmArgs args;
  try {
    set_active_tier(argv[1]);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 3;  // not a failure: this machine lacks the tier
  }
  args.M = std::atoll(argv[2]);
  args.N = std::atoll(argv[3]);
  args.K = std::atoll(argv[4]);
  const bool bf16 = std::strcmp(argv[5], "bf16") == 0;
  // 1.0 in the activations' type, 1.0 in e4m3.
  const std::vector<uint16_t> mat1(static_cast<size_t>(args.M * args.K), bf16 ? 0x3F80 : 0x3C00);
  const std::vector<uint8_t> mat2(static_cast<size_t>(args.N * args.K), 0x38);
  std::vector<uint16_t> out(static_cast<size_t>(args.M * args.N));
  const float scale = 1.f / 1024.f;
  args.mat1 = mat1.data();
  args.mat1_stride = args.K;
  args.mat1_dtype = bf16 ? DType::bf16 : DType::fp16;
  args.mat2 = mat2.data();
  args.scales = &scale;
  args.block_n = args.N;
  args.block_k = args.K;
  args.out = out.data();
  args.out_stride = args.N;
  args.out_dtype = args.mat1_dtype;
  const size_t bytes = static_cast<size_t>(round_up(gemm_scratch_bytes(args), 64));
  void* scratch = std::aligned_alloc(64, bytes);
  const KernelTable& table = kernel_table(active_tier());
  const TaskRange tasks{0, gemm_task_count(args)};
  run_gemm(table, args, tasks, scratch);  // touches every page, so that no fault is traced

#if defined(__x86_64__)
  trace.resize(size_t{1} << 23);
  struct sigaction action = {};
  action.sa_sigaction = on_trap;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGTRAP, &action, nullptr);
#endif
  trace_begin();
  run_gemm(table, args, tasks, scratch);
  trace_end();

  const float expected = static_cast<float>(args.K) * scale;
  const float got = bf16 ? to_float(bf16_t{out[0]}) : to_float(fp16_t{out[0]});
  if (got != expected) {
    std::fprintf(stderr, "the kernel gave %g instead of %g\n", got, expected);
    return 1;
  }
#if defined(__x86_64__)
  if (traced > trace.size()) {
    std::fprintf(stderr, "%zu instructions are more than the buffer holds\n", traced);
    return 1;
  }
  FILE* file = std::fopen(argv[6], "wb");
  if (file == nullptr || std::fwrite(trace.data(), 8, traced, file) != traced ||
      std::fclose(file) != 0) {
    std::perror(argv[6]);
    return 1;
  }
#endif
  std::free(scratch);
  return 0;
}
