// Many rows: a panel of weights is widened once and multiplied by a block of rows. Part of the GEMM
// family, compiled per tier.
#pragma once

#include "dot.h"
#include "epilogue.h"
#include "scratch.h"
#include "weight_block.h"

namespace sgl_kernel {
namespace SGL_TIER {

// Columns that are multiplied at once. A panel is [chains][parts][pairs][kPartVecs] vectors: the
// micro-kernel reads it in order.
constexpr int kPartVecs = kMicroVecs < kColumnVecs ? kMicroVecs : kColumnVecs;

template <typename Dot, typename weight_t>
SGL_INLINE void store_panel_pair(const weight_t* weights, int64_t padded_pairs, float* panel) {
  Vec w[Dot::kVecs];
  Dot::load_weights(weights, w);
#pragma GCC unroll 16
  for (int i = 0; i < Dot::kVecs; ++i) {
    const int64_t part = i / kPartVecs * padded_pairs * kPartVecs;
    store(panel + (part + i % kPartVecs) * kLanes, w[i]);
  }
}

// Widens [pairs, 32, 2] packed weights, and adds zeros up to `padded_pairs`. Returns the panel:
// the packed weight itself where it already is one.
template <typename Dot, typename packed_t>
SGL_INLINE const float* widen_panel(const packed_t* b, int64_t pairs, int64_t padded_pairs,
                                    float* panel) {
  constexpr bool kIsBf16 = std::is_same<packed_t, bf16_t>::value;
  constexpr int64_t kPairFloats = int64_t{kPartVecs} * kLanes;
  constexpr int kParts = Dot::kVecs / kPartVecs;
  if (kIsBf16 && !Dot::kWords && kParts == 1 && pairs == padded_pairs) {
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
      store_panel_pair<Dot>(b + p * kPairElements, padded_pairs, panel + p * kPairFloats);
    }
  }
  for (int part = 0; part < kParts; ++part) {
    memset(panel + (part * padded_pairs + pairs) * kPairFloats, 0,
           (padded_pairs - pairs) * kPairFloats * sizeof(float));
  }
  return panel;
}

// Chains of a tile of `rows` rows that are summed at once: all, where their sums fit registers.
template <typename Dot>
constexpr int chains_at_once(int rows) {
  return rows * kPartVecs * Dot::kChains <= kMicroRows * kMicroVecs ? Dot::kChains : 1;
}

// Rows of a tile; more where a part leaves registers free.
template <typename Dot>
constexpr int kTileRows =
    kMicroRows *
    (kMicroVecs > kPartVecs * Dot::kChains ? kMicroVecs / (kPartVecs * Dot::kChains) : 1);

// What a micro-kernel fetches meanwhile: memory works on the next panel while this one is
// multiplied.
struct Ahead {
  const char* at;
  int64_t bytes;
};

// sums[ROWS, kPartVecs vectors] (+)= a[ROWS, pairs] @ one part of a panel and those of the other
// chains behind it, times the rows' factors.
template <typename Dot, int ROWS>
SGL_INLINE void micro_kernel(const float* a, int64_t a_stride, const float* part, int64_t pairs,
                             const float* factors, bool start, Ahead ahead, float* sums) {
  constexpr int kAtOnce = chains_at_once<Dot>(ROWS);
  const int64_t chain_stride = kColumnVecs * pairs * kLanes;
  const int64_t step = ahead.bytes / (pairs * (Dot::kChains / kAtOnce));
  Vec chains[ROWS][Dot::kChains * kPartVecs];
#pragma GCC unroll 2
  for (int chain = 0; chain < Dot::kChains; chain += kAtOnce) {
    Vec acc[ROWS][kAtOnce * kPartVecs];
    for (int m = 0; m < ROWS; ++m) {
      for (int i = 0; i < kAtOnce * kPartVecs; ++i) acc[m][i] = zero();
    }
    for (int64_t p = 0; p < pairs; ++p) {
      __builtin_prefetch(ahead.at + p * step);
      Vec b[kAtOnce * kPartVecs];
#pragma GCC unroll 16
      for (int i = 0; i < kAtOnce * kPartVecs; ++i) {
        b[i] = load(part + (chain + i / kPartVecs) * chain_stride +
                    (p * kPartVecs + i % kPartVecs) * kLanes);
      }
#pragma GCC unroll 16
      for (int m = 0; m < ROWS; ++m) {
        const float* x = a + m * a_stride + p * Dot::kChains + chain;
#pragma GCC unroll 16
        for (int i = 0; i < kAtOnce * kPartVecs; ++i) {
          acc[m][i] = Dot::dot(set1(x[i / kPartVecs]), b[i], acc[m][i]);
        }
      }
    }
    for (int m = 0; m < ROWS; ++m) {
      for (int i = 0; i < kAtOnce * kPartVecs; ++i) chains[m][chain * kPartVecs + i] = acc[m][i];
    }
    ahead.at += pairs * step;
  }
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m) {
    const Vec factor = set1(factors[m]);
#pragma GCC unroll 16
    for (int i = 0; i < kPartVecs; ++i) {
      float* sum = sums + m * kBlockN + i * kLanes;
      const Vec before = start ? zero() : load(sum);
      store(sum, add(before, mul(sum_of_chains<Dot>(chains[m] + i, kPartVecs), factor)));
    }
  }
}

