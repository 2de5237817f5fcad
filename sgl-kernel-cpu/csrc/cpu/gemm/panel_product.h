// A panel of weights times a block of rows: what brgemm2 does to one block of K. Part of the GEMM
// family, compiled per tier.
#pragma once

#include "gemm/blocking.h"
#include "gemm/epilogue.h"
#include "gemm/panel.h"
#include "gemm/row_tiles.h"
#include "gemm/weight_block.h"

namespace sgl_kernel {
namespace SGL_TIER {

// KC for a block of rows. Tiles sum in the same order whatever it is, so many rows, whose sums go
// through memory with each block, take longer ones.
template <typename Dot>
SGL_INLINE int64_t block_length(int64_t rows) {
  return Dot::kTiles && rows <= kMC ? kMinKC : Dot::kKC;
}

// One block of K times one block of columns: what is multiplied, and where the sums go.
struct PanelOperands {
  const KBlock& k;
  const float* a;        // its rows as PanelProduct::convert leaves them
  const float* factors;  // [rows]
  int64_t n0;            // the first column
  SumsFlow flow;
  float* sums;   // [rows, 32] of the segment
  float* total;  // [rows, 32] of the segments before it
};

// What follows a product for rows whose sums are complete.
template <bool has_bias>
struct FinishRows {
  const GemmArgs& args;
  const PanelOperands& of;
  int64_t m0;  // the first row's place in out
  const float* scale;

  SGL_MEMBER void operator()(int64_t m, int64_t count) const {
    if (!of.k.ends_segment) return;
    const bool first = of.k.segment == 0;
    const float* sums = of.sums + m * kBlockN;
    float* before = of.total + m * kBlockN;
    if (of.k.ends) {
      const LastSegment last{sums, scale, first ? nullptr : before};
      copy_add_stub<has_bias>(args, last, m0 + m, count, of.n0);
    } else {
      copy_mul_add_stub(sums, scale, first, count, before);
    }
  }
};

constexpr int64_t kConvertRows = 16;  // rows that are converted at once, a row of tiles

// What brgemm2 does to one block of K; the order of the blocks is its own.
template <typename scalar_t, typename packed_t>
class PanelProduct {
 public:
  using Dot = DotFor<scalar_t, packed_t>;
  using Maker = PanelMaker<Dot, packed_t>;

  // Rows [m0, m0 + rows). `in_order`: column blocks are read one after the other as they lie in
  // memory. `panel` and `acc` ([rows, kVecs vectors]) are for tiers without tiles.
  SGL_MEMBER PanelProduct(const GemmArgs& args, int64_t m0, int64_t rows, bool in_order,
                          float* panel, float* acc)
      : args_(args),
        mat1_(static_cast<const scalar_t*>(args.mat1) + m0 * args.mat1_stride),
        m0_(m0),
        rows_(rows),
        part_pairs_(panel_pairs<Dot>(rows)),
        tiles_(row_tiles<Dot, packed_t>(rows)),
        prefetched_pairs_(in_order ? part_pairs_ / 4 : 0),
        panel_(panel),
        acc_(acc) {}

  // Floats of a converted row.
  SGL_INLINE int64_t row_floats(int64_t pairs) { return pairs * Dot::kAccumulators * Dot::kSplits; }

  // Rows [m, m + count) as the policy multiplies them, all rows of a part of K and then those of
  // the next, and the factors of their sums. Rows that pad the last ones become 0.
  SGL_MEMBER void convert(const KBlock& k, int64_t m, int64_t count, float* a,
                          float* factors) const {
    if constexpr (Dot::kTiles) {
      Dot::convert_rows(mat1_ + m * args_.mat1_stride + k.begin, args_.mat1_stride, count, k.depth,
                        pairs(k), a + m * row_floats(pairs(k)));
    } else {
      for (const int64_t end = m + count; m < end; ++m) {
        const scalar_t* row = mat1_ + m * args_.mat1_stride + k.begin;
        const float scale = scale_of_row<Dot, packed_t>(row, k.depth);
        for (int64_t begin = 0; begin < k.depth; begin += 2 * part_pairs_) {
          const int64_t depth = min_i64(2 * part_pairs_, k.depth - begin);
          const int64_t part = div_up(depth, 2);
          Dot::convert_row(row + begin, depth, 2 * part, scale,
                           a + rows_ * row_floats(begin / 2) + m * row_floats(part),
                           part * Dot::kAccumulators);
        }
        factors[m] = factor_of_row<Dot, packed_t>(scale);
      }
    }
  }

  // Begins with the panel of a block of columns.
  SGL_MEMBER void start(const KBlock& k, int64_t n0, float* next_panel, packed_t* gathered,
                        Maker* maker) const {
    const packed_t* b = weight_block<packed_t>(args_, {n0, k.begin, k.depth}, gathered);
    maker->start(b, div_up(k.depth, 2), pairs(k), next_panel);
  }

  // Adds to the sums of one block of columns; at the end of a segment, to its total; at the end of
  // K, to out. `weights` come from a maker's finish(), `next` makes those that follow.
  template <bool has_bias>
  SGL_MEMBER void multiply(const PanelOperands& of, const typename Maker::Ready* weights,
                           Maker& next) const {
    alignas(64) float scale[kBlockN];
    if (of.k.ends_segment) load_scales(args_, of.n0, of.k.segment, scale);
    const FinishRows<has_bias> finish{args_, of, m0_, scale};
    if constexpr (Dot::kTiles) {
      const TileProduct product{of.a, weights, pairs(of.k), rows_, of.flow, of.sums};
      Dot::multiply(product, next, finish);
    } else if (of.k.starts_segment && of.k.ends_segment && !of.k.ends) {
      // A segment in one block goes straight to the total, as in tinygemm.h.
      const RowSums out{of.factors, scale, of.total, of.k.segment == 0};
      multiply_parts(of, weights, next.packed(), out);
    } else {
      const RowSums out{of.factors, nullptr, of.sums, of.flow.start};
      multiply_parts(of, weights, next.packed(), out);
      finish(0, rows_);
    }
  }

