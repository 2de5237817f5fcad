// torch.ops.sgl_kernel_benchmark.*: the machine's limits on the threads that run the ops, and what
// a call costs. For benchmark/ only; arguments are not checked.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <chrono>
#include <cstring>
#include <optional>
#include <vector>

#include "dispatch/dispatch.h"
#include "dispatch/kernel_table.h"
#include "gemm/gemm.h"
#include "torch/common.h"

namespace sgl_kernel {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

const KernelTable& active_table() {
  return kernel_table(active_tier());
}

int64_t thread_count() {
  return torch::stable::get_num_threads();
}

// Calls f(thread, threads) once on each of Torch's threads.
template <typename F>
void on_each_thread(const F& f) {
  const int64_t threads = thread_count();
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) f(thread, threads);
  });
}

// Reads a contiguous tensor once.
void read_probe(const Tensor& data) {
  const KernelTable& table = active_table();
  const float* from = static_cast<const float*>(data.const_data_ptr());
  const int64_t count = data.numel() * static_cast<int64_t>(data.element_size()) / 4;
  std::vector<float> sinks(static_cast<size_t>(thread_count()));
  on_each_thread([&](int64_t thread, int64_t threads) {
    const int64_t begin = count * thread / threads;
    sinks[static_cast<size_t>(thread)] =
        table.read_probe(from + begin, count * (thread + 1) / threads - begin);
  });
}

// Copies a contiguous tensor to another of its size.
void copy_probe(Tensor dst, const Tensor& src) {
  const char* from = static_cast<const char*>(src.const_data_ptr());
  char* to = static_cast<char*>(dst.mutable_data_ptr());
  const int64_t bytes = src.numel() * static_cast<int64_t>(src.element_size());
  on_each_thread([&](int64_t thread, int64_t threads) {
    const int64_t begin = bytes * thread / threads;
    std::memcpy(to + begin, from + begin, bytes * (thread + 1) / threads - begin);
  });
}

// Multiply-adds in registers on each thread; returns how many all of them did.
int64_t multiply_probe(bool bf16, int64_t steps) {
  const KernelTable& table = active_table();
  std::vector<int64_t> done(static_cast<size_t>(thread_count()));
  on_each_thread([&](int64_t thread, int64_t) {
    float sink[2] = {1.f, 1e-20f};
    done[static_cast<size_t>(thread)] = table.multiply_probe(bf16, steps, sink);
  });
  int64_t sum = 0;
  for (const int64_t count : done) sum += count;
  return sum;
}

// What a call costs that computes nothing: the op below allocates its output, the one after it
// starts the threads as well.
Tensor empty_mm(const Tensor& mat1, const Tensor& mat2, const Tensor&, const std::optional<Tensor>&,
                ScalarType out_dtype, bool) {
  const int64_t shape[2] = {mat1.size(0), mat2.size(0)};
  return torch::stable::new_empty(mat1, {shape, 2}, out_dtype);
}

Tensor empty_parallel_mm(const Tensor& mat1, const Tensor& mat2, const Tensor& scales2,
                         const std::optional<Tensor>& bias, ScalarType out_dtype, bool is_vnni) {
  on_each_thread([](int64_t, int64_t) {});
  return empty_mm(mat1, mat2, scales2, bias, out_dtype, is_vnni);
}

// Seconds of one per-tensor GEMM without a call: the mean of `repeat` runs on the calling
// thread. mat1 bf16 or fp16, mat2 packed e4m3; out [M, N] of mat1's dtype.
double kernel_seconds(Tensor out, const Tensor& mat1, const Tensor& mat2, const Tensor& scales2,
                      int64_t repeat) {
  GemmArgs args;
  args.M = mat1.size(0);
  args.N = mat2.size(0);
  args.K = mat2.size(1);
  args.mat1 = mat1.const_data_ptr();
  args.mat1_stride = mat1.stride(0);
  args.mat1_dtype = to_dtype(mat1.scalar_type());
  args.mat2 = mat2.const_data_ptr();
  args.scales = static_cast<const float*>(scales2.const_data_ptr());
  args.block_n = args.N;
  args.block_k = args.K;
  args.out = out.mutable_data_ptr();
  args.out_stride = args.N;
  args.out_dtype = args.mat1_dtype;
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<Line> scratch(static_cast<size_t>(div_up(gemm_scratch_bytes(args), 64)));
  const KernelTable& table = active_table();
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < repeat; ++i) {
    run_gemm(table, args, {0, gemm_task_count(args)}, scratch.data());
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return seconds.count() / static_cast<double>(repeat);
}

}  // namespace
}  // namespace sgl_kernel

STABLE_TORCH_LIBRARY(sgl_kernel_benchmark, m) {
  m.def("read_probe(Tensor data) -> ()");
  m.def("copy_probe(Tensor(a!) dst, Tensor src) -> ()");
  m.def("multiply_probe(bool bf16, int steps) -> int");
  m.def(
      "empty_mm(Tensor mat1, Tensor mat2, Tensor scales2, Tensor? bias, ScalarType out_dtype, "
      "bool is_vnni) -> Tensor");
  m.def(
      "empty_parallel_mm(Tensor mat1, Tensor mat2, Tensor scales2, Tensor? bias, ScalarType "
      "out_dtype, "
      "bool is_vnni) -> Tensor");
  m.def(
      "kernel_seconds(Tensor(a!) out, Tensor mat1, Tensor mat2, Tensor scales2, int repeat) -> "
      "float");
}

STABLE_TORCH_LIBRARY_IMPL(sgl_kernel_benchmark, CompositeExplicitAutograd, m) {
  m.impl("read_probe", TORCH_BOX(&sgl_kernel::read_probe));
  m.impl("copy_probe", TORCH_BOX(&sgl_kernel::copy_probe));
  m.impl("multiply_probe", TORCH_BOX(&sgl_kernel::multiply_probe));
  m.impl("empty_mm", TORCH_BOX(&sgl_kernel::empty_mm));
  m.impl("empty_parallel_mm", TORCH_BOX(&sgl_kernel::empty_parallel_mm));
  m.impl("kernel_seconds", TORCH_BOX(&sgl_kernel::kernel_seconds));
}
