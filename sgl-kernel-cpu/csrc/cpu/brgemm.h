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

// Makes a panel of [pairs, 32, 2] packed weights, step by step: on tile tiers between the products
// of the panel before it, because the tile unit leaves the vector units free.
template <typename Dot, typename packed_t>
class PanelMaker {
 public:
  // `stride`: elements from this panel of the packed weight to the one after it.
  SGL_MEMBER void start(const packed_t* b, int64_t pairs, int64_t padded_pairs, int64_t stride,
                        float* panel) {
    b_ = b;
    pairs_ = pairs;
    padded_pairs_ = padded_pairs;
    stride_ = stride;
    panel_ = panel;
    done_ = 0;
  }
  // Nothing more to make.
  SGL_MEMBER void stop() { done_ = pairs_; }

  SGL_MEMBER int64_t pairs_left() const { return pairs_ - done_; }
  SGL_MEMBER const char* bytes() const { return reinterpret_cast<const char*>(b_); }
  SGL_MEMBER int64_t byte_count() const {
    return pairs_left() * kPairElements * static_cast<int64_t>(sizeof(packed_t));
  }

  SGL_MEMBER void advance(int64_t count) {
    const int64_t end = min_i64(done_ + count, pairs_);
    if (is_panel()) {
      for (; done_ < end; ++done_) fetch<3>(b_ + done_ * kPairElements);
    } else if constexpr (kIsWords) {
      alignas(64) Word words[kChunk * kPairElements];
      for (; done_ < end; done_ += kChunk) {
        const int64_t chunk = min_i64(kChunk, end - done_);
        codes_to_word_chunk(b_ + done_ * kPairElements, chunk, words);
        for (int64_t p = 0; p < chunk; ++p) store_pair(words + p * kPairElements, done_ + p);
      }
      done_ = end;
    } else {
      for (; done_ < end; ++done_) {
        if constexpr (Dot::kTiles) {
          fetch<3>(b_ + done_ * kPairElements + stride_);
          fetch<2>(b_ + done_ * kPairElements + 4 * stride_);
        }
        store_pair(b_ + done_ * kPairElements, done_);
      }
    }
  }

  // The rest, and zeros up to `padded_pairs`. Returns the panel: the packed weight itself where it
  // already is one.
  SGL_MEMBER const float* finish() {
    if (is_panel()) return reinterpret_cast<const float*>(b_);
    advance(pairs_);
    for (int part = 0; part < kParts; ++part) {
      memset(panel_ + (part * padded_pairs_ + pairs_) * kPairFloats, 0,
             (padded_pairs_ - pairs_) * kPairFloats * sizeof(float));
    }
    return panel_;
  }

 private:
  static constexpr bool kIsBf16 = std::is_same<packed_t, bf16_t>::value;
  static constexpr bool kIsWords = Dot::kWords && !kIsBf16;
  static constexpr int64_t kChunk = 8;
  static constexpr int64_t kPairFloats = int64_t{kPartVecs} * kLanes;
  static constexpr int kParts = Dot::kVecs / kPartVecs;

  SGL_MEMBER bool is_panel() const {
    return kIsBf16 && !Dot::kWords && kParts == 1 && pairs_ == padded_pairs_;
  }

  template <typename weight_t>
  SGL_MEMBER void store_pair(const weight_t* weights, int64_t pair) const {
    Vec w[Dot::kVecs];
    Dot::load_weights(weights, w);
#pragma GCC unroll 16
    for (int i = 0; i < Dot::kVecs; ++i) {
      const int64_t place = (i / kPartVecs * padded_pairs_ + pair) * kPartVecs + i % kPartVecs;
      store(panel_ + place * kLanes, w[i]);
    }
  }

  // Into L1 (3) or L2 (2), as prefetch_pair does.
  template <int LEVEL>
  SGL_INLINE void fetch(const packed_t* pair) {
    for (size_t byte = 0; byte < kPairElements * sizeof(packed_t); byte += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(pair) + byte, 0, LEVEL);
    }
  }

  const packed_t* b_ = nullptr;
  int64_t pairs_ = 0;
  int64_t padded_pairs_ = 0;
  int64_t stride_ = 0;
  float* panel_ = nullptr;
  int64_t done_ = 0;
};

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

