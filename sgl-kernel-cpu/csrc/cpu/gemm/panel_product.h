// A panel of widened weights times a block of rows: what brgemm2 does to one block of K. Part of
// the GEMM family, compiled per tier.
#pragma once

#include "gemm/epilogue.h"
#include "gemm/micro_kernel.h"
#include "gemm/weight_block.h"

namespace sgl_kernel {
namespace SGL_TIER {

// Pairs whose panel takes 16 KiB: they stay in L1 next to the rows and their sums.
template <typename Dot>
constexpr int64_t kSmallPanelPairs = 4096 / kPanelPair<Dot>;

// Pairs that a panel takes: a block's worth for many rows, which leave L1 anyway (to go on with
// their chains in another panel would cost more), and for policies that take long to make one.
template <typename Dot>
SGL_INLINE int64_t panel_pairs(int64_t rows) {
  constexpr int64_t kManyRows = 48;
  return Dot::kWords && rows < kManyRows ? kSmallPanelPairs<Dot> : Dot::kBlockK / 2;
}

// One k pair of a panel.
template <typename Dot, typename packed_t>
SGL_INLINE void make_pair(const packed_t* packed, int64_t pair, float* panel) {
  Vec w[Dot::kVecs];
  load_pair<Dot>(packed, pair, w);
#pragma GCC unroll 16
  for (int i = 0; i < Dot::kVecs; ++i) store(panel + pair * kPanelPair<Dot> + i * kLanes, w[i]);
}

// What comes next of the packed weights [pairs, 32, 2]. On tile tiers it is made into a panel, step
// by step between the products of the panel before it, because the tile unit leaves the vector
// units free. Elsewhere it waits for its products.
template <typename Dot, typename packed_t>
class PanelMaker {
 public:
  using Ready = std::conditional_t<Dot::kTiles, float, packed_t>;

  // `panel`: room for one.
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
  SGL_MEMBER const packed_t* packed() const { return b_; }

  // Makes a few more pairs of the panel of a tile tier.
  SGL_MEMBER void advance(int64_t count) {
    const int64_t end = min_i64(done_ + count, pairs_);
    if (is_panel()) {
      for (; done_ < end; ++done_) fetch<3>(b_ + done_ * kPairElements);
    } else {
      for (; done_ < end; ++done_) {
        fetch<3>(b_ + (done_ + kFetchL1) * kPairElements);
        fetch<2>(b_ + (done_ + kFetchL2) * kPairElements);
        make_pair<Dot>(b_, done_, panel_);
      }
    }
  }

  // The rest, and zeros up to `padded_pairs`. Returns the panel; the packed weights where they
  // already are one, or none is made.
  SGL_MEMBER const Ready* finish() {
    if constexpr (Dot::kTiles) {
      if (is_panel()) return reinterpret_cast<const float*>(b_);
      advance(pairs_);
      memset(panel_ + pairs_ * kPanelPair<Dot>, 0,
             (padded_pairs_ - pairs_) * kPanelPair<Dot> * sizeof(float));
      return panel_;
    } else {
      return b_;
    }
  }

 private:
  // Pairs between the one that tile tiers decode and those that they ask for.
  static constexpr int64_t kFetchL1 = 16;
  static constexpr int64_t kFetchL2 = 128;

