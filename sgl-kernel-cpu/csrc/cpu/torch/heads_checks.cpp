#include "torch/heads_checks.h"

namespace sgl_kernel {

void set_weight(const Checker& check, const Tensor& weight, const char* argument, int64_t columns,
                const char* meaning) {
  check_float_dtype(check, weight, argument);
  check.rank(weight, argument, 1, "[N]");
  check.size(weight, argument, 0, columns, meaning);
  check.contiguous(weight, argument);
}

void check_rows(const Checker& check, const Tensor& t, const char* argument) {
  check_float_dtype(check, t, argument);
  check.rank(t, argument, 2, "[M, N]");
  check.unit_last_stride(t, argument);
}

void run_heads(const HeadsArgs& args, const std::vector<SharedIndices>& indices) {
  const auto kernel = kernel_table(active_tier()).qk_norm_rope_store;
  const int64_t bytes = scratch_bytes<HeadsScratch>(args);
  int64_t elements = 0;
  for (int64_t g = 0; g < args.group_count; ++g) {
    elements += args.groups[g].heads * args.groups[g].head_dim;
  }
  run_step(
      args.tokens, row_grain(elements),
      [tokens = args.tokens, indices] {
        for (const SharedIndices& checked : indices) checked->refresh();
        return tokens;
      },
      [kernel, args, bytes](TaskRange tokens) { kernel(args, tokens, row_scratch(bytes)); });
}

HeadGroup heads_of(const Checker& check, const Tensor& t, const char* argument, int64_t head_dim,
                   int64_t most_dims, bool or_codes) {
  if (or_codes) {
    check.dense_cpu(t, argument);
    check.dtype(t, argument,
                {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half,
                 ScalarType::Float8_e4m3fn, ScalarType::Byte});
  } else {
    check_float_dtype(check, t, argument);
  }
  const int64_t dims = t.dim();
  if (dims < 2 || dims > most_dims) {
    check.fail(argument,
               std::string("[T, heads * head_dim] or [T, heads, head_dim]") +
                   (most_dims == 4 ? " or [B, S, heads, head_dim]" : ""),
               dims, "-D ", shape_name(t));
  }
  check.unit_last_stride(t, argument);
  if (dims > 2) check.size(t, argument, dims - 1, head_dim, "head_dim");
  if (dims == 2 && t.size(1) % head_dim != 0) {
    check.fail(argument, "a multiple of head_dim, " + std::to_string(head_dim) + ", in dimension 1",
               t.size(1), " in shape ", shape_name(t));
  }
  HeadGroup group;
  group.heads = dims > 2 ? t.size(dims - 2) : t.size(1) / head_dim;
  group.head_dim = head_dim;
  group.src = t.const_data_ptr();
  group.src_dtype = to_dtype(t.scalar_type());
  group.src_token_stride = t.stride(0);
  group.src_head_stride = dims > 2 ? t.stride(dims - 2) : head_dim;
  return group;
}

void set_rotation(const Checker& check, const Tensor& cos_sin_cache, int64_t head_dim, bool is_neox,
                  const Indices& positions, HeadsArgs* args) {
  args->rotary.positions = positions.data();
  args->rotary.cos_sin = cos_sin_cache.const_data_ptr();
  args->rotary.cos_sin_dtype = to_dtype(cos_sin_cache.scalar_type());
  args->rotary.cos_sin_stride = cos_sin_cache.stride(0);
  args->rotary.rotary_dim = cos_sin_cache.size(1);
  args->rotary.is_neox = is_neox;
  if (args->rotary.rotary_dim % 2 != 0 || args->rotary.rotary_dim > head_dim) {
    check.fail(
        "cos_sin_cache",
        "an even rotary_dim of at most head_dim, " + std::to_string(head_dim) + ", in dimension 1",
        args->rotary.rotary_dim);
  }
}

void check_cos_sin(const Checker& check, const Tensor& cos_sin_cache) {
  check_float_dtype(check, cos_sin_cache, "cos_sin_cache");
  check.rank(cos_sin_cache, "cos_sin_cache", 2, "[max_position, rotary_dim]");
  check.unit_last_stride(cos_sin_cache, "cos_sin_cache");
}

void set_norm(const Checker& check, const Tensor& weight, const char* argument, HeadGroup* group) {
  set_weight(check, weight, argument, group->head_dim, "head_dim");
  group->weight = weight.const_data_ptr();
  group->weight_dtype = to_dtype(weight.scalar_type());
}

void set_cache(const Checker& check, const CacheArgument& cache, const Indices& slots,
               HeadGroup* group) {
  const Tensor& t = cache.tensor;
  check.size(t, cache.name, 1, group->heads, "heads");
  check.size(t, cache.name, 2, group->head_dim, "head_dim");
  check.unit_last_stride(t, cache.name);
  group->dst = t.mutable_data_ptr();
  group->dst_dtype = to_dtype(t.scalar_type());
  group->dst_token_stride = t.stride(0);
  group->dst_head_stride = t.stride(1);
  group->dst_slots = slots.data();
  group->dst_scale = check.number(cache.scale, cache.scale_name, NumberRange::positive);
}

void use_caches(const Tensor& k_cache, const Tensor& v_cache, const HeadsArgs& args,
                MemoryUse* memory) {
  const HeadGroup& k = args.groups[0];
  const HeadGroup& v = args.groups[1];
  const bool same_tokens = k.src_token_stride == v.src_token_stride || args.tokens <= 1;
  const bool same_heads =
      (k.src_head_stride == v.src_head_stride && k.dst_head_stride == v.dst_head_stride) ||
      k.heads <= 1;
  const bool latent = k.src == v.src && k.src_dtype == v.src_dtype && k.dst == v.dst &&
                      k.dst_dtype == v.dst_dtype && k.dst_token_stride == v.dst_token_stride &&
                      k.dst_scale == v.dst_scale && k.heads == v.heads &&
                      v.head_dim <= k.head_dim && same_tokens && same_heads;
  memory->writes(k_cache, "k_cache");
  if (!latent) memory->writes(v_cache, "v_cache");
}

void check_head_dim(const Checker& check, int64_t head_dim, const char* argument) {
  if (head_dim < 1 || head_dim > kMostHeadDim) {
    check.fail(argument, "heads of 1 to " + std::to_string(kMostHeadDim) + " elements", head_dim);
  }
}

void check_cache(const Checker& check, const Tensor& cache, const char* argument, bool or_bytes) {
  check.dense_cpu(cache, argument);
  if (!(or_bytes && cache.scalar_type() == ScalarType::Byte)) {
    check.dtype(
        cache, argument,
        {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half, ScalarType::Float8_e4m3fn});
  }
  check.rank(cache, argument, 3, "[slots, heads, head_dim]");
  check.positive(cache, argument, 2, "head_dim");
  check_head_dim(check, cache.size(2), argument);
}

void check_caches(const Checker& check, const Tensor& k_cache, const Tensor& v_cache,
                  bool or_bytes) {
  check_cache(check, k_cache, "k_cache", or_bytes);
  check_cache(check, v_cache, "v_cache", or_bytes);
  check.size(v_cache, "v_cache", 0, k_cache.size(0), "slots of k_cache");
}

QkvHeads::QkvHeads(const Checker& check, const QkvArguments& given) {
  const Tensor& qkv = given.qkv;
  const Tensor& cos_sin_cache = given.cos_sin_cache;
  const Tensor& k_cache = given.k_cache.tensor;
  const Tensor& v_cache = given.v_cache.tensor;
  const int64_t num_heads = given.num_heads, num_kv_heads = given.num_kv_heads;
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

  HeadsArgs& args = args_;
  args.tokens = qkv.size(0);
  args.group_count = 3;
  args.eps = check.number(given.eps, "eps", NumberRange::not_negative);
  indices_.push_back(std::make_shared<Indices>(
      check, given.positions, "positions",
      IndexRange{args.tokens, "T of qkv", cos_sin_cache.size(0), "rows of cos_sin_cache"}));
  indices_.push_back(std::make_shared<Indices>(
      check, given.indices, "indices",
      IndexRange{args.tokens, "T of qkv", k_cache.size(0), "slots of k_cache"}));
  const Indices& positions = *indices_[0];
  const Indices& slots = *indices_[1];
  const DType type = to_dtype(qkv.scalar_type());
  void* data = qkv.mutable_data_ptr();
  const int64_t heads[3] = {num_heads, num_kv_heads, num_kv_heads};
  const int64_t dims[3] = {head_dim, head_dim, v_head_dim};
  int64_t column = 0;
  for (int g = 0; g < 3; ++g) {
    HeadGroup& group = args.groups[g];
    group.heads = heads[g];
    group.head_dim = dims[g];
    group.src = element_at(data, type, column);
    group.src_dtype = type;
    group.src_token_stride = qkv.stride(0);
    group.src_head_stride = dims[g];
    group.rotate = g < 2;
    column += heads[g] * dims[g];
  }
  HeadGroup& q = args.groups[0];
  q.dst = data;
  q.dst_dtype = type;
  q.dst_token_stride = q.src_token_stride;
  q.dst_head_stride = q.src_head_stride;
  set_cache(check, given.k_cache, slots, &args.groups[1]);
  set_cache(check, given.v_cache, slots, &args.groups[2]);
  if (given.q_weight.has_value()) set_norm(check, *given.q_weight, "q_weight", &args.groups[0]);
  if (given.k_weight.has_value()) set_norm(check, *given.k_weight, "k_weight", &args.groups[1]);
  set_rotation(check, cos_sin_cache, head_dim, given.is_neox, positions, &args);
  if (given.q_scale.has_value()) {
    const Tensor& q_scale = *given.q_scale;
    check.dense_cpu(q_scale, "q_scale");
    check.dtype(q_scale, "q_scale", {ScalarType::Float});
    check.rank(q_scale, "q_scale", 1, "[max_position]");
    check.size(q_scale, "q_scale", 0, cos_sin_cache.size(0), "rows of cos_sin_cache");
    check.contiguous(q_scale, "q_scale");
    args.groups[0].position_scale = static_cast<const float*>(q_scale.const_data_ptr());
  }
  memory_.writes(qkv, "qkv");
  memory_.writes(k_cache, "k_cache");
  memory_.writes(v_cache, "v_cache");
  memory_.reads(given.positions, "positions");
  memory_.reads(cos_sin_cache, "cos_sin_cache");
  memory_.reads(given.q_weight, "q_weight");
  memory_.reads(given.k_weight, "k_weight");
  memory_.reads(given.indices, "indices");
  memory_.reads(given.q_scale, "q_scale");
}

}  // namespace sgl_kernel
