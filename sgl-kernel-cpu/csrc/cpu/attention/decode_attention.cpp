// Decode: splits of the keys, each to a partial result, and their combination (split_kv.h).
// Compiled once per tier.
#include "attention/direct_tile.h"
#include "attention/online_softmax.h"
#include "attention/split_kv.h"
#include "dispatch/kernel_list.h"
#include "simd/fp_env.h"

namespace sgl_kernel {
namespace SGL_TIER {

// A block of keys of a request, and where the rows of head 0 are.
struct DecodeBlock {
  int64_t request = 0;
  int64_t index = -1;
  KeyBlock keys = {0, 0};
  const char* k[kKeyBlock];
  const char* v[kKeyBlock];

  SGL_MEMBER void find(const AttentionArgs& args, int64_t of_request, int64_t block) {
    request = of_request;
    index = block;
    keys = key_block(args.first_block(request) + block, args.seq_lens[request]);
    find_cached_rows(args, {args.k, request, 0}, keys, reinterpret_cast<const void**>(k));
    find_cached_rows(args, {args.v, request, 0}, keys, reinterpret_cast<const void**>(v));
    for (int64_t i = keys.count; i < kKeyBlock; ++i) {
      k[i] = k[keys.count - 1];
      v[i] = v[keys.count - 1];
    }
  }
};

// Products of a query row with the keys of a block, which are not scaled yet, to softmax weights
// e^(score - row_max); zeros where the row does not see a key. Keys stand in the lanes.
static void softmax_row(const AttentionArgs& args, KeyRange visible, float* scores, float* row_max,
                        float* row_sum) {
  alignas(64) static constexpr float kLaneIndex[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                       8, 9, 10, 11, 12, 13, 14, 15};
  const Vec lane = load(kLaneIndex);
  const Vec scale = set1(args.scale), none = set1(minus_infinity());
  const Vec cap = set1(args.logit_cap), double_inverse_cap = set1(2.f / args.logit_cap);
  const int64_t first = visible.begin / kLanes * kLanes;
  Vec largest = none;
  for (int64_t i = first; i < visible.end; i += kLanes) {
    Vec x = mul(load(scores + i), scale);
    if (args.logit_cap > 0) x = cap_scores(x, cap, double_inverse_cap);
    if (i < visible.begin || i + kLanes > visible.end) {
      x = select_less(lane, set1(static_cast<float>(visible.begin - i)), none, x);
      x = select_less(lane, set1(static_cast<float>(visible.end - i)), x, none);
    }
    store(scores + i, x);
    largest = max(largest, x);
  }
  *row_max = reduce_max(largest);
  // With nothing above minus infinity all weights are 0.
  const Vec shift = set1(*row_max == minus_infinity() ? 0.f : *row_max);
  Vec sums = zero();
  for (int64_t i = first; i < visible.end; i += kLanes) {
    const Vec e = exp(sub(load(scores + i), shift));
    store(scores + i, e);
    sums = add(sums, e);
  }
  *row_sum = reduce_add(sums);
}

// What a split leaves, of `group` rows; partial_floats(args) in all.
struct Partial {
  float* accumulator;  // [group, padded_v]
  float* row_max;      // [group]
  float* row_sum;      // [group]