  SGL_MEMBER bool is_panel() const {
    return std::is_same<packed_t, bf16_t>::value && pairs_ == padded_pairs_;
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

// Asks for packed weights that the next products need: `step` bytes with each pair of the first
// GROUPS groups of vectors. A request takes the place of a load, and what comes into L1 that of the
// panel: usually the first group asks, for lines into L2. From kHurriedBytes a pair on its requests
// would queue up, so all groups ask, into L1.
template <int GROUPS>
struct PanelAhead {
  const char* from;
  int64_t step;
  int64_t pairs;
  static constexpr int kSums = kMicroSums;
  static constexpr int kUnroll = kMicroUnroll;
  template <int GROUP>
  SGL_MEMBER void work(int64_t pair) const {
    if constexpr (GROUP < GROUPS) {
      __builtin_prefetch(from + (GROUP * pairs + pair) * step, 0, GROUPS == 1 ? 2 : 3);
    }
  }
};

// Measured on AVX2, where e4m3 hurries for one tile of rows, bf16 for up to three.
constexpr int64_t kHurriedBytes = 40;

// Rows of a tile; more where one row leaves registers free.
template <typename Dot>
constexpr int kTileRows = kMicroRows * (kMicroVecs > Dot::kVecs ? kMicroVecs / Dot::kVecs : 1);

// A call, so that its constants take no registers from the products. The codes are in L2 by now: a
// few pairs ahead is early enough for L1.
static inline __attribute__((noinline)) void make_words(const e4m3_t* codes, int64_t pairs,
                                                        Word* words) {
  constexpr int64_t kFetchL1 = 7 * kPairElements;
  WordMaker maker(codes, words);
  for (int64_t p = 0; p < pairs; ++p) {
    __builtin_prefetch(codes + p * kPairElements + kFetchL1, 0, 3);
    maker.make(p);
  }
  maker.finish(pairs, pairs);
}

// What a tile of rows is multiplied by.
struct PanelStep {
  int64_t a_stride;
  int64_t pairs;
  bool start;           // chains begin at +0
  float* panel;         // where the weights are kept
  const char* ahead;    // packed weights to ask for meanwhile,
  int64_t ahead_bytes;  // so much of them with each pair
};

// A tile of rows as a call: inlined into one function, loops spill their pointers where sums take
// most of 16 registers. With 32 the call only costs.
constexpr bool kTilesAreCalls = kMicroSums < 16;
template <typename Dot, int ROWS, bool KEEP, typename weight_t, typename Ahead>
static __attribute__((noinline)) void multiply_tile_call(const float* a, const weight_t* weights,
                                                         const PanelStep& step, Ahead ahead,
                                                         float* chains, const RowSums* out) {
  micro_kernel<Dot, ROWS, KEEP>(a, step.a_stride, weights, step.pairs, step.start, chains,
                                step.panel, &ahead, out);
}

template <typename Dot, int ROWS, bool KEEP, int GROUPS, typename weight_t>
SGL_INLINE void multiply_tile(const float* a, const weight_t* weights, const PanelStep& step,
                              float* chains, const RowSums* out) {
  PanelAhead<GROUPS> ahead{step.ahead, div_up(step.ahead_bytes, GROUPS), step.pairs};
  if constexpr (kTilesAreCalls) {
    multiply_tile_call<Dot, ROWS, KEEP>(a, weights, step, ahead, chains, out);
  } else {
    micro_kernel<Dot, ROWS, KEEP>(a, step.a_stride, weights, step.pairs, step.start, chains,
                                  step.panel, &ahead, out);
  }
}

// A tile of 1..ROWS rows.
template <typename Dot, int ROWS, bool KEEP, typename weight_t>
SGL_INLINE void multiply_rows(int64_t rows, const float* a, const weight_t* weights,
                              const PanelStep& step, float* chains, const RowSums* out) {
  if (rows == ROWS) {
    constexpr int kGroups = group_count<Dot>(ROWS);
    if (kGroups > 1 && step.ahead_bytes >= kHurriedBytes) {
      multiply_tile<Dot, ROWS, KEEP, kGroups>(a, weights, step, chains, out);
    } else {
      multiply_tile<Dot, ROWS, KEEP, 1>(a, weights, step, chains, out);
    }
  } else if constexpr (ROWS > 1) {
    multiply_rows<Dot, ROWS - 1, KEEP>(rows, a, weights, step, chains, out);
  }
}

// Rows cut into tiles as tall as each other: a low one would wait for its multiply-adds. The first
// `taller` tiles have one row more.
struct RowTiles {
  int64_t count;
  int64_t height;
  int64_t taller;
  int64_t ahead_bytes;  // its share of each pair of the next weights
};
template <typename Dot, typename packed_t>
SGL_INLINE RowTiles row_tiles(int64_t rows) {
  const int64_t count = div_up(rows, kTileRows<Dot>);
  return {count, rows / count, rows % count, div_up(kPairElements * sizeof(packed_t), count)};
}

// Whether a tile of rows keeps all chains in registers.
template <typename Dot>
constexpr bool kChainsInRegisters = group_count<Dot>(kTileRows<Dot>) == 1;

// What a product of a panel does with its sums.
struct SumsFlow {
  bool start;  // they start at zero
  bool held;   // up to kHeldRows of a tile tier: tiles still hold them from the product before
  bool hold;   // and keep them for the next one
};

// A block of K: [begin, begin + depth) of one segment.
struct KBlock {
  int64_t begin;
  int64_t depth;
  int64_t segment;
  bool starts_segment;
  bool ends_segment;
  bool ends;  // K
};

// The index-th block of at most block_k elements.
SGL_INLINE KBlock k_block_at(const GemmArgs& args, int64_t block_k, int64_t index) {
  const int64_t length = segment_length(args);
  const int64_t per_segment = div_up(length, block_k);
  const int64_t segment = index / per_segment;
  const int64_t inside = (index - segment * per_segment) * block_k;
  const int64_t end = min_i64(length, args.K - segment * length);
  const int64_t depth = min_i64(block_k, end - inside);
  const int64_t begin = segment * length + inside;
  return {begin, depth, segment, inside == 0, inside + depth == end, begin + depth == args.K};
}

// Elements of a block of K. Tiles sum in the same order whatever it is, so many rows, whose sums go
// through memory with each block, take longer ones.
template <typename Dot>
SGL_INLINE int64_t block_length(int64_t rows) {
  return Dot::kTiles && rows <= kBlockM ? kMinBlockK : Dot::kBlockK;
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
  using Dot = DotFor<scalar_t, packed_t>;
  using Maker = PanelMaker<Dot, packed_t>;

  const GemmArgs& args;
  const scalar_t* mat1;  // its first row
  int64_t m0;            // which is this one of out
  int64_t rows;
  int64_t part_pairs;  // of a block of K, that one panel takes
  RowTiles tiles;
  // The first quarter of the next panel has been asked for before: what is asked for last would
  // come late. Only where it follows in memory.
  int64_t ahead_pairs;
  float* panel;   // where it is kept
  float* chains;  // [rows, kVecs vectors]

  SGL_MEMBER int64_t pairs(const KBlock& k) const {
    return round_up(div_up(k.depth, 2), Dot::kPadPairs);
  }
  // Of a converted row.
  SGL_INLINE int64_t row_floats(int64_t pairs) { return pairs * Dot::kChains * Dot::kPlanes; }

  // Rows [m0, m0 + count) of mat1 as the policy multiplies them, all rows of a part of K and then
  // those of the next, and what their sums are to be multiplied by. Rows that pad the last ones
  // become 0.
  SGL_MEMBER void convert(const KBlock& k, int64_t m0, int64_t count, float* a,
                          float* factors) const {
    if constexpr (Dot::kTiles) {
      Dot::convert_rows(mat1 + m0 * args.mat1_stride + k.begin, args.mat1_stride, count, k.depth,
                        pairs(k), a + m0 * row_floats(pairs(k)));
    } else {
      for (int64_t m = m0; m < m0 + count; ++m) {
        const scalar_t* row = mat1 + m * args.mat1_stride + k.begin;
        const float scale = scale_of_row<Dot, packed_t>(row, k.depth);
        for (int64_t begin = 0; begin < k.depth; begin += 2 * part_pairs) {
          const int64_t depth = min_i64(2 * part_pairs, k.depth - begin);
          const int64_t count = div_up(depth, 2);
          Dot::convert_row(row + begin, depth, 2 * count, scale,
                           a + rows * row_floats(begin / 2) + m * row_floats(count),
                           count * Dot::kChains);
        }
        factors[m] = factor_of_row<Dot, packed_t>(scale);
      }
    }
  }

  // Begins with a panel.
  SGL_MEMBER void start(const KBlock& k, int64_t block, float* next_panel, packed_t* gathered,
                        Maker* maker) const {
    const packed_t* b = weight_block<packed_t>(args, block * kBlockN, k.begin, k.depth, gathered);
    maker->start(b, div_up(k.depth, 2), pairs(k), next_panel);
  }

  // Adds to the sums of one block of columns; at the end of a segment, to its total; at the end of
  // K, to out.
  template <bool has_bias>
  SGL_MEMBER void multiply(const KBlock& k, const float* a, const float* factors, int64_t block,
                           const typename Maker::Ready* weights, SumsFlow flow, Maker& next,
                           float* sums, float* total) const {
    alignas(64) float scale[kBlockN];
    if (k.ends_segment) load_scales(args, block * kBlockN, k.segment, scale);
    const FinishRows<has_bias> finish{args, k, m0, block * kBlockN, scale, sums, total};
    if constexpr (Dot::kTiles) {
      multiply_tiles<Dot::kPlanes>(a, weights, pairs(k), rows, flow, next, sums, finish);
    } else {
      if (k.starts_segment && k.ends_segment && !k.ends) {
        // A segment in one block goes straight to the total, as in tinygemm.h.
        const RowSums out{factors, scale, total, k.segment == 0};
        multiply_parts(k, a, weights, next.packed(), out);
      } else {
        multiply_parts(k, a, weights, next.packed(), {factors, nullptr, sums, flow.start});
        finish(0, rows);
      }
    }
  }

 private:
  // A block of K, part by part: out[rows, 32] (+)= a[rows, pairs] @ weights[pairs, 32]. Meanwhile
  // what comes next is fetched.
  SGL_MEMBER void multiply_parts(const KBlock& k, const float* a, const packed_t* weights,
                                 const packed_t* next, const RowSums& out) const {
    const int64_t all = pairs(k);
    for (int64_t begin = 0; begin < all; begin += part_pairs) {
      const int64_t count = min_i64(part_pairs, all - begin);
      const bool last = begin + count == all;
      const packed_t* part = weights + begin * kPairElements;
      const packed_t* behind = last ? next : part + count * kPairElements;
      const PanelStep step{row_floats(count),
                           count,
                           begin == 0,
                           panel,
                           reinterpret_cast<const char*>(behind + ahead_pairs * kPairElements),
                           tiles.ahead_bytes};
      multiply_part(a + rows * row_floats(begin), part, step, last, out);
    }
  }

  // Goes on with the chains; those of the last part are added to the sums.
  SGL_MEMBER void multiply_part(const float* a, const packed_t* weights, PanelStep step, bool last,
                                RowSums out) const {
    const float* ready = panel;
    if constexpr (!Dot::kWords) ready = make_panel(weights, step.pairs);
    const RowSums* from_registers = kChainsInRegisters<Dot> && last ? &out : nullptr;
    float* tile_chains = chains;
    for (int64_t tile = 0; tile < tiles.count; ++tile) {
      const int64_t height = tiles.height + (tile < tiles.taller ? 1 : 0);
      if constexpr (Dot::kWords) {
        if (tile == 0) multiply_words(height, a, weights, step, from_registers);
      }
      if (!Dot::kWords || tile > 0) {
        multiply_rows<Dot, kTileRows<Dot>, false>(height, a, ready, step, tile_chains,
                                                  from_registers);
      }
      if (!kChainsInRegisters<Dot> && last) {
        for (int64_t m = 0; m < height; ++m) {
          Vec row[Dot::kVecs];
          load_pair<Dot>(tile_chains, m, row);
          add_row_sums<Dot>(row, out, m);
        }
      }
      out.factors += height;
      out.sums += height * kBlockN;
      // A block in one part needs no chain for longer.
      if (!(step.start && last)) tile_chains += height * kPanelPair<Dot>;
      a += height * step.a_stride;
      step.ahead += step.pairs * step.ahead_bytes;
    }
  }

  // Packed bf16 pairs are a panel.
  SGL_MEMBER const float* make_panel(const packed_t* weights, int64_t count) const {
    if constexpr (std::is_same<packed_t, bf16_t>::value) {
      return reinterpret_cast<const float*>(weights);
    } else {
      for (int64_t p = 0; p < count; ++p) make_pair<Dot>(weights, p, panel);
      return panel;
    }
  }

  template <typename weight_t>
  SGL_MEMBER void multiply_first(int64_t height, const float* a, const weight_t* weights,
                                 const PanelStep& step, const RowSums* out) const {
    if (tiles.count == 1) {
      multiply_rows<Dot, kTileRows<Dot>, false>(height, a, weights, step, chains, out);
    } else {
      multiply_rows<Dot, kTileRows<Dot>, true>(height, a, weights, step, chains, out);
    }
  }

  // Where a weight is an instruction away from its f32, the first tile of rows makes the panel for
  // the others, if there are any, on its way: from e4m3 codes as words, a few pairs after the
  // other, so that they stay in L1.
  SGL_MEMBER void multiply_words(int64_t height, const float* a, const packed_t* weights,
                                 PanelStep step, const RowSums* out) const {
    constexpr int64_t kMost = kSmallPanelPairs<Dot>;
    for (int64_t left = step.pairs; left > 0; left -= kMost) {
      step.pairs = min_i64(left, kMost);
      const RowSums* part_out = left <= kMost ? out : nullptr;
      if constexpr (std::is_same<packed_t, e4m3_t>::value) {
        alignas(64) Word words[kMost * kPairElements];
        make_words(weights, step.pairs, words);
        multiply_first(height, a, words, step, part_out);
      } else {
        multiply_first(height, a, weights, step, part_out);
      }
      a += kMost * Dot::kChains;
      weights += kMost * kPairElements;
      step.start = false;
      step.panel += kMost * kPanelPair<Dot>;
      step.ahead += kMost * step.ahead_bytes;
    }
  }
};

}  // namespace SGL_TIER
}  // namespace sgl_kernel
