// Ops on heads of queries, keys and values between projections and attention: rotary embedding,
// head norms, storing into the KV cache. They check the arguments, allocate the output and split
// tokens over threads.
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "torch/heads_checks.h"
#include "torch/registration.h"
#include "torch/rows.h"

namespace sgl_kernel {
namespace {

// Heads among an op's arguments.
struct HeadsArgument {
  const Tensor& tensor;
  const char* name;
  int64_t head_dim;
};

// Two tensors of heads, and their tokens: [T, ...], or [B, S, heads, head_dim].
class HeadPair {
 public:
  HeadPair(const Checker& check, const HeadsArgument& first, const HeadsArgument& second)
      : first_(first.tensor), second_(second.tensor) {
    args_.groups[0] = heads_of(check, first_, first.name, first.head_dim, 4);
    args_.groups[1] = heads_of(check, second_, second.name, second.head_dim, 4);
    args_.group_count = 2;
    const bool batched = first_.dim() == 4;
    token_dims_ = batched ? 2 : 1;
    if (batched != (second_.dim() == 4)) {
      check.fail(second.name,
                 std::string("the dimensions of ") + first.name + ", " + shape_name(first_),
                 shape_name(second_));
    }
    const char* tokens = batched ? "B of the first" : "T of the first";
    for (int64_t d = 0; d < token_dims_; ++d) {
      check.size(second_, second.name, d, first_.size(d), d == 0 ? tokens : "S of the first");
    }
    check.dtype(second_, second.name, {first_.scalar_type()});
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
  HeadPair pair(check, {query, "query", head_size}, {key, "key", head_size});
  if (query.dim() != 4) {
    check.rank(
        key, "key", query.dim(),
        query.dim() == 2 ? "[T, heads * head_size] as query" : "[T, heads, head_size] as query");
  }
  const bool in_place = query.dim() != 3;
  check_cos_sin(check, cos_sin_cache);
  const auto checked = std::make_shared<Indices>(
      check, positions, "positions",
      IndexRange{pair.tokens(), "T of query", cos_sin_cache.size(0), "rows of cos_sin_cache"});
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
  HeadPair pair(check, {q, "q", q_weight.size(0)}, {k, "k", k_weight.size(0)});
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
void check_stored(const Checker& check, const Tensor& t, const char* argument,
                  const CacheArgument& cache) {
  const auto is_codes = [](const Tensor& x) {
    return x.scalar_type() == ScalarType::Float8_e4m3fn || x.scalar_type() == ScalarType::Byte;
  };
  if (is_codes(t)) {
    if (!is_codes(cache.tensor)) {
      check.fail(cache.name, std::string("dtype float8_e4m3fn or uint8 for FP8 ") + argument,
                 dtype_name(cache.tensor.scalar_type()));
    }
    if (cache.scale != 1) {
      check.fail(cache.scale_name,
                 std::string("1 for FP8 ") + argument + ", which is stored as it is", cache.scale);
    }
  } else if (cache.tensor.scalar_type() == ScalarType::Byte) {
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
  const auto slots = std::make_shared<Indices>(
      check, indices, "indices",
      IndexRange{args.tokens, "T of k", k_cache.size(0), "slots of k_cache"});
  const CacheArgument keys{k_cache, "k_cache", k_scale, "k_scale"};
  const CacheArgument values{v_cache, "v_cache", v_scale, "v_scale"};
  set_cache(check, keys, *slots, &args.groups[0]);
  set_cache(check, values, *slots, &args.groups[1]);
  check_stored(check, k, "k", keys);
  check_stored(check, v, "v", values);
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
  const CacheArgument keys{k_cache, "k_cache", k_scale, "k_scale"};
  const CacheArgument values{v_cache, "v_cache", v_scale, "v_scale"};
  QkvHeads heads(check, {qkv, positions, cos_sin_cache, is_neox, num_heads, num_kv_heads, q_weight,
                         k_weight, eps, keys, values, indices, q_scale});
  heads.memory().check(check);
  heads.run();
}

const RegisteredOp kOps[] = {
    SGL_OP(rotary_embedding_cpu,
           "(Tensor positions, Tensor(a!) query, Tensor(b!) key, int head_size, Tensor "
           "cos_sin_cache, bool is_neox) -> (Tensor, Tensor)"),
    SGL_OP(fused_qk_rmsnorm_cpu,
           "(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps) -> (Tensor, Tensor)"),
    SGL_OP(store_cache_cpu,
           "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor indices, int? "
           "row_dim=None, float k_scale=1.0, float v_scale=1.0) -> ()"),
    SGL_OP(fused_qk_norm_rope_store_cpu,
           "(Tensor(a!) qkv, Tensor positions, Tensor cos_sin_cache, bool is_neox, int num_heads, "
           "int num_kv_heads, Tensor? q_weight, Tensor? k_weight, float eps, Tensor(b!) k_cache, "
           "Tensor(c!) v_cache, Tensor indices, float k_scale=1.0, float v_scale=1.0, Tensor? "
           "q_scale=None) -> ()"),
};

}  // namespace
}  // namespace sgl_kernel

SGL_REGISTER_OPS(sgl_kernel::kOps)
