// The ops between the products: norms, activations, rotary embedding, the KV cache, the router.
// They check the arguments, allocate the output and split rows or tokens over threads.
#include <optional>
#include <tuple>

#include "torch_common.h"
#include "transformer_tiers.h"

namespace sgl_kernel {
namespace {

const TransformerKernels& kernels() {
  return transformer_kernels(active_tier());
}

void set_weight(const Checker& check, const Tensor& weight, const char* argument, int64_t columns,
                const char* meaning) {
  check_float_dtype(check, weight, argument);
  check.rank(weight, argument, 1, "[N]");
  check.size(weight, argument, 0, columns, meaning);
  check.contiguous(weight, argument);
}

void run_rms_norm(const RmsNormArgs& args) {
  const auto kernel = kernels().rms_norm;
  const int64_t floats = rms_norm_scratch(args);
  torch::stable::parallel_for(
      0, args.rows, row_grain(args.columns),
      [&](int64_t begin, int64_t end) { kernel(args, {begin, end}, row_scratch(floats)); });
}

Tensor rmsnorm_cpu(const Tensor& input, const Tensor& weight, double eps,
                   std::optional<ScalarType> out_dtype) {
  const Checker check("rmsnorm_cpu");
  check_float_dtype(check, input, "input");
  const int64_t dims = input.dim();
  if (dims != 2 && dims != 3) {
    check.fail("input", "[M, N] or [T, heads, N]", dims, "-D ", shape_name(input));
  }
  check.positive(input, "input", dims - 1, "N");
  check.unit_last_stride(input, "input");
  const ScalarType dtype = out_dtype.value_or(input.scalar_type());
  check_float_out_dtype(check, dtype);

  RmsNormArgs args;
  args.columns = input.size(dims - 1);
  set_weight(check, weight, "weight", args.columns, "N of input");
  args.group_rows = dims == 3 ? max_i64(1, input.size(1)) : 1;
  args.rows = input.size(0) * (dims == 3 ? input.size(1) : 1);
  args.eps = static_cast<float>(eps);
  args.input = input.const_data_ptr();
  args.input_type = element_type(input.scalar_type());
  args.input_group_stride = input.stride(0);
  args.input_row_stride = dims == 3 ? input.stride(1) : 0;
  args.weight = weight.const_data_ptr();
  args.weight_type = element_type(weight.scalar_type());
  Tensor out = torch::stable::new_empty(input, input.sizes(), dtype);
  args.out = out.mutable_data_ptr();
  args.out_type = element_type(dtype);
  args.out_group_stride = args.group_rows * args.columns;
  args.out_row_stride = args.columns;
  run_rms_norm(args);
  return out;
}

// A 2-D tensor that is written: its rows do not overlap.
void check_rows(const Checker& check, const Tensor& t, const char* argument) {
  check_float_dtype(check, t, argument);
  check.rank(t, argument, 2, "[M, N]");
  check.unit_last_stride(t, argument);
  if (t.size(0) > 1 && t.size(1) > 0 && t.stride(0) < t.size(1)) {
    check.fail(argument, "rows that do not overlap in memory", "row stride ", t.stride(0), " for ",
               shape_name(t));
  }
}

void fused_add_rmsnorm_cpu(Tensor input, Tensor residual, const Tensor& weight, double eps,
                           const std::optional<Tensor>& out) {
  const Checker check("fused_add_rmsnorm_cpu");
  check_rows(check, input, "input");
  check_rows(check, residual, "residual");
  check.positive(input, "input", 1, "N");
  check.size(residual, "residual", 0, input.size(0), "M of input");
  check.size(residual, "residual", 1, input.size(1), "N of input");
  set_weight(check, weight, "weight", input.size(1), "N of input");
  const Tensor& target = out.has_value() ? *out : input;
  if (out.has_value()) {
    check_rows(check, *out, "out");
    check.size(*out, "out", 0, input.size(0), "M of input");
    check.size(*out, "out", 1, input.size(1), "N of input");
  }

  RmsNormArgs args;
  args.rows = input.size(0);
  args.columns = input.size(1);
  args.eps = static_cast<float>(eps);
  args.input = input.const_data_ptr();
  args.input_type = element_type(input.scalar_type());
  args.input_group_stride = input.stride(0);
  args.residual = residual.mutable_data_ptr();
  args.residual_type = element_type(residual.scalar_type());
  args.residual_stride = residual.stride(0);
  args.weight = weight.const_data_ptr();
  args.weight_type = element_type(weight.scalar_type());
  args.out = target.mutable_data_ptr();
  args.out_type = element_type(target.scalar_type());
  args.out_group_stride = target.stride(0);
  run_rms_norm(args);
}

Tensor silu_and_mul_cpu(const Tensor& input, std::optional<ScalarType> out_dtype) {
  const Checker check("silu_and_mul_cpu");
  check_float_dtype(check, input, "input");
  check.rank(input, "input", 2, "[M, 2 N]");
  check.unit_last_stride(input, "input");
  if (input.size(1) % 2 != 0) {
    check.fail("input", "an even size in dimension 1", input.size(1), " in shape ",
               shape_name(input));
  }
  const ScalarType dtype = out_dtype.value_or(input.scalar_type());
  check_float_out_dtype(check, dtype);

  SiluAndMulArgs args;
  args.rows = input.size(0);
  args.columns = input.size(1) / 2;
  args.input = input.const_data_ptr();
  args.input_type = element_type(input.scalar_type());
  args.input_stride = input.stride(0);
  const int64_t shape[2] = {args.rows, args.columns};
  Tensor out = torch::stable::new_empty(input, {shape, 2}, dtype);
  args.out = out.mutable_data_ptr();
  args.out_type = element_type(dtype);
  const auto kernel = kernels().silu_and_mul;
  torch::stable::parallel_for(0, args.rows, row_grain(4 * args.columns),
                              [&](int64_t begin, int64_t end) { kernel(args, {begin, end}); });
  return out;
}

std::tuple<Tensor, Tensor> topk_softmax_cpu(const Tensor& hidden_states,
                                            const Tensor& gating_output, int64_t topk,
                                            bool renormalize) {
  const Checker check("topk_softmax_cpu");
  check_float_dtype(check, gating_output, "gating_output");
  check.rank(gating_output, "gating_output", 2, "[M, experts]");
  check.unit_last_stride(gating_output, "gating_output");
  check.dense_cpu(hidden_states, "hidden_states");
  check.rank(hidden_states, "hidden_states", 2, "[M, K]");
  check.size(hidden_states, "hidden_states", 0, gating_output.size(0), "M of gating_output");
  if (topk < 1 || topk > gating_output.size(1)) {
    check.fail("topk", "1 to the number of experts, " + std::to_string(gating_output.size(1)),
               topk);
  }
  TopkSoftmaxArgs args;
  args.rows = gating_output.size(0);
  args.experts = gating_output.size(1);
  args.topk = topk;
  args.renormalize = renormalize;
  args.gating = gating_output.const_data_ptr();
  args.gating_type = element_type(gating_output.scalar_type());
  args.gating_stride = gating_output.stride(0);
  const int64_t shape[2] = {args.rows, topk};
  Tensor weights = torch::stable::new_empty(gating_output, {shape, 2}, ScalarType::Float);
  Tensor ids = torch::stable::new_empty(gating_output, {shape, 2}, ScalarType::Int);
  args.weights = static_cast<float*>(weights.mutable_data_ptr());
  args.ids = static_cast<int32_t*>(ids.mutable_data_ptr());
  const auto kernel = kernels().topk_softmax;
  const int64_t floats = topk_softmax_scratch(args);
  torch::stable::parallel_for(
      0, args.rows, row_grain(args.experts * (4 + topk)),
      [&](int64_t begin, int64_t end) { kernel(args, {begin, end}, row_scratch(floats)); });
  return {weights, ids};
}

void run_heads(const HeadsArgs& args) {
  const auto kernel = kernels().heads;
  const int64_t floats = heads_scratch(args);
  int64_t elements = 0;
  for (int64_t g = 0; g < args.group_count; ++g) {
    elements += args.groups[g].heads * args.groups[g].head_dim;
  }
  torch::stable::parallel_for(0, args.tokens, row_grain(elements), [&](int64_t begin, int64_t end) {
    kernel(args, {begin, end}, row_scratch(floats));
  });
}

// Heads of a [T, heads * head_dim] or [T, heads, head_dim] tensor with strided tokens and heads.
HeadGroup heads_of(const Checker& check, const Tensor& t, const char* argument, int64_t head_dim) {
  check_float_dtype(check, t, argument);
  const int64_t dims = t.dim();
  if (dims != 2 && dims != 3) {
    check.fail(argument, "[T, heads * head_dim] or [T, heads, head_dim]", dims, "-D ",
               shape_name(t));
  }
  check.unit_last_stride(t, argument);
  if (dims == 3) check.size(t, argument, 2, head_dim, "head_dim");
  if (dims == 2 && t.size(1) % head_dim != 0) {
    check.fail(argument, "a multiple of head_dim, " + std::to_string(head_dim) + ", in dimension 1",
               t.size(1), " in shape ", shape_name(t));
  }
  HeadGroup group;
  group.heads = dims == 3 ? t.size(1) : t.size(1) / head_dim;
  group.head_dim = head_dim;
  group.src = t.const_data_ptr();
  group.src_type = element_type(t.scalar_type());
  group.src_token_stride = t.stride(0);
  group.src_head_stride = dims == 3 ? t.stride(1) : head_dim;
  return group;
}

// A new contiguous tensor of the source's shape and dtype as the place where the heads go.
Tensor new_heads(const Tensor& source, HeadGroup* group) {
  Tensor out = torch::stable::new_empty(source, source.sizes());
  group->dst = out.mutable_data_ptr();
  group->dst_type = group->src_type;
  group->dst_token_stride = group->heads * group->head_dim;
  group->dst_head_stride = group->head_dim;
  return out;
}

void set_rotation(const Checker& check, const Tensor& cos_sin_cache, int64_t head_dim, bool is_neox,
                  const Indices& positions, HeadsArgs* args) {
  args->positions = positions.data();
  args->cos_sin = cos_sin_cache.const_data_ptr();
  args->cos_sin_type = element_type(cos_sin_cache.scalar_type());
  args->cos_sin_stride = cos_sin_cache.stride(0);
  args->rotary_dim = cos_sin_cache.size(1);
  args->is_neox = is_neox;
  if (args->rotary_dim % 2 != 0 || args->rotary_dim > head_dim) {
    check.fail(
        "cos_sin_cache",
        "an even rotary_dim of at most head_dim, " + std::to_string(head_dim) + ", in dimension 1",
        args->rotary_dim);
  }
}

void check_cos_sin(const Checker& check, const Tensor& cos_sin_cache) {
  check_float_dtype(check, cos_sin_cache, "cos_sin_cache");
  check.rank(cos_sin_cache, "cos_sin_cache", 2, "[max_position, rotary_dim]");
  check.unit_last_stride(cos_sin_cache, "cos_sin_cache");
}

std::tuple<Tensor, Tensor> rotary_embedding_cpu(const Tensor& positions, const Tensor& query,
                                                const Tensor& key, int64_t head_size,
                                                const Tensor& cos_sin_cache, bool is_neox) {
  const Checker check("rotary_embedding_cpu");
  if (head_size < 1) check.fail("head_size", "1 or more", head_size);
  HeadsArgs args;
  args.groups[0] = heads_of(check, query, "query", head_size);
  args.groups[1] = heads_of(check, key, "key", head_size);
  args.group_count = 2;
  args.tokens = query.size(0);
  check.size(key, "key", 0, args.tokens, "T of query");
  check.dtype(key, "key", {query.scalar_type()});
  check_cos_sin(check, cos_sin_cache);
  const Indices checked(check, positions, "positions", args.tokens, "T of query",
                        cos_sin_cache.size(0), "rows of cos_sin_cache");
  set_rotation(check, cos_sin_cache, head_size, is_neox, checked, &args);
  args.groups[0].rotate = args.groups[1].rotate = true;
  Tensor query_out = new_heads(query, &args.groups[0]);
  Tensor key_out = new_heads(key, &args.groups[1]);
  run_heads(args);
  return {query_out, key_out};
}

void set_norm(const Checker& check, const Tensor& weight, const char* argument, HeadGroup* group) {
  set_weight(check, weight, argument, group->head_dim, "head_dim");
  group->weight = weight.const_data_ptr();
  group->weight_type = element_type(weight.scalar_type());
}

std::tuple<Tensor, Tensor> fused_qk_rmsnorm_cpu(const Tensor& q, const Tensor& k,
                                                const Tensor& q_weight, const Tensor& k_weight,
                                                double eps) {
  const Checker check("fused_qk_rmsnorm_cpu");
  check_float_dtype(check, q_weight, "q_weight");
  check_float_dtype(check, k_weight, "k_weight");
  check.rank(q_weight, "q_weight", 1, "[N]");
  check.rank(k_weight, "k_weight", 1, "[N]");
  check.positive(q_weight, "q_weight", 0, "N");
  check.positive(k_weight, "k_weight", 0, "N");
  HeadsArgs args;
  args.groups[0] = heads_of(check, q, "q", q_weight.size(0));
  args.groups[1] = heads_of(check, k, "k", k_weight.size(0));
  args.group_count = 2;
  args.tokens = q.size(0);
  args.eps = static_cast<float>(eps);
  check.size(k, "k", 0, args.tokens, "T of q");
  check.dtype(k, "k", {q.scalar_type()});
  set_norm(check, q_weight, "q_weight", &args.groups[0]);
  set_norm(check, k_weight, "k_weight", &args.groups[1]);
  Tensor q_out = new_heads(q, &args.groups[0]);
  Tensor k_out = new_heads(k, &args.groups[1]);
  run_heads(args);
  return {q_out, k_out};
}

void check_scale(const Checker& check, double scale, const char* argument) {
  if (!(scale > 0) || scale * 0 != 0) check.fail(argument, "a finite number above 0", scale);
}

// A [slots, heads, head_dim] cache as the place where the heads of `group` go.
void set_cache(const Checker& check, const Tensor& cache, const char* argument,
               const Indices& slots, double scale, const char* scale_argument, HeadGroup* group) {
  check.size(cache, argument, 1, group->heads, "heads");
  check.size(cache, argument, 2, group->head_dim, "head_dim");
  check.unit_last_stride(cache, argument);
  check.rows_apart(cache, argument);
  check_scale(check, scale, scale_argument);
  group->dst = cache.mutable_data_ptr();
  group->dst_type = element_type(cache.scalar_type());
  group->dst_token_stride = cache.stride(0);
  group->dst_head_stride = cache.stride(1);
  group->dst_slots = slots.data();
  group->dst_scale = static_cast<float>(scale);
}

void check_cache(const Checker& check, const Tensor& cache, const char* argument) {
  check.dense_cpu(cache, argument);
  check.dtype(
      cache, argument,
      {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half, ScalarType::Float8_e4m3fn});
  check.rank(cache, argument, 3, "[slots, heads, head_dim]");
  check.positive(cache, argument, 2, "head_dim");
}

void check_caches(const Checker& check, const Tensor& k_cache, const Tensor& v_cache) {
  check_cache(check, k_cache, "k_cache");
  check_cache(check, v_cache, "v_cache");
  check.size(v_cache, "v_cache", 0, k_cache.size(0), "slots of k_cache");
}

void store_cache_cpu(const Tensor& k, const Tensor& v, Tensor k_cache, Tensor v_cache,
                     const Tensor& indices, std::optional<int64_t> row_dim, double k_scale,
                     double v_scale) {
  const Checker check("store_cache_cpu");
  check_caches(check, k_cache, v_cache);
  HeadsArgs args;
  args.groups[0] = heads_of(check, k, "k", k_cache.size(2));
  args.groups[1] = heads_of(check, v, "v", v_cache.size(2));
  args.group_count = 2;
  args.tokens = k.size(0);
  check.size(v, "v", 0, args.tokens, "T of k");
  const int64_t row = args.groups[0].heads * args.groups[0].head_dim;
  if (row_dim.has_value() && *row_dim != row) {
    check.fail("row_dim", "heads * head_dim of k, " + std::to_string(row) + ", or None", *row_dim);
  }
  const Indices slots(check, indices, "indices", args.tokens, "T of k", k_cache.size(0),
                      "slots of k_cache");
  set_cache(check, k_cache, "k_cache", slots, k_scale, "k_scale", &args.groups[0]);
  set_cache(check, v_cache, "v_cache", slots, v_scale, "v_scale", &args.groups[1]);
  run_heads(args);
}

void fused_qk_norm_rope_store_cpu(Tensor qkv, const Tensor& positions, const Tensor& cos_sin_cache,
                                  bool is_neox, int64_t num_heads, int64_t num_kv_heads,
                                  const std::optional<Tensor>& q_weight,
                                  const std::optional<Tensor>& k_weight, double eps, Tensor k_cache,
                                  Tensor v_cache, const Tensor& indices, double k_scale,
                                  double v_scale) {
  const Checker check("fused_qk_norm_rope_store_cpu");
  check_caches(check, k_cache, v_cache);
  check_rows(check, qkv, "qkv");
  if (num_heads < 0) check.fail("num_heads", "0 or more", num_heads);
  if (num_kv_heads < 0) check.fail("num_kv_heads", "0 or more", num_kv_heads);
  const int64_t head_dim = k_cache.size(2), v_head_dim = v_cache.size(2);
  check.size(k_cache, "k_cache", 1, num_kv_heads, "num_kv_heads");
  check.size(v_cache, "v_cache", 1, num_kv_heads, "num_kv_heads");
  const int64_t width = qkv.size(1) - num_kv_heads * (head_dim + v_head_dim);
  if (width < 0 || width / head_dim != num_heads || width % head_dim != 0) {
    check.fail("qkv",
               "num_heads * head_dim + num_kv_heads * (head_dim + v_head_dim) columns with "
               "head_dim " +
                   std::to_string(head_dim) + " and v_head_dim " + std::to_string(v_head_dim) +
                   " of the caches",
               qkv.size(1), " in shape ", shape_name(qkv));
  }
  check_cos_sin(check, cos_sin_cache);

  HeadsArgs args;
  args.tokens = qkv.size(0);
  args.group_count = 3;
  args.eps = static_cast<float>(eps);
  const Indices checked(check, positions, "positions", args.tokens, "T of qkv",
                        cos_sin_cache.size(0), "rows of cos_sin_cache");
  const Indices slots(check, indices, "indices", args.tokens, "T of qkv", k_cache.size(0),
                      "slots of k_cache");
  const ElementType type = element_type(qkv.scalar_type());
  void* data = qkv.mutable_data_ptr();
  const int64_t heads[3] = {num_heads, num_kv_heads, num_kv_heads};
  const int64_t dims[3] = {head_dim, head_dim, v_head_dim};
  int64_t column = 0;
  for (int g = 0; g < 3; ++g) {
    HeadGroup& group = args.groups[g];
    group.heads = heads[g];
    group.head_dim = dims[g];
    group.src = element_at(data, type, column);
    group.src_type = type;
    group.src_token_stride = qkv.stride(0);
    group.src_head_stride = dims[g];
    group.rotate = g < 2;
    column += heads[g] * dims[g];
  }
  HeadGroup& q = args.groups[0];
  q.dst = data;
  q.dst_type = type;
  q.dst_token_stride = q.src_token_stride;
  q.dst_head_stride = q.src_head_stride;
  set_cache(check, k_cache, "k_cache", slots, k_scale, "k_scale", &args.groups[1]);
  set_cache(check, v_cache, "v_cache", slots, v_scale, "v_scale", &args.groups[2]);
  if (q_weight.has_value()) set_norm(check, *q_weight, "q_weight", &args.groups[0]);
  if (k_weight.has_value()) set_norm(check, *k_weight, "k_weight", &args.groups[1]);
  set_rotation(check, cos_sin_cache, head_dim, is_neox, checked, &args);
  run_heads(args);
}

}  // namespace
}  // namespace sgl_kernel

