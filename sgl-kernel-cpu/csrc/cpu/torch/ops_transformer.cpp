// The ops between the products: norms, activations, rotary embedding, the KV cache, the router.
// They check the arguments, allocate the output and split rows or tokens over threads.
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "dispatch/dispatch.h"
#include "dispatch/kernel_table.h"
#include "torch/heads_checks.h"
#include "torch/registration.h"
#include "torch/rows.h"
#include "transformer/embedding.h"

namespace sgl_kernel {
namespace {

const KernelTable& kernels() {
  return kernel_table(active_tier());
}

void run_rms_norm(const RmsNormArgs& args) {
  const auto kernel = kernels().rms_norm;
  const int64_t bytes = scratch_bytes<RmsNormScratch>(args);
  run_step(args.rows, row_grain(args.columns),
           [kernel, args, bytes](TaskRange rows) { kernel(args, rows, row_scratch(bytes)); });
}

// Rows of a slab: of the input, of the output, and of the residual if there is one.
void run_norm_slab(RmsNormArgs args, const RowSlab& slab) {
  args.rows = slab.count();
  args.group_rows = slab.rows;
  args.input = element_at(args.input, args.input_dtype, slab.offsets[0]);
  args.input_group_stride = slab.group_strides[0];
  args.input_row_stride = slab.row_strides[0];
  args.out = element_at(args.out, args.out_dtype, slab.offsets[1]);
  args.out_group_stride = slab.group_strides[1];
  args.out_row_stride = slab.row_strides[1];
  if (args.residual != nullptr) {
    args.residual = element_at(args.residual, args.residual_dtype, slab.offsets[2]);
    args.residual_group_stride = slab.group_strides[2];
    args.residual_row_stride = slab.row_strides[2];
  }
  run_rms_norm(args);
}

// Input and weight, checked; the rows come in slabs.
RmsNormArgs norm_args(const Checker& check, const Tensor& input, const Tensor& weight, double eps) {
  check_float_dtype(check, input, "input");
  check.least_rank(input, "input", 1, "[..., N]");
  const int64_t last = input.dim() - 1;
  check.positive(input, "input", last, "N");
  check.unit_last_stride(input, "input");
  set_weight(check, weight, "weight", input.size(last), "N of input");
  RmsNormArgs args;
  args.columns = input.size(last);
  args.eps = check.number(eps, "eps", NumberRange::not_negative);
  args.input = input.const_data_ptr();
  args.input_dtype = to_dtype(input.scalar_type());
  args.weight = weight.const_data_ptr();
  args.weight_dtype = to_dtype(weight.scalar_type());
  return args;
}

void set_norm_out(const Tensor& out, RmsNormArgs* args) {
  args->out = out.mutable_data_ptr();
  args->out_dtype = to_dtype(out.scalar_type());
}

Tensor rmsnorm_cpu(const Tensor& input, const Tensor& weight, double eps,
                   std::optional<ScalarType> out_dtype) {
  const Checker check("rmsnorm_cpu");
  RmsNormArgs args = norm_args(check, input, weight, eps);
  const ScalarType dtype = out_dtype.value_or(input.scalar_type());
  check_float_out_dtype(check, dtype);
  Tensor out = new_output(input, input.sizes(), dtype);
  set_norm_out(out, &args);
  RowDims({input, out}, input.dim() - 1).for_each_slab(2, [&](const RowSlab& slab) {
    run_norm_slab(args, slab);
  });
  return out;
}

// input + residual into the residual; what follows is the norm of the sum.
RmsNormArgs add_norm_args(const Checker& check, const Tensor& input, const Tensor& residual,
                          const Tensor& weight, double eps) {
  RmsNormArgs args = norm_args(check, input, weight, eps);
  check_float_dtype(check, residual, "residual");
  check.same_rows(residual, "residual", input, "input");
  check.size(residual, "residual", input.dim() - 1, args.columns, "N of input");
  check.unit_last_stride(residual, "residual");
  args.residual = residual.mutable_data_ptr();
  args.residual_dtype = to_dtype(residual.scalar_type());
  return args;
}

void run_add_norm(RmsNormArgs args, const Tensor& input, const Tensor& residual,
                  const Tensor& out) {
  set_norm_out(out, &args);
  RowDims({input, out, residual}, input.dim() - 1).for_each_slab(2, [&](const RowSlab& slab) {
    run_norm_slab(args, slab);
  });
}

void fused_add_rmsnorm_cpu(Tensor input, Tensor residual, const Tensor& weight, double eps) {
  const Checker check("fused_add_rmsnorm_cpu");
  const RmsNormArgs args = add_norm_args(check, input, residual, weight, eps);
  MemoryUse memory;
  memory.writes(input, "input");
  memory.writes(residual, "residual");
  memory.reads(weight, "weight");
  memory.check(check);
  run_add_norm(args, input, residual, input);
}

Tensor add_rmsnorm_cpu(const Tensor& input, Tensor residual, const Tensor& weight, double eps,
                       std::optional<ScalarType> out_dtype) {
  const Checker check("add_rmsnorm_cpu");
  const RmsNormArgs args = add_norm_args(check, input, residual, weight, eps);
  const ScalarType dtype = out_dtype.value_or(input.scalar_type());
  check_float_out_dtype(check, dtype);
  MemoryUse memory;
  memory.writes(residual, "residual");
  memory.reads(input, "input");
  memory.reads(weight, "weight");
  memory.check(check);
  Tensor out = new_output(input, input.sizes(), dtype);
  run_add_norm(args, input, residual, out);
  return out;
}

Tensor packed_embedding_cpu(const Tensor& indices, const Tensor& weight, bool is_vnni,
                            std::optional<ScalarType> out_dtype) {
  const Checker check("packed_embedding_cpu");
  check.dense_cpu(weight, "weight");
  check.dtype(weight, "weight", {ScalarType::BFloat16, ScalarType::Half});
  check.rank(weight, "weight", 2, "[N, K]");
  check.contiguous(weight, "weight");
  check.dense_cpu(indices, "indices");
  check.rank(indices, "indices", 1, "[T]");
  const ScalarType dtype = out_dtype.value_or(weight.scalar_type());
  check_float_out_dtype(check, dtype);
  const int64_t tokens = indices.size(0);
  const auto rows = std::make_shared<Indices>(check, indices, "indices", tokens, "T",
                                              weight.size(0), "rows of weight");
  EmbeddingArgs args;
  args.rows = rows->data();
  args.N = weight.size(0);
  args.K = weight.size(1);
  args.table = weight.const_data_ptr();
  args.table_dtype = to_dtype(weight.scalar_type());
  args.is_vnni = is_vnni;
  const int64_t shape[2] = {tokens, args.K};
  Tensor out = new_output(weight, {shape, 2}, dtype);
  args.out = out.mutable_data_ptr();
  args.out_dtype = to_dtype(dtype);
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
  check.least_rank(input, "input", 1, "[..., 2 N]");
  const int64_t last = input.dim() - 1;
  check.unit_last_stride(input, "input");
  if (input.size(last) % 2 != 0) {
    check.fail("input", "an even size in dimension " + std::to_string(last), input.size(last),
               " in shape ", shape_name(input));
  }
  const ScalarType dtype = out_dtype.value_or(input.scalar_type());
  check_float_out_dtype(check, dtype);

  SiluAndMulArgs args;
  args.columns = input.size(last) / 2;
  args.input_dtype = to_dtype(input.scalar_type());
  args.out_dtype = to_dtype(dtype);
  const std::vector<int64_t> shape = sizes_with_last(input, args.columns);
  Tensor out = new_output(input, {shape.data(), shape.size()}, dtype);
  const void* rows = input.const_data_ptr();
  void* out_rows = out.mutable_data_ptr();
  const auto kernel = kernels().silu_and_mul;
  RowDims({input, out}, last).for_each_slab(1, [&](const RowSlab& slab) {
    args.rows = slab.rows;
    args.input = element_at(rows, args.input_dtype, slab.offsets[0]);
    args.input_stride = slab.row_strides[0];
    args.out = element_at(out_rows, args.out_dtype, slab.offsets[1]);
    run_step(args.rows, row_grain(4 * args.columns),
             [kernel, args](TaskRange rows) { kernel(args, rows); });
  });
  return out;
}

std::tuple<Tensor, Tensor> topk_softmax_cpu(const Tensor& hidden_states,
                                            const Tensor& gating_output, int64_t topk,
                                            bool renormalize,
                                            const std::optional<Tensor>& correction_bias) {
  const Checker check("topk_softmax_cpu");
  check_float_dtype(check, gating_output, "gating_output");
  check.rank(gating_output, "gating_output", 2, "[M, experts]");
  check.unit_last_stride(gating_output, "gating_output");
  check.dense_cpu(hidden_states, "hidden_states");
  check.rank(hidden_states, "hidden_states", 2, "[M, K]");
  check.size(hidden_states, "hidden_states", 0, gating_output.size(0), "M of gating_output");
  if (gating_output.size(1) > kMostExperts) {
    check.fail("gating_output", "at most " + std::to_string(kMostExperts) + " experts",
               gating_output.size(1));
  }
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
  args.gating_dtype = to_dtype(gating_output.scalar_type());
  args.gating_stride = gating_output.stride(0);
  if (correction_bias.has_value()) {
    check_float_dtype(check, *correction_bias, "correction_bias");
    check.rank(*correction_bias, "correction_bias", 1, "[experts]");
    check.size(*correction_bias, "correction_bias", 0, args.experts, "experts of gating_output");
    check.contiguous(*correction_bias, "correction_bias");
    args.bias = correction_bias->const_data_ptr();
    args.bias_dtype = to_dtype(correction_bias->scalar_type());
  }
  const int64_t shape[2] = {args.rows, topk};
  Tensor weights = new_output(gating_output, {shape, 2}, ScalarType::Float);
  Tensor ids = new_output(gating_output, {shape, 2}, ScalarType::Int);
  args.weights = static_cast<float*>(weights.mutable_data_ptr());
  args.ids = static_cast<int32_t*>(ids.mutable_data_ptr());
  const auto kernel = kernels().topk_softmax;
  const int64_t bytes = scratch_bytes<TopkSoftmaxScratch>(args);
  run_step(args.rows, row_grain(args.experts * (4 + topk)),
           [kernel, args, bytes](TaskRange rows) { kernel(args, rows, row_scratch(bytes)); });
  return {weights, ids};
}

// Two tensors of heads, and their tokens: [T, ...], or [B, S, heads, head_dim].
class HeadPair {
 public:
  HeadPair(const Checker& check, const Tensor& first, const char* first_argument,
           int64_t first_head_dim, const Tensor& second, const char* second_argument,
           int64_t second_head_dim)
      : first_(first), second_(second) {
    args_.groups[0] = heads_of(check, first, first_argument, first_head_dim, 4);
    args_.groups[1] = heads_of(check, second, second_argument, second_head_dim, 4);
    args_.group_count = 2;
    const bool batched = first.dim() == 4;
    token_dims_ = batched ? 2 : 1;
    if (batched != (second.dim() == 4)) {
      check.fail(second_argument,
                 std::string("the dimensions of ") + first_argument + ", " + shape_name(first),
                 shape_name(second));
    }
    const char* tokens = batched ? "B of the first" : "T of the first";
    for (int64_t d = 0; d < token_dims_; ++d) {
      check.size(second, second_argument, d, first.size(d), d == 0 ? tokens : "S of the first");
    }
    check.dtype(second, second_argument, {first.scalar_type()});
  }

