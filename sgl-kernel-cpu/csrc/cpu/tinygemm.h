// A few rows: the weight is read once, widened in registers and multiplied by all rows at once.
// Part of the GEMM family, compiled per tier.
#pragma once

#include "epilogue.h"
#include "micro_kernel.h"
#include "scratch.h"
#include "weight_block.h"

namespace sgl_kernel {
namespace SGL_TIER {

// What a tile works on: all rows of mat1, one block of 32 columns, all segments of K. Segment s
// starts at float s * a_segment of a row of a, and at pair s * segment_pairs of b.
template <typename packed_t>
struct TinyBlock {
  const float* a;  // [rows, planes, floats]
  int64_t a_stride;
  int64_t a_segment;
  const float* row_factors;  // [rows, blocks]: what a row's sums of a block of K are multiplied by
  const packed_t* b;         // [pairs, 32, 2]
  int64_t n0;                // first column of the block
  int64_t segments;
  int64_t segment_pairs;  // pairs of every segment but the last
  int64_t last_pairs;
  int64_t segment_blocks;  // blocks of kBlockK in a segment
};

// Asks for the packed weights that far ahead.
template <typename packed_t>
struct PackedAhead {
  const packed_t* b;
  template <int GROUP>
  SGL_MEMBER void fetch(int64_t pair) const {
    if constexpr (GROUP == 0) prefetch_pair(b + pair * kPairElements);
  }
};

// Pairs of a chunk: of words, few enough for the processor to decode the next ones while it
// multiplies these.
template <typename Dot, typename packed_t>
constexpr bool kMakesWords = Dot::kWords && std::is_same<packed_t, e4m3_t>::value;
template <typename Dot, typename packed_t>
constexpr int64_t kChunkPairs = kMakesWords<Dot, packed_t> ? 8 : 32;

// chains[ROWS, kVecs] += a[ROWS, pairs] * b[pairs, 32], packed weights in whichever form the
// policy multiplies.
template <typename Dot, int ROWS, typename packed_t>
SGL_INLINE void multiply_chunk(const float* a, int64_t a_stride, const packed_t* b, int64_t pairs,
                               float* chains) {
  const PackedAhead<packed_t> ahead{b};
  if constexpr (kMakesWords<Dot, packed_t>) {
    alignas(64) Word words[kChunkPairs<Dot, packed_t> * kPairElements];
    codes_to_word_chunk(b, pairs, words);
    micro_kernel<Dot, ROWS, false>(a, a_stride, words, pairs, false, chains, nullptr, ahead);
  } else {
    micro_kernel<Dot, ROWS, false>(a, a_stride, b, pairs, false, chains, nullptr, ahead);
  }
}

// BLOCK_M rows times BLOCK_N columns over the whole K.
template <typename scalar_t, typename packed_t, bool has_bias, int BLOCK_M, int BLOCK_N>
struct tinygemm_kernel_nn2 {
  using Dot = TinyDotFor<scalar_t>;
  static constexpr int kRows = BLOCK_M * Dot::kPlanes;
  static_assert(BLOCK_N == kBlockN, "a k pair of the packed weight is one block of columns");

  SGL_INLINE void apply(const GemmArgs& args, const TinyBlock<packed_t>& block) {
    alignas(64) float total[BLOCK_M * BLOCK_N];
    for (int64_t s = 0; s < block.segments; ++s) {
      const bool last = s + 1 == block.segments;
      alignas(64) float sums[BLOCK_M * BLOCK_N] = {};
      alignas(64) float scale[kBlockN];
      multiply_segment(block, s, last ? block.last_pairs : block.segment_pairs, sums);
      load_scales(args, block.n0, s, scale);
      if (last) {
        const LastSegment of{sums, scale, s == 0 ? nullptr : total};
        copy_add_stub<has_bias>(args, of, 0, BLOCK_M, block.n0);
      } else {
        copy_mul_add_stub(sums, scale, s == 0, BLOCK_M, total);
      }
    }
  }

