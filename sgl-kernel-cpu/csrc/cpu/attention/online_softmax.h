// A block of keys times groups of rows of queries: weights, their sums, weighted values. What
// extend_attention.cpp and decode_attention.cpp share. Compiled once per tier.
#pragma once

#include "attention/query_rows.h"

namespace sgl_kernel {
namespace SGL_TIER {

// The keys of a block that a row sees, as [begin, end) inside the block; begin and end rise with
// the row.
struct Visible {
  int64_t begin;
  int64_t end;
};
SGL_INLINE Visible visible_keys(const Rows& rows, Keys keys, int64_t r) {
  const int64_t end = min_i64(keys.count, max_i64(0, rows.end_keys[r] - keys.begin));
  return {min_i64(end, max_i64(0, rows.first_keys[r] - keys.begin)), end};
}

// cap * tanh(x / cap), through tanh(y) = 1 - 2 / (e^2y + 1).
SGL_INLINE Vec cap_scores(Vec x, Vec cap, Vec double_inverse_cap) {
  const Vec e = exp(mul(x, double_inverse_cap));
  return mul(cap, sub(set1(1.f), div(set1(2.f), add(e, set1(1.f)))));
}

// 0 where a largest score is minus infinity: with nothing above it all weights are to be 0, not
// NaN.
SGL_INLINE Vec shift_of(Vec largest) {
  return select_less(largest, set1(bits_float(0xFF7FFFFFu)), zero(), largest);
}

// A block's rows of queries [first, first + count), count <= kRowGroup: what they see of it, and
// the results besides the weighted values.
struct RowGroup {
  int64_t first;
  int64_t count;
  bool whole;  // all rows see all keys
  alignas(64) int32_t begin[kRowGroup];
  alignas(64) int32_t end[kRowGroup];
  alignas(64) float largest[kRowGroup];
  alignas(64) float sum[kRowGroup];

  SGL_MEMBER int64_t vecs() const { return div_up(count, kLanes); }