  HeadsArgs& args() { return args_; }
  int64_t tokens() const { return first_.size(0) * (token_dims_ == 2 ? first_.size(1) : 1); }

  // Does args() to the heads of both tensors and writes the results into others of their shapes;
  // these may be the same.
  void run(const Tensor& first_out, const Tensor& second_out,
           const std::vector<SharedIndices>& indices) const {
    const Tensor* outs[2] = {&first_out, &second_out};
    const RowDims dims({first_, second_, first_out, second_out}, token_dims_);
    dims.for_each_slab(1, [&](const RowSlab& slab) {
      HeadsArgs args = args_;
      args.tokens = slab.rows;
      if (args.rotary.positions != nullptr) args.rotary.positions += slab.first_row;
      for (int g = 0; g < 2; ++g) {
        HeadGroup& group = args.groups[g];
        const Tensor& out = *outs[g];
        group.src = element_at(group.src, group.src_dtype, slab.offsets[g]);
        group.src_token_stride = slab.row_strides[g];
        group.dst_dtype = group.src_dtype;
        group.dst = element_at(out.mutable_data_ptr(), group.dst_dtype, slab.offsets[2 + g]);
        group.dst_token_stride = slab.row_strides[2 + g];
        group.dst_head_stride = out.dim() == 2 ? group.head_dim : out.stride(out.dim() - 2);
      }
      run_heads(args, indices);
    });
  }

