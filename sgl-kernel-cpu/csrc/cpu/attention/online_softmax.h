// A block of keys times the query tiles of a task: scores, softmax weights, weighted values, and
// how they join what the blocks before have left (online softmax). What extend_attention.cpp and
// decode_attention.cpp share. Compiled once per tier.
#pragma once

#include "attention/query_rows.h"

namespace sgl_kernel {
namespace SGL_TIER {

// The keys of a block that a row sees, counted inside the block; begin and end rise with the row.
SGL_INLINE KeyRange visible_keys(const QueryRows& rows, KeyBlock keys, int64_t r) {
  const int64_t end = min_i64(keys.count, max_i64(0, rows.end_keys[r] - keys.begin));
  return {min_i64(end, max_i64(0, rows.first_keys[r] - keys.begin)), end};
}

// cap * tanh(x / cap), through tanh(y) = 1 - 2 / (e^2y + 1).
SGL_INLINE Vec cap_scores(Vec x, Vec cap, Vec double_inverse_cap) {
  const Vec e = exp(mul(x, double_inverse_cap));
  return mul(cap, sub(set1(1.f), div(set1(2.f), add(e, set1(1.f)))));
}

// What is subtracted from scores before exp: their maximum, or 0 where that is minus infinity. With
// nothing above minus infinity all weights are to be 0, not NaN.
SGL_INLINE Vec softmax_shift(Vec row_max) {
  return select_less(row_max, set1(bits_float(0xFF7FFFFFu)), zero(), row_max);
}

// A block's query rows [first, first + count), count <= kQueryTile: what they see of it, and the
// results besides the weighted values.
struct QueryTile {
  int64_t first;
  int64_t count;
  bool unmasked;  // all rows see all keys
  alignas(64) int32_t begin[kQueryTile];
  alignas(64) int32_t end[kQueryTile];
  alignas(64) float row_max[kQueryTile];
  alignas(64) float row_sum[kQueryTile];

  SGL_MEMBER int64_t vecs() const { return div_up(count, kLanes); }

