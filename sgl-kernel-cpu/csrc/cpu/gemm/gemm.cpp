#include "gemm/gemm.h"

#include <stdexcept>

#include "dispatch/kernel_table.h"
#include "gemm/gemm_scratch.h"

namespace sgl_kernel {

int64_t gemm_task_count(const GemmArgs& args) {
  return args.M == 0 ? 0 : row_block_count(args) * div_up(args.N, kBlockN);
}

int64_t gemm_scratch_bytes(const GemmArgs& args) {
  // Where tinygemm_kernel2 fits, tiers with tiles may still take a panel.
  const int64_t tiny = tiny_fits(args) ? scratch_bytes<TinyScratch>(args) : 0;
  return max_i64(tiny, scratch_bytes<PanelScratch>(args));
}

void choose_row_block(const KernelTable& table, int64_t threads, GemmArgs* args) {
  constexpr int64_t kTasksPerThread = 4;  // so that all have about as much to do
  // fp16 weights are multiplied without tiles.
  args->row_block = args->mat2_dtype == DType::fp16 ? kMC : table.gemm_row_block();
  if (gemm_task_count(*args) < threads * kTasksPerThread) args->row_block = kMC;
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

}  // namespace sgl_kernel
