// The attention ops: check every index against the pools it points into, then split the work.
//
// A decode step falls into equal blocks of keys, a prefill into blocks of queries whose costs
// differ: there each thread takes the next one when it is done. Neither changes a bit of a result.
#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "torch/attention_checks.h"
#include "torch/registration.h"

namespace sgl_kernel {
namespace {

struct AttentionMemory;
struct AttentionWorkspace;

void* attention_memory(const AttentionArgs& args) {
  return thread_buffer<AttentionMemory>(scratch_bytes<AttentionScratch>(args));
}

// Multiply-adds that a thread should have at least.
constexpr int64_t kMinAttentionWork = int64_t{1} << 17;

// A decode step and what its kernels point to, which a graph keeps.
struct DecodeStep {
  explicit DecodeStep(const Checker& op) : check(op) {}

  const Checker check;
  Batch batch;
  AttentionArgs args;
  DecodePlan plan;
  std::vector<int64_t> split_begins;

  int64_t wave_size() const { return plan.end_split - plan.first_split; }
  int64_t wave_pairs() const { return (plan.end_request - plan.first_request) * args.num_kv_heads; }

  // Cuts the work by the lengths as they are now. Partial results lie in memory of this thread.
  void make_plan() {
    split_begins.assign(static_cast<size_t>(args.requests + 1), 0);
    for (int64_t r = 0; r < args.requests; ++r) {
      split_begins[r + 1] = split_begins[r] + args.num_kv_heads * args.key_blocks(r);
    }
    plan.split_begins = split_begins.data();
    const int64_t bytes = split_workspace_bytes(args, split_begins.back());
    first_wave(args, thread_buffer<AttentionWorkspace>(bytes), &plan);
  }

  // What a graph does before it runs the step again.
  void refresh() {
    batch.pool_indices->refresh();
    batch.seq_lens->refresh();
    check_requests(check, batch, args);
    make_plan();
  }
};

void run_decode(const std::shared_ptr<DecodeStep>& step) {
  const KernelTable* kernels = &kernel_table(active_tier());
  const AttentionArgs& args = step->args;
  step->make_plan();
  // Reading a key or value costs about as much as eight multiply-adds.
  const int64_t task_work = kKeyBlock * (args.head_dim + args.v_head_dim) * (args.group() + 8);
  const int64_t grain = max_i64(1, kMinAttentionWork / task_work);
  const auto decode = [kernels, step](TaskRange tasks) {
    const int64_t first = step->plan.first_split;
    kernels->decode_attention(step->args, step->plan, {first + tasks.begin, first + tasks.end},
                              attention_memory(step->args));
  };
  const int64_t pair_work =
      partial_floats(args) * max_i64(1, step->wave_size() / max_i64(1, step->wave_pairs()));
  const int64_t pair_grain = max_i64(1, kMinAttentionWork / pair_work);
  const auto combine = [kernels, step](TaskRange pairs) {
    kernels->combine_splits(step->args, step->plan, pairs, attention_memory(step->args));
  };
  if (recording().graph != nullptr) {
    const auto refresh = [step] {
      step->refresh();
      return step->wave_size();
    };
    const auto again = [step] {
      return next_wave(step->args, &step->plan) ? step->wave_size() : -1;
    };
    record_step({refresh, grain, decode, {}});
    record_step({[step] { return step->wave_pairs(); }, pair_grain, combine, {}, again});
  }
  do {
    run_tasks(step->wave_size(), grain, decode);
    run_tasks(step->wave_pairs(), pair_grain, combine);
  } while (next_wave(args, &step->plan));
}

void run_extend(const AttentionArgs& args) {
  const KernelTable& kernels = kernel_table(active_tier());
  std::vector<ExtendTask> tasks;
  int64_t work = 0;
  for (int64_t r = 0; r < args.requests; ++r) {
    work += args.extend_lens[r] * args.seq_lens[r];
    for (int64_t b = args.query_blocks(r) - 1; b >= 0; --b) {  // the longest first
      for (int64_t h = 0; h < args.num_kv_heads; ++h) tasks.push_back({r, h, b});
    }
  }
  work *= args.num_heads * (args.head_dim + args.v_head_dim);
  const int64_t count = static_cast<int64_t>(tasks.size());
  const int64_t threads = min_i64(min_i64(count, torch::stable::get_num_threads()),
                                  max_i64(1, work / kMinAttentionWork));
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) {
      kernels.extend_attention(args, tasks[i], attention_memory(args));
    }
  });
}

