// The GEMM family, compiled once per tier. Included by the small instantiation files only.
//
//   tinygemm_kernel_nn2  a few rows: decodes the packed weight in registers, sums stay in registers
//   tinygemm_kernel2     picks its tile by the number of rows
//   brgemm2              many rows: decodes a panel of weights once, multiplies it by a block of
//   rows copy_mul_add_stub    f32 sums of one segment of K: times scale, added to the total
//   copy_add_stub        total -> out: bias, one rounding
//
// Per-tensor, per-channel and block scales are one path: K falls into segments that share a scale
// (one segment unless scales are per block), and the scales of a segment are a vector over the
// columns.
//
// Order of summation: inside a segment every output element is one chain of f32 fused multiply-adds
// over k = 0, 1, 2, ..., starting at +0. Blocking over K stores and reloads the chain, never splits
// it, so a row has the same bits whichever kernel, row count or thread computed it. dot.h describes
// the tiers whose instructions add in another order, and how they keep that promise.
#pragma once

#include "dot.h"
#include "epilogue.h"
#include "fp_env.h"
#include "gemm.h"
#include "weight_block.h"

namespace sgl_kernel {
namespace SGL_TIER {

constexpr int kMicroCols = kMicroVecs * kLanes;
static_assert(kBlockN % kGroupCols == 0 && kBlockN % kMicroCols == 0, "tiles must cover a block");

// What a tile of the tiny path works on: all rows of mat1, one block of columns, all segments of K.
// Segment s starts at step s * segment_steps of a and at pair s * segment_pairs of b.
template <typename packed_t>
struct TinyBlock {
  const float* a;  // [rows, steps] 32-bit elements of mat1
  int64_t a_stride;
  const packed_t* b;  // [pairs, 32, 2]
  int64_t n0;         // first column of the block
  int64_t segments;
  int64_t segment_pairs;  // pairs of every segment but the last
  int64_t last_pairs;
};

// Hardware prefetchers stop at page borders and start anew behind them; with a few hundred cycles
// of decoding per line they never get far enough ahead. 2 KiB was the best of 512 B to 8 KiB.
constexpr int64_t kPrefetchBytes = 2048;

// Asks for the cache lines of the k pair that many bytes ahead. May point past the weight: a
// prefetch reads nothing and cannot fault.
template <typename packed_t>
SGL_INLINE void prefetch_pair(const packed_t* pair) {
  const char* ahead = reinterpret_cast<const char*>(pair) + kPrefetchBytes;
  for (size_t byte = 0; byte < kBlockN * 2 * sizeof(packed_t); byte += 64) {
    __builtin_prefetch(ahead + byte);
  }
}

// BLOCK_M rows times BLOCK_N columns (from `column` of the block) over the whole K: the weight is
// decoded in registers and the sums of a segment stay there.
template <typename scalar_t, typename packed_t, bool has_bias, int BLOCK_M, int BLOCK_N>
struct tinygemm_kernel_nn2 {
  using Dot = TinyDotFor<scalar_t>;
  static constexpr int kGroups = BLOCK_N / kGroupCols;
  static constexpr int kVecs = kGroups * kGroupVecs;

  SGL_INLINE void apply(const GemmArgs& args, const TinyBlock<packed_t>& block, int column) {
    alignas(64) float total[BLOCK_M * BLOCK_N];
    for (int64_t s = 0; s < block.segments; ++s) {
      const bool last = s + 1 == block.segments;
      alignas(64) float sums[BLOCK_M * BLOCK_N];
      alignas(64) float scale[kBlockN];
      const float* a = block.a + s * block.segment_pairs * Dot::kStepsPerPair;
      const packed_t* b = block.b + (s * block.segment_pairs * kBlockN + column) * 2;
      multiply_segment(a, block.a_stride, b, last ? block.last_pairs : block.segment_pairs, sums);
      load_scales(args, block.n0, s, scale);
      copy_mul_add_stub(sums, BLOCK_N, scale + column, s == 0, BLOCK_M, BLOCK_N, total, BLOCK_N);
    }
    copy_add_stub<has_bias>(args, total, BLOCK_N, 0, BLOCK_M, block.n0, column, BLOCK_N);
  }

