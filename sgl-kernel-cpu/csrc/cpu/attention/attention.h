// Causal attention of grouped heads over a paged KV cache, for prefill (extend) and decode.
//
// Softmax is computed online, as in FlashAttention: keys come in blocks of kKeyBlock at fixed
// places of the sequence. A block gives every query row its row maximum, its row sum, which is the
// sum of e^(score - maximum), and an accumulator, which is the sum of the values so weighted.
// Blocks are combined in the order of the sequence. Nothing of this depends on which other rows,
// requests or threads there are, so a token's output has the same bits in a prefill of any
// chunking, in a decode step, alone or in a batch.
//
// A query row is one token and one query head. The rows that share a head of keys (grouped-query
// attention) are computed together, so that a key or value is loaded once for all of them.
#pragma once

#include "runtime/scratch.h"
#include "simd/dtype.h"
#include "simd/int_math.h"

namespace sgl_kernel {

// The keys of a block (FlashAttention's Bc), the query rows that share the panels of a block (Br),
// and those of them whose scores are in scratch at a time, a query tile. With heads of 128 elements
// the panels of keys and values are 2 * 64 * 128 * 4 = 64 KiB and stay in the second-level cache
// while 192 rows use them; the scores of a tile are 64 * 48 * 4 = 12 KiB and stay in the first.
constexpr int64_t kKeyBlock = 64;
constexpr int64_t kQueryBlock = 192;
constexpr int64_t kQueryTile = 48;

// What bounds the scratch: the longest head; the most elements of queries that a head of keys
// serves; floats of queries that a decode step holds, if they are of more than one head of keys.
constexpr int64_t kMostAttentionDim = 16384;
constexpr int64_t kMostGroupElements = int64_t{1} << 20;
constexpr int64_t kHeldQueryFloats = int64_t{1} << 20;
constexpr int64_t kSplitWorkspaceBytes = int64_t{64} << 20;  // of a decode step, see split_kv.h

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
    DType dtype = DType::f32;
    int64_t slot_stride = 0;
    int64_t head_stride = 0;
    float scale = 1.f;
    // The rows of the tokens that extend the sequence, [tokens, num_kv_heads, ...], where they are
    // not to be taken from the cache; else null.
    const void* extend = nullptr;
    DType extend_dtype = DType::f32;
    int64_t extend_token_stride = 0;
    int64_t extend_head_stride = 0;
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

  int64_t workspace_bytes = kSplitWorkspaceBytes;  // of the partial results of a decode step

  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t padded_k() const { return round_up(head_dim, 16); }
  int64_t padded_v() const { return round_up(v_head_dim, 32); }
  int64_t tokens_a_block() const { return max_i64(1, kQueryBlock / group()); }
  // Most rows that are computed at once, and those whose queries are held: of a decode step, in
  // panels of their own, those of held_heads() heads of keys, which are usually all.
  int64_t block_rows() const { return max_i64(kQueryBlock, round_up(group(), 16)); }
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

// Keys [begin, end), counted from the first one of the sequence or of a block.
struct KeyRange {
  int64_t begin;
  int64_t end;
};

// What a thread needs besides its arguments; below 64 MiB.
struct AttentionScratch {
  float* scores;         // [kKeyBlock, kQueryTile] of a query tile, then their softmax weights
  float* k_panel;        // [kKeyBlock, padded_k]
  float* v_panel;        // [padded_v / kTileCols][kKeyBlock][kTileCols]
  float* q;              // panels of pack_queries, or [rows, head_dim] of a decode step
  float* accumulator;    // [rows, padded_v], of all blocks so far
  float* running_max;    // [rows] the largest score of all blocks so far
  float* running_sum;    // [rows] the sum of e^(score - running_max)
  int64_t* first_keys;   // [rows] what a row sees: keys from here
  int64_t* end_keys;     // [rows] to here
  const void** queries;  // [rows] where they are
  float* staged;         // [kKeyBlock, max(padded_k, padded_v)]

  SGL_MEMBER AttentionScratch(const AttentionArgs& args, ScratchLayout* layout) {
    const int64_t rows = args.block_rows(), k = args.padded_k(), v = args.padded_v();
    scores = layout->take<float>(kKeyBlock * kQueryTile);
    k_panel = layout->take<float>(kKeyBlock * k);
    v_panel = layout->take<float>(kKeyBlock * v);
    q = layout->take<float>(args.query_panel_rows() * k);
    accumulator = layout->take<float>(rows * v);
    running_max = layout->take<float>(rows);
    running_sum = layout->take<float>(rows);
    first_keys = layout->take<int64_t>(rows);
    end_keys = layout->take<int64_t>(rows);
    queries = layout->take<const void*>(rows);
    staged = layout->take<float>(kKeyBlock * max_i64(k, v));
  }
};

// Prefill: a task is a block of queries of one request and one head of keys.
struct ExtendTask {
  int64_t request;
  int64_t kv_head;
  int64_t block;  // of queries
};

}  // namespace sgl_kernel
