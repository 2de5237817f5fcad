// The kernels' interface: plain pointers in one named struct, no Torch, no threads, no allocation.
//
//   out[m, n] = sum over k of mat1[m, k] * mat2[n, k] * scales[n / block_n, k / block_k]  (+
//   bias[n])
//
// A per-tensor scale is a grid of one block, a per-channel scale a grid of blocks of one column.
//
// The caller owns parallelism: it splits [0, gemm_task_count(args)) over threads, and gives each
// thread its own scratch of gemm_scratch_bytes(args) bytes, 64-byte aligned.
#pragma once

#include <cstdint>

#include "gemm/packing.h"
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

  int64_t row_block = 0;  // the most rows that share a decoded panel; 0: kBlockM
};

// Half-open range of tasks; a task is one block of rows times one block of 32 columns.
struct TaskRange {
  int64_t begin;
  int64_t end;
};

// Up to this many rows, or fewer on tiers with tiles, are multiplied straight from the packed
// weight (tinygemm_kernel2); more rows share a panel of decoded weights (brgemm2).
constexpr int64_t kTinyRows = 4;
constexpr int64_t kBlockM = 96;      // rows that share one decoded panel, unless row_block says
constexpr int64_t kMaxBlockM = 256;  // another number, up to this
constexpr int64_t kMinBlockK = 128;  // K goes through the kernels in blocks; each way to multiply
constexpr int64_t kMaxBlockK = 512;  // has its own size between these (dot.h)
constexpr int64_t kSmallM = 16;      // up to this many rows mat1 is converted once, whole

SGL_INLINE int64_t row_block_count(const GemmArgs& args) {
  return args.M <= kTinyRows ? 1 : div_up(args.M, args.row_block == 0 ? kBlockM : args.row_block);
}

// Rows per block, balanced so that the last block is not a sliver that re-reads the whole weight.
SGL_INLINE int64_t rows_per_block(const GemmArgs& args) {
  if (args.M <= kTinyRows) return args.M;
  return min_i64(args.M, round_up(div_up(args.M, row_block_count(args)), 16));
}

SGL_INLINE int64_t gemm_task_count(const GemmArgs& args) {
  return args.M == 0 ? 0 : row_block_count(args) * div_up(args.N, kBlockN);
}

// K is processed in segments that share a scale.
SGL_INLINE int64_t segment_length(const GemmArgs& args) {
  return args.scales == nullptr ? args.K : min_i64(args.block_k, args.K);
}

// Column blocks that share the conversion of a run of mat1's K, and floats of such a run. Tiles
// take long runs: their processors have 2 MiB of second-level cache.
constexpr int64_t kChunkBlocks = 16;
constexpr int64_t kTileChunkBlocks = 64;
constexpr int64_t kTileRunFloats = int64_t{256} << 10;
// And floats of a run where few rows are converted whole; a longer K goes by in several runs.
constexpr int64_t kSmallRunFloats = int64_t{1} << 20;

// Blocks that K falls into: whole ones inside each segment.
SGL_INLINE int64_t panel_block_count(const GemmArgs& args, int64_t block_k) {
  const int64_t segment = segment_length(args);
  const int64_t full = (args.K - 1) / segment;  // segments before the last, which may be shorter
  return full * div_up(segment, block_k) + div_up(args.K - full * segment, block_k);
}

// Floats that one segment of a row takes in the tiny path: whole blocks of 32 elements.
SGL_INLINE int64_t tiny_segment_floats(int64_t segment) {
  return round_up(segment, 32);
}

SGL_INLINE int64_t tiny_scratch_bytes(const GemmArgs& args, int64_t element) {
  constexpr int64_t kPlanes = 2;  // of the tier that needs most
  const int64_t segment = segment_length(args);
  const int64_t segments = div_up(args.K, segment);
  const int64_t rows = args.M * kPlanes * segments * tiny_segment_floats(segment) * 4;
  const int64_t factors = args.M * segments * div_up(segment, kMinBlockK) * 4;
  const int64_t gathered = segments * round_up(segment, 2) * kBlockN * element;
  return round_up(rows, 64) + round_up(factors, 64) + round_up(gathered, 64);
}

// The tiny path holds a whole row of mat1, each segment padded, and a block of weights. Where that
// takes more, as with segments of a few elements along a long K, a panel serves few rows too; the
// bits are the same.
constexpr int64_t kMostTinyBytes = int64_t{16} << 20;

SGL_INLINE bool tiny_fits(const GemmArgs& args, int64_t element) {
  return args.M <= kTinyRows && tiny_scratch_bytes(args, element) <= kMostTinyBytes;
}

// Bounded for every shape: at most 9 MiB.
SGL_INLINE int64_t panel_scratch_bytes(const GemmArgs& args, int64_t element) {
  // Either many rows of a run of K, or a few rows of all blocks, as far as a run goes.
  const bool small = args.M <= kSmallM;
  const int64_t rows = small ? kSmallM * kMaxBlockK * panel_block_count(args, kMaxBlockK)
                             : max_i64(kBlockM * kMaxBlockK, kTileRunFloats);
  const int64_t factors = small ? kSmallM * panel_block_count(args, kMinBlockK) : kMaxBlockM;
  const int64_t panels = kBlockN * kMaxBlockK * 4;
  const int64_t blocks = min_i64(kTileChunkBlocks, div_up(args.N, kBlockN));
  const int64_t row_bytes = round_up(rows_per_block(args), 16) * kBlockN * 4;
  const int64_t sums = blocks * row_bytes;
  const int64_t chains = 2 * row_bytes;
  const int64_t gathered = 2 * kBlockN * kMaxBlockK * element;
  return 4 * min_i64(rows, kSmallRunFloats) +
         round_up(4 * min_i64(factors, kSmallRunFloats / kMinBlockK), 64) + panels + chains +
         2 * sums + gathered;
}

SGL_INLINE int64_t gemm_scratch_bytes(const GemmArgs& args) {
  const int64_t element = dtype_bytes(args.mat2_dtype);
  const int64_t panel = panel_scratch_bytes(args, element);
  return tiny_fits(args, element) ? max_i64(tiny_scratch_bytes(args, element), panel) : panel;
}

// B independent products; strides in elements. mat2 is [B, N, K] contiguous, each batch packed
// alone.
struct BmmArgs {
  GemmArgs gemm;  // pointers of batch 0
  int64_t batch = 0;
  int64_t mat1_batch_stride = 0;
  int64_t out_batch_stride = 0;
  int64_t scale_batch_stride = 0;  // 0: one scale for all, 1: one per batch
};

SGL_INLINE int64_t bmm_task_count(const BmmArgs& args) {
  return args.batch * gemm_task_count(args.gemm);
}

struct KernelTable;  // dispatch/kernel_table.h

// Sets row_block for work that `threads` threads share. The result's bits do not depend on it.
void choose_row_block(const KernelTable& table, int64_t threads, GemmArgs* args);

void run_gemm(const KernelTable& table, const GemmArgs& args, TaskRange tasks, void* scratch);
void run_bmm(const KernelTable& table, const BmmArgs& args, TaskRange tasks, void* scratch);

}  // namespace sgl_kernel
