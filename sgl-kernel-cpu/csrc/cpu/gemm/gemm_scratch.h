// The scratch of a product: which arrays a kernel needs, and how large they are for any range of
// tasks on any tier. The sizes depend on nothing but the arguments, so that the caller can bring
// the memory.
#pragma once

#include "gemm/blocking.h"
#include "runtime/scratch.h"

namespace sgl_kernel {

// Floats that one segment of a row takes in the tiny path: whole blocks of 32 elements.
SGL_INLINE int64_t tiny_segment_floats(int64_t segment) {
  return round_up(segment, 32);
}

// Of tinygemm_kernel2.
struct TinyScratch {
  float* a;        // [M, splits, segments, floats of a segment]
  float* factors;  // [M, segments, blocks of K in a segment]
  void* gathered;  // one block of 32 columns, all of K

  SGL_MEMBER TinyScratch(const GemmArgs& args, ScratchLayout* layout) {
    constexpr int64_t kSplits = 2;  // of the tier that needs most
    const int64_t segment = segment_length(args);
    const int64_t segments = div_up(args.K, segment);
    const int64_t row_bytes = kBlockN * dtype_bytes(args.mat2_dtype);
    a = layout->take<float>(args.M * kSplits * segments * tiny_segment_floats(segment));
    factors = layout->take<float>(args.M * segments * div_up(segment, kMinKC));
    gathered = layout->take<char>(segments * round_up(segment, 2) * row_bytes);
  }
};

// That is a whole row of mat1, each segment padded, and a block of weights. Where it takes more
// than this, as with segments of a few elements along a long K, a panel serves few rows, too; the
// bits are the same.
constexpr int64_t kMostTinyBytes = int64_t{16} << 20;

SGL_INLINE bool tiny_fits(const GemmArgs& args) {
  return args.M <= kTinyRows && scratch_bytes<TinyScratch>(args) <= kMostTinyBytes;
}

// Of brgemm2: at most 9 MiB for every shape.
struct PanelScratch {
  float* a;        // a run of blocks of K: all rows of one block, then those of the next
  float* factors;  // [blocks of the run, rows]
  float* panels;   // what is multiplied and, on tiers with tiles, what is made meanwhile
  float* sums;     // [column blocks, rows, 32] of a segment
  float* total;    // [column blocks, rows, 32] of the segments before it
  void* gathered;  // two blocks of weights
  float* acc;      // [rows, accumulators of 32 columns]

  SGL_MEMBER PanelScratch(const GemmArgs& args, ScratchLayout* layout) {
    // Either many rows of a run of K, or a few rows of all blocks, as far as a run goes.
    const bool small = args.M <= kSmallM;
    const int64_t row_floats = small ? kSmallM * kMaxKC * k_block_count(args, kMaxKC)
                                     : max_i64(kMC * kMaxKC, kTileRunFloats);
    const int64_t row_factors = small ? kSmallM * k_block_count(args, kMinKC) : kMaxMC;
    // Sums of all columns that a run of K passes over wait for the next run.
    const int64_t column_blocks = min_i64(kTileNCBlocks, div_up(args.N, kBlockN));
    const int64_t block_floats = round_up(rows_per_block(args), 16) * kBlockN;
    a = layout->take<float>(min_i64(row_floats, kSmallRunFloats));
    factors = layout->take<float>(min_i64(row_factors, kSmallRunFloats / kMinKC));
    panels = layout->take<float>(kBlockN * kMaxKC);
    sums = layout->take<float>(column_blocks * block_floats);
    total = layout->take<float>(column_blocks * block_floats);
    gathered = layout->take<char>(2 * kBlockN * kMaxKC * dtype_bytes(args.mat2_dtype));
    acc = layout->take<float>(2 * block_floats);
  }
};

}  // namespace sgl_kernel