  SGL_INLINE void multiply_segment(const float* a, int64_t a_stride, const packed_t* b,
                                   int64_t pairs, float* sums) {
    typename Dot::Sum acc[BLOCK_M][kVecs];
    for (int m = 0; m < BLOCK_M; ++m) {
      for (int i = 0; i < kVecs; ++i) acc[m][i].start();
    }
    for (int64_t p0 = 0; p0 < pairs; p0 += Dot::kFlushPairs) {
      const int64_t p1 = min_i64(p0 + Dot::kFlushPairs, pairs);
      for (int64_t p = p0; p < p1; ++p) {
        prefetch_pair(b + p * kBlockN * 2);
#pragma GCC unroll 8
        for (int g = 0; g < kGroups; ++g) {
          Vec steps[Dot::kStepsPerPair][kGroupVecs];
          Dot::decode_group(b + (p * kBlockN + g * kGroupCols) * 2, steps);
#pragma GCC unroll 2
          for (int s = 0; s < Dot::kStepsPerPair; ++s) {
#pragma GCC unroll 4
            for (int m = 0; m < BLOCK_M; ++m) {
              const Vec x = set1(a[m * a_stride + p * Dot::kStepsPerPair + s]);
#pragma GCC unroll 4
              for (int i = 0; i < kGroupVecs; ++i) {
                acc[m][g * kGroupVecs + i].step(s, x, steps[s][i]);
              }
            }
          }
        }
      }
      for (int m = 0; m < BLOCK_M; ++m) {
        for (int i = 0; i < kVecs; ++i) acc[m][i].flush();
      }
    }
    for (int m = 0; m < BLOCK_M; ++m) {
      for (int i = 0; i < kVecs; ++i) store(sums + m * BLOCK_N + i * kLanes, acc[m][i].value());
    }
  }
};

template <typename scalar_t, typename packed_t, bool has_bias, int BLOCK_M>
SGL_INLINE void tinygemm_tiles(const GemmArgs& args, const TinyBlock<packed_t>& block) {
  // One row keeps all 32 columns in registers: four chains or more hide the FMA latency. With more
  // rows a 16-register file has room for the decoder and half of the columns.
  constexpr int kCols = static_cast<int>(kBlockN) / (BLOCK_M == 1 || kLanes >= 16 ? 1 : 2);
  for (int column = 0; column < kBlockN; column += kCols) {
    tinygemm_kernel_nn2<scalar_t, packed_t, has_bias, BLOCK_M, kCols>::apply(args, block, column);
  }
}

// One block of 32 columns for all rows, 1 <= M <= kTinyRows.
template <typename scalar_t, typename packed_t, bool has_bias>
SGL_INLINE void tinygemm_kernel2(const GemmArgs& args, const TinyBlock<packed_t>& block) {
  static_assert(kTinyRows == 4, "one case per row count");
  switch (args.M) {
    case 1:
      return tinygemm_tiles<scalar_t, packed_t, has_bias, 1>(args, block);
    case 2:
      return tinygemm_tiles<scalar_t, packed_t, has_bias, 2>(args, block);
    case 3:
      return tinygemm_tiles<scalar_t, packed_t, has_bias, 3>(args, block);
    case 4:
      return tinygemm_tiles<scalar_t, packed_t, has_bias, 4>(args, block);
  }
}

// Decodes [pairs, 32, 2] packed weights to [32 / kMicroCols][steps][kMicroCols] 32-bit elements,
// and adds zeros up to `padded_pairs`.
template <typename Dot, typename packed_t>
SGL_INLINE void decode_panel(const packed_t* b, int64_t pairs, int64_t padded_pairs, float* panel) {
  const int64_t steps_total = padded_pairs * Dot::kStepsPerPair;
  for (int64_t p = 0; p < padded_pairs; ++p) {
    for (int g = 0; g < kBlockN / kGroupCols; ++g) {
      Vec steps[Dot::kStepsPerPair][kGroupVecs] = {};
      if (p < pairs) Dot::decode_group(b + (p * kBlockN + g * kGroupCols) * 2, steps);
      for (int s = 0; s < Dot::kStepsPerPair; ++s) {
        for (int i = 0; i < kGroupVecs; ++i) {
          const int column = g * kGroupCols + i * kLanes;
          store(panel + (column / kMicroCols) * steps_total * kMicroCols + column % kMicroCols +
                    (p * Dot::kStepsPerPair + s) * kMicroCols,
                steps[s][i]);
        }
      }
    }
  }
}

// ROWS x kMicroCols of sums (+)= a[ROWS, steps] @ part[steps, kMicroCols].
template <typename Dot, int ROWS>
SGL_INLINE void micro_kernel(const float* a, int64_t a_stride, const float* part, int64_t steps,
                             bool start, float* sums) {
  Vec acc[ROWS][kMicroVecs];
  for (int m = 0; m < ROWS; ++m) {
    for (int i = 0; i < kMicroVecs; ++i) {
      acc[m][i] = start ? zero() : load(sums + m * kBlockN + i * kLanes);
    }
  }
  for (int64_t s = 0; s < steps; ++s) {
    Vec b[kMicroVecs];
    for (int i = 0; i < kMicroVecs; ++i) b[i] = load(part + s * kMicroCols + i * kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) {
      const Vec x = set1(a[m * a_stride + s]);
#pragma GCC unroll 8
      for (int i = 0; i < kMicroVecs; ++i) acc[m][i] = Dot::dot(x, b[i], acc[m][i]);
    }
  }
  for (int m = 0; m < ROWS; ++m) {
    for (int i = 0; i < kMicroVecs; ++i) store(sums + m * kBlockN + i * kLanes, acc[m][i]);
  }
}

// The same for a row count known at run time, 1..ROWS.
template <typename Dot, int ROWS>
SGL_INLINE void micro_kernel_rows(int64_t rows, const float* a, int64_t a_stride, const float* part,
                                  int64_t steps, bool start, float* sums) {
  if (rows == ROWS) {
    micro_kernel<Dot, ROWS>(a, a_stride, part, steps, start, sums);
  } else if constexpr (ROWS > 1) {
    micro_kernel_rows<Dot, ROWS - 1>(rows, a, a_stride, part, steps, start, sums);
  }
}

// sums[rows, 32] (+)= a[rows, steps] @ panel: the batch-reduce step over one block of K.
template <typename Dot>
SGL_INLINE void multiply_panel(const float* a, int64_t a_stride, const float* panel, int64_t steps,
                               int64_t rows, bool start, float* sums) {
  if constexpr (Dot::kTiles) {
    multiply_tiles(a, a_stride, panel, steps, rows, start, sums);
  } else {
    for (int64_t m = 0; m < rows; m += kMicroRows) {
      const int64_t tile = min_i64(kMicroRows, rows - m);
      for (int part = 0; part < kBlockN / kMicroCols; ++part) {
        micro_kernel_rows<Dot, kMicroRows>(tile, a + m * a_stride, a_stride,
                                           panel + part * steps * kMicroCols, steps, start,
                                           sums + m * kBlockN + part * kMicroCols);
      }
    }
  }
}

struct Scratch {
  char* next;
  template <typename T>
  SGL_INLINE T* take(Scratch* scratch, int64_t count) {
    T* p = reinterpret_cast<T*>(scratch->next);
    scratch->next += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return p;
  }
};

// All column blocks of `tasks` for M <= kTinyRows.
template <typename scalar_t, typename packed_t, bool has_bias>
static void tinygemm_blocks(const GemmArgs& args, TaskRange tasks, Scratch scratch) {
  using Dot = TinyDotFor<scalar_t>;
  const int64_t segment = segment_length(args);
  TinyBlock<packed_t> block;
  block.segments = div_up(args.K, segment);
  block.segment_pairs = div_up(segment, 2);
  block.last_pairs = div_up(args.K - (block.segments - 1) * segment, 2);
  const int64_t pairs = block.segments * block.segment_pairs;
  block.a_stride = pairs * Dot::kStepsPerPair;
  float* a = Scratch::take<float>(&scratch, args.M * block.a_stride);
  packed_t* gathered = Scratch::take<packed_t>(&scratch, pairs * kBlockN * 2);
  block.a = a;
  for (int64_t m = 0; m < args.M; ++m) {
    const scalar_t* row = static_cast<const scalar_t*>(args.mat1) + m * args.mat1_stride;
    for (int64_t s = 0; s < block.segments; ++s) {
      const int64_t depth = min_i64(segment, args.K - s * segment);
      Dot::convert_row(row + s * segment, depth, round_up(depth, 2),
                       a + m * block.a_stride + s * block.segment_pairs * Dot::kStepsPerPair);
    }
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
        packed_t* piece = gathered + s * block.segment_pairs * kBlockN * 2;
        const packed_t* b = weight_block<packed_t>(args, block.n0, s * segment, depth, piece);
        if (b != piece) memcpy(piece, b, round_up(depth, 2) * kBlockN * sizeof(packed_t));
      }
      block.b = gathered;
    }
    tinygemm_kernel2<scalar_t, packed_t, has_bias>(args, block);
  }
}

