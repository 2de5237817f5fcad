// The ops between the products: norms, activations, rotary embedding, the KV cache, the router.
// They check the arguments, allocate the output and split rows or tokens over threads.
#include <memory>
#include <optional>
#include <tuple>

#include "embedding.h"
#include "torch_heads.h"
#include "transformer_tiers.h"

namespace sgl_kernel {
namespace {

const TransformerKernels& kernels() {
  return transformer_kernels(active_tier());
}

void run_rms_norm(const RmsNormArgs& args) {
  const auto kernel = kernels().rms_norm;
  const int64_t floats = rms_norm_scratch(args);
  run_step(args.rows, row_grain(args.columns),
           [kernel, args, floats](TaskRange rows) { kernel(args, rows, row_scratch(floats)); });
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
  Tensor out = new_output(input, input.sizes(), dtype);
  args.out = out.mutable_data_ptr();
  args.out_type = element_type(dtype);
  args.out_group_stride = args.group_rows * args.columns;
  args.out_row_stride = args.columns;
  run_rms_norm(args);
  return out;
}

// input + residual into the residual, and the norm of the sum into `out`, a 2-D tensor like input.
RmsNormArgs add_norm_args(const Checker& check, const Tensor& input, const Tensor& residual,
                          const Tensor& weight, double eps) {
  check_rows(check, input, "input");
  check_rows(check, residual, "residual");
  check.positive(input, "input", 1, "N");
  check.size(residual, "residual", 0, input.size(0), "M of input");
  check.size(residual, "residual", 1, input.size(1), "N of input");
  set_weight(check, weight, "weight", input.size(1), "N of input");
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
  return args;
}

void run_add_norm(RmsNormArgs args, const Tensor& out) {
  args.out = out.mutable_data_ptr();
  args.out_type = element_type(out.scalar_type());
  args.out_group_stride = out.stride(0);
  run_rms_norm(args);
}

void fused_add_rmsnorm_cpu(Tensor input, Tensor residual, const Tensor& weight, double eps) {
  const Checker check("fused_add_rmsnorm_cpu");
  run_add_norm(add_norm_args(check, input, residual, weight, eps), input);
}

Tensor add_rmsnorm_cpu(const Tensor& input, Tensor residual, const Tensor& weight, double eps,
                       std::optional<ScalarType> out_dtype) {
  const Checker check("add_rmsnorm_cpu");
  const RmsNormArgs args = add_norm_args(check, input, residual, weight, eps);
  const ScalarType dtype = out_dtype.value_or(input.scalar_type());
  check_float_out_dtype(check, dtype);
  Tensor out = new_output(input, input.sizes(), dtype);
  run_add_norm(args, out);
  return out;
}

Tensor packed_embedding_cpu(const Tensor& indices, const Tensor& weight, bool is_vnni,
                            std::optional<ScalarType> out_dtype) {
  const Checker check("packed_embedding_cpu");
  check.dense_cpu(weight, "weight");
  check.dtype(weight, "weight", {ScalarType::BFloat16});
  check.rank(weight, "weight", 2, "[N, K]");
  check.contiguous(weight, "weight");
  check.dense_cpu(indices, "indices");
  check.rank(indices, "indices", 1, "[T]");
  const ScalarType dtype = out_dtype.value_or(ScalarType::BFloat16);
  check_float_out_dtype(check, dtype);
  const int64_t tokens = indices.size(0);
  const auto rows = std::make_shared<Indices>(check, indices, "indices", tokens, "T",
                                              weight.size(0), "rows of weight");
  EmbeddingArgs args;
  args.rows = rows->data();
  args.N = weight.size(0);
  args.K = weight.size(1);
  args.table = static_cast<const bf16_t*>(weight.const_data_ptr());
  args.is_vnni = is_vnni;
  const int64_t shape[2] = {tokens, args.K};
  Tensor out = new_output(weight, {shape, 2}, dtype);
  args.out = out.mutable_data_ptr();
  args.out_type = element_type(dtype);
  run_step(
      tokens, row_grain(args.K),
      [rows, tokens] {
        rows->refresh();
        return tokens;
      },
      [args](TaskRange tokens) { embed_rows(args, tokens); });
  return out;
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
  Tensor out = new_output(input, {shape, 2}, dtype);
  args.out = out.mutable_data_ptr();
  args.out_type = element_type(dtype);
  const auto kernel = kernels().silu_and_mul;
  run_step(args.rows, row_grain(4 * args.columns),
           [kernel, args](TaskRange rows) { kernel(args, rows); });
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
  Tensor weights = new_output(gating_output, {shape, 2}, ScalarType::Float);
  Tensor ids = new_output(gating_output, {shape, 2}, ScalarType::Int);
  args.weights = static_cast<float*>(weights.mutable_data_ptr());
  args.ids = static_cast<int32_t*>(ids.mutable_data_ptr());
  const auto kernel = kernels().topk_softmax;
  const int64_t floats = topk_softmax_scratch(args);
  run_step(args.rows, row_grain(args.experts * (4 + topk)),
           [kernel, args, floats](TaskRange rows) { kernel(args, rows, row_scratch(floats)); });
  return {weights, ids};
}

// A new contiguous tensor of the source's shape and dtype as the place where the heads go.
Tensor new_heads(const Tensor& source, HeadGroup* group) {
  Tensor out = new_output(source, source.sizes(), source.scalar_type());
  group->dst = out.mutable_data_ptr();
  group->dst_type = group->src_type;
  group->dst_token_stride = group->heads * group->head_dim;
  group->dst_head_stride = group->head_dim;
  return out;
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
  const auto checked =
      std::make_shared<Indices>(check, positions, "positions", args.tokens, "T of query",
                                cos_sin_cache.size(0), "rows of cos_sin_cache");
  set_rotation(check, cos_sin_cache, head_size, is_neox, *checked, &args);
  args.groups[0].rotate = args.groups[1].rotate = true;
  Tensor query_out = new_heads(query, &args.groups[0]);
  Tensor key_out = new_heads(key, &args.groups[1]);
  run_heads(args, {checked});
  return {query_out, key_out};
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
  run_heads(args, {});
  return {q_out, k_out};
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
  const auto slots = std::make_shared<Indices>(check, indices, "indices", args.tokens, "T of k",
                                               k_cache.size(0), "slots of k_cache");
  set_cache(check, k_cache, "k_cache", *slots, k_scale, "k_scale", &args.groups[0]);
  set_cache(check, v_cache, "v_cache", *slots, v_scale, "v_scale", &args.groups[1]);
  run_heads(args, {slots});
}

void fused_qk_norm_rope_store_cpu(Tensor qkv, const Tensor& positions, const Tensor& cos_sin_cache,
                                  bool is_neox, int64_t num_heads, int64_t num_kv_heads,
                                  const std::optional<Tensor>& q_weight,
                                  const std::optional<Tensor>& k_weight, double eps, Tensor k_cache,
                                  Tensor v_cache, const Tensor& indices, double k_scale,
                                  double v_scale, const std::optional<Tensor>& q_scale) {
  const Checker check("fused_qk_norm_rope_store_cpu");
  const QkvHeads heads(check, qkv, positions, cos_sin_cache, is_neox, num_heads, num_kv_heads,
                       q_weight, k_weight, eps, k_cache, v_cache, indices, k_scale, v_scale,
                       q_scale);
  heads.run();
}

}  // namespace
}  // namespace sgl_kernel