// A decode step is one new token a request.
void set_decode_batch(int64_t requests, Batch* batch) {
  batch->tokens = requests;
  batch->extend_lens.assign(static_cast<size_t>(requests), 1);
  for (int64_t r = 0; r < requests; ++r) batch->extend_starts.push_back(r);
}

void decode_attention_cpu(const Tensor& query, Tensor k_cache, Tensor v_cache, Tensor output,
                          const std::optional<Tensor>& key, const std::optional<Tensor>& value,
                          const std::optional<Tensor>& loc,
                          const std::optional<Tensor>& attn_logits, const Tensor& req_to_token,
                          const Tensor& req_pool_indices, const Tensor& seq_lens, double sm_scale,
                          double logit_cap, int64_t sliding_window,
                          const std::optional<Tensor>& sinks, double k_scale, double v_scale) {
  const Checker check("decode_attention_cpu");
  check_float_dtype(check, query, "query");
  check.rank(query, "query", 3, "[B, heads, head_dim]");
  const int64_t requests = query.size(0);
  const AttentionOptions options{{k_cache, "k_cache", k_scale, "k_scale"},
                                 {v_cache, "v_cache", v_scale, "v_scale"},
                                 sm_scale,
                                 logit_cap,
                                 sliding_window,
                                 sinks};
  const auto step = std::make_shared<DecodeStep>(check);
  AttentionArgs& args = step->args;
  args = cache_args(check, options, query.size(1), "query");
  set_queries(check, query, "query", output, "output", &args);
  set_decode_batch(requests, &step->batch);
  step->batch.slots = k_cache.size(0);
  set_requests(check, {req_to_token, req_pool_indices, seq_lens}, &step->batch, &args);
  if (key.has_value() != value.has_value() || key.has_value() != loc.has_value()) {
    check.fail("key, value, loc", "all three or none", "some of them");
  }
  if (attn_logits.has_value()) check.dense_cpu(*attn_logits, "attn_logits");  // not used
  HeadsArgs heads;
  SharedIndices slots;
  if (key.has_value()) {
    heads.tokens = requests;
    heads.group_count = 2;
    heads.groups[0] = heads_of(check, *key, "key", args.head_dim);
    heads.groups[1] = heads_of(check, *value, "value", args.v_head_dim);
    check.size(*key, "key", 0, requests, "B of query");
    check.size(*value, "value", 0, requests, "B of query");
    slots = std::make_shared<Indices>(
        check, *loc, "loc",
        IndexRange{requests, "B of query", k_cache.size(0), "slots of k_cache"});
    set_cache(check, options.k_cache, *slots, &heads.groups[0]);
    set_cache(check, options.v_cache, *slots, &heads.groups[1]);
  }
  MemoryUse memory;
  memory.writes(output, "output");
  memory.reads(query, "query");
  memory.reads(req_to_token, "req_to_token");
  memory.reads(req_pool_indices, "req_pool_indices");
  memory.reads(seq_lens, "seq_lens");
  memory.reads(sinks, "sinks");
  if (key.has_value()) {
    use_caches(k_cache, v_cache, heads, &memory);
    memory.reads(key, "key");
    memory.reads(value, "value");
    memory.reads(loc, "loc");
  } else {
    memory.reads(k_cache, "k_cache");
    memory.reads(v_cache, "v_cache");
  }
  memory.check(check);
  if (key.has_value()) run_heads(heads, {slots});
  run_decode(step);
}