// A tile of 1..ROWS rows.
template <typename Dot, int ROWS>
SGL_INLINE void multiply_rows(int64_t rows, const float* a, int64_t a_stride, const float* part,
                              int64_t pairs, const float* factors, bool start, Ahead ahead,
                              float* sums) {
  if (rows == ROWS) {
    micro_kernel<Dot, ROWS>(a, a_stride, part, pairs, factors, start, ahead, sums);
  } else if constexpr (ROWS > 1) {
    multiply_rows<Dot, ROWS - 1>(rows, a, a_stride, part, pairs, factors, start, ahead, sums);
  }
}

// sums[rows, 32] (+)= a[rows, pairs] @ panel: the batch-reduce step over one block of K. The next
// panel is made of `next_bytes` at `next`.
template <typename Dot>
SGL_INLINE void multiply_panel(const float* a, int64_t a_stride, const float* panel, int64_t pairs,
                               int64_t rows, const float* factors, bool start, const char* next,
                               int64_t next_bytes, float* sums) {
  if constexpr (Dot::kTiles) {
    multiply_tiles<Dot::kPlanes>(a, a_stride, panel, pairs, rows, start, next, sums);
  } else {
    // Tiles as tall as each other: a low one would wait for its multiply-adds.
    const int64_t tiles = div_up(rows, kTileRows<Dot>);
    // Requests that come too fast would wait for each other: they are spread over some calls.
    const int64_t share = next_bytes / min_i64(tiles * (kColumnVecs / kPartVecs), 4);
    const char* end = next + next_bytes;
    // Part by part, so that one stays in L1 while the rows pass.
    for (int v = 0; v < kColumnVecs; v += kPartVecs) {
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t m = rows * tile / tiles;
        const int64_t height = rows * (tile + 1) / tiles - m;
        const Ahead ahead{next, next < end ? share : 0};
        multiply_rows<Dot, kTileRows<Dot>>(height, a + m * a_stride, a_stride,
                                           panel + v * pairs * kLanes, pairs, factors + m, start,
                                           ahead, sums + m * kBlockN + v * kLanes);
        next += ahead.bytes;
      }
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
  static constexpr int64_t kRowFloats = Dot::kBlockK / 2 * Dot::kChains * Dot::kPlanes;

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
    const int64_t plane_stride = pairs(k) * Dot::kChains;
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
    multiply_panel<Dot>(a, pairs(k) * Dot::kChains * Dot::kPlanes, widened, pairs(k), rows, factors,
                        k.starts_segment, next,
                        pairs(k) * kPairElements * static_cast<int64_t>(sizeof(packed_t)), sums);
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
