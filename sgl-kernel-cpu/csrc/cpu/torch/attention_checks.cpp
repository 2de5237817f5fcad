#include "torch/attention_checks.h"

#include <algorithm>

namespace sgl_kernel {
namespace {

void set_cache_side(const Checker& check, const CacheArgument& cache, int64_t num_kv_heads,
                    AttentionArgs::Cache* side) {
  const Tensor& t = cache.tensor;
  check_cache(check, t, cache.name);
  check.size(t, cache.name, 1, num_kv_heads, "heads of k_cache");
  check.unit_last_stride(t, cache.name);
  side->data = t.const_data_ptr();
  side->dtype = to_dtype(t.scalar_type());
  side->slot_stride = t.stride(0);
  side->head_stride = t.stride(1);
  side->scale = check.number(cache.scale, cache.scale_name, NumberRange::positive);
}

template <typename T>
void check_slots(const Checker& check, const T* table, int64_t begin, int64_t end, int64_t slots,
                 int64_t request) {
  T least = 0, greatest = 0;
  for (int64_t i = begin; i < end; ++i) {
    least = table[i] < least ? table[i] : least;
    greatest = table[i] > greatest ? table[i] : greatest;
  }
  if (least < 0 || greatest >= slots) {
    check.fail("req_to_token", "slots in [0, " + std::to_string(slots) + ") of the cache",
               least < 0 ? least : greatest, " for a token of request ", request);
  }
}

}  // namespace

AttentionArgs cache_args(const Checker& check, const AttentionOptions& options, int64_t num_heads,
                         const char* heads_argument) {
  const Tensor& k_cache = options.k_cache.tensor;
  const Tensor& v_cache = options.v_cache.tensor;
  check_cache(check, k_cache, options.k_cache.name);
  check_cache(check, v_cache, options.v_cache.name);
  check.positive(k_cache, options.k_cache.name, 1, "heads");
  check.size(v_cache, options.v_cache.name, 0, k_cache.size(0), "slots of the keys");
  AttentionArgs args;
  args.num_heads = num_heads;
  args.num_kv_heads = k_cache.size(1);
  args.head_dim = k_cache.size(2);
  args.v_head_dim = v_cache.size(2);
  if (num_heads < 1 || num_heads % args.num_kv_heads != 0) {
    check.fail(heads_argument,
               "heads that are a multiple of the cache's, " + std::to_string(args.num_kv_heads),
               num_heads);
  }
  const int64_t longest = max_i64(args.head_dim, args.v_head_dim);
  if (longest > kMostAttentionDim ||
      args.group() > kMostGroupElements / max_i64(args.padded_k(), args.padded_v())) {
    check.fail(options.k_cache.name,
               "heads of at most " + std::to_string(kMostAttentionDim) + " elements, and " +
                   std::to_string(kMostGroupElements) + " in the query heads that share one",
               longest, " elements for ", args.group(), " query heads");
  }
  set_cache_side(check, options.k_cache, args.num_kv_heads, &args.k);
  set_cache_side(check, options.v_cache, args.num_kv_heads, &args.v);
  args.scale = check.number(options.sm_scale, "sm_scale", NumberRange::any);
  args.logit_cap = check.number(options.logit_cap, "logit_cap", NumberRange::not_negative,
                                "a finite number above 0, or 0 for none");
  args.sliding_window = options.sliding_window;
  if (options.sinks.has_value()) {
    const Tensor& sinks = *options.sinks;
    check_float_dtype(check, sinks, "sinks");
    check.rank(sinks, "sinks", 1, "[num_heads]");
    check.size(sinks, "sinks", 0, num_heads, "num_heads");
    check.contiguous(sinks, "sinks");
    args.sinks = sinks.const_data_ptr();
    args.sinks_dtype = to_dtype(sinks.scalar_type());
  }
  return args;
}

void set_queries(const Checker& check, const Tensor& q, const char* argument, const Tensor& out,
                 const char* out_argument, AttentionArgs* args) {
  check_float_dtype(check, q, argument);
  check_float_dtype(check, out, out_argument);
  check.rank(q, argument, 3, "[T, heads, head_dim]");
  check.rank(out, out_argument, 3, "[T, heads, v_head_dim]");
  check.size(q, argument, 2, args->head_dim, "head_dim of the cache");
  check.size(out, out_argument, 0, q.size(0), "T of the queries");
  check.size(out, out_argument, 1, q.size(1), "heads of the queries");
  check.size(out, out_argument, 2, args->v_head_dim, "v_head_dim of the cache");
  check.unit_last_stride(q, argument);
  check.unit_last_stride(out, out_argument);
  args->q = q.const_data_ptr();
  args->q_dtype = to_dtype(q.scalar_type());
  args->q_token_stride = q.stride(0);
  args->q_head_stride = q.stride(1);
  args->out = out.mutable_data_ptr();
  args->out_dtype = to_dtype(out.scalar_type());
  args->out_token_stride = out.stride(0);
  args->out_head_stride = out.stride(1);
}

void set_extend_side(const Checker& check, const Tensor& t, const char* argument,
                     const ExtendShape& shape, AttentionArgs::Cache* side) {
  check_float_dtype(check, t, argument);
  check.rank(t, argument, 3, "[T, heads, head_dim]");
  check.size(t, argument, 0, shape.tokens, "T of the queries");
  check.size(t, argument, 1, shape.heads, "heads of the cache");
  check.size(t, argument, 2, shape.head_dim, "head_dim of the cache");
  check.unit_last_stride(t, argument);
  side->extend = t.const_data_ptr();
  side->extend_dtype = to_dtype(t.scalar_type());
  side->extend_token_stride = t.stride(0);
  side->extend_head_stride = t.stride(1);
}

void check_requests(const Checker& check, const Batch& batch, const AttentionArgs& args) {
  for (int64_t r = 0; r < args.requests; ++r) {
    const int64_t length = batch.extend_lens[r], start = batch.extend_starts[r];
    // One token of a request of length 0 is padding.
    if (length > max_i64(1, args.seq_lens[r])) {
      check.fail("extend_seq_lens", "0 to seq_lens, " + std::to_string(args.seq_lens[r]), length,
                 " for request ", r);
    }
    if (start > batch.tokens - length) {
      check.fail("extend_start_loc",
                 "0 to T - extend_seq_lens, " + std::to_string(batch.tokens - length), start,
                 " for request ", r);
    }
    if (length == 0) continue;
    const int64_t row = args.req_pool_indices[r] * args.req_stride;
    const int64_t begin = args.first_key(r, 0);
    const int64_t end = args.seq_lens[r] - (args.k.extend == nullptr ? 0 : length);
    if (args.wide_slots) {
      check_slots(check, static_cast<const int64_t*>(args.req_to_token) + row, begin, end,
                  batch.slots, r);
    } else {
      check_slots(check, static_cast<const int32_t*>(args.req_to_token) + row, begin, end,
                  batch.slots, r);
    }
  }
}

void set_requests(const Checker& check, const RequestArguments& given, Batch* batch,
                  AttentionArgs* args) {
  const Tensor& req_to_token = given.req_to_token;
  check.dense_cpu(req_to_token, "req_to_token");
  check.dtype(req_to_token, "req_to_token", {ScalarType::Int, ScalarType::Long});
  check.rank(req_to_token, "req_to_token", 2, "[requests, max_context_len]");
  check.unit_last_stride(req_to_token, "req_to_token");
  const int64_t requests = static_cast<int64_t>(batch->extend_lens.size());
  batch->pool_indices.emplace(
      check, given.req_pool_indices, "req_pool_indices",
      IndexRange{requests, "requests", req_to_token.size(0), "rows of req_to_token"});
  batch->seq_lens.emplace(
      check, given.seq_lens, "seq_lens",
      IndexRange{requests, "requests", req_to_token.size(1) + 1, "columns of req_to_token"});
  args->requests = requests;
  args->req_to_token = req_to_token.const_data_ptr();
  args->wide_slots = req_to_token.scalar_type() == ScalarType::Long;
  args->req_stride = req_to_token.stride(0);
  args->req_pool_indices = batch->pool_indices->data();
  args->seq_lens = batch->seq_lens->data();
  args->extend_lens = batch->extend_lens.data();
  args->extend_starts = batch->extend_starts.data();
  check_requests(check, *batch, *args);
}

void check_rows_apart(const Checker& check, const Batch& batch) {
  const int64_t requests = static_cast<int64_t>(batch.extend_lens.size());
  std::vector<int64_t> order;
  for (int64_t r = 0; r < requests; ++r) {
    if (batch.extend_lens[r] > 0) order.push_back(r);
  }
  const auto starts_before = [&batch](int64_t a, int64_t b) {
    return batch.extend_starts[a] < batch.extend_starts[b];
  };
  std::sort(order.begin(), order.end(), starts_before);
  for (size_t i = 1; i < order.size(); ++i) {
    const int64_t r = order[i], before = order[i - 1];
    if (batch.extend_starts[r] < batch.extend_starts[before] + batch.extend_lens[before]) {
      check.fail("extend_start_loc", "rows that belong to one request", batch.extend_starts[r],
                 " for request ", r, ", among the rows of request ", before);
    }
  }
}

}  // namespace sgl_kernel
