// The GEMM family, compiled once per tier. Included by the small instantiation files only:
// gemm_fp8.cpp, gemm_bf16.cpp and gemm_fp16.cpp, one for each type of weight (packed_t).
//
//   tinygemm_kernel_nn2  a few rows, one block of columns (tinygemm.h)
//   tinygemm_kernel2     picks it by the number of rows, for a range of blocks
//   brgemm2              many rows share a widened panel of weights (brgemm.h, panel_product.h)
//   micro_kernel         the innermost loop of both (micro_kernel.h)
//   copy_mul_add_stub    f32 sums of one segment of K: times scale, added to the total (epilogue.h)
//   copy_add_stub        the same for the last segment, then -> out: bias, one rounding
//   add_row_sums         accumulators to the sums of a segment, or of one in one block to the total
//
// Per-tensor, per-channel and block scales are one path: K falls into segments that share a scale
// (one segment unless scales are per block), and the scales of a segment are a vector over the
// columns.
//
// Order of summation: a segment is summed in blocks of KC; the accumulators of a block start at +0
// (dot.h), and the block's sum is added to the segment's. The order is the same in both kernels, so
// a row has the same bits whichever kernel, row count or thread computed it.
//
// Loops of brgemm2, outermost first, in the names of BLIS and oneDNN (blocking.h):
//
//   a block of MC rows                     a task has one of them, and one block of 32 columns
//     NC columns                           whose sums wait in L2 for the next run
//       a run: some blocks of K            the rows' part of it is converted, once for NC columns
//         a block of 32 columns
//           a block of KC elements of K    becomes a panel [KC, 32], in L1 or L2
//             a tile of at most MR rows
//               a group of NR floats       a row's accumulators, in registers
//                 a k pair                 one step of the micro-kernel
//
// With AVX2 a run is one block of K: 96 rows of 256 floats are 96 KiB and the sums of 512 columns
// 192 KiB, which an L2 of 512 KiB (Zen) holds, while the panel's 32 KiB pass through L1.
//
// What a tier has; the last column is what its registers, or AMX tiles, hold: accumulators, weights
// and elements of mat1.
//
//   tier         policy    MR x NR   KC       MC      NC    acc     weights  elements
//   scalar       DotF32     2 x 16   256      96      512    8 x 4        4         1
//   avx2         DotF32     6 x 16   256      96      512   12 x 8        2         1
//   avx512       DotF32     6 x 64   256      96      512   24 x 16       4         2
//   avx512_bf16  DotBf16   12 x 32   512      96      512   24 x 16       2         1
//   amx          DotTile   32 x 32   128/192  96/256  2048   4 tiles      2         2
//   neon         DotF32     6 x 16   256      96      512   24 x 4        4         1
//   neon_bf16    DotBf16    6 x 16   512      96      512   24 x 4        4         1
//
// Fewer rows than MR take wider groups. fp16 weights take DotF32 on every tier, and so do fp16 rows
// where the policy is DotBf16. On amx one or two rows take DotTileOrder (dot.h).
//
// Glossary of what is private here:
//
//   block (of columns)  32 output columns, the unit of the packed weight (packing.h)
//   k pair              two consecutive k of each of the 32 columns, which stand side by side
//   accumulators        what products are added to in registers: of each output element one for
//                       even k and one for odd k, or one for both (Dot::kAccumulators)
//   sums                [rows, 32] of a segment: accumulators added up, block after block of K
//   total               [rows, 32] of the segments so far, each times its scale
//   segment             elements of K that share a scale
//   panel               a block of K of 32 columns, widened to what the policy multiplies (panel.h)
//   part                the k pairs of a block of K that one panel takes: 16 KiB, or all (panel.h)
//   run                 blocks of K whose elements of mat1 are converted at once (brgemm.h)
//   tiny                the way of tinygemm_kernel2
//   fp16 bits           e4m3 weights on their way to f32 (e4m3_fp16_bits.h)
//   factor              what a row's sums are multiplied by, because it was scaled (same file)
//   split               an fp16 row as two bf16 rows, high and low parts, on amx (dot.h)
//   gathered            weights copied to where their k pairs are whole (weight_block.h)
//   prefetcher          what the micro-kernel does for the next weights between its products
#pragma once

#include "gemm/brgemm.h"
#include "gemm/tinygemm.h"
#include "simd/fp_env.h"

namespace sgl_kernel {
namespace SGL_TIER {

template <typename scalar_t, typename packed_t, bool has_bias>
static void gemm_tasks(const GemmArgs& args, TaskRange tasks, void* memory) {
  const FpEnvGuard fp_env(DotFor<scalar_t, packed_t>::kFlushSubnormals);
  if (args.M <= TinyDotFor<scalar_t, packed_t>::kMostRows && tiny_fits(args)) {
    tinygemm_blocks<scalar_t, packed_t, has_bias>(args, tasks, memory);
    return;
  }
  ScratchLayout layout(memory);
  const PanelScratch scratch(args, &layout);
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
