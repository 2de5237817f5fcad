// A few rows: the weight is read once, widened and multiplied by all rows at once, without a panel.
// Part of the GEMM family, compiled per tier.
//
// This is what decoding does, and it is bandwidth-bound: M = 1 does two operations for each byte of
// e4m3 that comes from memory. So a block of columns is walked once along all of K, and the
// accumulators of its 32 columns fit in registers: 8 of the 16 of AVX2 for one row. With 2 to 4
// rows several groups of vectors share what the first has brought into L1. The rows of mat1 have
// been converted before and stay in the caches for all blocks of columns.
#pragma once

#include "gemm/epilogue.h"
#include "gemm/gemm_scratch.h"
#include "gemm/tiny_products.h"
#include "gemm/weight_block.h"

namespace sgl_kernel {
namespace SGL_TIER {

// What a call works on: all rows of mat1, one block of 32 columns, all segments of K. Segment s
// starts at float s * a_segment of a row of a, and at pair s * segment_pairs of b.
template <typename packed_t>
struct TinyBlock {
  const float* a;  // [rows, splits, a_stride]
  int64_t a_stride;
  int64_t a_segment;
  const float* row_factors;  // [rows, blocks]: what a row's sums of a block of K are multiplied by
  const packed_t* b = nullptr;       // [pairs, 32, 2]
  const packed_t* next_b = nullptr;  // of the block that follows, or null
  int64_t n0 = 0;                    // first column of the block
  int64_t segments;
  int64_t segment_pairs;  // pairs of every segment but the last
  int64_t last_pairs;
  int64_t segment_blocks;  // blocks of K in a segment

  SGL_MEMBER int64_t pairs(int64_t segment) const {
    return segment + 1 == segments ? last_pairs : segment_pairs;
  }
};

// BLOCK_M rows times BLOCK_N columns over the whole K.
template <typename scalar_t, typename packed_t, bool has_bias, int BLOCK_M, int BLOCK_N>
struct tinygemm_kernel_nn2 {
  using Dot = TinyDotFor<scalar_t, packed_t>;
  static constexpr int kRows = BLOCK_M * Dot::kSplits;
  using Products = TinyProducts<Dot, kRows, packed_t>;
  // A segment in one block of K goes straight to the total, as in panel_product.h; zeros get other
  // signs than by way of sums. Not in the order of tiles, whose accumulators run over less than a
  // block.
  static constexpr bool kGoesStraight = 2 * Dot::kAccumulatedPairs == Dot::kKC;
  static_assert(BLOCK_N == kBlockN, "a k pair of the packed weights is one block of columns");

  SGL_INLINE void apply(const GemmArgs& args, const TinyBlock<packed_t>& block,
                        Products* products) {
    alignas(64) float total[BLOCK_M * BLOCK_N];
    for (int64_t s = 0; s < block.segments; ++s) {
      alignas(64) float sums[BLOCK_M * BLOCK_N];
      alignas(64) float scale[kBlockN];
      load_scales(args, block.n0, s, scale);
      const bool last = s + 1 == block.segments;
      if (kGoesStraight && !last && block.pairs(s) <= Dot::kAccumulatedPairs) {
        multiply_segment(block, s, products, scale, s == 0, total);
        continue;
      }
      multiply_segment(block, s, products, nullptr, true, sums);
      if (last) {
        const LastSegment of{sums, scale, s == 0 ? nullptr : total};
        copy_add_stub<has_bias>(args, of, 0, BLOCK_M, block.n0);
      } else {
        copy_mul_add_stub(sums, scale, s == 0, BLOCK_M, total);
      }
    }
  }

 private:
  // The pairs from p0 of a segment on that the accumulators run over; behind a segment, the next
  // one's first, behind the last, those of the next block.
  SGL_INLINE PairRun<packed_t> run_at(const TinyBlock<packed_t>& block, int64_t segment,
                                      int64_t p0) {
    const packed_t* b = block.b;
    if (p0 >= block.pairs(segment)) {
      p0 = 0;
      if (++segment == block.segments) {
        if (block.next_b == nullptr) return {block.b, 0};
        segment = 0;
        b = block.next_b;
      }
    }
    return {b + (segment * block.segment_pairs + p0) * kPairElements,
            min_i64(Dot::kAccumulatedPairs, block.pairs(segment) - p0)};
  }

  // sums[BLOCK_M, 32] (+)= a segment's products, times the columns' scale unless it is null.
  SGL_INLINE void multiply_segment(const TinyBlock<packed_t>& block, int64_t segment,
                                   Products* products, const float* scale, bool start,
                                   float* sums) {
    const float* a = block.a + segment * block.a_segment;
    PairRun<packed_t> now = run_at(block, segment, 0);
    for (int64_t p0 = 0; p0 < block.pairs(segment); p0 += Dot::kAccumulatedPairs) {
      const PairRun<packed_t> next = run_at(block, segment, p0 + now.pairs);
      alignas(64) float acc[kRows * Dot::kVecs * kLanes];
      products->multiply(a + p0 * Dot::kAccumulators, block.a_stride, now, next, acc);
      add_accumulators(block, segment * block.segment_blocks + p0 / (Dot::kKC / 2), acc, scale,
                       start && p0 == 0, sums);
      now = next;
    }
  }