  SGL_INLINE void multiply_segment(const TinyBlock<packed_t>& block, int64_t segment, int64_t pairs,
                                   float* sums) {
    const float* a = block.a + segment * block.a_segment;
    const packed_t* b = block.b + segment * block.segment_pairs * kPairElements;
    for (int64_t p0 = 0; p0 < pairs; p0 += Dot::kFlushPairs) {
      const int64_t p1 = min_i64(p0 + Dot::kFlushPairs, pairs);
      alignas(64) float chains[kRows * Dot::kVecs * kLanes] = {};
      constexpr int64_t kChunk = kChunkPairs<Dot, packed_t>;
      int64_t p = p0;
      for (; p + kChunk <= p1; p += kChunk) {
        multiply_chunk<Dot, kRows>(a + p * Dot::kChains, block.a_stride, b + p * kPairElements,
                                   kChunk, chains);
      }
      if (p < p1) {
        multiply_chunk<Dot, kRows>(a + p * Dot::kChains, block.a_stride, b + p * kPairElements,
                                   p1 - p, chains);
      }
      const int64_t k_block = segment * block.segment_blocks + p0 / (Dot::kBlockK / 2);
      for (int m = 0; m < BLOCK_M; ++m) {
        const Vec factor =
            set1(block.row_factors[m * block.segments * block.segment_blocks + k_block]);
        for (int plane = 0; plane < Dot::kPlanes; ++plane) {
          for (int i = 0; i < kColumnVecs; ++i) {
            float* sum = sums + m * BLOCK_N + i * kLanes;
            const float* chain = chains + ((m * Dot::kPlanes + plane) * Dot::kVecs + i) * kLanes;
            const Vec part = sum_of_chains<Dot>(chain);
            store(sum, add(load(sum), mul(part, factor)));
          }
        }
      }
    }
  }
};

// One block of 32 columns for all rows, 1 <= M <= kTinyRows.
template <typename scalar_t, typename packed_t, bool has_bias>
SGL_INLINE void tinygemm_kernel2(const GemmArgs& args, const TinyBlock<packed_t>& block) {
  static_assert(kTinyRows == 4, "one case per row count");
  switch (args.M) {
    case 1:
      return tinygemm_kernel_nn2<scalar_t, packed_t, has_bias, 1, kBlockN>::apply(args, block);
    case 2:
      return tinygemm_kernel_nn2<scalar_t, packed_t, has_bias, 2, kBlockN>::apply(args, block);
    case 3:
      return tinygemm_kernel_nn2<scalar_t, packed_t, has_bias, 3, kBlockN>::apply(args, block);
    case 4:
      return tinygemm_kernel_nn2<scalar_t, packed_t, has_bias, 4, kBlockN>::apply(args, block);
  }
}

// Converts one row, all segments and blocks of K, and says what its sums are to be multiplied by.
template <typename Dot, typename scalar_t, typename packed_t>
SGL_INLINE void convert_tiny_row(const GemmArgs& args, const TinyBlock<packed_t>& block,
                                 const scalar_t* row, float* a, float* factors) {
  const int64_t segment = segment_length(args);
  for (int64_t s = 0; s < block.segments; ++s) {
    const int64_t depth = min_i64(segment, args.K - s * segment);
    for (int64_t k = 0; k < depth; k += Dot::kBlockK) {
      const int64_t part = min_i64(Dot::kBlockK, depth - k);
      const scalar_t* src = row + s * segment + k;
      const float scale = scale_of_row<Dot, packed_t>(src, part);
      Dot::convert_row(src, part, round_up(part, 2), scale,
                       a + s * block.a_segment + k / 2 * Dot::kChains, block.a_stride);
      factors[s * block.segment_blocks + k / Dot::kBlockK] = factor_of_row<Dot, packed_t>(scale);
    }
  }
}

// All column blocks of `tasks` for M <= kTinyRows.
template <typename scalar_t, typename packed_t, bool has_bias>
static void tinygemm_blocks(const GemmArgs& args, TaskRange tasks, Scratch scratch) {
  using Dot = TinyDotFor<scalar_t>;
  const int64_t segment = segment_length(args);
  TinyBlock<packed_t> block;
  block.segments = div_up(args.K, segment);
  block.segment_pairs = div_up(segment, 2);
  block.last_pairs = div_up(args.K - (block.segments - 1) * segment, 2);
  block.segment_blocks = div_up(segment, Dot::kBlockK);
  block.a_segment = tiny_segment_floats(segment) / 2 * Dot::kChains;
  block.a_stride = block.segments * block.a_segment;
  float* a = Scratch::take<float>(&scratch, args.M * Dot::kPlanes * block.a_stride);
  float* factors = Scratch::take<float>(&scratch, args.M * block.segments * block.segment_blocks);
  packed_t* gathered =
      Scratch::take<packed_t>(&scratch, block.segments * block.segment_pairs * kPairElements);
  block.a = a;
  block.row_factors = factors;
  for (int64_t m = 0; m < args.M; ++m) {
    convert_tiny_row<Dot>(
        args, block, static_cast<const scalar_t*>(args.mat1) + m * args.mat1_stride,
        a + m * Dot::kPlanes * block.a_stride, factors + m * block.segments * block.segment_blocks);
  }
  // With even lengths the segments stand one after the other in the packed weight, too.
  const bool one_piece = block.segments == 1 || (segment % 2 == 0 && args.K % 2 == 0);
  for (int64_t task = tasks.begin; task < tasks.end; ++task) {
    block.n0 = task * kBlockN;
    if (one_piece) {
      block.b = weight_block<packed_t>(args, block.n0, 0, args.K, gathered);
    } else {
      for (int64_t s = 0; s < block.segments; ++s) {
        const int64_t depth = min_i64(segment, args.K - s * segment);
        packed_t* piece = gathered + s * block.segment_pairs * kPairElements;
        const packed_t* b = weight_block<packed_t>(args, block.n0, s * segment, depth, piece);
        if (b != piece) memcpy(piece, b, round_up(depth, 2) * kBlockN * sizeof(packed_t));
      }
      block.b = gathered;
    }
    tinygemm_kernel2<scalar_t, packed_t, has_bias>(args, block);
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
