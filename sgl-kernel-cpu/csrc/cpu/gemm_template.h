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
#include "fp_env.h"
#include "gemm.h"

namespace sgl_kernel {
namespace SGL_TIER {

constexpr int kMicroCols = kMicroVecs * kLanes;
static_assert(kBlockN % kGroupCols == 0 && kBlockN % kMicroCols == 0, "tiles must cover a block");

// The scales of segment `segment` for the 32 columns at n0, as far as they exist.
SGL_INLINE void load_scales(const GemmArgs& args, int64_t n0, int64_t segment, float* scale) {
  if (args.scales == nullptr) {
    for (int64_t i = 0; i < kBlockN; ++i) scale[i] = 1.f;
    return;
  }
  const int64_t width = min_i64(kBlockN, args.N - n0);
  const int64_t row_stride = div_up(args.K, args.block_k);
  int64_t row = n0 / args.block_n;
  int64_t left = (row + 1) * args.block_n - n0;  // columns of this row of blocks still to come
  for (int64_t i = 0; i < kBlockN; ++i) {
    if (left == 0 && i < width) {
      ++row;
      left = args.block_n;
    }
    --left;
    scale[i] = args.scales[row * row_stride + segment];
  }
}

template <typename bias_t>
SGL_INLINE void load_bias_as(const GemmArgs& args, int64_t n0, float* bias) {
  const bias_t* source = static_cast<const bias_t*>(args.bias) + n0;
  const int64_t width = min_i64(kBlockN, args.N - n0);
  for (int64_t i = 0; i < kBlockN; ++i) bias[i] = i < width ? to_float(source[i]) : 0.f;
}

// The bias of the 32 columns at n0 in f32, as far as it exists.
SGL_INLINE void load_bias(const GemmArgs& args, int64_t n0, float* bias) {
  switch (args.bias_type) {
    case FloatType::f32:
      return load_bias_as<float>(args, n0, bias);
    case FloatType::bf16:
      return load_bias_as<bf16_t>(args, n0, bias);
    case FloatType::fp16:
      return load_bias_as<fp16_t>(args, n0, bias);
  }
}

// total[rows, columns] (+)= sums[rows, columns] * scale[columns]; multiplied and added in two
// roundings on every tier.
SGL_INLINE void copy_mul_add_stub(const float* sums, int64_t sums_stride, const float* scale,
                                  bool first, int64_t rows, int columns, float* total,
                                  int64_t total_stride) {
  for (int64_t m = 0; m < rows; ++m) {
    for (int i = 0; i < columns; i += kLanes) {
      Vec v = mul(load(sums + m * sums_stride + i), load(scale + i));
      if (!first) v = add(load(total + m * total_stride + i), v);
      store(total + m * total_stride + i, v);
    }
  }
}

template <typename out_t, bool has_bias>
SGL_INLINE void copy_add_row(out_t* out, const float* total, const float* bias, int64_t width) {
  for (int64_t i = 0; i < width; i += kLanes) {
    Vec v = load(total + i);
    if (has_bias) v = add(v, load(bias + i));
    if (i + kLanes <= width) {
      store_out(out + i, v);
    } else {
      out_t tail[kLanes];
      store_out(tail, v);
      memcpy(out + i, tail, (width - i) * sizeof(out_t));
    }
  }
}

// out[m0 .. m0 + rows, n0 + column ..] = total (+ bias), rounded once; clipped to N. total:
// [rows, columns], readable up to whole vectors.
template <bool has_bias>
SGL_INLINE void copy_add_stub(const GemmArgs& args, const float* total, int64_t total_stride,
                              int64_t m0, int64_t rows, int64_t n0, int64_t column,
                              int64_t columns) {
  alignas(64) float bias[kBlockN];
  if (has_bias) load_bias(args, n0, bias);
  const int64_t width = min_i64(columns, args.N - n0 - column);
  for (int64_t m = 0; m < rows; ++m) {
    const int64_t offset = (m0 + m) * args.out_stride + n0 + column;
    const float* row = total + m * total_stride;
    switch (args.out_type) {
      case FloatType::f32:
        copy_add_row<float, has_bias>(static_cast<float*>(args.out) + offset, row, bias + column,
                                      width);
        break;
      case FloatType::bf16:
        copy_add_row<bf16_t, has_bias>(static_cast<bf16_t*>(args.out) + offset, row, bias + column,
                                       width);
        break;
      case FloatType::fp16:
        copy_add_row<fp16_t, has_bias>(static_cast<fp16_t*>(args.out) + offset, row, bias + column,
                                       width);
        break;
    }
  }
}

// Element (column, k) of a block in scratch.
SGL_INLINE int64_t gathered_index(int64_t column, int64_t k) {
  return ((k / 2) * kBlockN + column) * 2 + (k & 1);
}

// Columns [n0, n0 + width) of a row-major weight.
template <typename packed_t>
static void gather_rows(const packed_t* weight, int64_t K, int64_t n0, int64_t width, int64_t k0,
                        int64_t depth, packed_t* scratch) {
  for (int64_t column = 0; column < width; ++column) {
    const packed_t* row = weight + (n0 + column) * K + k0;
    for (int64_t k = 0; k + 1 < depth; k += 2) {
      memcpy(scratch + gathered_index(column, k), row + k, 2 * sizeof(packed_t));
    }
    if (depth % 2 != 0) scratch[gathered_index(column, depth - 1)] = row[depth - 1];
  }
}

// The same of a packed weight: whole rows of pairs where k0 is even, single elements otherwise.
template <typename packed_t>
static void gather_packed(const packed_t* weight, int64_t N, int64_t K, int64_t n0, int64_t width,
                          int64_t k0, int64_t depth, packed_t* scratch) {
  int64_t k = 0;
  if (k0 % 2 == 0) {
    for (; k + 1 < depth; k += 2) {
      memcpy(scratch + gathered_index(0, k), weight + packed_index(N, K, n0, k0 + k),
             width * 2 * sizeof(packed_t));
    }
  }
  for (; k < depth; ++k) {
    for (int64_t column = 0; column < width; ++column) {
      scratch[gathered_index(column, k)] = weight[packed_index(N, K, n0 + column, k0 + k)];
    }
  }
}

// The k pairs [k0, k0 + depth) of column block n0 as [ceil(depth / 2), 32, 2]. Points into the
// weight where it already stands so; ragged columns, odd depths and unpacked weights are gathered
// into `scratch`, padded with zeros.
template <typename packed_t>
SGL_INLINE const packed_t* weight_block(const GemmArgs& args, int64_t n0, int64_t k0, int64_t depth,
                                        packed_t* scratch) {
  const packed_t* weight = static_cast<const packed_t*>(args.mat2);
  const int64_t width = min_i64(kBlockN, args.N - n0);
  if (args.is_vnni && width == kBlockN && k0 % 2 == 0 && depth % 2 == 0) {
    return weight + n0 * args.K + k0 * kBlockN;
  }
  memset(static_cast<void*>(scratch), 0, round_up(depth, 2) * kBlockN * sizeof(packed_t));
  if (args.is_vnni) {
    gather_packed(weight, args.N, args.K, n0, width, k0, depth, scratch);
  } else {
    gather_rows(weight, args.K, n0, width, k0, depth, scratch);
  }
  return scratch;
}

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
