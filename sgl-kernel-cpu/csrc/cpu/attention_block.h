// A block of keys times rows of queries, and merging blocks: what extend_attention.cpp and
// decode_attention.cpp share. Compiled once per tier.
#pragma once

#include "attention.h"
#include "attention_tile.h"
#include "row_convert.h"

namespace sgl_kernel {
namespace SGL_TIER {

static_assert(kKeyBlock % kTileCols == 0 && 32 % kTileCols == 0, "tiles must cover a block");

// Rows of queries that see the same keys' head: tokens [first_token, ...) of a request, each with
// all heads of a group, and what is known about them.
struct Rows {
  int64_t request = 0;
  int64_t kv_head = 0;
  int64_t first_token = 0;
  int64_t count = 0;  // tokens times group

  int64_t* first_keys;  // [count] what a row sees: keys from here
  int64_t* end_keys;    // [count] to here
  float* q;             // [count, head_dim]
  float* scores;        // [count, kKeyBlock]
  float* block;         // [count, padded_v]: of the block of keys at hand
  float* largest;       // [count]
  float* sum;           // [count]
  float* total;         // [count, padded_v]: of all blocks so far
  float* total_largest;
  float* total_sum;
  float* k_panel;  // [kKeyBlock / kTileCols][head_dim][kTileCols]
  float* v_panel;  // [padded_v / kTileCols][kKeyBlock][kTileCols]
  float* staged;   // [kKeyBlock, max(head_dim, v_head_dim)]