void extend_attention_cpu(const Tensor& q_extend, const std::optional<Tensor>& k_extend,
                          const std::optional<Tensor>& v_extend, Tensor o_extend,
                          const Tensor& k_buffer, const Tensor& v_buffer,
                          const Tensor& req_to_token, const Tensor& req_pool_indices,
                          const Tensor& seq_lens, const Tensor& extend_seq_lens,
                          const Tensor& extend_start_loc, int64_t max_len_extend, double sm_scale,
                          double logit_cap, int64_t sliding_window,
                          const std::optional<Tensor>& sinks, double k_scale, double v_scale) {
  const Checker check("extend_attention_cpu");
  refuse_recording(check);
  check_float_dtype(check, q_extend, "q_extend");
  check.rank(q_extend, "q_extend", 3, "[T, heads, head_dim]");
  const int64_t tokens = q_extend.size(0);
  AttentionArgs args = cache_args(check,
                                  {{k_buffer, "k_buffer", k_scale, "k_scale"},
                                   {v_buffer, "v_buffer", v_scale, "v_scale"},
                                   sm_scale,
                                   logit_cap,
                                   sliding_window,
                                   sinks},
                                  q_extend.size(1), "q_extend");
  set_queries(check, q_extend, "q_extend", o_extend, "o_extend", &args);
  if (k_extend.has_value() != v_extend.has_value()) {
    check.fail("k_extend, v_extend", "both or none", "one of them");
  }
  if (k_extend.has_value()) {
    const int64_t heads = args.num_kv_heads;
    set_extend_side(check, *k_extend, "k_extend", {tokens, heads, args.head_dim}, &args.k);
    set_extend_side(check, *v_extend, "v_extend", {tokens, heads, args.v_head_dim}, &args.v);
  }
  check.dense_cpu(seq_lens, "seq_lens");
  check.rank(seq_lens, "seq_lens", 1, "[requests]");
  const int64_t requests = seq_lens.size(0);
  const int64_t longest = min_i64(max_i64(0, max_len_extend), tokens);
  const Indices lengths(check, extend_seq_lens, "extend_seq_lens",
                        {requests, "requests", longest + 1, "max_len_extend, T"});
  const Indices starts(check, extend_start_loc, "extend_start_loc",
                       {requests, "requests", tokens + 1, "T + 1"});
  Batch batch;
  batch.tokens = tokens;
  batch.slots = k_buffer.size(0);
  batch.extend_lens.assign(lengths.data(), lengths.data() + requests);
  batch.extend_starts.assign(starts.data(), starts.data() + requests);
  set_requests(check, {req_to_token, req_pool_indices, seq_lens}, &batch, &args);
  check_rows_apart(check, batch);
  MemoryUse memory;
  memory.writes(o_extend, "o_extend");
  memory.reads(q_extend, "q_extend");
  memory.reads(k_extend, "k_extend");
  memory.reads(v_extend, "v_extend");
  memory.reads(k_buffer, "k_buffer");
  memory.reads(v_buffer, "v_buffer");
  memory.reads(req_to_token, "req_to_token");
  memory.reads(req_pool_indices, "req_pool_indices");
  memory.reads(seq_lens, "seq_lens");
  memory.reads(extend_seq_lens, "extend_seq_lens");
  memory.reads(extend_start_loc, "extend_start_loc");
  memory.reads(sinks, "sinks");
  memory.check(check);
  run_extend(args);
}

