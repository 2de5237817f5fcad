// Many rows: a panel of weights is widened once and multiplied by a block of rows. Part of the GEMM
// family, compiled per tier.
#pragma once

#include "gemm/gemm_scratch.h"
#include "gemm/panel_product.h"

namespace sgl_kernel {
namespace SGL_TIER {

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
                    int64_t block_end, const PanelScratch& scratch) {
  using Product = PanelProduct<scalar_t, packed_t>;
  using Dot = typename Product::Dot;
  static_assert(kMinKC <= Dot::kKC && Dot::kKC <= kMaxKC, "scratch is laid out for these");
  constexpr int64_t kPanelFloats = Dot::kKC / 2 * kPanelPair<Dot>;
  static_assert(2 * kPanelFloats <= kBlockN * kMaxKC, "two panels fit where one was asked for");
  const int64_t kc = block_length<Dot>(rows);
  const int64_t k_blocks = k_block_count(args, kc);
  // A few rows of mat1 are converted first, whole unless K is very long, and the weight is then
  // read from end to end; of many rows, as much as a cache holds.
  const int64_t padded_rows = round_up(rows, Dot::kPadRows);
  const int64_t block_floats = padded_rows * Product::row_floats(kc / 2);
  const int64_t most = args.M <= kSmallM ? kSmallRunFloats : Dot::kTiles ? kTileRunFloats : 0;
  const int64_t run = min_i64(k_blocks, max_i64(1, most / block_floats));
  const int64_t nc_blocks = Dot::kTiles ? kTileNCBlocks : kNCBlocks;
  // Sums and totals wait for the next run, those of all column blocks.
  const bool waiting = run < k_blocks;
  if (waiting && block_end - block_begin > nc_blocks) {
    for (int64_t block = block_begin; block < block_end; block += nc_blocks) {
      brgemm2<scalar_t, packed_t, has_bias>(args, m0, rows, block,
                                            min_i64(block + nc_blocks, block_end), scratch);
    }
    return;
  }
  const int64_t sums_floats = padded_rows * kBlockN;
  packed_t* gathered = static_cast<packed_t*>(scratch.gathered);
  const Product product(args, m0, rows, !waiting, scratch.panels, scratch.acc);

  PanelPlace now{k_blocks, block_end - block_begin, run};
  PanelPlace next = now;
  typename Product::Maker maker;
  int64_t odd = 0;
  const auto start_next = [&] {
    product.start(k_block_at(args, kc, next.run_begin + next.inside),
                  (block_begin + next.column) * kBlockN,
                  scratch.panels + (Dot::kTiles ? odd * kPanelFloats : 0),
                  gathered + odd * kBlockN * kMaxKC, &maker);
    odd = 1 - odd;
    next.step();
  };
  start_next();
  for (; !now.done(); now.step()) {
    if (now.column == 0 && now.begins_run()) {
      for (int64_t m = 0; m < rows; m += kConvertRows) {
        for (int64_t i = 0; i < now.run(); ++i) {
          product.convert(k_block_at(args, kc, now.run_begin + i), m,
                          min_i64(kConvertRows, rows - m), scratch.a + i * block_floats,
                          scratch.factors + i * rows);
        }
      }
    }
    const KBlock k = k_block_at(args, kc, now.run_begin + now.inside);
    const auto* weights = maker.finish();
    next.done() ? maker.stop() : start_next();
    const int64_t place = waiting ? now.column * sums_floats : 0;
    const PanelOperands operands{
        k,
        scratch.a + now.inside * block_floats,
        scratch.factors + now.inside * rows,
        (block_begin + now.column) * kBlockN,
        {k.starts_segment, !now.begins_run(), !k.ends_segment && !now.ends_run()},
        scratch.sums + place,
        scratch.total + place};
    product.template multiply<has_bias>(operands, weights, maker);
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
