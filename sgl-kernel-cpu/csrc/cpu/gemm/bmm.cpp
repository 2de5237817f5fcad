#include "gemm/bmm.h"

namespace sgl_kernel {

int64_t bmm_task_count(const BmmArgs& args) {
  return args.batch * gemm_task_count(args.gemm);
}

// One batch after the other inside a thread's range.
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