  // False if none of them sees any key.
  SGL_MEMBER bool look(const Rows& rows, Keys keys) {
    const Visible top = visible_keys(rows, keys, first);
    const Visible bottom = visible_keys(rows, keys, first + count - 1);
    if (bottom.end == 0 || top.begin == keys.count) return false;
    whole = bottom.begin == 0 && top.end == kKeyBlock;
    if (whole) return true;
    for (int64_t r = 0; r < kRowGroup; ++r) {
      const Visible visible = r < count ? visible_keys(rows, keys, first + r) : Visible{0, 0};
      begin[r] = static_cast<int32_t>(visible.begin);
      end[r] = static_cast<int32_t>(visible.end);
    }
    return true;
  }
};

// Scores that a row does not see become minus infinity, in keys [from, to).
static inline void mask_scores(const AttentionArgs& args, int64_t from, int64_t to, float* scores,
                               RowGroup* group) {
  const Vec cap = set1(args.logit_cap), double_inverse_cap = set1(2.f / args.logit_cap);
  const Vec none = set1(minus_infinity());
  float begins[kRowGroup], ends[kRowGroup];
  for (int64_t r = 0; r < kRowGroup; ++r) {
    begins[r] = group->whole ? 0.f : static_cast<float>(group->begin[r]);
    ends[r] = group->whole ? static_cast<float>(kKeyBlock) : static_cast<float>(group->end[r]);
  }
  for (int64_t v = 0; v < group->vecs(); ++v) {
    const Vec begin = load(begins + v * kLanes), end = load(ends + v * kLanes);
    Vec greatest = none;
    for (int64_t k = from; k < to; ++k) {
      float* p = scores + k * kRowGroup + v * kLanes;
      const Vec key = set1(static_cast<float>(k));
      Vec x = load(p);
      if (args.logit_cap > 0) x = cap_scores(x, cap, double_inverse_cap);
      x = select_less(key, begin, none, select_less(key, end, x, none));
      store(p, x);
      greatest = max(greatest, x);
    }
    store(group->largest + v * kLanes, greatest);
  }
}

// Scores of keys [from, to), multiples of kLanes, to weights e^(score - largest) and their sums: a
// chain for each key modulo kLanes, then what reduce_add does.
static inline void softmax_scores(int64_t from, int64_t to, float* scores, RowGroup* group) {
  for (int64_t v = 0; v < group->vecs(); ++v) {
    const Vec shift = shift_of(load(group->largest + v * kLanes));
    Vec sums[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      Vec sum = zero();
      for (int64_t k = from + i; k < to; k += kLanes) {
        float* p = scores + k * kRowGroup + v * kLanes;
        const Vec e = exp_of_negative(sub(load(p), shift));
        store(p, e);
        sum = add(sum, e);
      }
      sums[i] = sum;
    }
    store(group->sum + v * kLanes, add_lanes(sums));
  }
}

// Merges a block's largest scores and sums into the rows' so far; gives the factors by which totals
// and the block's values are multiplied.
static inline void merge_sums(const RowGroup& group, const Rows& rows, float* keep, float* take) {
  for (int64_t v = 0; v < group.vecs(); ++v) {
    float* const total_largest = rows.total_largest + group.first + v * kLanes;
    float* const total_sum = rows.total_sum + group.first + v * kLanes;
    const Vec before = load(total_largest), largest = load(group.largest + v * kLanes);
    const Vec m = select_less(before, largest, largest, before);
    const Vec shift = shift_of(m);
    const Vec kept = exp_of_negative(sub(before, shift));
    const Vec taken = exp_of_negative(sub(largest, shift));
    store(keep + v * kLanes, kept);
    store(take + v * kLanes, taken);
    store(total_sum, fma(load(total_sum), kept, mul(load(group.sum + v * kLanes), taken)));
    store(total_largest, m);
  }
}

static inline void multiply_values(const Rows& rows, const RowGroup& group, Factors factors,
                                   float* out, int64_t padded_v) {
  for (int64_t r = 0; r < group.count; r += kTileRows) {
    const int64_t count = min_i64(kTileRows, group.count - r);
    const Factors tile =
        factors.keep == nullptr ? factors : Factors{factors.keep + r, factors.take + r};
    for (int64_t c = 0; c < padded_v; c += kTileCols) {
      const float* values = rows.v_panel + c * kKeyBlock;
      float* to = out + r * padded_v + c;
      if (group.whole || (group.begin[r] == group.begin[r + count - 1] &&
                          group.end[r] == group.end[r + count - 1])) {
        const int64_t begin = group.whole ? 0 : group.begin[r];
        const int64_t end = group.whole ? kKeyBlock : group.end[r];
        if (begin == end && tile.keep != nullptr) continue;
        value_tile_rows<kTileRows>(count, rows.scores + begin * kRowGroup + r,
                                   values + begin * kTileCols, end - begin, tile, to, padded_v);
      } else {
        value_edge_tile(rows.scores + r, values, group.begin + r, group.end + r, count, tile, to,
                        padded_v);
      }
    }
  }
}

// A block of keys, whose panels are loaded, to weights of a group of rows, their largest scores
// and sums.
static inline void weigh_keys(const AttentionArgs& args, const Rows& rows, RowGroup* group) {
  int64_t from = 0, to = kKeyBlock;
  if (!group->whole) {
    from = group->begin[0];
    to = group->end[group->count - 1];
  }
  for (int64_t v = 0; v < group->vecs(); ++v) {
    store(group->largest + v * kLanes, set1(minus_infinity()));
  }
  for (int64_t column = 0; column < group->count; column += kScoreCols) {
    score_keys<kScoreVecs>(min_i64(kScoreVecs, group->vecs() - column / kLanes), rows.k_panel,
                           args.padded_k(), from / kScoreKeys * kScoreKeys,
                           round_up(to, kScoreKeys),
                           rows.q + (group->first + column) * args.head_dim, args.head_dim,
                           args.scale, rows.scores + column, group->largest + column);
  }
  from = from / kLanes * kLanes;
  to = round_up(to, kLanes);
  if (!group->whole || args.logit_cap > 0) mask_scores(args, from, to, rows.scores, group);
  softmax_scores(from, to, rows.scores, group);
}

// A request's only new token, all rows of which are given: adds up its totals as a decode step
// does, with the bits of panels. False, and nothing done, where keys have to go through panels.
bool attend_token(const AttentionArgs& args, const Rows& rows);

}  // namespace SGL_TIER
}  // namespace sgl_kernel