// Rows [m0, m0 + rows) times column blocks [block_begin, block_end), at most kChunkBlocks of them.
template <typename scalar_t, typename packed_t, bool has_bias>
static void brgemm2(const GemmArgs& args, int64_t m0, int64_t rows, int64_t block_begin,
                    int64_t block_end, Scratch scratch) {
  using Dot = DotFor<scalar_t>;
  constexpr int64_t kMaxSteps = kBlockK / 2 * Dot::kStepsPerPair;
  float* a = Scratch::take<float>(&scratch, kBlockM * kMaxSteps);
  float* panel = Scratch::take<float>(&scratch, kBlockN * kMaxSteps);
  float* sums = Scratch::take<float>(&scratch, kChunkBlocks * kBlockM * kBlockN);
  float* total = Scratch::take<float>(&scratch, kChunkBlocks * kBlockM * kBlockN);
  packed_t* gathered = Scratch::take<packed_t>(&scratch, kBlockN * kBlockK);
  const int64_t padded_rows = round_up(rows, Dot::kPadRows);
  const int64_t block_stride = padded_rows * kBlockN;
  const int64_t segment = segment_length(args);
  const scalar_t* mat1 = static_cast<const scalar_t*>(args.mat1) + m0 * args.mat1_stride;

  for (int64_t k_begin = 0; k_begin < args.K; k_begin += segment) {
    const int64_t k_end = min_i64(k_begin + segment, args.K);
    for (int64_t k0 = k_begin; k0 < k_end; k0 += kBlockK) {
      const int64_t depth = min_i64(kBlockK, k_end - k0);
      const int64_t padded_depth = round_up(depth, Dot::kPadK);
      const int64_t steps = padded_depth / 2 * Dot::kStepsPerPair;
      for (int64_t m = 0; m < rows; ++m) {
        Dot::convert_row(mat1 + m * args.mat1_stride + k0, depth, padded_depth, a + m * steps);
      }
      memset(a + rows * steps, 0, (padded_rows - rows) * steps * sizeof(float));
      for (int64_t block = block_begin; block < block_end; ++block) {
        const int64_t n0 = block * kBlockN;
        float* block_sums = sums + (block - block_begin) * block_stride;
        const packed_t* b = weight_block<packed_t>(args, n0, k0, depth, gathered);
        decode_panel<Dot>(b, div_up(depth, 2), padded_depth / 2, panel);
        multiply_panel<Dot>(a, steps, panel, steps, rows, k0 == k_begin, block_sums);
        if (k0 + depth == k_end) {
          alignas(64) float scale[kBlockN];
          load_scales(args, n0, k_begin / segment, scale);
          copy_mul_add_stub(block_sums, kBlockN, scale, k_begin == 0, rows, kBlockN,
                            total + (block - block_begin) * block_stride, kBlockN);
        }
      }
    }
  }
  for (int64_t block = block_begin; block < block_end; ++block) {
    copy_add_stub<has_bias>(args, total + (block - block_begin) * block_stride, kBlockN, m0, rows,
                            block * kBlockN, 0, kBlockN);
  }
}