 private:
  const Tensor first_;
  const Tensor second_;
  HeadsArgs args_;
  int64_t token_dims_ = 1;
};

Tensor new_like(const Tensor& t) {
  return new_output(t, t.sizes(), t.scalar_type());
}

// As SGLang has it, [T, heads, head_size] is left as it is, while other forms are rotated in place.
// A result is a tensor of its own in either case: an operator's schema has no way to say that it
// returns an argument now and then.
std::tuple<Tensor, Tensor> rotary_embedding_cpu(const Tensor& positions, Tensor query, Tensor key,
                                                int64_t head_size, const Tensor& cos_sin_cache,
                                                bool is_neox) {
  const Checker check("rotary_embedding_cpu");
  check_head_dim(check, head_size, "head_size");
  HeadPair pair(check, query, "query", head_size, key, "key", head_size);
  if (query.dim() != 4) {
    check.rank(
        key, "key", query.dim(),
        query.dim() == 2 ? "[T, heads * head_size] as query" : "[T, heads, head_size] as query");
  }
  const bool in_place = query.dim() != 3;
  check_cos_sin(check, cos_sin_cache);
  const auto checked =
      std::make_shared<Indices>(check, positions, "positions", pair.tokens(), "T of query",
                                cos_sin_cache.size(0), "rows of cos_sin_cache");
  HeadsArgs& args = pair.args();
  set_rotation(check, cos_sin_cache, head_size, is_neox, *checked, &args);
  args.groups[0].rotate = args.groups[1].rotate = true;
  if (in_place) {
    MemoryUse memory;
    memory.writes(query, "query");
    memory.writes(key, "key");
    memory.reads(positions, "positions");
    memory.reads(cos_sin_cache, "cos_sin_cache");
    memory.check(check);
  }
  const Tensor query_out = new_like(query), key_out = new_like(key);
  if (in_place) {
    pair.run(query, key, {checked});
    args.groups[0].rotate = args.groups[1].rotate = false;
  }
  pair.run(query_out, key_out, {checked});
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
  check_head_dim(check, q_weight.size(0), "q_weight");
  check_head_dim(check, k_weight.size(0), "k_weight");
  HeadPair pair(check, q, "q", q_weight.size(0), k, "k", k_weight.size(0));
  HeadsArgs& args = pair.args();
  args.eps = check.number(eps, "eps", NumberRange::not_negative);
  set_norm(check, q_weight, "q_weight", &args.groups[0]);
  set_norm(check, k_weight, "k_weight", &args.groups[1]);
  const Tensor q_out = new_like(q), k_out = new_like(k);
  pair.run(q_out, k_out, {});
  return {q_out, k_out};
}

// Whether k or v can go into a cache: numbers into a cache of numbers, FP8 codes and bytes, as they
// are, into one of codes or bytes.
void check_stored(const Checker& check, const Tensor& t, const char* argument, const Tensor& cache,
                  const char* cache_argument, double scale, const char* scale_argument) {
  const auto is_codes = [](const Tensor& x) {
    return x.scalar_type() == ScalarType::Float8_e4m3fn || x.scalar_type() == ScalarType::Byte;
  };
  if (is_codes(t)) {
    if (!is_codes(cache)) {
      check.fail(cache_argument, std::string("dtype float8_e4m3fn or uint8 for FP8 ") + argument,
                 dtype_name(cache.scalar_type()));
    }
    if (scale != 1) {
      check.fail(scale_argument,
                 std::string("1 for FP8 ") + argument + ", which is stored as it is", scale);
    }
  } else if (cache.scalar_type() == ScalarType::Byte) {
    check.fail(argument, "dtype float8_e4m3fn or uint8 for a uint8 cache",
               dtype_name(t.scalar_type()));
  }
}

void store_cache_cpu(const Tensor& k, const Tensor& v, Tensor k_cache, Tensor v_cache,
                     const Tensor& indices, std::optional<int64_t> row_dim, double k_scale,
                     double v_scale) {
  const Checker check("store_cache_cpu");
  check_caches(check, k_cache, v_cache, true);
  HeadsArgs args;
  args.groups[0] = heads_of(check, k, "k", k_cache.size(2), 3, true);
  args.groups[1] = heads_of(check, v, "v", v_cache.size(2), 3, true);
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
  check_stored(check, k, "k", k_cache, "k_cache", k_scale, "k_scale");
  check_stored(check, v, "v", v_cache, "v_cache", v_scale, "v_scale");
  MemoryUse memory;
  use_caches(k_cache, v_cache, args, &memory);
  memory.reads(k, "k");
  memory.reads(v, "v");
  memory.reads(indices, "indices");
  memory.check(check);
  run_heads(args, {slots});
}

void fused_qk_norm_rope_store_cpu(Tensor qkv, const Tensor& positions, const Tensor& cos_sin_cache,
                                  bool is_neox, int64_t num_heads, int64_t num_kv_heads,
                                  const std::optional<Tensor>& q_weight,
                                  const std::optional<Tensor>& k_weight, double eps, Tensor k_cache,
                                  Tensor v_cache, const Tensor& indices, double k_scale,
                                  double v_scale, const std::optional<Tensor>& q_scale) {
  const Checker check("fused_qk_norm_rope_store_cpu");
  QkvHeads heads(check, qkv, positions, cos_sin_cache, is_neox, num_heads, num_kv_heads, q_weight,
                 k_weight, eps, k_cache, v_cache, indices, k_scale, v_scale, q_scale);
  heads.memory().check(check);
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
      "topk_softmax_cpu(Tensor hidden_states, Tensor gating_output, int topk, bool renormalize, "
      "Tensor? correction_bias=None) -> (Tensor, Tensor)");
  m.def(
      "rotary_embedding_cpu(Tensor positions, Tensor(a!) query, Tensor(b!) key, int head_size, "
      "Tensor cos_sin_cache, bool is_neox) -> (Tensor, Tensor)");
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
  SGL_IMPL(m, packed_embedding_cpu);
  SGL_IMPL(m, rmsnorm_cpu);
  SGL_IMPL(m, fused_add_rmsnorm_cpu);
  SGL_IMPL(m, add_rmsnorm_cpu);
  SGL_IMPL(m, silu_and_mul_cpu);
  SGL_IMPL(m, topk_softmax_cpu);
  SGL_IMPL(m, rotary_embedding_cpu);
  SGL_IMPL(m, fused_qk_rmsnorm_cpu);
  SGL_IMPL(m, store_cache_cpu);
  SGL_IMPL(m, fused_qk_norm_rope_store_cpu);
}