STABLE_TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) {
  m.def(
      "rmsnorm_cpu(Tensor input, Tensor weight, float eps, ScalarType? out_dtype=None) -> Tensor");
  m.def(
      "fused_add_rmsnorm_cpu(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float eps, "
      "Tensor(c!)? out=None) -> ()");
  m.def("silu_and_mul_cpu(Tensor input, ScalarType? out_dtype=None) -> Tensor");
  m.def(
      "topk_softmax_cpu(Tensor hidden_states, Tensor gating_output, int topk, bool renormalize) -> "
      "(Tensor, Tensor)");
  m.def(
      "rotary_embedding_cpu(Tensor positions, Tensor query, Tensor key, int head_size, Tensor "
      "cos_sin_cache, bool is_neox) -> (Tensor, Tensor)");
  m.def(
      "fused_qk_rmsnorm_cpu(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps) -> "
      "(Tensor, Tensor)");
  m.def(
      "store_cache_cpu(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor indices, "
      "int? row_dim=None, float k_scale=1.0, float v_scale=1.0) -> ()");
  m.def(
      "fused_qk_norm_rope_store_cpu(Tensor(a!) qkv, Tensor positions, Tensor cos_sin_cache, bool "
      "is_neox, int num_heads, int num_kv_heads, Tensor? q_weight, Tensor? k_weight, float eps, "
      "Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor indices, float k_scale=1.0, float "
      "v_scale=1.0) -> ()");
}

// Not the CPU key, see torch_extension_cpu.cpp.
STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CompositeExplicitAutograd, m) {
  m.impl("rmsnorm_cpu", TORCH_BOX(&sgl_kernel::rmsnorm_cpu));
  m.impl("fused_add_rmsnorm_cpu", TORCH_BOX(&sgl_kernel::fused_add_rmsnorm_cpu));
  m.impl("silu_and_mul_cpu", TORCH_BOX(&sgl_kernel::silu_and_mul_cpu));
  m.impl("topk_softmax_cpu", TORCH_BOX(&sgl_kernel::topk_softmax_cpu));
  m.impl("rotary_embedding_cpu", TORCH_BOX(&sgl_kernel::rotary_embedding_cpu));
  m.impl("fused_qk_rmsnorm_cpu", TORCH_BOX(&sgl_kernel::fused_qk_rmsnorm_cpu));
  m.impl("store_cache_cpu", TORCH_BOX(&sgl_kernel::store_cache_cpu));
  m.impl("fused_qk_norm_rope_store_cpu", TORCH_BOX(&sgl_kernel::fused_qk_norm_rope_store_cpu));
}
