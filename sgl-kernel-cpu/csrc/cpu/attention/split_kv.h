// How a decode step is cut into tasks: split-KV, as in Flash-Decoding.
//
// With one new token a request there are too few query rows to keep all threads busy, so the keys
// are split: a split is a block of kKeyBlock keys of one request and one head of keys. Splits are
// in the order (request, block of keys, kv head), which reads the cache as it lies. Each leaves a
// partial result, of the accumulators, maxima and sums of the rows that share the head of keys.
// Combining those of a request and kv head, in the order of the sequence, gives its output.
//
// The partial results lie in a workspace. Long contexts have more splits than it holds, so they go
// by in waves: a wave computes as many splits as fit, and combines what they have left. The
// accumulators of a request that goes on behind the wave are carried to the next one, where they
// are what combining begins with, so that waves change no bit.
#pragma once

#include "attention/attention.h"

namespace sgl_kernel {

struct DecodePlan {
  // [requests + 1]: request r has splits [split_begins[r], split_begins[r + 1]).
  const int64_t* split_begins = nullptr;
  float* partials = nullptr;  // of the wave's splits, each of partial_floats(args)
  // The wave's splits, multiples of the kv heads, and the requests that they are of.
  int64_t first_split = 0;
  int64_t end_split = 0;
  int64_t first_request = 0;
  int64_t end_request = 0;
  float* carried = nullptr;   // [num_kv_heads] partial results of first_request, where it goes on
  float* to_carry = nullptr;  // the same of the last request, where it goes on
};

// Of the rows that share a head of keys: accumulators, maxima, sums.
SGL_INLINE int64_t partial_floats(const AttentionArgs& args) {
  return args.group() * (args.padded_v() + 2);
}

// Splits of a wave: as many as leave workspace_bytes of partial results, or one block of keys.
SGL_INLINE int64_t wave_splits(const AttentionArgs& args) {
  const int64_t block_bytes =
      args.num_kv_heads * partial_floats(args) * static_cast<int64_t>(sizeof(float));
  return args.num_kv_heads * max_i64(1, args.workspace_bytes / block_bytes);
}

// What lies in the workspace of a step that has `splits` splits in all.
struct SplitWorkspace {
  float* partials;
  float* carried;
  float* to_carry;

  SGL_MEMBER SplitWorkspace(const AttentionArgs& args, int64_t splits, ScratchLayout* layout) {
    const int64_t floats = partial_floats(args);
    partials = layout->take<float>(min_i64(splits, wave_splits(args)) * floats);
    to_carry = layout->take<float>(args.num_kv_heads * floats);
    carried = layout->take<float>(args.num_kv_heads * floats);
  }
};

SGL_INLINE int64_t split_workspace_bytes(const AttentionArgs& args, int64_t splits) {
  ScratchLayout counted;
  const SplitWorkspace unused(args, splits, &counted);
  (void)unused;
  return counted.bytes();
}

// The first wave, of work whose splits begin where plan->split_begins says, in a workspace of
// split_workspace_bytes().
void first_wave(const AttentionArgs& args, void* workspace, DecodePlan* plan);
// The wave after it; false if there is none.
bool next_wave(const AttentionArgs& args, DecodePlan* plan);

}  // namespace sgl_kernel
