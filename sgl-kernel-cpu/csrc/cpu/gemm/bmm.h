// Batched products: a caller of the GEMM family.
#pragma once

#include "gemm/gemm.h"

namespace sgl_kernel {

// B independent products; strides in elements. mat2 is [B, N, K] contiguous, each batch packed
// alone.
struct BmmArgs {
  GemmArgs gemm;  // pointers of batch 0
  int64_t batch = 0;
  int64_t mat1_batch_stride = 0;
  int64_t out_batch_stride = 0;
  int64_t scale_batch_stride = 0;  // 0: one scale for all, 1: one per batch
};

int64_t bmm_task_count(const BmmArgs& args);

// The same scratch as one product of the batch: gemm_scratch_bytes(args.gemm).
void run_bmm(const KernelTable& table, const BmmArgs& args, TaskRange tasks, void* scratch);

}  // namespace sgl_kernel
