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
        store_panel_pair<Dot>(words + p * kPairElements, padded_pairs,
                              panel + (p0 + p) * kPairFloats);
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
// factors. `sums` points at the columns of the first part. Where `next` is set, one cache line from
// there on is fetched with each pair: memory works on the next panel while this one is multiplied.
template <typename Dot, int ROWS, int VECS>
SGL_INLINE void micro_kernel(const float* a, int64_t a_stride, const float* part, int64_t pairs,
                             const float* factors, bool start, const char* next, float* sums) {
  Vec acc[ROWS][VECS];
  for (int m = 0; m < ROWS; ++m) {
    for (int i = 0; i < VECS; ++i) acc[m][i] = zero();
  }
  const int64_t next_step = next == nullptr ? 0 : 64;
  if (next == nullptr) next = reinterpret_cast<const char*>(part);
  for (int64_t p = 0; p < pairs; ++p) {
    __builtin_prefetch(next + p * next_step);
    Vec b[VECS];
#pragma GCC unroll 16
    for (int i = 0; i < VECS; ++i) {
      b[i] = load(part + ((i / kMicroVecs * pairs + p) * kMicroVecs + i % kMicroVecs) * kLanes);
    }
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) {
      const typename Dot::Pair x = Dot::load_pair(a + m * a_stride + p * Dot::kFloatsPerPair);
#pragma GCC unroll 16
      for (int i = 0; i < VECS; ++i) acc[m][i] = Dot::dot(x, b[i], acc[m][i], i);
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
                              int64_t pairs, const float* factors, bool start, const char* next,
                              float* sums) {
  if (rows == ROWS) {
    constexpr int kVecs = micro_vecs<Dot>(ROWS);
    for (int v = 0; v < Dot::kVecs; v += kVecs) {
      micro_kernel<Dot, ROWS, kVecs>(a, a_stride, panel + v * pairs * kLanes, pairs, factors, start,
                                     v == 0 ? next : nullptr,
                                     sums + v / Dot::kVecsPerFold * kLanes);
    }
  } else if constexpr (ROWS > 1) {
    multiply_rows<Dot, ROWS - 1>(rows, a, a_stride, panel, pairs, factors, start, next, sums);
  }
}

// sums[rows, 32] (+)= a[rows, pairs] @ panel: the batch-reduce step over one block of K.
template <typename Dot>
SGL_INLINE void multiply_panel(const float* a, int64_t a_stride, const float* panel, int64_t pairs,
                               int64_t rows, const float* factors, bool start, const char* next,
                               float* sums) {
  if constexpr (Dot::kTiles) {
    multiply_tiles<Dot::kPlanes>(a, a_stride, panel, pairs, rows, start, next, sums);
  } else {
    constexpr int kFull = micro_vecs<Dot>(kMicroRows);
    const int64_t full_rows = rows / kMicroRows * kMicroRows;
    // Part by part, so that one stays in L1 while the rows pass.
    for (int v = 0; v < Dot::kVecs; v += kFull) {
      for (int64_t m = 0; m < full_rows; m += kMicroRows) {
        micro_kernel<Dot, kMicroRows, kFull>(
            a + m * a_stride, a_stride, panel + v * pairs * kLanes, pairs, factors + m, start,
            v == 0 && m == 0 ? next : nullptr, sums + m * kBlockN + v / Dot::kVecsPerFold * kLanes);
      }
    }
    if (full_rows < rows) {
      multiply_rows<Dot, kMicroRows - 1>(
          rows - full_rows, a + full_rows * a_stride, a_stride, panel, pairs, factors + full_rows,
          start, full_rows == 0 ? next : nullptr, sums + full_rows * kBlockN);
    }
  }
}

// A block of K: [begin, begin + depth) of one segment.
struct KBlock {
  int64_t begin;
  int64_t depth;
  int64_t segment;
  bool starts_segment;
  bool ends_segment;
};

template <typename Dot>
SGL_INLINE KBlock k_block_at(const GemmArgs& args, int64_t index) {
  const int64_t length = segment_length(args);
  const int64_t per_segment = div_up(length, Dot::kBlockK);
  const int64_t segment = index / per_segment;
  const int64_t inside = (index - segment * per_segment) * Dot::kBlockK;
  const int64_t end = min_i64(length, args.K - segment * length);
  const int64_t depth = min_i64(Dot::kBlockK, end - inside);
  return {segment * length + inside, depth, segment, inside == 0, inside + depth == end};
}

// What brgemm2 does to one block of K; the order of the blocks is its own.
template <typename scalar_t, typename packed_t>
struct PanelProduct {
  using Dot = DotFor<scalar_t>;
  static constexpr int64_t kRowFloats = Dot::kBlockK / 2 * Dot::kFloatsPerPair * Dot::kPlanes;

  const GemmArgs& args;
  const scalar_t* mat1;  // its first row
  int64_t rows;
  float* panel;
  packed_t* gathered;

  SGL_MEMBER int64_t padded_rows() const { return round_up(rows, Dot::kPadRows); }
  SGL_MEMBER int64_t pairs(const KBlock& k) const {
    return round_up(div_up(k.depth, 2), Dot::kPadPairs);
  }

  // Rows of mat1 as the policy multiplies them, and what their sums are to be multiplied by.
  SGL_MEMBER void convert(const KBlock& k, float* a, float* factors) const {
    const int64_t plane_stride = pairs(k) * Dot::kFloatsPerPair;
    const int64_t a_stride = plane_stride * Dot::kPlanes;
    for (int64_t m = 0; m < rows; ++m) {
      const scalar_t* row = mat1 + m * args.mat1_stride + k.begin;
      const float scale = scale_of_row<Dot, packed_t>(row, k.depth);
      Dot::convert_row(row, k.depth, pairs(k) * 2, scale, a + m * a_stride, plane_stride);
      factors[m] = factor_of_row<Dot, packed_t>(scale);
    }
    memset(a + rows * a_stride, 0, (padded_rows() - rows) * a_stride * sizeof(float));
  }

  // Adds to the sums of one block of columns; at the end of a segment, to its total. `stride`:
  // elements from this panel of the packed weight to the next one.
  SGL_MEMBER void multiply(const KBlock& k, const float* a, const float* factors, int64_t block,
                           int64_t stride, float* sums, float* total) const {
    const int64_t n0 = block * kBlockN;
    const packed_t* b = weight_block<packed_t>(args, n0, k.begin, k.depth, gathered);
    const float* widened = widen_panel<Dot>(b, div_up(k.depth, 2), pairs(k), panel);
    const char* next = reinterpret_cast<const char*>(b) + stride * sizeof(packed_t);
    multiply_panel<Dot>(a, pairs(k) * Dot::kFloatsPerPair * Dot::kPlanes, widened, pairs(k), rows,
                        factors, k.starts_segment, next, sums);
    if (k.ends_segment) {
      alignas(64) float scale[kBlockN];
      load_scales(args, n0, k.segment, scale);
      copy_mul_add_stub(sums, kBlockN, scale, k.segment == 0, rows, kBlockN, total, kBlockN);
    }
  }
};

// Rows [m0, m0 + rows) times column blocks [block_begin, block_end): at most kChunkBlocks of them,
// or any number where M <= kSmallM.
template <typename scalar_t, typename packed_t, bool has_bias>
static void brgemm2(const GemmArgs& args, int64_t m0, int64_t rows, int64_t block_begin,
                    int64_t block_end, Scratch scratch) {
  using Product = PanelProduct<scalar_t, packed_t>;
  using Dot = typename Product::Dot;
  const int64_t k_blocks = panel_block_count(args, Dot::kBlockK);
  const bool small = args.M <= kSmallM;
  float* a =
      Scratch::take<float>(&scratch, (small ? kSmallM * k_blocks : kBlockM) * Product::kRowFloats);
  float* factors = Scratch::take<float>(&scratch, small ? kSmallM * k_blocks : kBlockM);
  float* panel = Scratch::take<float>(&scratch, kBlockN * kMaxBlockK);
  float* sums = Scratch::take<float>(&scratch, kChunkBlocks * kBlockM * kBlockN);
  float* total = Scratch::take<float>(&scratch, kChunkBlocks * kBlockM * kBlockN);
  packed_t* gathered = Scratch::take<packed_t>(&scratch, kBlockN * kMaxBlockK);
  const Product product{args, static_cast<const scalar_t*>(args.mat1) + m0 * args.mat1_stride, rows,
                        panel, gathered};
  const auto finish = [&](int64_t block, const float* block_total) {
    copy_add_stub<has_bias>(args, block_total, kBlockN, m0, rows, block * kBlockN, 0, kBlockN);
  };

  if (small) {
    // All of mat1 is converted first, and the weight is then read from end to end.
    for (int64_t i = 0; i < k_blocks; ++i) {
      product.convert(k_block_at<Dot>(args, i), a + i * kSmallM * Product::kRowFloats,
                      factors + i * kSmallM);
    }
    for (int64_t block = block_begin; block < block_end; ++block) {
      for (int64_t i = 0; i < k_blocks; ++i) {
        const KBlock k = k_block_at<Dot>(args, i);
        product.multiply(k, a + i * kSmallM * Product::kRowFloats, factors + i * kSmallM, block,
                         k.depth * kBlockN, sums, total);
      }
      finish(block, total);
    }
    return;
  }
  const int64_t block_stride = product.padded_rows() * kBlockN;
  for (int64_t i = 0; i < k_blocks; ++i) {
    const KBlock k = k_block_at<Dot>(args, i);
    product.convert(k, a, factors);
    for (int64_t block = block_begin; block < block_end; ++block) {
      const int64_t place = (block - block_begin) * block_stride;
      product.multiply(k, a, factors, block, args.K * kBlockN, sums + place, total + place);
    }
  }
  for (int64_t block = block_begin; block < block_end; ++block) {
    finish(block, total + (block - block_begin) * block_stride);
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