  SGL_INLINE void add_accumulators(const TinyBlock<packed_t>& block, int64_t k_block,
                                   const float* acc, const float* scale, bool start, float* sums) {
    const int64_t blocks = block.segments * block.segment_blocks;
    for (int m = 0; m < BLOCK_M; ++m) {
      for (int split = 0; split < Dot::kSplits; ++split) {
        Vec row[Dot::kVecs];
        load_pair<Dot>(acc, m * Dot::kSplits + split, row);
        const RowSums out{block.row_factors + m * blocks + k_block, scale, sums + m * BLOCK_N,
                          start && split == 0};
        add_row_sums<Dot>(row, out, 0);
      }
    }
  }
};

// Converts one row, all segments and blocks of K, and says what its sums are to be multiplied by.
template <typename Dot, typename scalar_t, typename packed_t>
SGL_INLINE void convert_tiny_row(const GemmArgs& args, const TinyBlock<packed_t>& block,
                                 const scalar_t* row, float* a, float* factors) {
  const int64_t segment = segment_length(args);
  for (int64_t s = 0; s < block.segments; ++s) {
    const int64_t depth = min_i64(segment, args.K - s * segment);
    for (int64_t k = 0; k < depth; k += Dot::kKC) {
      const int64_t part = min_i64(Dot::kKC, depth - k);
      const scalar_t* src = row + s * segment + k;
      const float scale = scale_of_row<Dot, packed_t>(src, part);
      Dot::convert_row(src, part, round_up(part, 2), scale,
                       a + s * block.a_segment + k / 2 * Dot::kAccumulators, block.a_stride);
      factors[s * block.segment_blocks + k / Dot::kKC] = factor_of_row<Dot, packed_t>(scale);
    }
  }
}

// The weights of one block of 32 columns, all segments; gathered into scratch unless they stand so
// in the packed weight.
template <typename packed_t>
SGL_INLINE const packed_t* tiny_weights(const GemmArgs& args, const TinyBlock<packed_t>& block,
                                        packed_t* gathered) {
  const int64_t segment = segment_length(args);
  // With even lengths the segments stand one after the other in the packed weight, too.
  if (block.segments == 1 || (segment % 2 == 0 && args.K % 2 == 0)) {
    return weight_block<packed_t>(args, {block.n0, 0, args.K}, gathered);
  }
  for (int64_t s = 0; s < block.segments; ++s) {
    const int64_t depth = min_i64(segment, args.K - s * segment);
    packed_t* piece = gathered + s * block.segment_pairs * kPairElements;
    const packed_t* b = weight_block<packed_t>(args, {block.n0, s * segment, depth}, piece);
    if (b != piece) memcpy(piece, b, round_up(depth, 2) * kBlockN * sizeof(packed_t));
  }
  return gathered;
}

// All column blocks of `tasks` for BLOCK_M rows.
template <typename scalar_t, typename packed_t, bool has_bias, int BLOCK_M>
static void tinygemm_columns(const GemmArgs& args, TaskRange tasks, TinyBlock<packed_t> block,
                             packed_t* gathered) {
  using Kernel = tinygemm_kernel_nn2<scalar_t, packed_t, has_bias, BLOCK_M, kBlockN>;
  typename Kernel::Products products;
  for (int64_t task = tasks.begin; task < tasks.end; ++task) {
    block.n0 = task * kBlockN;
    block.b = tiny_weights(args, block, gathered);
    // What is gathered is not there yet.
    const bool follows =
        block.b != gathered && task + 1 < tasks.end && block.n0 + 2 * kBlockN <= args.N;
    block.next_b = follows ? block.b + kBlockN * args.K : nullptr;
    Kernel::apply(args, block, &products);
  }
}

// The same for 1 <= M <= kTinyRows.
template <typename scalar_t, typename packed_t, bool has_bias>
SGL_INLINE void tinygemm_kernel2(const GemmArgs& args, TaskRange tasks,
                                 const TinyBlock<packed_t>& block, packed_t* gathered) {
  static_assert(kTinyRows == 4, "one case per row count");
  switch (args.M) {
    case 1:
      return tinygemm_columns<scalar_t, packed_t, has_bias, 1>(args, tasks, block, gathered);
    case 2:
      return tinygemm_columns<scalar_t, packed_t, has_bias, 2>(args, tasks, block, gathered);
    case 3:
      return tinygemm_columns<scalar_t, packed_t, has_bias, 3>(args, tasks, block, gathered);
    case 4:
      return tinygemm_columns<scalar_t, packed_t, has_bias, 4>(args, tasks, block, gathered);
  }
}

// All column blocks of `tasks` for M <= kTinyRows.
template <typename scalar_t, typename packed_t, bool has_bias>
static void tinygemm_blocks(const GemmArgs& args, TaskRange tasks, void* memory) {
  using Dot = TinyDotFor<scalar_t, packed_t>;
  static_assert(Dot::kMostRows <= kTinyRows, "tinygemm_kernel2 has a case for each row count");
  const int64_t segment = segment_length(args);
  TinyBlock<packed_t> block;
  block.segments = div_up(args.K, segment);
  block.segment_pairs = div_up(segment, 2);
  block.last_pairs = div_up(args.K - (block.segments - 1) * segment, 2);
  block.segment_blocks = div_up(segment, Dot::kKC);
  block.a_segment = tiny_segment_floats(segment) / 2 * Dot::kAccumulators;
  block.a_stride = block.segments * block.a_segment;
  ScratchLayout layout(memory);
  const TinyScratch scratch(args, &layout);
  block.a = scratch.a;
  block.row_factors = scratch.factors;
  for (int64_t m = 0; m < args.M; ++m) {
    convert_tiny_row<Dot>(args, block,
                          static_cast<const scalar_t*>(args.mat1) + m * args.mat1_stride,
                          scratch.a + m * Dot::kSplits * block.a_stride,
                          scratch.factors + m * block.segments * block.segment_blocks);
  }
  tinygemm_kernel2<scalar_t, packed_t, has_bias>(args, tasks, block,
                                                 static_cast<packed_t*>(scratch.gathered));
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
