// The GEMM family, compiled once per tier. Included by the small instantiation files only.
//
//   tinygemm_kernel_nn2  a few rows: decodes the packed weight in registers, sums stay in registers
//   tinygemm_kernel2     picks its tile by the number of rows
//   brgemm2              many rows: decodes a panel of weights once, multiplies it by a block of
//   rows copy_mul_add_stub    f32 sums -> out: scale, bias, one rounding
//
// Order of summation: every output element is one chain of f32 fused multiply-adds over k = 0, 1,
// 2, ..., starting at +0. Blocking over K stores and reloads the chain, never splits it, so a row
// has the same bits whichever kernel, row count or thread computed it. The bf16 dot instruction
// adds a k pair at a time; it is used for all row counts of its tier or for none.
#pragma once

#include <type_traits>

#include "fp_env.h"
#include "gemm.h"
#include "vec.h"

namespace sgl_kernel {
namespace SGL_TIER {

constexpr int kBlockVecs = static_cast<int>(kBlockN) / kLanes;
constexpr int kGroupCols = kGroupVecs * kLanes;
constexpr int kMicroCols = kMicroVecs * kLanes;
static_assert(kBlockN % kGroupCols == 0 && kBlockN % kMicroCols == 0, "tiles must cover a block");

// How one k pair is multiplied. A step multiplies one 32-bit element of mat1 (an f32, or a bf16
// pair) with one vector of 32-bit weight elements.
struct DotF32 {
  static constexpr int kStepsPerPair = 2;

  template <typename packed_t>
  SGL_INLINE void decode_group(const packed_t* p, Vec (*steps)[kGroupVecs]) {
    decode_pairs(p, steps[0], steps[1]);
  }
  SGL_INLINE Vec dot(Vec a, Vec b, Vec c) { return fma(a, b, c); }

  // One row of mat1 as f32, padded to an even k.
  template <typename scalar_t>
  SGL_INLINE void convert_row(const scalar_t* src, float* dst, int64_t k) {
    int64_t i = 0;
    for (; i + kLanes <= k; i += kLanes) store(dst + i, load_act(src + i));
    for (; i < k; ++i) dst[i] = to_float(src[i]);
    if (k % 2 != 0) dst[k] = 0.f;
  }
};

#if defined(SGL_TIER_AVX512_BF16)
struct DotBf16 {
  static constexpr int kStepsPerPair = 1;

  template <typename packed_t>
  SGL_INLINE void decode_group(const packed_t* p, Vec (*steps)[kGroupVecs]) {
    decode_pairs_bf16(p, steps[0]);
  }
  SGL_INLINE Vec dot(Vec a, Vec b, Vec c) { return dot_bf16(a, b, c); }

