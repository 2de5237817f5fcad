// Prefill: a block of queries of one request times all keys that it sees. Compiled once per tier.
#include "attention/online_softmax.h"
#include "dispatch/kernel_list.h"
#include "simd/fp_env.h"

namespace sgl_kernel {
namespace SGL_TIER {

void extend_attention_kernel_impl(const AttentionArgs& args, ExtendTask task, void* scratch) {
  const FpEnvGuard fp_env(false);
  const int64_t padded = args.padded_v();
  QueryRows rows(args, ScratchLayout(scratch));
  rows.request = task.request;
  rows.kv_head = task.kv_head;
  rows.first_token = task.block * args.tokens_a_block();
  const int64_t tokens =
      min_i64(args.tokens_a_block(), args.extend_lens[task.request] - rows.first_token);
  rows.count = tokens * args.group();
  clear_accumulators(args, rows);
  // In a batch that mixes prefill and decode most requests have one new token.
  if (args.extend_lens[task.request] == 1 && attend_single_token(args, rows)) {
    return store_outputs(args, rows);
  }
  pack_query_rows(args, rows);
  const int64_t prefix = args.seq_lens[task.request] - args.extend_lens[task.request];
  const int64_t end = prefix + rows.first_token + tokens;
  const int64_t first = args.first_key(task.request, rows.first_token) / kKeyBlock;
  QueryTile tile;
  alignas(64) float accumulator_scale[kQueryTile], block_scale[kQueryTile];
  for (int64_t b = first; b * kKeyBlock < end; ++b) {
    const KeyBlock keys = key_block(b, end);
    pack_block(args, rows, keys);
    for (int64_t r = 0; r < rows.count; r += kQueryTile) {
      tile.first = r;
      tile.count = min_i64(kQueryTile, rows.count - r);
      if (!tile.find_visible(rows, keys)) continue;
      qk_softmax(args, rows, &tile);
      update_running(tile, rows, accumulator_scale, block_scale);
      multiply_values(rows, tile, {accumulator_scale, block_scale}, rows.accumulator + r * padded,
                      padded);
    }
  }
  store_outputs(args, rows);
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