  SGL_MEMBER Partial(const AttentionArgs& args, float* floats) {
    accumulator = floats;
    row_max = accumulator + args.group() * args.padded_v();
    row_sum = row_max + args.group();
  }
};

// A split without panels.
template <typename T, int ROWS>
static void direct_split(const AttentionArgs& args, const QueryRows& rows, const DecodeBlock& block,
                         const DecodeBlock& next, const Partial& partial) {
  const KeyRange visible = visible_keys(rows, block.keys, 0);
  constexpr int64_t kSize = static_cast<int64_t>(sizeof(T));
  qk_dot<T, ROWS>(rows.q,
                  {block.k, next.k, rows.kv_head * args.k.head_stride * kSize, args.k.scale},
                  block.keys.count, args.head_dim, rows.scores);
  for (int r = 0; r < ROWS; ++r) {
    softmax_row(args, visible, rows.scores + r * kKeyBlock, partial.row_max + r,
                partial.row_sum + r);
  }
  pv_accumulate<T, ROWS>(rows.scores,
                         {block.v, next.v, rows.kv_head * args.v.head_stride * kSize, args.v.scale},
                         visible, {partial.accumulator, args.padded_v(), args.v_head_dim});
}

using DirectSplit = void (*)(const AttentionArgs& args, const QueryRows& rows,
                             const DecodeBlock& block, const DecodeBlock& next,
                             const Partial& partial);

template <typename T, int ROWS = kMostDirectRows>
static DirectSplit direct_split_of(int64_t rows) {
  if (rows == ROWS) return direct_split<T, ROWS>;
  if constexpr (ROWS > 1) return direct_split_of<T, ROWS - 1>(rows);
  return nullptr;
}

// Null: through panels.
static DirectSplit choose_direct_split(const AttentionArgs& args) {
  if (args.k.dtype != args.v.dtype) return nullptr;
  if (args.k.dtype == DType::e4m3) return direct_split_of<e4m3_t>(args.group());
  if (args.k.scale != 1.f || args.v.scale != 1.f) return nullptr;
  if (args.k.dtype == DType::bf16) return direct_split_of<bf16_t>(args.group());
  if (args.k.dtype == DType::fp16) return direct_split_of<fp16_t>(args.group());
  return direct_split_of<float>(args.group());
}

// Queries as f32 rows, not in panels.
static void load_query_rows(const AttentionArgs& args, const QueryRows& rows) {
  find_queries(args, rows);
  for (int64_t r = 0; r < rows.count; ++r) {
    load_row(rows.queries[r], args.q_dtype, args.head_dim, rows.q + r * args.head_dim);
  }
}

// A split through panels.
static void packed_split(const AttentionArgs& args, const QueryRows& rows, KeyBlock keys,
                         const Partial& partial) {
  QueryTile tile;
  pack_block(args, rows, keys);
  for (int64_t r = 0; r < rows.count; r += kQueryTile) {
    tile.first = r;
    tile.count = min_i64(kQueryTile, rows.count - r);
    tile.find_visible(rows, keys);
    qk_softmax(args, rows, &tile);
    multiply_values(rows, tile, {nullptr, nullptr}, partial.accumulator + r * args.padded_v(),
                    args.padded_v());
    const size_t bytes = static_cast<size_t>(tile.count) * sizeof(float);
    memcpy(partial.row_max + r, tile.row_max, bytes);
    memcpy(partial.row_sum + r, tile.row_sum, bytes);
  }
}

void decode_attention_kernel_impl(const AttentionArgs& args, const DecodePlan& plan,
                                  TaskRange splits, void* scratch) {
  const FpEnvGuard fp_env(false);
  if (splits.begin >= splits.end) return;
  const int64_t heads = args.num_kv_heads;
  const DirectSplit direct = choose_direct_split(args);
  QueryRows rows(args, ScratchLayout(scratch));
  rows.count = args.group();
  const int64_t head_floats = round_up(rows.count, kLanes) * args.head_dim;
  float* const queries = rows.q;
  int64_t request = 0;
  while (splits.begin >= plan.split_begins[request + 1]) ++request;
  DecodeBlock blocks[2];
  DecodeBlock *block = &blocks[0], *next = &blocks[1];
  next->find(args, request, (splits.begin - plan.split_begins[request]) / heads);
  const int64_t held = args.held_heads();
  int64_t loaded = -1;  // the first head whose queries are held
  for (int64_t split = splits.begin; split < splits.end; ++split) {
    while (split >= plan.split_begins[request + 1]) {
      ++request;
      loaded = -1;
    }
    const int64_t inside = split - plan.split_begins[request];
    if (block->index < 0 || block->request != request || block->index != inside / heads) {
      DecodeBlock* const done = block;
      block = next;
      next = done;
      // The block behind this one, which may be the next request's first.
      int64_t next_request = request;
      const int64_t after = split - inside % heads + heads;
      while (next_request + 1 < args.requests && after >= plan.split_begins[next_request + 1]) {
        ++next_request;
      }
      if (after < splits.end) {
        next->find(args, next_request, (after - plan.split_begins[next_request]) / heads);
      } else {
        *next = *block;
      }
    }
    const int64_t kv_head = inside % heads;
    if (loaded < 0 || kv_head < loaded || kv_head >= loaded + held) {
      loaded = kv_head / held * held;
      rows.request = request;
      for (int64_t h = loaded; h < min_i64(loaded + held, heads); ++h) {
        rows.kv_head = h;
        rows.q = queries + (h - loaded) * head_floats;
        direct != nullptr ? load_query_rows(args, rows) : pack_query_rows(args, rows);
      }
    }
    rows.kv_head = kv_head;
    rows.q = queries + (kv_head - loaded) * head_floats;
    const Partial partial(args, plan.partials + (split - plan.first_split) * partial_floats(args));
    if (direct != nullptr) {
      direct(args, rows, *block, *next, partial);
    } else {
      packed_split(args, rows, block->keys, partial);
    }
  }
}

// Joins row r of a partial result to the row's accumulator, of which running_max and running_sum
// tell: accumulator * e^(running_max - m) + partial * e^(row_max - m), m the larger maximum.
static void combine_row(int64_t padded_v, const Partial& partial, int64_t r,
                        const QueryRows& rows) {
  const float* const block = partial.accumulator + r * padded_v;
  const float row_max = partial.row_max[r], row_sum = partial.row_sum[r];
  float* const accumulator = rows.accumulator + r * padded_v;
  float* const running_max = rows.running_max + r;
  float* const running_sum = rows.running_sum + r;
  const float m = row_max > *running_max ? row_max : *running_max;
  const float shift = m == minus_infinity() ? 0.f : m;
  const Vec kept = exp(set1(*running_max - shift)), taken = exp(set1(row_max - shift));
  for (int64_t c = 0; c < padded_v; c += kLanes) {
    store(accumulator + c, fma(load(accumulator + c), kept, mul(load(block + c), taken)));
  }
  float sums[kLanes];
  store(sums, fma(set1(*running_sum), kept, mul(set1(row_sum), taken)));
  *running_sum = sums[0];
  *running_max = m;
}

static void combine_partial(const AttentionArgs& args, const Partial& partial,
                            const QueryRows& rows) {
  const int64_t padded = args.padded_v();
  for (int64_t r = 0; r < rows.count; ++r) combine_row(padded, partial, r, rows);
}

bool attend_single_token(const AttentionArgs& args, const QueryRows& rows) {
  const DirectSplit direct = choose_direct_split(args);
  if (direct == nullptr || args.k.extend != nullptr || args.v.extend != nullptr) return false;
  load_query_rows(args, rows);
  const Partial partial(args, rows.v_panel);
  const int64_t count = args.key_blocks(rows.request);
  DecodeBlock blocks[2];
  if (count > 0) blocks[0].find(args, rows.request, 0);
  for (int64_t b = 0; b < count; ++b) {
    const DecodeBlock& block = blocks[b % 2];
    DecodeBlock& next = blocks[(b + 1) % 2];
    if (b + 1 < count) {
      next.find(args, rows.request, b + 1);
    } else {
      next = block;
    }
    direct(args, rows, block, next, partial);
    combine_partial(args, partial, rows);
  }
  return true;
}

// The rows' accumulators, maxima and sums to or from a place of partial_floats(args).
static void carry(const AttentionArgs& args, const QueryRows& rows, const Partial& to) {
  const size_t row = sizeof(float), count = static_cast<size_t>(rows.count);
  memcpy(to.accumulator, rows.accumulator, count * static_cast<size_t>(args.padded_v()) * row);
  memcpy(to.row_max, rows.running_max, count * row);
  memcpy(to.row_sum, rows.running_sum, count * row);
}
static void take_carried(const AttentionArgs& args, const QueryRows& rows, const Partial& from) {
  const size_t row = sizeof(float), count = static_cast<size_t>(rows.count);
  memcpy(rows.accumulator, from.accumulator, count * static_cast<size_t>(args.padded_v()) * row);
  memcpy(rows.running_max, from.row_max, count * row);
  memcpy(rows.running_sum, from.row_sum, count * row);
}

void combine_splits_kernel_impl(const AttentionArgs& args, const DecodePlan& plan, TaskRange pairs,
                                void* scratch) {
  const FpEnvGuard fp_env(false);
  const int64_t heads = args.num_kv_heads;
  QueryRows rows(args, ScratchLayout(scratch));
  rows.count = args.group();
  for (int64_t pair = pairs.begin; pair < pairs.end; ++pair) {
    rows.request = plan.first_request + pair / heads;
    rows.kv_head = pair % heads;
    if (args.extend_lens[rows.request] == 0) continue;
    const int64_t place = rows.kv_head * partial_floats(args);
    const int64_t begin = plan.split_begins[rows.request];
    const int64_t blocks = args.key_blocks(rows.request);
    const int64_t first = max_i64(0, (plan.first_split - begin) / heads);
    const int64_t end = min_i64(blocks, (plan.end_split - begin) / heads);
    clear_accumulators(args, rows);
    if (first > 0) take_carried(args, rows, {args, plan.carried + place});
    for (int64_t b = first; b < end; ++b) {
      const int64_t split = begin + b * heads + rows.kv_head - plan.first_split;
      combine_partial(args, {args, plan.partials + split * partial_floats(args)}, rows);
    }
    if (end < blocks) {
      carry(args, rows, {args, plan.to_carry + place});
    } else {
      store_outputs(args, rows);
    }
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
