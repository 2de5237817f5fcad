#include "attention_block.h"
#include "fp_env.h"
#include "transformer_tiers.h"

namespace sgl_kernel {
namespace SGL_TIER {

void extend_attention_kernel_impl(const AttentionArgs& args, ExtendTask task, float* scratch) {
  const FpEnvGuard fp_env(false);
  const int64_t group = args.group(), padded = args.padded_v();
  Rows rows(args, scratch);
  rows.request = task.request;
  rows.kv_head = task.kv_head;
  rows.first_token = task.block * args.tokens_a_block();
  const int64_t tokens =
      min_i64(args.tokens_a_block(), args.extend_lens[task.request] - rows.first_token);
  rows.count = tokens * group;
  load_queries(args, &rows);
  start_totals(args, rows);
  const int64_t prefix = args.seq_lens[task.request] - args.extend_lens[task.request];
  const int64_t end = prefix + rows.first_token + tokens;
  const int64_t first = args.first_key(task.request, rows.first_token) / kKeyBlock;
  for (int64_t b = first; b * kKeyBlock < end; ++b) {
    const Keys keys = keys_of_block(b, end);
    load_keys(args, rows, keys);
    load_values(args, rows, keys);
    // Rows that see any of these keys are consecutive: earlier tokens end before, later ones begin
    // behind.
    int64_t from = 0, to = rows.count;
    const auto sees = [&](int64_t r) {
      const Visible visible = visible_keys(rows, keys, r);
      return visible.begin < visible.end;
    };
    while (from < to && !sees(from)) from += group;
    while (to > from && !sees(to - 1)) to -= group;
    attend_block(args, rows, keys, from, to);
    for (int64_t r = from; r < to; ++r) {
      merge_block(padded, rows.block + r * padded, rows.largest[r], rows.sum[r],
                  rows.total + r * padded, rows.total_largest + r, rows.total_sum + r);
    }
  }
  store_outputs(args, rows);
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
