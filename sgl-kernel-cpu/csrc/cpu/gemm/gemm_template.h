// The GEMM family, compiled once per tier. Included by the small instantiation files only.
//
//   tinygemm_kernel_nn2  a few rows, one block of columns: sums stay in registers
//   tinygemm_kernel2     picks it by the number of rows, for a range of blocks
//   brgemm2              many rows: widens a panel of weights once, multiplies it by a block of
//                        rows
//   copy_mul_add_stub    f32 sums of one segment of K: times scale, added to the total
//   copy_add_stub        the same for the last segment, then -> out: bias, one rounding
//   add_row_sums         sums of chains to those of a segment, or of one in one block to the total
//
// Per-tensor, per-channel and block scales are one path: K falls into segments that share a scale
// (one segment unless scales are per block), and the scales of a segment are a vector over the
// columns.
//
// Order of summation: a segment is summed in blocks of Dot::kBlockK; the chains of a block start at
// +0 (dot.h), and the block's sum is added to the segment's. The order is the same in both kernels,
// so a row has the same bits whichever kernel, row count or thread computed it.
#pragma once

#include "gemm/brgemm.h"
#include "gemm/tinygemm.h"
#include "simd/fp_env.h"

namespace sgl_kernel {
namespace SGL_TIER {

template <typename scalar_t, typename packed_t, bool has_bias>
static void gemm_tasks(const GemmArgs& args, TaskRange tasks, void* scratch_bytes) {
  const FpEnvGuard fp_env(DotFor<scalar_t, packed_t>::kFlushSubnormals);
  const Scratch scratch{static_cast<char*>(scratch_bytes)};
  if (args.M <= TinyDotFor<scalar_t, packed_t>::kMostRows && tiny_fits(args, sizeof(packed_t))) {
    tinygemm_blocks<scalar_t, packed_t, has_bias>(args, tasks, scratch);
    return;
  }
  const typename DotFor<scalar_t, packed_t>::TileState tile_state;
  const int64_t column_blocks = div_up(args.N, kBlockN);
  const int64_t block_rows = rows_per_block(args);
  int64_t task = tasks.begin;
  while (task < tasks.end) {
    const int64_t row_block = task / column_blocks;
    const int64_t block = task - row_block * column_blocks;
    const int64_t m0 = row_block * block_rows;
    const int64_t rows = min_i64(block_rows, args.M - m0);
    const int64_t count = min_i64(column_blocks - block, tasks.end - task);
    brgemm2<scalar_t, packed_t, has_bias>(args, m0, rows, block, block + count, scratch);
    task += count;
  }
}

// The entry of one weight type: the run-time properties become template parameters here, once.
template <typename packed_t>
static void gemm_kernel_impl(const GemmArgs& args, TaskRange tasks, void* scratch) {
  const bool has_bias = args.bias != nullptr;
  if (args.mat1_dtype == DType::bf16) {
    has_bias ? gemm_tasks<bf16_t, packed_t, true>(args, tasks, scratch)
             : gemm_tasks<bf16_t, packed_t, false>(args, tasks, scratch);
  } else {
    has_bias ? gemm_tasks<fp16_t, packed_t, true>(args, tasks, scratch)
             : gemm_tasks<fp16_t, packed_t, false>(args, tasks, scratch);
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
