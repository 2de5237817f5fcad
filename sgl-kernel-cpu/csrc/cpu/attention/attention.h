// Causal attention of grouped heads over a paged KV cache, for prefill and decode.
//
// Keys are taken in blocks of kKeyBlock at fixed places of the sequence. A block gives every query
// row three things: its largest score, the sum of e^(score - largest), and the sum of values so
// weighted. Blocks are merged in the order of the sequence. Nothing of this depends on which other
// rows, requests or threads there are, so a token's output has the same bits in a prefill of any
// chunking, in a decode step, alone or in a batch.
#pragma once

#include "gemm/gemm.h"
#include "simd/dtype.h"
#include "simd/int_math.h"

namespace sgl_kernel {

constexpr int64_t kKeyBlock = 64;
constexpr int64_t kQueryRows = 192;  // rows (tokens times heads of a group) that share a block
constexpr int64_t kRowGroup = 48;    // and those that are computed together

// What bounds the scratch: the longest head; the most elements of queries that a head of keys
// serves; floats of queries that a decode step holds, if they are of more than one head of keys.
constexpr int64_t kMostAttentionDim = 16384;
constexpr int64_t kMostGroupElements = int64_t{1} << 20;
constexpr int64_t kHeldQueryFloats = int64_t{1} << 20;
constexpr int64_t kTurnBytes = int64_t{64} << 20;

struct AttentionArgs {
  int64_t requests = 0;
  int64_t num_heads = 0;  // a multiple of num_kv_heads
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t v_head_dim = 0;

  const void* q = nullptr;  // [tokens, num_heads, head_dim]
  DType q_dtype = DType::f32;
  int64_t q_token_stride = 0;
  int64_t q_head_stride = 0;

  void* out = nullptr;  // [tokens, num_heads, v_head_dim]
  DType out_dtype = DType::f32;
  int64_t out_token_stride = 0;
  int64_t out_head_stride = 0;

  // [slots, num_kv_heads, head_dim or v_head_dim]; what is stored is multiplied by the scale.
  struct Cache {
    const void* data = nullptr;
    DType type = DType::f32;
    int64_t slot_stride = 0;
    int64_t head_stride = 0;
    float scale = 1.f;
    // New tokens' rows [tokens, num_kv_heads, ...] where they are not to be taken from the cache.
    const void* fresh = nullptr;
    DType fresh_dtype = DType::f32;
    int64_t fresh_token_stride = 0;
    int64_t fresh_head_stride = 0;
  };
  Cache k;
  Cache v;

  // Slot of a request's token j: req_to_token[req_pool_indices[request], j].
  const void* req_to_token = nullptr;
  bool wide_slots = false;  // int64, else int32
  int64_t req_stride = 0;
  const int64_t* req_pool_indices = nullptr;  // [requests]
  const int64_t* seq_lens = nullptr;          // [requests] with the new tokens; 0: padding, zeros
  const int64_t* extend_lens = nullptr;       // [requests] new tokens, the sequence's last
  const int64_t* extend_starts = nullptr;     // [requests] place of the first of them in q and out

  float scale = 1.f;
  float logit_cap = 0.f;        // > 0: scores become cap * tanh(score / cap)
  int64_t sliding_window = 0;   // > 0: a query sees that many tokens, itself included
  const void* sinks = nullptr;  // [num_heads] scores that take weight and add no value, or null
  DType sinks_dtype = DType::f32;

  int64_t turn_bytes = kTurnBytes;  // of partial results of a decode step, see DecodePlan

  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t padded_k() const { return round_up(head_dim, 16); }
  int64_t padded_v() const { return round_up(v_head_dim, 32); }
  int64_t tokens_a_block() const { return max_i64(1, kQueryRows / group()); }
  // Most rows that are computed at once, and those whose queries are held: of a decode step, in
  // panels of their own, those of held_heads() heads of keys, which are usually all.
  int64_t block_rows() const { return max_i64(kQueryRows, round_up(group(), 16)); }
  int64_t held_heads() const {
    const int64_t floats = round_up(group(), 16) * padded_k();
    return min_i64(num_kv_heads, max_i64(1, kHeldQueryFloats / floats));
  }
  int64_t query_panel_rows() const {
    return max_i64(block_rows(), held_heads() * round_up(group(), 16));
  }
  int64_t query_blocks(int64_t request) const {
    return div_up(extend_lens[request], tokens_a_block());
  }
  // First key that the request's new token sees.
  int64_t first_key(int64_t request, int64_t token) const {
    const int64_t end = seq_lens[request] - extend_lens[request] + token + 1;
    return sliding_window > 0 ? max_i64(0, end - sliding_window) : 0;
  }
  // Blocks of keys that a decode step of the request looks at.
  int64_t first_block(int64_t request) const { return first_key(request, 0) / kKeyBlock; }
  int64_t key_blocks(int64_t request) const {
    if (extend_lens[request] == 0) return 0;
    return div_up(seq_lens[request], kKeyBlock) - first_block(request);
  }
};

// Floats of scratch that a thread needs; below 64 MiB.
SGL_INLINE int64_t attention_scratch(const AttentionArgs& args) {
  const int64_t k = args.padded_k(), v = args.padded_v();
  return args.query_panel_rows() * k + args.block_rows() * (v + 8) +
         kKeyBlock * (k + v + max_i64(k, v) + kRowGroup);
}

// Prefill: a task is a block of queries of one request and one head of keys.
struct ExtendTask {
  int64_t request;
  int64_t kv_head;
  int64_t block;  // of queries
};

// Decode, one new token a request: tasks are (request, block of keys, kv head), in this order,
// which reads the cache as it lies; request r begins at task_begins[r], task_begins[requests] is
// their number. Each leaves a partial result of partial_floats(args), and merging those of a
// request and kv head gives its output.
//
// Long contexts go by in turns, so that partial results take bounded memory. A turn does tasks
// [first_task, end_task), multiples of the kv heads, and merges what they have left for requests
// [first_request, end_request). Totals of a request that is not over are carried to the next turn.
struct DecodePlan {
  const int64_t* task_begins = nullptr;
  float* partials = nullptr;  // of the turn's tasks
  int64_t first_task = 0;
  int64_t end_task = 0;
  int64_t first_request = 0;
  int64_t end_request = 0;
  float* carried = nullptr;   // [num_kv_heads] totals of first_request, where it goes on
  float* to_carry = nullptr;  // the same of the last request, where it goes on
};

SGL_INLINE int64_t partial_floats(const AttentionArgs& args) {
  return args.group() * (args.padded_v() + 2);
}

// Tasks that go by in a turn: as many as leave turn_bytes of partial results, or one block.
SGL_INLINE int64_t decode_turn_tasks(const AttentionArgs& args) {
  const int64_t block = args.num_kv_heads * partial_floats(args) * 4;
  return args.num_kv_heads * max_i64(1, args.turn_bytes / block);
}

// Floats for the partial results of `tasks` tasks in all, then two totals to carry.
SGL_INLINE int64_t decode_plan_floats(const AttentionArgs& args, int64_t tasks) {
  const int64_t turn = min_i64(tasks, decode_turn_tasks(args));
  return (turn + 2 * args.num_kv_heads) * partial_floats(args);
}

// The first turn, of work whose tasks begin where plan->task_begins says, in memory of
// decode_plan_floats().
void start_turns(const AttentionArgs& args, float* memory, DecodePlan* plan);
// The turn after it; false if there is none.
bool next_turn(const AttentionArgs& args, DecodePlan* plan);

}  // namespace sgl_kernel
