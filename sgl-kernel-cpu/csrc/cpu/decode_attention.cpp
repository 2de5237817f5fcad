#include "attention_block.h"
#include "decode_tile.h"
#include "fp_env.h"
#include "transformer_tiers.h"

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

template <typename T, int ROWS>
static void decode_few(const AttentionArgs& args, const Rows& rows, const DecodeBlock& block,
                       const DecodeBlock& next) {
  const Visible visible = visible_keys(rows, block.keys, 0);
  constexpr int64_t kSize = static_cast<int64_t>(sizeof(T));
  score_few<T, ROWS>(rows.q, block.k, next.k, rows.kv_head * args.k.head_stride * kSize,
                     block.keys.count, args.head_dim, args.k.scale, rows.scores, kKeyBlock);
  for (int r = 0; r < ROWS; ++r) {
    softmax_scores(args, visible, rows.scores + r * kKeyBlock, rows.largest + r, rows.sum + r);
  }
  weigh_few<T, ROWS>(rows.scores, kKeyBlock, block.v, next.v,
                     rows.kv_head * args.v.head_stride * kSize, visible.begin, visible.end,
                     args.v_head_dim, args.v.scale, rows.block, args.padded_v());
}

using DecodeFew = void (*)(const AttentionArgs& args, const Rows& rows, const DecodeBlock& block,
                           const DecodeBlock& next);

template <typename T>
static DecodeFew decode_few_rows(int64_t rows) {
  static_assert(kFewRows == 4, "one case per row count");
  switch (rows) {
    case 1:
      return decode_few<T, 1>;
    case 2:
      return decode_few<T, 2>;
    case 3:
      return decode_few<T, 3>;
    case 4:
      return decode_few<T, 4>;
  }
  return nullptr;
}

// Null: through panels.
static DecodeFew choose_decode_few(const AttentionArgs& args) {
  if (args.k.type != args.v.type) return nullptr;
  if (args.k.type == ElementType::e4m3) return decode_few_rows<e4m3_t>(args.group());
  if (args.k.scale != 1.f || args.v.scale != 1.f) return nullptr;
  if (args.k.type == ElementType::bf16) return decode_few_rows<bf16_t>(args.group());
  if (args.k.type == ElementType::fp16) return decode_few_rows<fp16_t>(args.group());
  return decode_few_rows<float>(args.group());
}

void decode_attention_kernel_impl(const AttentionArgs& args, const DecodePlan& plan,
                                  TaskRange tasks, float* scratch) {
  const FpEnvGuard fp_env(false);
  if (tasks.begin >= tasks.end) return;
  const int64_t group = args.group(), padded = args.padded_v(), heads = args.num_kv_heads;
  const DecodeFew few = choose_decode_few(args);
  Rows rows(args, scratch);
  rows.count = group;
  float* const queries = rows.q;
  int64_t request = 0;
  while (tasks.begin >= plan.task_begins[request + 1]) ++request;
  DecodeBlock blocks[2];
  DecodeBlock *block = &blocks[0], *next = &blocks[1];
  next->find(args, request, (tasks.begin - plan.task_begins[request]) / heads);
  bool loaded = false;
  for (int64_t t = tasks.begin; t < tasks.end; ++t) {
    while (t >= plan.task_begins[request + 1]) {
      ++request;
      loaded = false;
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
    if (!loaded) {
      rows.request = request;
      for (rows.kv_head = 0; rows.kv_head < heads; ++rows.kv_head) {
        rows.q = queries + rows.kv_head * group * args.head_dim;
        load_queries(args, &rows);
      }
      loaded = true;
    }
    rows.kv_head = inside % heads;
    rows.q = queries + rows.kv_head * group * args.head_dim;
    float* partial = plan.partials + t * partial_floats(args);
    rows.block = partial;
    rows.largest = partial + group * padded;
    rows.sum = rows.largest + group;
    if (few != nullptr) {
      few(args, rows, *block, *next);
    } else {
      load_keys(args, rows, block->keys);
      load_values(args, rows, block->keys);
      attend_block(args, rows, block->keys, 0, group);
    }
  }
}

void merge_attention_kernel_impl(const AttentionArgs& args, const DecodePlan& plan, TaskRange pairs,
                                 float* scratch) {
  const FpEnvGuard fp_env(false);
  const int64_t group = args.group(), padded = args.padded_v();
  Rows rows(args, scratch);
  rows.count = group;
  for (int64_t pair = pairs.begin; pair < pairs.end; ++pair) {
    rows.request = pair / args.num_kv_heads;
    rows.kv_head = pair % args.num_kv_heads;
    if (args.extend_lens[rows.request] == 0) continue;
    const int64_t blocks = args.key_blocks(rows.request);
    start_totals(args, rows);
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t task = plan.task_begins[rows.request] + b * args.num_kv_heads + rows.kv_head;
      const float* partial = plan.partials + task * partial_floats(args);
      for (int64_t r = 0; r < group; ++r) {
        merge_block(padded, partial + r * padded, partial[group * padded + r],
                    partial[group * padded + group + r], rows.total + r * padded,
                    rows.total_largest + r, rows.total_sum + r);
      }
    }
    store_outputs(args, rows);
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
