// Many rows: a panel of weights is widened once and multiplied by a block of rows. Part of the GEMM
// family, compiled per tier.
#pragma once

#include "dot.h"
#include "epilogue.h"
#include "scratch.h"
#include "weight_block.h"

namespace sgl_kernel {
namespace SGL_TIER {

// A panel is [parts][pairs][kMicroVecs] vectors: the micro-kernel reads it in order.
template <typename Dot>
constexpr int kParts = Dot::kVecs / kMicroVecs;

template <typename Dot, typename weight_t>
SGL_INLINE void store_panel_pair(const weight_t* weights, int64_t padded_pairs, float* panel) {
  Vec w[Dot::kVecs];
  Dot::load_weights(weights, w);
#pragma GCC unroll 16
  for (int i = 0; i < Dot::kVecs; ++i) {
    const int64_t part = i / kMicroVecs * padded_pairs * kMicroVecs;
    store(panel + (part + i % kMicroVecs) * kLanes, w[i]);
  }
}

// Widens [pairs, 32, 2] packed weights, and adds zeros up to `padded_pairs`. Returns the panel:
// the packed weight itself where it already is one.
template <typename Dot, typename packed_t>
SGL_INLINE const float* widen_panel(const packed_t* b, int64_t pairs, int64_t padded_pairs,
                                    float* panel) {
  constexpr bool kIsBf16 = std::is_same<packed_t, bf16_t>::value;
  constexpr int64_t kPairFloats = int64_t{kMicroVecs} * kLanes;
  if (kIsBf16 && !Dot::kWords && kParts<Dot> == 1 && pairs == padded_pairs) {
    return reinterpret_cast<const float*>(b);
  }
  if constexpr (Dot::kWords && !kIsBf16) {
    constexpr int64_t kChunk = 8;
    alignas(64) Word words[kChunk * kPairElements];
    for (int64_t p0 = 0; p0 < pairs; p0 += kChunk) {
      const int64_t count = min_i64(kChunk, pairs - p0);
      codes_to_word_chunk(b + p0 * kPairElements, count, words);
      for (int64_t p = 0; p < count; ++p) {
        store_panel_pair<Dot>(words + p * kPairElements, padded_pairs, panel + (p0 + p) * kPairFloats);
      }
    }
  } else {
    for (int64_t p = 0; p < pairs; ++p) {
      prefetch_pair(b + p * kPairElements);
      store_panel_pair<Dot>(b + p * kPairElements, padded_pairs, panel + p * kPairFloats);
    }
  }
  for (int part = 0; part < kParts<Dot>; ++part) {
    memset(panel + (part * padded_pairs + pairs) * kPairFloats, 0,
           (padded_pairs - pairs) * kPairFloats * sizeof(float));
  }
  return panel;
}

// ROWS x VECS of sums (+)= a[ROWS, pairs] @ VECS / kMicroVecs parts of a panel, times the rows'
// factors. `sums` points at the columns of the first part.
template <typename Dot, int ROWS, int VECS>
SGL_INLINE void micro_kernel(const float* a, int64_t a_stride, const float* part, int64_t pairs,
                             const float* factors, bool start, float* sums) {
  Vec acc[ROWS][VECS];
  for (int m = 0; m < ROWS; ++m) {
    for (int i = 0; i < VECS; ++i) acc[m][i] = zero();
  }
  for (int64_t p = 0; p < pairs; ++p) {
    Vec b[VECS];
#pragma GCC unroll 16
    for (int i = 0; i < VECS; ++i) {
      b[i] = load(part + ((i / kMicroVecs * pairs + p) * kMicroVecs + i % kMicroVecs) * kLanes);
    }
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) {
      const Vec x = Dot::load_pair(a + m * a_stride + p * Dot::kFloatsPerPair);
#pragma GCC unroll 16
      for (int i = 0; i < VECS; ++i) acc[m][i] = Dot::dot(x, b[i], acc[m][i]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m) {
    const Vec factor = set1(factors[m]);
#pragma GCC unroll 16
    for (int i = 0; i < VECS; i += Dot::kVecsPerFold) {
      float* sum = sums + m * kBlockN + i / Dot::kVecsPerFold * kLanes;
      const Vec before = start ? zero() : load(sum);
      store(sum, add(before, mul(Dot::fold(acc[m] + i), factor)));
    }
  }
}

// Few rows take more columns at once, so that enough chains hide the latency of an FMA.
template <typename Dot>
constexpr int micro_vecs(int rows) {
  int vecs = kMicroVecs;
  while (vecs * 2 <= Dot::kVecs && vecs * 2 * rows <= kMicroRows * kMicroVecs) vecs *= 2;
  return vecs;
}

// All columns of a tile of 1..ROWS rows.
template <typename Dot, int ROWS>
SGL_INLINE void multiply_rows(int64_t rows, const float* a, int64_t a_stride, const float* panel,
                              int64_t pairs, const float* factors, bool start, float* sums) {
  if (rows == ROWS) {
    constexpr int kVecs = micro_vecs<Dot>(ROWS);
    for (int v = 0; v < Dot::kVecs; v += kVecs) {
      micro_kernel<Dot, ROWS, kVecs>(a, a_stride, panel + v * pairs * kLanes, pairs, factors, start,
                                     sums + v / Dot::kVecsPerFold * kLanes);
    }
  } else if constexpr (ROWS > 1) {
    multiply_rows<Dot, ROWS - 1>(rows, a, a_stride, panel, pairs, factors, start, sums);
  }
}

// sums[rows, 32] (+)= a[rows, pairs] @ panel: the batch-reduce step over one block of K.
template <typename Dot>
SGL_INLINE void multiply_panel(const float* a, int64_t a_stride, const float* panel, int64_t pairs,
                               int64_t rows, const float* factors, bool start, float* sums) {
  if constexpr (Dot::kTiles) {
    multiply_tiles<Dot::kPlanes>(a, a_stride, panel, pairs, rows, start, sums);
  } else {
    constexpr int kFull = micro_vecs<Dot>(kMicroRows);
    const int64_t full_rows = rows / kMicroRows * kMicroRows;
    // Part by part, so that one stays in L1 while the rows pass.
    for (int v = 0; v < Dot::kVecs; v += kFull) {
      for (int64_t m = 0; m < full_rows; m += kMicroRows) {
        micro_kernel<Dot, kMicroRows, kFull>(
            a + m * a_stride, a_stride, panel + v * pairs * kLanes, pairs, factors + m, start,
            sums + m * kBlockN + v / Dot::kVecsPerFold * kLanes);
      }
    }
    if (full_rows < rows) {
      multiply_rows<Dot, kMicroRows - 1>(rows - full_rows, a + full_rows * a_stride, a_stride,
                                         panel, pairs, factors + full_rows, start,
                                         sums + full_rows * kBlockN);
    }
  }
}

// Rows [m0, m0 + rows) times column blocks [block_begin, block_end), at most kChunkBlocks of them.
template <typename scalar_t, typename packed_t, bool has_bias>
static void brgemm2(const GemmArgs& args, int64_t m0, int64_t rows, int64_t block_begin,
                    int64_t block_end, Scratch scratch) {
  using Dot = DotFor<scalar_t>;
  float* a = Scratch::take<float>(&scratch, kBlockM * kBlockK);
  float* panel = Scratch::take<float>(&scratch, kBlockN * kBlockK);
  float* sums = Scratch::take<float>(&scratch, kChunkBlocks * kBlockM * kBlockN);
  float* total = Scratch::take<float>(&scratch, kChunkBlocks * kBlockM * kBlockN);
  packed_t* gathered = Scratch::take<packed_t>(&scratch, kBlockN * kBlockK);
  float factors[kBlockM];
  const int64_t padded_rows = round_up(rows, Dot::kPadRows);
  const int64_t block_stride = padded_rows * kBlockN;
  const int64_t segment = segment_length(args);
  const scalar_t* mat1 = static_cast<const scalar_t*>(args.mat1) + m0 * args.mat1_stride;

  for (int64_t k_begin = 0; k_begin < args.K; k_begin += segment) {
    const int64_t k_end = min_i64(k_begin + segment, args.K);
    for (int64_t k0 = k_begin; k0 < k_end; k0 += kBlockK) {
      const int64_t depth = min_i64(kBlockK, k_end - k0);
      const int64_t pairs = round_up(div_up(depth, 2), Dot::kPadPairs);
      const int64_t plane_stride = pairs * Dot::kFloatsPerPair;
      const int64_t a_stride = plane_stride * Dot::kPlanes;
      for (int64_t m = 0; m < rows; ++m) {
        const scalar_t* row = mat1 + m * args.mat1_stride + k0;
        const float scale = scale_of_row<Dot, packed_t>(row, depth);
        Dot::convert_row(row, depth, pairs * 2, scale, a + m * a_stride, plane_stride);
        factors[m] = factor_of_row<Dot, packed_t>(scale);
      }
      memset(a + rows * a_stride, 0, (padded_rows - rows) * a_stride * sizeof(float));
      for (int64_t block = block_begin; block < block_end; ++block) {
        const int64_t n0 = block * kBlockN;
        float* block_sums = sums + (block - block_begin) * block_stride;
        const packed_t* b = weight_block<packed_t>(args, n0, k0, depth, gathered);
        const float* widened = widen_panel<Dot>(b, div_up(depth, 2), pairs, panel);
        multiply_panel<Dot>(a, a_stride, widened, pairs, rows, factors, k0 == k_begin, block_sums);
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

}  // namespace SGL_TIER
}  // namespace sgl_kernel
