#include "attention/direct_tile.h"
#include "attention/online_softmax.h"
#include "dispatch/kernel_list.h"
#include "simd/fp_env.h"

namespace sgl_kernel {
namespace SGL_TIER {

// A block of keys of a request, and where the rows of head 0 are.
struct DecodeBlock {
  int64_t request = 0;
  int64_t index = -1;
  Keys keys = {0, 0};
  const char* k[kKeyBlock];
  const char* v[kKeyBlock];

  SGL_MEMBER void find(const AttentionArgs& args, int64_t of_request, int64_t block) {
    request = of_request;
    index = block;
    keys = keys_of_block(args.first_block(request) + block, args.seq_lens[request]);
    find_cached_rows(args, args.k, request, 0, keys, reinterpret_cast<const void**>(k));
    find_cached_rows(args, args.v, request, 0, keys, reinterpret_cast<const void**>(v));
    for (int64_t i = keys.count; i < kKeyBlock; ++i) {
      k[i] = k[keys.count - 1];
      v[i] = v[keys.count - 1];
    }
  }
};

// Raw products of a row of queries to weights e^(score - largest), zeros where the row does not see
// a key.
static void softmax_row(const AttentionArgs& args, Visible visible, float* scores, float* largest,
                        float* sum) {
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

// What a task leaves, of `group` rows.
struct Partial {
  float* values;  // [group, padded_v]
  float* largest;
  float* sum;

  SGL_MEMBER Partial(const AttentionArgs& args, float* floats) {
    values = floats;
    largest = values + args.group() * args.padded_v();
    sum = largest + args.group();
  }
};

template <typename T, int ROWS>
static void decode_few(const AttentionArgs& args, const Rows& rows, const DecodeBlock& block,
                       const DecodeBlock& next, const Partial& partial) {
  const Visible visible = visible_keys(rows, block.keys, 0);
  constexpr int64_t kSize = static_cast<int64_t>(sizeof(T));
  score_few<T, ROWS>(rows.q, block.k, next.k, rows.kv_head * args.k.head_stride * kSize,
                     block.keys.count, args.head_dim, args.k.scale, rows.scores, kKeyBlock);
  for (int r = 0; r < ROWS; ++r) {
    softmax_row(args, visible, rows.scores + r * kKeyBlock, partial.largest + r, partial.sum + r);
  }
  weigh_few<T, ROWS>(rows.scores, kKeyBlock, block.v, next.v,
                     rows.kv_head * args.v.head_stride * kSize, visible.begin, visible.end,
                     args.v_head_dim, args.v.scale, partial.values, args.padded_v());
}

using DecodeFew = void (*)(const AttentionArgs& args, const Rows& rows, const DecodeBlock& block,
                           const DecodeBlock& next, const Partial& partial);

template <typename T, int ROWS = kFewRows>
static DecodeFew decode_few_rows(int64_t rows) {
  if (rows == ROWS) return decode_few<T, ROWS>;
  if constexpr (ROWS > 1) return decode_few_rows<T, ROWS - 1>(rows);
  return nullptr;
}

// Null: through panels.
static DecodeFew choose_decode_few(const AttentionArgs& args) {
  if (args.k.type != args.v.type) return nullptr;
  if (args.k.type == DType::e4m3) return decode_few_rows<e4m3_t>(args.group());
  if (args.k.scale != 1.f || args.v.scale != 1.f) return nullptr;
  if (args.k.type == DType::bf16) return decode_few_rows<bf16_t>(args.group());
  if (args.k.type == DType::fp16) return decode_few_rows<fp16_t>(args.group());
  return decode_few_rows<float>(args.group());
}

static void load_query_rows(const AttentionArgs& args, const Rows& rows) {
  find_queries(args, rows);
  for (int64_t r = 0; r < rows.count; ++r) {
    load_row(rows.queries[r], args.q_dtype, args.head_dim, rows.q + r * args.head_dim);
  }
}

static void decode_panels(const AttentionArgs& args, const Rows& rows, Keys keys,
                          const Partial& partial) {
  RowGroup group;
  load_panels(args, rows, keys);
  for (int64_t r = 0; r < rows.count; r += kRowGroup) {
    group.first = r;
    group.count = min_i64(kRowGroup, rows.count - r);
    group.look(rows, keys);
    weigh_keys(args, rows, &group);
    multiply_values(rows, group, {nullptr, nullptr}, partial.values + r * args.padded_v(),
                    args.padded_v());
    const size_t bytes = static_cast<size_t>(group.count) * sizeof(float);
    memcpy(partial.largest + r, group.largest, bytes);
    memcpy(partial.sum + r, group.sum, bytes);
  }
}

void decode_attention_kernel_impl(const AttentionArgs& args, const DecodePlan& plan,
                                  TaskRange tasks, float* scratch) {
  const FpEnvGuard fp_env(false);
  if (tasks.begin >= tasks.end) return;
  const int64_t heads = args.num_kv_heads;
  const DecodeFew few = choose_decode_few(args);
  Rows rows(args, scratch);
  rows.count = args.group();
  const int64_t head_floats = round_up(rows.count, kLanes) * args.head_dim;
  float* const queries = rows.q;
  int64_t request = 0;
  while (tasks.begin >= plan.task_begins[request + 1]) ++request;
  DecodeBlock blocks[2];
  DecodeBlock *block = &blocks[0], *next = &blocks[1];
  next->find(args, request, (tasks.begin - plan.task_begins[request]) / heads);
  const int64_t held = args.held_heads();
  int64_t loaded = -1;  // the first head whose queries are held
  for (int64_t t = tasks.begin; t < tasks.end; ++t) {
    while (t >= plan.task_begins[request + 1]) {
      ++request;
      loaded = -1;
    }
    const int64_t inside = t - plan.task_begins[request];
    if (block->index < 0 || block->request != request || block->index != inside / heads) {
      DecodeBlock* const done = block;
      block = next;
      next = done;
      // The block behind this one, which may be the next request's first.
      int64_t ahead = request;
      const int64_t after = t - inside % heads + heads;
      while (ahead + 1 < args.requests && after >= plan.task_begins[ahead + 1]) ++ahead;
      if (after < tasks.end) {
        next->find(args, ahead, (after - plan.task_begins[ahead]) / heads);
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
        few != nullptr ? load_query_rows(args, rows) : load_queries(args, rows);
      }
    }
    rows.kv_head = kv_head;
    rows.q = queries + (kv_head - loaded) * head_floats;
    const Partial partial(args, plan.partials + (t - plan.first_task) * partial_floats(args));
    if (few != nullptr) {
      few(args, rows, *block, *next, partial);
    } else {
      decode_panels(args, rows, block->keys, partial);
    }
  }
}

// total = total * e^(total_largest - m) + block * e^(largest - m), m the larger of the two.
static void merge_block(int64_t padded_v, const float* block, float largest, float sum,
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

static void merge_partial(const AttentionArgs& args, const Partial& partial, const Rows& rows) {
  const int64_t padded = args.padded_v();
  for (int64_t r = 0; r < rows.count; ++r) {
    merge_block(padded, partial.values + r * padded, partial.largest[r], partial.sum[r],
                rows.total + r * padded, rows.total_largest + r, rows.total_sum + r);
  }
}

bool attend_token(const AttentionArgs& args, const Rows& rows) {
  const DecodeFew few = choose_decode_few(args);
  if (few == nullptr || args.k.fresh != nullptr || args.v.fresh != nullptr) return false;
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
    few(args, rows, block, next, partial);
    merge_partial(args, partial, rows);
  }
  return true;
}

// Totals of rows to or from a place of partial_floats(args).
static void carry_totals(const AttentionArgs& args, const Rows& rows, const Partial& to) {
  const size_t row = sizeof(float), count = static_cast<size_t>(rows.count);
  memcpy(to.values, rows.total, count * static_cast<size_t>(args.padded_v()) * row);
  memcpy(to.largest, rows.total_largest, count * row);
  memcpy(to.sum, rows.total_sum, count * row);
}
static void go_on_with_totals(const AttentionArgs& args, const Rows& rows, const Partial& from) {
  const size_t row = sizeof(float), count = static_cast<size_t>(rows.count);
  memcpy(rows.total, from.values, count * static_cast<size_t>(args.padded_v()) * row);
  memcpy(rows.total_largest, from.largest, count * row);
  memcpy(rows.total_sum, from.sum, count * row);
}

void merge_attention_kernel_impl(const AttentionArgs& args, const DecodePlan& plan, TaskRange pairs,
                                 float* scratch) {
  const FpEnvGuard fp_env(false);
  const int64_t heads = args.num_kv_heads;
  Rows rows(args, scratch);
  rows.count = args.group();
  for (int64_t pair = pairs.begin; pair < pairs.end; ++pair) {
    rows.request = plan.first_request + pair / heads;
    rows.kv_head = pair % heads;
    if (args.extend_lens[rows.request] == 0) continue;
    const int64_t place = rows.kv_head * partial_floats(args);
    const int64_t begin = plan.task_begins[rows.request];
    const int64_t blocks = args.key_blocks(rows.request);
    const int64_t first = max_i64(0, (plan.first_task - begin) / heads);
    const int64_t end = min_i64(blocks, (plan.end_task - begin) / heads);
    start_totals(args, rows);
    if (first > 0) go_on_with_totals(args, rows, {args, plan.carried + place});
    for (int64_t b = first; b < end; ++b) {
      const int64_t task = begin + b * heads + rows.kv_head - plan.first_task;
      merge_partial(args, {args, plan.partials + task * partial_floats(args)}, rows);
    }
    if (end < blocks) {
      carry_totals(args, rows, {args, plan.to_carry + place});
    } else {
      store_outputs(args, rows);
    }
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