  SGL_INLINE void convert_row(const bf16_t* src, float* dst, int64_t k) {
    memcpy(dst, src, k * sizeof(bf16_t));
    if (k % 2 != 0) reinterpret_cast<uint16_t*>(dst)[k] = 0;
  }
};
template <typename scalar_t>
using DotFor = std::conditional_t<std::is_same<scalar_t, bf16_t>::value, DotBf16, DotF32>;
#else
template <typename scalar_t>
using DotFor = DotF32;
#endif

// Scale and bias of one block of columns, padded so that whole vectors can be read.
struct Epilogue {
  alignas(64) float scale[kBlockN];
  alignas(64) float bias[kBlockN];
};

SGL_INLINE void load_epilogue(const GemmArgs& args, int64_t n0, Epilogue* epilogue) {
  const int64_t width = min_i64(kBlockN, args.N - n0);
  for (int64_t i = 0; i < kBlockN; ++i) {
    const int64_t n = n0 + min_i64(i, width - 1);
    epilogue->scale[i] = args.scales == nullptr ? 1.f : args.scales[n * args.scale_stride];
    epilogue->bias[i] = args.bias == nullptr ? 0.f : args.bias[n];
  }
}

// One row: out = sums * scale (+ bias), rounded once. The f32 inputs are readable up to whole
// vectors.
template <typename out_t, bool has_bias>
SGL_INLINE void copy_mul_add_row(out_t* out, const float* sums, const float* scale,
                                 const float* bias, int64_t width) {
  for (int64_t i = 0; i < width; i += kLanes) {
    Vec v = mul(load(sums + i), load(scale + i));
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

// Rows [m0, m0 + rows) and columns [column, column + columns) of the block at n0, clipped to its
// width. sums: [rows, columns] f32 with row stride sums_stride.
template <bool has_bias>
SGL_INLINE void copy_mul_add_stub(const GemmArgs& args, const Epilogue& epilogue, const float* sums,
                                  int64_t sums_stride, int64_t m0, int64_t rows, int64_t n0,
                                  int64_t column, int64_t columns) {
  const int64_t width = min_i64(columns, args.N - n0 - column);
  const float* scale = epilogue.scale + column;
  const float* bias = epilogue.bias + column;
  for (int64_t m = 0; m < rows; ++m) {
    const int64_t offset = (m0 + m) * args.out_stride + n0 + column;
    const float* row = sums + m * sums_stride;
    switch (args.out_type) {
      case OutType::f32:
        copy_mul_add_row<float, has_bias>(static_cast<float*>(args.out) + offset, row, scale, bias,
                                          width);
        break;
      case OutType::bf16:
        copy_mul_add_row<bf16_t, has_bias>(static_cast<bf16_t*>(args.out) + offset, row, scale,
                                           bias, width);
        break;
      case OutType::fp16:
        copy_mul_add_row<fp16_t, has_bias>(static_cast<fp16_t*>(args.out) + offset, row, scale,
                                           bias, width);
        break;
    }
  }
}

// The k pairs [k0, k0 + depth) of column block n0 as [depth/2, 32, 2]. Points into the weight where
// it already stands so; ragged columns, an odd K's tail and unpacked weights are gathered into
// `scratch`, padded with zeros. k0 is even.
template <typename packed_t>
SGL_INLINE const packed_t* weight_block(const GemmArgs& args, int64_t n0, int64_t k0, int64_t depth,
                                        packed_t* scratch) {
  const packed_t* weight = static_cast<const packed_t*>(args.mat2);
  const int64_t width = min_i64(kBlockN, args.N - n0);
  if (args.is_vnni && width == kBlockN && depth % 2 == 0)
    return weight + n0 * args.K + k0 * kBlockN;

  memset(static_cast<void*>(scratch), 0, round_up(depth, 2) * kBlockN * sizeof(packed_t));
  for (int64_t column = 0; column < width; ++column) {
    const int64_t n = n0 + column;
    for (int64_t k = 0; k < depth; ++k) {
      const int64_t index =
          args.is_vnni ? packed_index(args.N, args.K, n, k0 + k) : n * args.K + k0 + k;
      scratch[((k / 2) * kBlockN + column) * 2 + (k & 1)] = weight[index];
    }
  }
  return scratch;
}

// What a tile of the tiny path works on: all rows of mat1, one block of columns.
struct TinyBlock {
  const float* a;  // [rows, steps] 32-bit elements of mat1
  int64_t a_stride;
  int64_t pairs;  // k pairs
  int64_t n0;     // first column of the block
  Epilogue epilogue;
};

// BLOCK_M rows times BLOCK_N columns (from `column` of the block) over the whole K: the weight is
// decoded in registers and the sums stay there. b: the block, [pairs, 32, 2].
template <typename scalar_t, typename packed_t, bool has_bias, int BLOCK_M, int BLOCK_N>
struct tinygemm_kernel_nn2 {
  using Dot = DotFor<scalar_t>;
  static constexpr int kGroups = BLOCK_N / kGroupCols;

  SGL_INLINE void apply(const GemmArgs& args, const TinyBlock& block, const packed_t* b,
                        int column) {
    Vec acc[BLOCK_M][kGroups * kGroupVecs];
    for (int m = 0; m < BLOCK_M; ++m) {
      for (int i = 0; i < kGroups * kGroupVecs; ++i) acc[m][i] = zero();
    }
    b += column * 2;
    for (int64_t p = 0; p < block.pairs; ++p) {
#pragma GCC unroll 8
      for (int g = 0; g < kGroups; ++g) {
        Vec steps[Dot::kStepsPerPair][kGroupVecs];
        Dot::decode_group(b + (p * kBlockN + g * kGroupCols) * 2, steps);
#pragma GCC unroll 2
        for (int s = 0; s < Dot::kStepsPerPair; ++s) {
#pragma GCC unroll 4
          for (int m = 0; m < BLOCK_M; ++m) {
            const Vec x = set1(block.a[m * block.a_stride + p * Dot::kStepsPerPair + s]);
#pragma GCC unroll 4
            for (int i = 0; i < kGroupVecs; ++i) {
              Vec& sum = acc[m][g * kGroupVecs + i];
              sum = Dot::dot(x, steps[s][i], sum);
            }
          }
        }
      }
    }
    alignas(64) float sums[BLOCK_M * BLOCK_N];
    for (int m = 0; m < BLOCK_M; ++m) {
      for (int i = 0; i < kGroups * kGroupVecs; ++i)
        store(sums + m * BLOCK_N + i * kLanes, acc[m][i]);
    }
    copy_mul_add_stub<has_bias>(args, block.epilogue, sums, BLOCK_N, 0, BLOCK_M, block.n0, column,
                                BLOCK_N);
  }
};

template <typename scalar_t, typename packed_t, bool has_bias, int BLOCK_M>
SGL_INLINE void tinygemm_tiles(const GemmArgs& args, const TinyBlock& block, const packed_t* b) {
  // One row keeps all 32 columns in registers: four chains or more hide the FMA latency. With more
  // rows a 16-register file has room for the decoder and half of the columns.
  constexpr int kCols = static_cast<int>(kBlockN) / (BLOCK_M == 1 || kLanes >= 16 ? 1 : 2);
  for (int column = 0; column < kBlockN; column += kCols) {
    tinygemm_kernel_nn2<scalar_t, packed_t, has_bias, BLOCK_M, kCols>::apply(args, block, b,
                                                                             column);
  }
}

// One block of 32 columns for all rows, 1 <= M <= kTinyRows.
template <typename scalar_t, typename packed_t, bool has_bias>
SGL_INLINE void tinygemm_kernel2(const GemmArgs& args, const TinyBlock& block, const packed_t* b) {
  static_assert(kTinyRows == 4, "one case per row count");
  switch (args.M) {
    case 1:
      return tinygemm_tiles<scalar_t, packed_t, has_bias, 1>(args, block, b);
    case 2:
      return tinygemm_tiles<scalar_t, packed_t, has_bias, 2>(args, block, b);
    case 3:
      return tinygemm_tiles<scalar_t, packed_t, has_bias, 3>(args, block, b);
    case 4:
      return tinygemm_tiles<scalar_t, packed_t, has_bias, 4>(args, block, b);
  }
}

// Decodes [depth/2, 32, 2] packed weights to [32 / kMicroCols][steps][kMicroCols] 32-bit elements.
template <typename Dot, typename packed_t>
SGL_INLINE void decode_panel(const packed_t* b, int64_t pairs, float* panel) {
  const int64_t steps_total = pairs * Dot::kStepsPerPair;
  for (int64_t p = 0; p < pairs; ++p) {
    for (int g = 0; g < kBlockN / kGroupCols; ++g) {
      Vec steps[Dot::kStepsPerPair][kGroupVecs];
      Dot::decode_group(b + (p * kBlockN + g * kGroupCols) * 2, steps);
      const int column = g * kGroupCols;
      float* part = panel + (column / kMicroCols) * steps_total * kMicroCols + column % kMicroCols;
      for (int s = 0; s < Dot::kStepsPerPair; ++s) {
        for (int i = 0; i < kGroupVecs; ++i) {
          store(part + (p * Dot::kStepsPerPair + s) * kMicroCols + i * kLanes, steps[s][i]);
        }
      }
    }
  }
}

// ROWS x kMicroCols of sums += a[ROWS, steps] @ part[steps, kMicroCols].
template <typename Dot, int ROWS>
SGL_INLINE void micro_kernel(const float* a, int64_t a_stride, const float* part, int64_t steps,
                             float* sums) {
  Vec acc[ROWS][kMicroVecs];
  for (int m = 0; m < ROWS; ++m) {
    for (int i = 0; i < kMicroVecs; ++i) acc[m][i] = load(sums + m * kBlockN + i * kLanes);
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
                                  int64_t steps, float* sums) {
  if (rows == ROWS) {
    micro_kernel<Dot, ROWS>(a, a_stride, part, steps, sums);
  } else if constexpr (ROWS > 1) {
    micro_kernel_rows<Dot, ROWS - 1>(rows, a, a_stride, part, steps, sums);
  }
}

// sums[rows, 32] += a[rows, steps] @ panel: the batch-reduce step over one block of K.
template <typename Dot>
SGL_INLINE void multiply_panel(const float* a, int64_t a_stride, const float* panel, int64_t steps,
                               int64_t rows, float* sums) {
  for (int64_t m = 0; m < rows; m += kMicroRows) {
    const int64_t tile = min_i64(kMicroRows, rows - m);
    for (int part = 0; part < kBlockN / kMicroCols; ++part) {
      micro_kernel_rows<Dot, kMicroRows>(tile, a + m * a_stride, a_stride,
                                         panel + part * steps * kMicroCols, steps,
                                         sums + m * kBlockN + part * kMicroCols);
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
  using Dot = DotFor<scalar_t>;
  const int64_t padded_k = round_up(args.K, 2);
  const int64_t a_stride = padded_k / 2 * Dot::kStepsPerPair;
  float* a = Scratch::take<float>(&scratch, args.M * a_stride);
  packed_t* gathered = Scratch::take<packed_t>(&scratch, kBlockN * padded_k);
  for (int64_t m = 0; m < args.M; ++m) {
    Dot::convert_row(static_cast<const scalar_t*>(args.mat1) + m * args.mat1_stride,
                     a + m * a_stride, args.K);
  }
  TinyBlock block;
  block.a = a;
  block.a_stride = a_stride;
  block.pairs = padded_k / 2;
  for (int64_t task = tasks.begin; task < tasks.end; ++task) {
    block.n0 = task * kBlockN;
    load_epilogue(args, block.n0, &block.epilogue);
    const packed_t* b = weight_block<packed_t>(args, block.n0, 0, args.K, gathered);
    tinygemm_kernel2<scalar_t, packed_t, has_bias>(args, block, b);
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
  packed_t* gathered = Scratch::take<packed_t>(&scratch, kBlockN * kBlockK);
  const int64_t sums_stride = rows * kBlockN;

  memset(sums, 0, (block_end - block_begin) * sums_stride * sizeof(float));
  for (int64_t k0 = 0; k0 < args.K; k0 += kBlockK) {
    const int64_t depth = min_i64(kBlockK, args.K - k0);
    const int64_t pairs = div_up(depth, 2);
    const int64_t steps = pairs * Dot::kStepsPerPair;
    for (int64_t m = 0; m < rows; ++m) {
      Dot::convert_row(static_cast<const scalar_t*>(args.mat1) + (m0 + m) * args.mat1_stride + k0,
                       a + m * steps, depth);
    }
    for (int64_t block = block_begin; block < block_end; ++block) {
      const packed_t* b = weight_block<packed_t>(args, block * kBlockN, k0, depth, gathered);
      decode_panel<Dot>(b, pairs, panel);
      multiply_panel<Dot>(a, steps, panel, steps, rows, sums + (block - block_begin) * sums_stride);
    }
  }
  for (int64_t block = block_begin; block < block_end; ++block) {
    const int64_t n0 = block * kBlockN;
    Epilogue epilogue;
    load_epilogue(args, n0, &epilogue);
    copy_mul_add_stub<has_bias>(args, epilogue, sums + (block - block_begin) * sums_stride, kBlockN,
                                m0, rows, n0, 0, kBlockN);
  }
}

template <typename scalar_t, typename packed_t, bool has_bias>
static void gemm_tasks(const GemmArgs& args, TaskRange tasks, void* scratch_bytes) {
  const Scratch scratch{static_cast<char*>(scratch_bytes)};
  if (args.M <= kTinyRows) {
    tinygemm_blocks<scalar_t, packed_t, has_bias>(args, tasks, scratch);
    return;
  }
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
  const FpEnvGuard fp_env;
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
