// Which splits of a decode step are in which wave. Compiled once, not per tier.
#include "attention/split_kv.h"

#include <utility>

namespace sgl_kernel {
namespace {

// From the first request that is not over on: those whose last split is in the wave, and the one in
// whose middle it ends.
void find_requests(const AttentionArgs& args, DecodePlan* plan) {
  plan->end_request = plan->first_request;
  while (plan->end_request < args.requests &&
         plan->split_begins[plan->end_request + 1] <= plan->end_split) {
    ++plan->end_request;
  }
  if (plan->end_request < args.requests &&
      plan->split_begins[plan->end_request] < plan->end_split) {
    ++plan->end_request;
  }
}

}  // namespace

void first_wave(const AttentionArgs& args, void* workspace, DecodePlan* plan) {
  const int64_t splits = plan->split_begins[args.requests];
  ScratchLayout layout(workspace);
  const SplitWorkspace memory(args, splits, &layout);
  plan->partials = memory.partials;
  plan->carried = memory.carried;
  plan->to_carry = memory.to_carry;
  plan->first_split = 0;
  plan->end_split = min_i64(splits, wave_splits(args));
  plan->first_request = 0;
  find_requests(args, plan);
}

bool next_wave(const AttentionArgs& args, DecodePlan* plan) {
  const int64_t splits = plan->split_begins[args.requests];
  if (plan->end_split >= splits) return false;
  plan->first_split = plan->end_split;
  plan->end_split = min_i64(splits, plan->first_split + wave_splits(args));
  while (plan->split_begins[plan->first_request + 1] <= plan->first_split) ++plan->first_request;
  std::swap(plan->carried, plan->to_carry);
  find_requests(args, plan);
  return true;
}

}  // namespace sgl_kernel