STABLE_TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) {
  m.def(
      "packed_embedding_cpu(Tensor indices, Tensor weight, bool is_vnni, ScalarType? "
      "out_dtype=None) -> Tensor");
  m.def(
      "rmsnorm_cpu(Tensor input, Tensor weight, float eps, ScalarType? out_dtype=None) -> Tensor");
  m.def(
      "fused_add_rmsnorm_cpu(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float eps) -> "
      "()");
  m.def(
      "add_rmsnorm_cpu(Tensor input, Tensor(a!) residual, Tensor weight, float eps, ScalarType? "
      "out_dtype=None) -> Tensor");
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
      "v_scale=1.0, Tensor? q_scale=None) -> ()");
}

// Not the CPU key, see torch_extension_cpu.cpp.
STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CompositeExplicitAutograd, m) {
  m.impl("packed_embedding_cpu", TORCH_BOX(&sgl_kernel::packed_embedding_cpu));
  m.impl("rmsnorm_cpu", TORCH_BOX(&sgl_kernel::rmsnorm_cpu));
  m.impl("fused_add_rmsnorm_cpu", TORCH_BOX(&sgl_kernel::fused_add_rmsnorm_cpu));
  m.impl("add_rmsnorm_cpu", TORCH_BOX(&sgl_kernel::add_rmsnorm_cpu));
  m.impl("silu_and_mul_cpu", TORCH_BOX(&sgl_kernel::silu_and_mul_cpu));
  m.impl("topk_softmax_cpu", TORCH_BOX(&sgl_kernel::topk_softmax_cpu));
  m.impl("rotary_embedding_cpu", TORCH_BOX(&sgl_kernel::rotary_embedding_cpu));
  m.impl("fused_qk_rmsnorm_cpu", TORCH_BOX(&sgl_kernel::fused_qk_rmsnorm_cpu));
  m.impl("store_cache_cpu", TORCH_BOX(&sgl_kernel::store_cache_cpu));
  m.impl("fused_qk_norm_rope_store_cpu", TORCH_BOX(&sgl_kernel::fused_qk_norm_rope_store_cpu));
}
