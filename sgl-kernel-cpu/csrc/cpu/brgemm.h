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
  SGL_MEMBER void start(const packed_t* b, int64_t pairs, int64_t padded_pairs, float* panel) {
    b_ = b;
    pairs_ = pairs;
    padded_pairs_ = padded_pairs;
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
          fetch<3>(b_ + (done_ + kFetchL1) * kPairElements);
          fetch<2>(b_ + (done_ + kFetchL2) * kPairElements);
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
  // Pairs between the one that tile tiers decode and those that they ask for.
  static constexpr int64_t kFetchL1 = 16;
  static constexpr int64_t kFetchL2 = 128;
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

// What a product of a panel does with its sums.
struct SumsFlow {
  bool start;  // they start at zero
  bool held;   // up to kHeldRows of a tile tier: tiles still hold them from the product before
  bool hold;   // and keep them for the next one
};

// sums[rows, 32] (+)= a[rows, pairs] @ panel: the batch-reduce step over one block of K. Meanwhile
// the next panel is fetched, or made. Calls finish(m, count) for rows whose sums are complete.
template <typename Dot, typename packed_t, typename Finish>
SGL_INLINE void multiply_panel(const float* a, int64_t a_stride, const float* panel, int64_t pairs,
                               int64_t rows, const float* factors, SumsFlow flow,
                               PanelMaker<Dot, packed_t>& next, float* sums, const Finish& finish) {
  if constexpr (Dot::kTiles) {
    multiply_tiles<Dot::kPlanes>(a, panel, pairs, rows, flow, next, sums, finish);
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
                                           panel + v * pairs * kLanes, pairs, factors + m,
                                           flow.start, ahead, sums + m * kBlockN + v * kLanes);
        ahead.at += ahead.bytes;
      }
    }
    finish(0, rows);
  }
}

// A block of K: [begin, begin + depth) of one segment.
struct KBlock {
  int64_t begin;
  int64_t depth;
  int64_t segment;
  bool starts_segment;
  bool ends_segment;
  bool ends;  // K
};

template <typename Dot>
SGL_INLINE KBlock k_block_at(const GemmArgs& args, int64_t index) {
  const int64_t length = segment_length(args);
  const int64_t per_segment = div_up(length, Dot::kBlockK);
  const int64_t segment = index / per_segment;
  const int64_t inside = (index - segment * per_segment) * Dot::kBlockK;
  const int64_t end = min_i64(length, args.K - segment * length);
  const int64_t depth = min_i64(Dot::kBlockK, end - inside);
  const int64_t begin = segment * length + inside;
  return {begin, depth, segment, inside == 0, inside + depth == end, begin + depth == args.K};
}

// What follows a product for rows whose sums are complete.
template <bool has_bias>
struct FinishRows {
  const GemmArgs& args;
  const KBlock& k;
  int64_t m0;  // the place in out
  int64_t n0;
  const float* scale;
  const float* sums;
  float* total;

  SGL_MEMBER void operator()(int64_t m, int64_t count) const {
    if (!k.ends_segment) return;
    const bool first = k.segment == 0;
    const float* of = sums + m * kBlockN;
    float* before = total + m * kBlockN;
    if (k.ends) {
      copy_add_stub<has_bias>(args, {of, scale, first ? nullptr : before}, m0 + m, count, n0);
    } else {
      copy_mul_add_stub(of, scale, first, count, before);
    }
  }
};

constexpr int64_t kConvertRows = 16;  // a row of tiles

// What brgemm2 does to one block of K; the order of the blocks is its own.
template <typename scalar_t, typename packed_t>
struct PanelProduct {
  using Dot = DotFor<scalar_t>;
  static constexpr int64_t kRowFloats = Dot::kBlockK / 2 * Dot::kChains * Dot::kPlanes;

  const GemmArgs& args;
  const scalar_t* mat1;  // its first row
  int64_t m0;            // which is this one of out
  int64_t rows;

  SGL_MEMBER int64_t padded_rows() const { return round_up(rows, Dot::kPadRows); }
  SGL_MEMBER int64_t pairs(const KBlock& k) const {
    return round_up(div_up(k.depth, 2), Dot::kPadPairs);
  }

  // Rows [m0, m0 + count) of mat1 as the policy multiplies them, and what their sums are to be
  // multiplied by. Rows that pad the last ones become 0.
  SGL_MEMBER void convert(const KBlock& k, int64_t m0, int64_t count, float* a,
                          float* factors) const {
    const int64_t plane_stride = pairs(k) * Dot::kChains;
    const int64_t a_stride = plane_stride * Dot::kPlanes;
    if constexpr (Dot::kTiles) {
      Dot::convert_rows(mat1 + m0 * args.mat1_stride + k.begin, args.mat1_stride, count, k.depth,
                        pairs(k), a + m0 * a_stride);
    } else {
      for (int64_t m = m0; m < m0 + count; ++m) {
        const scalar_t* row = mat1 + m * args.mat1_stride + k.begin;
        const float scale = scale_of_row<Dot, packed_t>(row, k.depth);
        Dot::convert_row(row, k.depth, pairs(k) * 2, scale, a + m * a_stride, plane_stride);
        factors[m] = factor_of_row<Dot, packed_t>(scale);
      }
    }
  }

  // Begins with a panel.
  SGL_MEMBER void start(const KBlock& k, int64_t block, float* panel, packed_t* gathered,
                        PanelMaker<Dot, packed_t>* maker) const {
    const packed_t* b = weight_block<packed_t>(args, block * kBlockN, k.begin, k.depth, gathered);
    maker->start(b, div_up(k.depth, 2), pairs(k), panel);
  }