 private:
  SGL_MEMBER int64_t pairs(const KBlock& k) const {
    return round_up(div_up(k.depth, 2), Dot::kPadPairs);
  }

  // A block of K, part by part: out[rows, 32] (+)= a[rows, pairs] @ weights[pairs, 32]. Meanwhile
  // what comes next is prefetched.
  SGL_MEMBER void multiply_parts(const PanelOperands& of, const packed_t* weights,
                                 const packed_t* next, const RowSums& out) const {
    const int64_t all = pairs(of.k);
    for (int64_t begin = 0; begin < all; begin += part_pairs_) {
      const int64_t count = min_i64(part_pairs_, all - begin);
      const bool last = begin + count == all;
      const packed_t* part = weights + begin * kPairElements;
      const packed_t* behind = last ? next : part + count * kPairElements;
      const PanelStep step{
          row_floats(count),
          count,
          begin == 0,
          panel_,
          reinterpret_cast<const char*>(behind + prefetched_pairs_ * kPairElements),
          tiles_.prefetch_bytes};
      multiply_part(of.a + rows_ * row_floats(begin), part, step, last, out);
    }
  }

  // Goes on with the accumulators; those of the last part are added to the sums.
  SGL_MEMBER void multiply_part(const float* a, const packed_t* weights, PanelStep step, bool last,
                                RowSums out) const {
    const float* ready = panel_;
    if constexpr (!Dot::kTakesFp16Bits) ready = make_panel(weights, step.pairs);
    const RowSums* from_registers = kAccumulatorsInRegisters<Dot> && last ? &out : nullptr;
    float* tile_acc = acc_;
    for (int64_t tile = 0; tile < tiles_.count; ++tile) {
      const int64_t height = tiles_.height + (tile < tiles_.taller ? 1 : 0);
      if constexpr (Dot::kTakesFp16Bits) {
        if (tile == 0) multiply_and_widen(height, a, weights, step, from_registers);
      }
      if (!Dot::kTakesFp16Bits || tile > 0) {
        multiply_rows<Dot, kTileRows<Dot>, false>(height, a, ready, step, tile_acc, from_registers);
      }
      if (!kAccumulatorsInRegisters<Dot> && last) {
        for (int64_t m = 0; m < height; ++m) {
          Vec row[Dot::kVecs];
          load_pair<Dot>(tile_acc, m, row);
          add_row_sums<Dot>(row, out, m);
        }
      }
      out.factors += height;
      out.sums += height * kBlockN;
      // A block in one part needs no accumulator for longer.
      if (!(step.start && last)) tile_acc += height * kPanelPair<Dot>;
      a += height * step.a_stride;
      step.prefetched += step.pairs * step.prefetch_bytes;
    }
  }

  // Packed bf16 pairs are a panel already.
  SGL_MEMBER const float* make_panel(const packed_t* weights, int64_t count) const {
    if constexpr (std::is_same<packed_t, bf16_t>::value) {
      return reinterpret_cast<const float*>(weights);
    } else {
      for (int64_t p = 0; p < count; ++p) make_pair<Dot>(weights, p, panel_);
      return panel_;
    }
  }

  template <typename weight_t>
  SGL_MEMBER void multiply_first(int64_t height, const float* a, const weight_t* weights,
                                 const PanelStep& step, const RowSums* out) const {
    if (tiles_.count == 1) {
      multiply_rows<Dot, kTileRows<Dot>, false>(height, a, weights, step, acc_, out);
    } else {
      multiply_rows<Dot, kTileRows<Dot>, true>(height, a, weights, step, acc_, out);
    }
  }

  // Where a weight is an instruction away from its f32, the first tile of rows makes the panel for
  // the others, if there are any, on its way. e4m3 codes become fp16 bits first, so many that these
  // (at most 8 KiB) and their panel (16 KiB) stay in L1.
  SGL_MEMBER void multiply_and_widen(int64_t height, const float* a, const packed_t* weights,
                                     PanelStep step, const RowSums* out) const {
    constexpr int64_t kMost = kSmallPanelPairs<Dot>;
    for (int64_t left = step.pairs; left > 0; left -= kMost) {
      step.pairs = min_i64(left, kMost);
      const RowSums* part_out = left <= kMost ? out : nullptr;
      if constexpr (std::is_same<packed_t, e4m3_t>::value) {
        alignas(64) E4m3AsFp16 widened[kMost * kPairElements];
        widen_e4m3(weights, step.pairs, widened);
        multiply_first(height, a, widened, step, part_out);
      } else {
        multiply_first(height, a, weights, step, part_out);
      }
      a += kMost * Dot::kAccumulators;
      weights += kMost * kPairElements;
      step.start = false;
      step.panel += kMost * kPanelPair<Dot>;
      step.prefetched += kMost * step.prefetch_bytes;
    }
  }

  const GemmArgs& args_;
  const scalar_t* mat1_;  // its first row
  int64_t m0_;            // which is this one of out
  int64_t rows_;
  int64_t part_pairs_;  // k pairs of a block of K that one panel takes
  RowTiles tiles_;
  // The first quarter of the next panel has been prefetched before: what is prefetched last would
  // come late. Only where it follows in memory.
  int64_t prefetched_pairs_;
  float* panel_;  // where it is kept
  float* acc_;    // [rows, kVecs vectors]
};

}  // namespace SGL_TIER
}  // namespace sgl_kernel