template <typename scalar_t, typename packed_t, bool has_bias>
static void gemm_tasks(const GemmArgs& args, TaskRange tasks, void* scratch_bytes) {
  const FpEnvGuard fp_env(DotFor<scalar_t>::kFlushSubnormals);
  const Scratch scratch{static_cast<char*>(scratch_bytes)};
  if (args.M <= kTinyRows) {
    tinygemm_blocks<scalar_t, packed_t, has_bias>(args, tasks, scratch);
    return;
  }
  const typename DotFor<scalar_t>::TileState tile_state;
  const int64_t column_blocks = div_up(args.N, kBlockN);
  const int64_t block_rows = rows_per_block(args.M);
  int64_t task = tasks.begin;
  while (task < tasks.end) {
    const int64_t row_block = task / column_blocks;
    const int64_t block = task - row_block * column_blocks;
    const int64_t count = min_i64(min_i64(kChunkBlocks, column_blocks - block), tasks.end - task);
    const int64_t m0 = row_block * block_rows;
    brgemm2<scalar_t, packed_t, has_bias>(args, m0, min_i64(block_rows, args.M - m0), block,
                                          block + count, scratch);
    task += count;
  }
}

// The entry of one weight type: the run-time properties become template parameters here, once.
template <typename packed_t>
static void gemm_kernel_impl(const GemmArgs& args, TaskRange tasks, void* scratch) {
  const bool has_bias = args.bias != nullptr;
  if (args.mat1_type == ActType::bf16) {
    has_bias ? gemm_tasks<bf16_t, packed_t, true>(args, tasks, scratch)
             : gemm_tasks<bf16_t, packed_t, false>(args, tasks, scratch);
  } else {
    has_bias ? gemm_tasks<fp16_t, packed_t, true>(args, tasks, scratch)
             : gemm_tasks<fp16_t, packed_t, false>(args, tasks, scratch);
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
