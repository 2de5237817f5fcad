// Batched products: a caller of the GEMM family, one batch after the other inside a thread's range.
#include <stdexcept>

#include "dispatch/kernel_table.h"
#include "gemm/gemm.h"

namespace sgl_kernel {
void choose_row_block(const KernelTable& table, int64_t threads, GemmArgs* args) {
  constexpr int64_t kTasksPerThread = 4;  // so that all have about as much to do
  // fp16 weights are multiplied without tiles.
  args->row_block = args->mat2_dtype == DType::fp16 ? kBlockM : table.gemm_row_block();
  if (gemm_task_count(*args) < threads * kTasksPerThread) args->row_block = kBlockM;
}

void run_gemm(const KernelTable& table, const GemmArgs& args, TaskRange tasks, void* scratch) {
  switch (args.mat2_dtype) {
    case DType::e4m3:
      return table.fp8_scaled_mm(args, tasks, scratch);
    case DType::bf16:
      return table.weight_packed_linear(args, tasks, scratch);
    case DType::fp16:
      return table.fp16_packed_linear(args, tasks, scratch);
    case DType::f32:
      throw std::logic_error("no kernel multiplies f32 weights");
  }
}

void run_bmm(const KernelTable& table, const BmmArgs& args, TaskRange tasks, void* scratch) {
  const int64_t per_batch = gemm_task_count(args.gemm);
  int64_t task = tasks.begin;
  while (task < tasks.end) {
    const int64_t b = task / per_batch;
    const int64_t batch_end = min_i64((b + 1) * per_batch, tasks.end);
    GemmArgs gemm = args.gemm;
    gemm.mat1 = element_at(gemm.mat1, gemm.mat1_dtype, b * args.mat1_batch_stride);
    gemm.mat2 = element_at(gemm.mat2, gemm.mat2_dtype, b * gemm.N * gemm.K);
    gemm.out = element_at(gemm.out, gemm.out_dtype, b * args.out_batch_stride);
    if (gemm.scales != nullptr) gemm.scales += b * args.scale_batch_stride;
    run_gemm(table, gemm, {task - b * per_batch, batch_end - b * per_batch}, scratch);
    task = batch_end;
  }
}

}  // namespace sgl_kernel
