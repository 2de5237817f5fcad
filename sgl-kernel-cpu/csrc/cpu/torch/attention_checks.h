// What the attention ops check: the caches, queries and output, and every index against the pool
// that it points into.
#pragma once

#include <optional>
#include <vector>

#include "torch/heads_checks.h"

namespace sgl_kernel {

// What all attention ops are given besides queries, requests and output.
struct AttentionOptions {
  CacheArgument k_cache;
  CacheArgument v_cache;
  double sm_scale;
  double logit_cap;
  int64_t sliding_window;
  const std::optional<Tensor>& sinks;
};

// Where the tokens of requests are, as the op is given it.
struct RequestArguments {
  const Tensor& req_to_token;
  const Tensor& req_pool_indices;
  const Tensor& seq_lens;
};

// What keys or values of new tokens have to be.
struct ExtendShape {
  int64_t tokens;
  int64_t heads;
  int64_t head_dim;
};

// Requests of one call: where their tokens are.
struct Batch {
  std::optional<Indices> pool_indices;
  std::optional<Indices> seq_lens;
  std::vector<int64_t> extend_lens;
  std::vector<int64_t> extend_starts;
  int64_t tokens = 0;  // rows of queries
  int64_t slots = 0;   // of the cache
};

// Caches, heads and how scores are made. `heads_argument` says where num_heads comes from.
AttentionArgs cache_args(const Checker& check, const AttentionOptions& options, int64_t num_heads,
                         const char* heads_argument);
// Queries as [T, heads, head_dim], and the output of the same form.
void set_queries(const Checker& check, const Tensor& q, const char* argument, const Tensor& out,
                 const char* out_argument, AttentionArgs* args);
// Keys or values of the new tokens, which are not to be taken from the cache.
void set_extend_side(const Checker& check, const Tensor& t, const char* argument,
                     const ExtendShape& shape, AttentionArgs::Cache* side);
// Lengths and places of the requests, checked. The batch comes with all but the indices.
void set_requests(const Checker& check, const RequestArguments& requests, Batch* batch,
                  AttentionArgs* args);
// Everything that the kernels will follow is looked at here: it may change from one run of a graph
// to the next.
void check_requests(const Checker& check, const Batch& batch, const AttentionArgs& args);
// The requests' rows of the output are theirs alone.
void check_rows_apart(const Checker& check, const Batch& batch);

}  // namespace sgl_kernel
