#include "attention/online_softmax.h"
#include "dispatch/kernel_list.h"
#include "simd/fp_env.h"

namespace sgl_kernel {
namespace SGL_TIER {

void extend_attention_kernel_impl(const AttentionArgs& args, ExtendTask task, float* scratch) {
  const FpEnvGuard fp_env(false);
  const int64_t padded = args.padded_v();
  Rows rows(args, scratch);
  rows.request = task.request;
  rows.kv_head = task.kv_head;
  rows.first_token = task.block * args.tokens_a_block();
  const int64_t tokens =
      min_i64(args.tokens_a_block(), args.extend_lens[task.request] - rows.first_token);
  rows.count = tokens * args.group();
  start_totals(args, rows);
  // In a batch that mixes prefill and decode most requests have one new token.
  if (args.extend_lens[task.request] == 1 && attend_token(args, rows)) {
    return store_outputs(args, rows);
  }
  load_queries(args, rows);
  const int64_t prefix = args.seq_lens[task.request] - args.extend_lens[task.request];
  const int64_t end = prefix + rows.first_token + tokens;
  const int64_t first = args.first_key(task.request, rows.first_token) / kKeyBlock;
  RowGroup group;
  alignas(64) float keep[kRowGroup], take[kRowGroup];
  for (int64_t b = first; b * kKeyBlock < end; ++b) {
    const Keys keys = keys_of_block(b, end);
    load_panels(args, rows, keys);
    for (int64_t r = 0; r < rows.count; r += kRowGroup) {
      group.first = r;
      group.count = min_i64(kRowGroup, rows.count - r);
      if (!group.look(rows, keys)) continue;
      weigh_keys(args, rows, &group);
      merge_sums(group, rows, keep, take);
      multiply_values(rows, group, {keep, take}, rows.total + r * padded, padded);
    }
  }
  store_outputs(args, rows);
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