  SGL_MEMBER Rows(const AttentionArgs& args, float* scratch) {
    const int64_t rows = max_i64(kQueryRows, args.num_heads), padded = args.padded_v();
    const int64_t depth = round_up(args.head_dim, 16);
    const auto take = [&scratch](int64_t floats) {
      float* p = scratch;
      scratch += floats;
      return p;
    };
    first_keys = reinterpret_cast<int64_t*>(take(2 * rows));
    end_keys = reinterpret_cast<int64_t*>(take(2 * rows));
    q = take(rows * depth);
    scores = take(rows * kKeyBlock);
    block = take(rows * padded);
    total = take(rows * padded);
    largest = take(round_up(rows, 16));
    sum = take(round_up(rows, 16));
    total_largest = take(round_up(rows, 16));
    total_sum = take(round_up(rows, 16));
    k_panel = take(kKeyBlock * depth);
    v_panel = take(kKeyBlock * padded);
    staged = take(kKeyBlock * max_i64(depth, padded));
  }
};

// Keys [begin, begin + count) of a request.
struct Keys {
  int64_t begin;
  int64_t count;
};

SGL_INLINE Keys keys_of_block(int64_t block, int64_t end) {
  return {block * kKeyBlock, min_i64(kKeyBlock, end - block * kKeyBlock)};
}

SGL_INLINE float minus_infinity() {
  return bits_float(0xFF800000u);
}

static inline void load_queries(const AttentionArgs& args, Rows* rows) {
  const int64_t group = args.group();
  for (int64_t r = 0; r < rows->count; ++r) {
    const int64_t inside = rows->first_token + r / group;
    const int64_t token = args.extend_starts[rows->request] + inside;
    const int64_t head = rows->kv_head * group + r % group;
    rows->first_keys[r] = args.first_key(rows->request, inside);
    rows->end_keys[r] = args.seq_lens[rows->request] - args.extend_lens[rows->request] + inside + 1;
    load_row(
        element_at(args.q, args.q_type, token * args.q_token_stride + head * args.q_head_stride),
        args.q_type, args.head_dim, rows->q + r * args.head_dim);
  }
}

template <typename index_t>
static inline void find_cached(const AttentionArgs& args, const AttentionArgs::Cache& cache,
                               int64_t request, int64_t kv_head, Keys keys, const void** found) {
  const index_t* slots = static_cast<const index_t*>(args.req_to_token) +
                         args.req_pool_indices[request] * args.req_stride + keys.begin;
  const char* base =
      static_cast<const char*>(element_at(cache.data, cache.type, kv_head * cache.head_stride));
  const int64_t bytes = cache.slot_stride * element_size(cache.type);
  for (int64_t i = 0; i < keys.count; ++i) found[i] = base + slots[i] * bytes;
}

// Where the cached rows of keys (or values) are.
SGL_INLINE void find_cached_rows(const AttentionArgs& args, const AttentionArgs::Cache& cache,
                                 int64_t request, int64_t kv_head, Keys keys, const void** found) {
  args.wide_slots ? find_cached<int64_t>(args, cache, request, kv_head, keys, found)
                  : find_cached<int32_t>(args, cache, request, kv_head, keys, found);
}

// The same where new tokens' rows are not to be taken from the cache: a block that has any goes
// through f32 rows in `staged`.
static inline ElementType find_rows(const AttentionArgs& args, const AttentionArgs::Cache& cache,
                                    const Rows& rows, Keys keys, int64_t width, const void** found,
                                    float* scale) {
  const int64_t prefix = args.seq_lens[rows.request] - args.extend_lens[rows.request];
  const int64_t cached =
      cache.fresh == nullptr ? keys.count : min_i64(keys.count, max_i64(0, prefix - keys.begin));
  *scale = cache.scale;
  find_cached_rows(args, cache, rows.request, rows.kv_head, {keys.begin, cached}, found);
  if (cached == keys.count) return cache.type;
  const Vec factor = set1(cache.scale);
  for (int64_t i = 0; i < keys.count; ++i) {
    float* row = rows.staged + i * width;
    if (i < cached) {
      load_row(found[i], cache.type, width, row);
      for (int64_t d = 0; d < width; d += kLanes) {
        const int64_t n = min_i64(kLanes, width - d);
        store_first(row + d, mul(load_first(row + d, n), factor), n);
      }
    } else {
      const int64_t at = args.extend_starts[rows.request] + keys.begin + i - prefix;
      load_row(element_at(cache.fresh, cache.fresh_type,
                          at * cache.fresh_token_stride + rows.kv_head * cache.fresh_head_stride),
               cache.fresh_type, width, row);
    }
    found[i] = row;
  }
  *scale = 1.f;
  return ElementType::f32;
}

static inline void load_keys(const AttentionArgs& args, const Rows& rows, Keys keys) {
  const void* found[kKeyBlock];
  float scale;
  switch (find_rows(args, args.k, rows, keys, args.head_dim, found, &scale)) {
    case ElementType::f32:
      return transpose_panel<float>(found, keys.count, args.head_dim, scale, rows.k_panel);
    case ElementType::bf16:
      return transpose_panel<bf16_t>(found, keys.count, args.head_dim, scale, rows.k_panel);
    case ElementType::fp16:
      return transpose_panel<fp16_t>(found, keys.count, args.head_dim, scale, rows.k_panel);
    case ElementType::e4m3:
      return transpose_panel<e4m3_t>(found, keys.count, args.head_dim, scale, rows.k_panel);
  }
}

static inline void load_values(const AttentionArgs& args, const Rows& rows, Keys keys) {
  const void* found[kKeyBlock];
  float scale;
  const int64_t width = args.v_head_dim, padded = args.padded_v();
  switch (find_rows(args, args.v, rows, keys, width, found, &scale)) {
    case ElementType::f32:
      return copy_panel<float>(found, keys.count, width, padded, scale, rows.v_panel);
    case ElementType::bf16:
      return copy_panel<bf16_t>(found, keys.count, width, padded, scale, rows.v_panel);
    case ElementType::fp16:
      return copy_panel<fp16_t>(found, keys.count, width, padded, scale, rows.v_panel);
    case ElementType::e4m3:
      return copy_panel<e4m3_t>(found, keys.count, width, padded, scale, rows.v_panel);
  }
}

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

// Raw products of a row to weights e^(score - largest), zeros where the row does not see a key.
static inline void softmax_scores(const AttentionArgs& args, Visible visible, float* scores,
                                  float* largest, float* sum) {
  alignas(64) static constexpr float kLaneIndex[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                       8, 9, 10, 11, 12, 13, 14, 15};
  const Vec lane = load(kLaneIndex);
  const Vec scale = set1(args.scale), none = set1(minus_infinity());
  const Vec cap = set1(args.logit_cap), double_inverse_cap = set1(2.f / args.logit_cap);
  const int64_t first = visible.begin / kLanes * kLanes;
  Vec greatest = none;
  for (int64_t i = first; i < visible.end; i += kLanes) {
    Vec x = mul(load(scores + i), scale);
    if (args.logit_cap > 0) x = cap_scores(x, cap, double_inverse_cap);
    if (i < visible.begin || i + kLanes > visible.end) {
      x = select_less(lane, set1(static_cast<float>(visible.begin - i)), none, x);
      x = select_less(lane, set1(static_cast<float>(visible.end - i)), x, none);
    }
    store(scores + i, x);
    greatest = max(greatest, x);
  }
  *largest = reduce_max(greatest);
  // With nothing above minus infinity all weights are 0.
  const Vec shift = set1(*largest == minus_infinity() ? 0.f : *largest);
  Vec sums = zero();
  for (int64_t i = first; i < visible.end; i += kLanes) {
    const Vec e = exp(sub(load(scores + i), shift));
    store(scores + i, e);
    sums = add(sums, e);
  }
  *sum = reduce_add(sums);
}

// Rows [r, r + count) of a tile: weights times values, over the keys that each row sees and no
// other, so that a NaN in a value stays with those who see it. All rows share the middle.
static inline void multiply_values(const AttentionArgs& args, const Rows& rows, Keys keys,
                                   int64_t r, int64_t count) {
  const int64_t padded = args.padded_v();
  const auto multiply = [&](int64_t row, int64_t n, int64_t begin, int64_t end) {
    if (begin >= end) return;
    multiply_parts(n, rows.scores + row * kKeyBlock + begin, kKeyBlock,
                   rows.v_panel + begin * kTileCols, kKeyBlock, end - begin, padded,
                   rows.block + row * padded, padded);
  };
  memset(rows.block + r * padded, 0, static_cast<size_t>(count * padded) * sizeof(float));
  const int64_t middle_begin = visible_keys(rows, keys, r + count - 1).begin;
  const int64_t middle_end = visible_keys(rows, keys, r).end;
  if (middle_begin >= middle_end) {
    for (int64_t i = r; i < r + count; ++i) {
      const Visible visible = visible_keys(rows, keys, i);
      multiply(i, 1, visible.begin, visible.end);
    }
    return;
  }
  for (int64_t i = r; i < r + count; ++i) {
    multiply(i, 1, visible_keys(rows, keys, i).begin, middle_begin);
  }
  multiply(r, count, middle_begin, middle_end);
  for (int64_t i = r; i < r + count; ++i) {
    multiply(i, 1, middle_end, visible_keys(rows, keys, i).end);
  }
}

// Fills block, largest and sum of rows [begin, end), which all see some of the keys; the panels are
// loaded.
static inline void attend_block(const AttentionArgs& args, const Rows& rows, Keys keys,
                                int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; r += kTileRows) {
    const int64_t count = min_i64(kTileRows, end - r);
    const int64_t from = visible_keys(rows, keys, r).begin / kTileCols * kTileCols;
    const int64_t to = round_up(visible_keys(rows, keys, r + count - 1).end, kTileCols);
    float* scores = rows.scores + r * kKeyBlock;
    for (int64_t i = 0; i < count; ++i) {
      memset(scores + i * kKeyBlock + from, 0, static_cast<size_t>(to - from) * sizeof(float));
    }
    multiply_parts(count, rows.q + r * args.head_dim, args.head_dim,
                   rows.k_panel + from * args.head_dim, args.head_dim, args.head_dim, to - from,
                   scores + from, kKeyBlock);
    for (int64_t i = 0; i < count; ++i) {
      softmax_scores(args, visible_keys(rows, keys, r + i), scores + i * kKeyBlock,
                     rows.largest + r + i, rows.sum + r + i);
    }
    multiply_values(args, rows, keys, r, count);
  }
}

// total = total * e^(total_largest - m) + block * e^(largest - m), m the larger of the two.
static inline void merge_block(int64_t padded_v, const float* block, float largest, float sum,
                               float* total, float* total_largest, float* total_sum) {
  const float m = largest > *total_largest ? largest : *total_largest;
  const float shift = m == minus_infinity() ? 0.f : m;
  const Vec keep = exp(set1(*total_largest - shift)), take = exp(set1(largest - shift));
  for (int64_t c = 0; c < padded_v; c += kLanes) {
    store(total + c, fma(load(total + c), keep, mul(load(block + c), take)));
  }
  float sums[kLanes];
  store(sums, fma(set1(*total_sum), keep, mul(set1(sum), take)));
  *total_sum = sums[0];
  *total_largest = m;
}

static inline void start_totals(const AttentionArgs& args, const Rows& rows) {
  for (int64_t r = 0; r < rows.count; ++r) {
    rows.total_largest[r] = minus_infinity();
    rows.total_sum[r] = 0.f;
  }
  memset(rows.total, 0, static_cast<size_t>(rows.count * args.padded_v()) * sizeof(float));
}

// Totals to outputs: the sink joins the sum, and the weights are divided by it.
static inline void store_outputs(const AttentionArgs& args, const Rows& rows) {
  const int64_t group = args.group(), padded = args.padded_v();
  for (int64_t r = 0; r < rows.count; ++r) {
    const int64_t token = args.extend_starts[rows.request] + rows.first_token + r / group;
    const int64_t head = rows.kv_head * group + r % group;
    float factor = 1.f, sum = rows.total_sum[r];
    if (args.sinks != nullptr) {
      const float sink = args.sinks[head], before = rows.total_largest[r];
      const float m = sink > before ? sink : before;
      const float shift = m == minus_infinity() ? 0.f : m;
      factor = exp_scalar(before - shift);
      sum = sum * factor + exp_scalar(sink - shift);
    }
    // Padding sees nothing and gives zeros.
    const Vec weight = set1(args.seq_lens[rows.request] == 0 ? 0.f : factor / sum);
    float* total = rows.total + r * padded;
    for (int64_t c = 0; c < padded; c += kLanes) store(total + c, mul(load(total + c), weight));
    store_row(total, args.v_head_dim, args.out_type,
              element_at(args.out, args.out_type,
                         token * args.out_token_stride + head * args.out_head_stride));
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
