// Heads in the bindings: checks of projections and caches, shared by the ops that prepare heads and
// by attention.
#pragma once

#include <optional>
#include <vector>

#include "dispatch/dispatch.h"
#include "dispatch/kernel_table.h"
#include "torch/common.h"

namespace sgl_kernel {

void set_weight(const Checker& check, const Tensor& weight, const char* argument, int64_t columns,
                const char* meaning);
// A cache [slots, heads, head_dim] among an op's arguments, and the scale of what it holds.
struct CacheArgument {
  const Tensor& tensor;
  const char* name;
  double scale;
  const char* scale_name;
};

// A 2-D tensor with strided rows.
void check_rows(const Checker& check, const Tensor& t, const char* argument);
// `indices`: what args points to.
void run_heads(const HeadsArgs& args, const std::vector<SharedIndices>& indices);
// Heads of a [T, heads * head_dim] or [T, heads, head_dim] tensor with strided tokens and heads;
// with most_dims 4 also of [B, S, heads, head_dim], whose token stride is for the caller to set.
// or_codes: of any of the dtypes, or FP8 codes.
HeadGroup heads_of(const Checker& check, const Tensor& t, const char* argument, int64_t head_dim,
                   int64_t most_dims = 3, bool or_codes = false);
void set_rotation(const Checker& check, const Tensor& cos_sin_cache, int64_t head_dim, bool is_neox,
                  const Indices& positions, HeadsArgs* args);
void check_cos_sin(const Checker& check, const Tensor& cos_sin_cache);
void set_norm(const Checker& check, const Tensor& weight, const char* argument, HeadGroup* group);
// A cache as the place where the heads of `group` go.
void set_cache(const Checker& check, const CacheArgument& cache, const Indices& slots,
               HeadGroup* group);
// Notes that the first two groups, keys and values, go into the caches. In latent attention values
// are the first elements of each head of keys; then v_cache may be those of k_cache, since both
// stores write the same bytes.
void use_caches(const Tensor& k_cache, const Tensor& v_cache, const HeadsArgs& args,
                MemoryUse* memory);
void check_head_dim(const Checker& check, int64_t head_dim, const char* argument);
// or_bytes: codes may come as uint8.
void check_cache(const Checker& check, const Tensor& cache, const char* argument,
                 bool or_bytes = false);
void check_caches(const Checker& check, const Tensor& k_cache, const Tensor& v_cache,
                  bool or_bytes = false);

// The arguments that ops on a fused projection share, as their schemas name them.
struct QkvArguments {
  const Tensor& qkv;
  const Tensor& positions;
  const Tensor& cos_sin_cache;
  bool is_neox;
  int64_t num_heads;
  int64_t num_kv_heads;
  const std::optional<Tensor>& q_weight;
  const std::optional<Tensor>& k_weight;
  double eps;
  CacheArgument k_cache;
  CacheArgument v_cache;
  const Tensor& indices;
  const std::optional<Tensor>& q_scale;
};

// What fused ops do with a fused projection: queries normalised and rotated in place, keys too on
// their way into the cache, values into the cache.
class QkvHeads {
 public:
  QkvHeads(const Checker& check, const QkvArguments& given);

  // What the arguments are used for. The caller adds its own, and checks them before run().
  MemoryUse& memory() { return memory_; }
  void run() const { run_heads(args_, indices_); }

 private:
  HeadsArgs args_;
  std::vector<SharedIndices> indices_;
  MemoryUse memory_;
};

}  // namespace sgl_kernel
