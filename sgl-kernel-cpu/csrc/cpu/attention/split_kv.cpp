// Which tasks of a decode step go by in which turn. Compiled once, not per tier.
#include <utility>

#include "attention/attention.h"

namespace sgl_kernel {
namespace {

// From the first request that is not over on: those whose last task is in the turn, and the one in
// whose middle it ends.
void find_requests(const AttentionArgs& args, DecodePlan* plan) {
  plan->end_request = plan->first_request;
  while (plan->end_request < args.requests &&
         plan->task_begins[plan->end_request + 1] <= plan->end_task) {
    ++plan->end_request;
  }
  if (plan->end_request < args.requests && plan->task_begins[plan->end_request] < plan->end_task) {
    ++plan->end_request;
  }
}

}  // namespace

void start_turns(const AttentionArgs& args, float* memory, DecodePlan* plan) {
  const int64_t tasks = plan->task_begins[args.requests];
  const int64_t turn = min_i64(tasks, decode_turn_tasks(args));
  plan->partials = memory;
  plan->first_task = 0;
  plan->end_task = turn;
  plan->first_request = 0;
  plan->to_carry = memory + turn * partial_floats(args);
  plan->carried = plan->to_carry + args.num_kv_heads * partial_floats(args);
  find_requests(args, plan);
}

bool next_turn(const AttentionArgs& args, DecodePlan* plan) {
  const int64_t tasks = plan->task_begins[args.requests];
  if (plan->end_task >= tasks) return false;
  plan->first_task = plan->end_task;
  plan->end_task = min_i64(tasks, plan->first_task + decode_turn_tasks(args));
  while (plan->task_begins[plan->first_request + 1] <= plan->first_task) ++plan->first_request;
  std::swap(plan->carried, plan->to_carry);
  find_requests(args, plan);
  return true;
}

}  // namespace sgl_kernel