// sums[rows, 32] (+)= a[rows, pairs] @ panel: the batch-reduce step over one block of K. Meanwhile
// the next panel is fetched, or made.
template <typename Dot, typename packed_t>
SGL_INLINE void multiply_panel(const float* a, int64_t a_stride, const float* panel, int64_t pairs,
                               int64_t rows, const float* factors, bool start,
                               PanelMaker<Dot, packed_t>& next, float* sums) {
  if constexpr (Dot::kTiles) {
    multiply_tiles<Dot::kPlanes>(a, a_stride, panel, pairs, rows, start, next, sums);
  } else {
    // Tiles as tall as each other: a low one would wait for its multiply-adds.
    const int64_t tiles = div_up(rows, kTileRows<Dot>);
    // Requests that come too fast would wait for each other: they are spread over some calls.
    const int64_t share = next.byte_count() / min_i64(tiles * (kColumnVecs / kPartVecs), 4);
    Ahead ahead{next.bytes(), share};
    const char* end = next.bytes() + next.byte_count();
    // Part by part, so that one stays in L1 while the rows pass.
    for (int v = 0; v < kColumnVecs; v += kPartVecs) {
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t m = rows * tile / tiles;
        const int64_t height = rows * (tile + 1) / tiles - m;
        if (ahead.at >= end) ahead.bytes = 0;
        multiply_rows<Dot, kTileRows<Dot>>(height, a + m * a_stride, a_stride,
                                           panel + v * pairs * kLanes, pairs, factors + m, start,
                                           ahead, sums + m * kBlockN + v * kLanes);
        ahead.at += ahead.bytes;
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

  // Begins with a panel. `stride`: elements from it to the next one in the packed weight.
  SGL_MEMBER void start(const KBlock& k, int64_t block, int64_t stride, float* panel,
                        packed_t* gathered, PanelMaker<Dot, packed_t>* maker) const {
    const packed_t* b = weight_block<packed_t>(args, block * kBlockN, k.begin, k.depth, gathered);
    maker->start(b, div_up(k.depth, 2), pairs(k), stride, panel);
  }

  // Adds to the sums of one block of columns; at the end of a segment, to its total.
  SGL_MEMBER void multiply(const KBlock& k, const float* a, const float* factors, int64_t block,
                           const float* panel, PanelMaker<Dot, packed_t>& next, float* sums,
                           float* total) const {
    multiply_panel<Dot>(a, pairs(k) * Dot::kChains * Dot::kPlanes, panel, pairs(k), rows, factors,
                        k.starts_segment, next, sums);
    if (k.ends_segment) {
      alignas(64) float scale[kBlockN];
      load_scales(args, block * kBlockN, k.segment, scale);
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
  constexpr int64_t kPanelFloats = Dot::kBlockK / 2 * Dot::kVecs * kLanes;
  static_assert(2 * kPanelFloats <= kBlockN * kMaxBlockK, "two panels fit where one was asked for");
  const int64_t k_blocks = panel_block_count(args, Dot::kBlockK);
  const int64_t blocks = block_end - block_begin;
  // A few rows of mat1 are converted first, whole, and the weight is then read from end to end;
  // many rows share a block of K.
  const bool small = args.M <= kSmallM;
  const int64_t a_blocks = small ? k_blocks : 1;
  const int64_t a_rows = small ? kSmallM : kBlockM;
  float* a = Scratch::take<float>(&scratch, a_rows * a_blocks * Product::kRowFloats);
  float* factors = Scratch::take<float>(&scratch, a_rows * a_blocks);
  float* panels = Scratch::take<float>(&scratch, kBlockN * kMaxBlockK);
  float* sums = Scratch::take<float>(&scratch, kChunkBlocks * kBlockM * kBlockN);
  float* total = Scratch::take<float>(&scratch, kChunkBlocks * kBlockM * kBlockN);
  packed_t* gathered = Scratch::take<packed_t>(&scratch, 2 * kBlockN * kMaxBlockK);
  const Product product{args, static_cast<const scalar_t*>(args.mat1) + m0 * args.mat1_stride,
                        rows};

  const auto k_index = [&](int64_t step) { return small ? step % k_blocks : step / blocks; };
  const auto block_index = [&](int64_t step) { return small ? step / k_blocks : step % blocks; };
  PanelMaker<Dot, packed_t> maker;
  const auto start = [&](int64_t step) {
    const KBlock k = k_block_at<Dot>(args, k_index(step));
    const int64_t odd = step % 2;
    product.start(k, block_begin + block_index(step), small ? k.depth * kBlockN : args.K * kBlockN,
                  panels + (Dot::kTiles ? odd * kPanelFloats : 0),
                  gathered + odd * kBlockN * kMaxBlockK, &maker);
  };
  const int64_t steps = k_blocks * blocks;
  const int64_t block_stride = small ? 0 : product.padded_rows() * kBlockN;
  start(0);
  for (int64_t step = 0; step < steps; ++step) {
    const KBlock k = k_block_at<Dot>(args, k_index(step));
    const int64_t block = block_index(step);
    const int64_t place = small ? k_index(step) : 0;
    float* block_a = a + place * a_rows * Product::kRowFloats;
    float* block_factors = factors + place * a_rows;
    if (block == 0) product.convert(k, block_a, block_factors);
    const float* panel = maker.finish();
    step + 1 < steps ? start(step + 1) : maker.stop();
    float* block_total = total + block * block_stride;
    product.multiply(k, block_a, block_factors, block_begin + block, panel, maker,
                     sums + block * block_stride, block_total);
    if (k_index(step) == k_blocks - 1) {
      copy_add_stub<has_bias>(args, block_total, kBlockN, m0, rows, (block_begin + block) * kBlockN,
                              0, kBlockN);
    }
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
