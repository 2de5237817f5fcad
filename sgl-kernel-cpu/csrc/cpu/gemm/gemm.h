// The driver of the GEMM family: a product as plain pointers in one named struct, without Torch,
// threads or allocation.
//
//   out[m, n] = sum over k of mat1[m, k] * mat2[n, k] * scales[n / block_n, k / block_k]
//               (+ bias[n])
//
// A per-tensor scale is a grid of one block, a per-channel scale a grid of blocks of one column.
//
// The caller owns parallelism: it splits [0, gemm_task_count(args)) over threads, and gives each
// thread its own scratch of gemm_scratch_bytes(args) bytes, aligned as scratch.h says.
#pragma once

#include <cstdint>

#include "gemm/packing.h"
#include "runtime/task_range.h"
#include "simd/dtype.h"
#include "simd/int_math.h"

namespace sgl_kernel {

struct GemmArgs {
  int64_t M = 0;
  int64_t N = 0;
  int64_t K = 0;

  const void* mat1 = nullptr;  // [M, K] activations, unit stride along K
  int64_t mat1_stride = 0;     // elements from row to row
  DType mat1_dtype = DType::bf16;

  const void* mat2 = nullptr;  // [N, K] weight, contiguous
  DType mat2_dtype = DType::e4m3;
  bool is_vnni = true;  // packed by pack_weight_blocks, else row-major

  // [ceil(N / block_n), ceil(K / block_k)], contiguous; null: 1.0 everywhere.
  const float* scales = nullptr;
  int64_t block_n = 0;  // >= 1
  int64_t block_k = 0;  // >= 1; K or more: one scale along K

  const void* bias = nullptr;  // [N] or null
  DType bias_dtype = DType::f32;

  void* out = nullptr;  // [M, N], unit stride along N
  int64_t out_stride = 0;
  DType out_dtype = DType::bf16;

  int64_t row_block = 0;  // MC, the most rows that share a widened panel; 0: kMC (blocking.h)
};

// A task is one block of rows times one block of 32 columns.
int64_t gemm_task_count(const GemmArgs& args);

// At most 16 MiB for every shape.
int64_t gemm_scratch_bytes(const GemmArgs& args);

struct KernelTable;  // dispatch/kernel_table.h

// Sets row_block for work that `threads` threads share. The result's bits do not depend on it.
void choose_row_block(const KernelTable& table, int64_t threads, GemmArgs* args);

// Computes the tasks' part of out.
void run_gemm(const KernelTable& table, const GemmArgs& args, TaskRange tasks, void* scratch);

}  // namespace sgl_kernel