  // False if none of them sees any key.
  SGL_MEMBER bool find_visible(const QueryRows& rows, KeyBlock keys) {
    const KeyRange top = visible_keys(rows, keys, first);
    const KeyRange bottom = visible_keys(rows, keys, first + count - 1);
    if (bottom.end == 0 || top.begin == keys.count) return false;
    unmasked = bottom.begin == 0 && top.end == kKeyBlock;
    if (unmasked) return true;
    for (int64_t r = 0; r < kQueryTile; ++r) {
      const KeyRange visible = r < count ? visible_keys(rows, keys, first + r) : KeyRange{0, 0};
      begin[r] = static_cast<int32_t>(visible.begin);
      end[r] = static_cast<int32_t>(visible.end);
    }
    return true;
  }
};

// Caps the scores of keys [from, to). Those that a row does not see become minus infinity.
static inline void mask_scores(const AttentionArgs& args, int64_t from, int64_t to, float* scores,
                               QueryTile* tile) {
  const Vec cap = set1(args.logit_cap), double_inverse_cap = set1(2.f / args.logit_cap);
  const Vec none = set1(minus_infinity());
  float begins[kQueryTile], ends[kQueryTile];
  for (int64_t r = 0; r < kQueryTile; ++r) {
    begins[r] = tile->unmasked ? 0.f : static_cast<float>(tile->begin[r]);
    ends[r] = tile->unmasked ? static_cast<float>(kKeyBlock) : static_cast<float>(tile->end[r]);
  }
  for (int64_t v = 0; v < tile->vecs(); ++v) {
    const Vec begin = load(begins + v * kLanes), end = load(ends + v * kLanes);
    Vec largest = none;
    for (int64_t k = from; k < to; ++k) {
      float* p = scores + k * kQueryTile + v * kLanes;
      const Vec key = set1(static_cast<float>(k));
      Vec x = load(p);
      if (args.logit_cap > 0) x = cap_scores(x, cap, double_inverse_cap);
      x = select_less(key, begin, none, select_less(key, end, x, none));
      store(p, x);
      largest = max(largest, x);
    }
    store(tile->row_max + v * kLanes, largest);
  }
}

// Scores of keys [from, to), multiples of kLanes, to weights e^(score - row_max) and their sums. A
// row has an accumulator for each key modulo kLanes, and these are then added as reduce_add adds
// lanes: so the sum has the bits of softmax_row, whose keys stand in the lanes.
static inline void softmax_scores(int64_t from, int64_t to, float* scores, QueryTile* tile) {
  for (int64_t v = 0; v < tile->vecs(); ++v) {
    const Vec shift = softmax_shift(load(tile->row_max + v * kLanes));
    Vec sums[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      Vec sum = zero();
      for (int64_t k = from + i; k < to; k += kLanes) {
        float* p = scores + k * kQueryTile + v * kLanes;
        const Vec e = exp_of_negative(sub(load(p), shift));
        store(p, e);
        sum = add(sum, e);
      }
      sums[i] = sum;
    }
    store(tile->row_sum + v * kLanes, add_lanes(sums));
  }
}

// Joins a block's maxima and sums to the running ones; gives the factors by which accumulators and
// the block's values are multiplied.
static inline void update_running(const QueryTile& tile, const QueryRows& rows,
                                  float* accumulator_scale, float* block_scale) {
  for (int64_t v = 0; v < tile.vecs(); ++v) {
    float* const running_max = rows.running_max + tile.first + v * kLanes;
    float* const running_sum = rows.running_sum + tile.first + v * kLanes;
    const Vec before = load(running_max), row_max = load(tile.row_max + v * kLanes);
    const Vec m = select_less(before, row_max, row_max, before);
    const Vec shift = softmax_shift(m);
    const Vec kept = exp_of_negative(sub(before, shift));
    const Vec taken = exp_of_negative(sub(row_max, shift));
    store(accumulator_scale + v * kLanes, kept);
    store(block_scale + v * kLanes, taken);
    store(running_sum, fma(load(running_sum), kept, mul(load(tile.row_sum + v * kLanes), taken)));
    store(running_max, m);
  }
}

// The tile's weights times the block's values, into rows of `out`, padded_v floats apart.
static inline void multiply_values(const QueryRows& rows, const QueryTile& tile, Rescale rescale,
                                   float* out, int64_t padded_v) {
  for (int64_t r = 0; r < tile.count; r += kPvRows) {
    const int64_t count = min_i64(kPvRows, tile.count - r);
    const Rescale of_rows = rescale.accumulator_scale == nullptr
                                ? rescale
                                : Rescale{rescale.accumulator_scale + r, rescale.block_scale + r};
    for (int64_t c = 0; c < padded_v; c += kTileCols) {
      const PvOperands operands = {rows.scores + r, rows.v_panel + c * kKeyBlock, of_rows,
                                   out + r * padded_v + c, padded_v};
      if (tile.unmasked ||
          (tile.begin[r] == tile.begin[r + count - 1] && tile.end[r] == tile.end[r + count - 1])) {
        const int64_t begin = tile.unmasked ? 0 : tile.begin[r];
        const int64_t end = tile.unmasked ? kKeyBlock : tile.end[r];
        if (begin == end && of_rows.accumulator_scale != nullptr) continue;
        pv_product<kPvRows>(count, operands, begin, end);
      } else {
        pv_masked_tile(operands, tile.begin + r, tile.end + r, count);
      }
    }
  }
}

// A block of keys, whose panels are packed, to the softmax weights of a query tile, its row maxima
// and row sums.
static inline void qk_softmax(const AttentionArgs& args, const QueryRows& rows, QueryTile* tile) {
  int64_t from = 0, to = kKeyBlock;
  if (!tile->unmasked) {
    from = tile->begin[0];
    to = tile->end[tile->count - 1];
  }
  for (int64_t v = 0; v < tile->vecs(); ++v) {
    store(tile->row_max + v * kLanes, set1(minus_infinity()));
  }
  for (int64_t column = 0; column < tile->count; column += kScoreCols) {
    const QkOperands operands = {rows.k_panel, args.padded_k(),
                                 rows.q + (tile->first + column) * args.head_dim, args.head_dim,
                                 args.scale};
    qk_product<kQkVecs>(min_i64(kQkVecs, tile->vecs() - column / kLanes), operands,
                        from / kQkKeys * kQkKeys, round_up(to, kQkKeys), rows.scores + column,
                        tile->row_max + column);
  }
  from = from / kLanes * kLanes;
  to = round_up(to, kLanes);
  if (!tile->unmasked || args.logit_cap > 0) mask_scores(args, from, to, rows.scores, tile);
  softmax_scores(from, to, rows.scores, tile);
}

// A request's only new token, all rows of which are given: brings its accumulators to the end of
// the sequence as a decode step does, with the bits of panels. False, and nothing done, where keys
// have to go through panels.
bool attend_single_token(const AttentionArgs& args, const QueryRows& rows);

}  // namespace SGL_TIER
}  // namespace sgl_kernel