Tensor fused_qkv_attention_cpu(Tensor qkv, const Tensor& positions, const Tensor& cos_sin_cache,
                               bool is_neox, int64_t num_heads, int64_t num_kv_heads,
                               const std::optional<Tensor>& q_weight,
                               const std::optional<Tensor>& k_weight, double eps, Tensor k_cache,
                               Tensor v_cache, const Tensor& indices, const Tensor& req_to_token,
                               const Tensor& req_pool_indices, const Tensor& seq_lens,
                               const std::optional<Tensor>& extend_seq_lens, double sm_scale,
                               double logit_cap, int64_t sliding_window,
                               const std::optional<Tensor>& sinks, double k_scale, double v_scale,
                               const std::optional<Tensor>& q_scale) {
  const Checker check("fused_qkv_attention_cpu");
  const CacheArgument keys{k_cache, "k_cache", k_scale, "k_scale"};
  const CacheArgument values{v_cache, "v_cache", v_scale, "v_scale"};
  QkvHeads heads(check, {qkv, positions, cos_sin_cache, is_neox, num_heads, num_kv_heads, q_weight,
                         k_weight, eps, keys, values, indices, q_scale});
  const int64_t tokens = qkv.size(0);
  const auto step = std::make_shared<DecodeStep>(check);
  AttentionArgs& args = step->args;
  args = cache_args(check, {keys, values, sm_scale, logit_cap, sliding_window, sinks}, num_heads,
                    "num_heads");

  Batch& batch = step->batch;
  bool decodes = true;
  if (extend_seq_lens.has_value()) {
    refuse_recording(check);
    check.dense_cpu(*extend_seq_lens, "extend_seq_lens");
    check.rank(*extend_seq_lens, "extend_seq_lens", 1, "[requests]");
    const int64_t requests = extend_seq_lens->size(0);
    const Indices lengths(check, *extend_seq_lens, "extend_seq_lens",
                          {requests, "requests", tokens + 1, "T + 1"});
    int64_t start = 0;
    for (int64_t r = 0; r < requests; ++r) {
      batch.extend_lens.push_back(lengths[r]);
      batch.extend_starts.push_back(start);
      start += lengths[r];
      decodes = decodes && lengths[r] <= 1;
    }
    if (start != tokens) {
      check.fail("extend_seq_lens", "lengths that sum to T of qkv, " + std::to_string(tokens),
                 start);
    }
    batch.tokens = tokens;
  } else {
    set_decode_batch(tokens, &batch);
  }
  batch.slots = k_cache.size(0);
  set_requests(check, {req_to_token, req_pool_indices, seq_lens}, &batch, &args);

  MemoryUse& memory = heads.memory();
  memory.reads(req_to_token, "req_to_token");
  memory.reads(req_pool_indices, "req_pool_indices");
  memory.reads(seq_lens, "seq_lens");
  memory.reads(extend_seq_lens, "extend_seq_lens");
  memory.reads(sinks, "sinks");
  memory.check(check);

  const int64_t shape[2] = {tokens, num_heads * args.v_head_dim};
  Tensor out = new_output(qkv, {shape, 2}, qkv.scalar_type());
  args.q = qkv.const_data_ptr();
  args.q_dtype = args.out_dtype = to_dtype(qkv.scalar_type());
  args.q_token_stride = qkv.stride(0);
  args.q_head_stride = args.head_dim;
  args.out = out.mutable_data_ptr();
  args.out_token_stride = shape[1];
  args.out_head_stride = args.v_head_dim;
  heads.run();
  decodes ? run_decode(step) : run_extend(args);
  return out;
}

const RegisteredOp kOps[] = {
    SGL_OP(decode_attention_cpu,
           "(Tensor query, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) output, Tensor? key, "
           "Tensor? value, Tensor? loc, Tensor? attn_logits, Tensor req_to_token, Tensor "
           "req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap, int "
           "sliding_window=0, Tensor? sinks=None, float k_scale=1.0, float v_scale=1.0) -> ()"),
    SGL_OP(extend_attention_cpu,
           "(Tensor q_extend, Tensor? k_extend, Tensor? v_extend, Tensor(a!) o_extend, Tensor "
           "k_buffer, Tensor v_buffer, Tensor req_to_token, Tensor req_pool_indices, Tensor "
           "seq_lens, Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, float "
           "sm_scale, float logit_cap, int sliding_window=0, Tensor? sinks=None, float "
           "k_scale=1.0, float v_scale=1.0) -> ()"),
    SGL_OP(fused_qkv_attention_cpu,
           "(Tensor(a!) qkv, Tensor positions, Tensor cos_sin_cache, bool is_neox, int num_heads, "
           "int num_kv_heads, Tensor? q_weight, Tensor? k_weight, float eps, Tensor(b!) k_cache, "
           "Tensor(c!) v_cache, Tensor indices, Tensor req_to_token, Tensor req_pool_indices, "
           "Tensor seq_lens, Tensor? extend_seq_lens, float sm_scale, float logit_cap=0.0, int "
           "sliding_window=0, Tensor? sinks=None, float k_scale=1.0, float v_scale=1.0, Tensor? "
           "q_scale=None) -> Tensor"),
};

}  // namespace
}  // namespace sgl_kernel

SGL_REGISTER_OPS(sgl_kernel::kOps)