  // Adds to the sums of one block of columns; at the end of a segment, to its total; at the end of
  // K, to out.
  template <bool has_bias>
  SGL_MEMBER void multiply(const KBlock& k, const float* a, const float* factors, int64_t block,
                           const float* panel, SumsFlow flow, PanelMaker<Dot, packed_t>& next,
                           float* sums, float* total) const {
    alignas(64) float scale[kBlockN];
    if (k.ends_segment) load_scales(args, block * kBlockN, k.segment, scale);
    const FinishRows<has_bias> finish{args, k, m0, block * kBlockN, scale, sums, total};
    multiply_panel<Dot>(a, pairs(k) * Dot::kChains * Dot::kPlanes, panel, pairs(k), rows, factors,
                        flow, next, sums, finish);
  }
};

// Where brgemm2 stands: K goes by in runs of blocks that are converted at once, all column blocks
// pass over a run, and each takes its blocks of K in turn.
struct PanelPlace {
  int64_t k_blocks;  // in all
  int64_t columns;
  int64_t longest_run;
  int64_t run_begin = 0;
  int64_t column = 0;
  int64_t inside = 0;

  SGL_MEMBER int64_t run() const { return min_i64(longest_run, k_blocks - run_begin); }
  SGL_MEMBER bool begins_run() const { return inside == 0; }
  SGL_MEMBER bool ends_run() const { return inside + 1 == run(); }
  SGL_MEMBER bool done() const { return run_begin >= k_blocks; }
  SGL_MEMBER void step() {
    if (++inside < run()) return;
    inside = 0;
    if (++column < columns) return;
    column = 0;
    run_begin += longest_run;
  }
};

// Rows [m0, m0 + rows) times column blocks [block_begin, block_end).
template <typename scalar_t, typename packed_t, bool has_bias>
static void brgemm2(const GemmArgs& args, int64_t m0, int64_t rows, int64_t block_begin,
                    int64_t block_end, Scratch scratch) {
  using Product = PanelProduct<scalar_t, packed_t>;
  using Dot = typename Product::Dot;
  constexpr int64_t kPanelFloats = Dot::kBlockK / 2 * Dot::kVecs * kLanes;
  static_assert(2 * kPanelFloats <= kBlockN * kMaxBlockK, "two panels fit where one was asked for");
  const Product product{args, static_cast<const scalar_t*>(args.mat1) + m0 * args.mat1_stride, m0,
                        rows};
  const int64_t k_blocks = panel_block_count(args, Dot::kBlockK);
  // A few rows of mat1 are converted first, whole, and the weight is then read from end to end; of
  // many rows, as much as a cache holds.
  const int64_t block_floats = product.padded_rows() * Product::kRowFloats;
  const int64_t fitting = Dot::kTiles ? kTileRunFloats / block_floats : 1;
  const int64_t run = args.M <= kSmallM ? k_blocks : min_i64(k_blocks, max_i64(1, fitting));
  const int64_t chunk = Dot::kTiles ? kTileChunkBlocks : kChunkBlocks;
  // Sums and totals wait for the next run, those of all column blocks.
  const bool waiting = run < k_blocks;
  if (waiting && block_end - block_begin > chunk) {
    for (int64_t block = block_begin; block < block_end; block += chunk) {
      brgemm2<scalar_t, packed_t, has_bias>(args, m0, rows, block,
                                            min_i64(block + chunk, block_end), scratch);
    }
    return;
  }
  const int64_t sums_floats = product.padded_rows() * kBlockN;
  const int64_t all_sums = (waiting ? block_end - block_begin : 1) * sums_floats;
  float* a = Scratch::take<float>(&scratch, run * block_floats);
  float* factors = Scratch::take<float>(&scratch, Dot::kTiles ? 0 : run * rows);
  float* panels = Scratch::take<float>(&scratch, kBlockN * kMaxBlockK);
  float* sums = Scratch::take<float>(&scratch, all_sums);
  float* total = Scratch::take<float>(&scratch, all_sums);
  packed_t* gathered = Scratch::take<packed_t>(&scratch, 2 * kBlockN * kMaxBlockK);

  PanelPlace now{k_blocks, block_end - block_begin, run};
  PanelPlace next = now;
  PanelMaker<Dot, packed_t> maker;
  int64_t odd = 0;
  const auto start_next = [&] {
    product.start(k_block_at<Dot>(args, next.run_begin + next.inside), block_begin + next.column,
                  panels + (Dot::kTiles ? odd * kPanelFloats : 0),
                  gathered + odd * kBlockN * kMaxBlockK, &maker);
    odd = 1 - odd;
    next.step();
  };
  start_next();
  for (; !now.done(); now.step()) {
    if (now.column == 0 && now.begins_run()) {
      for (int64_t m = 0; m < rows; m += kConvertRows) {
        for (int64_t i = 0; i < now.run(); ++i) {
          product.convert(k_block_at<Dot>(args, now.run_begin + i), m,
                          min_i64(kConvertRows, rows - m), a + i * block_floats,
                          factors + i * rows);
        }
      }
    }
    const KBlock k = k_block_at<Dot>(args, now.run_begin + now.inside);
    const float* panel = maker.finish();
    next.done() ? maker.stop() : start_next();
    const int64_t place = waiting ? now.column * sums_floats : 0;
    const SumsFlow flow{k.starts_segment, !now.begins_run(), !k.ends_segment && !now.ends_run()};
    product.template multiply<has_bias>(k, a + now.inside * block_floats,
                                        factors + now.inside * rows, block_begin + now.column,
                                        panel, flow, maker, sums + place, total + place);
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
