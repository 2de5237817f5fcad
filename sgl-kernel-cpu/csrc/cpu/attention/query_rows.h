// Rows of queries, the keys and values that they see, and their totals: what attention loads and
// stores. Compiled once per tier.
#pragma once

#include "attention/attention.h"
#include "attention/packed_tile.h"
#include "simd/row_convert.h"

namespace sgl_kernel {
namespace SGL_TIER {

// Rows of queries that see the same keys' head: tokens [first_token, ...) of a request, each with
// all heads of a group, and what is known about them.
struct Rows {
  int64_t request = 0;
  int64_t kv_head = 0;
  int64_t first_token = 0;
  int64_t count = 0;  // tokens times group

  int64_t* first_keys;   // [count] what a row sees: keys from here
  int64_t* end_keys;     // [count] to here
  const void** queries;  // [count] where they are
  float* q;              // panels of transpose_queries, or [count, head_dim] of a decode step
  float* scores;         // [kKeyBlock, kRowGroup] of a group of rows, then their weights
  float* total;          // [count, padded_v]: of all blocks so far
  float* total_largest;
  float* total_sum;
  float* k_panel;  // [kKeyBlock, padded_k]
  float* v_panel;  // [padded_v / kTileCols][kKeyBlock][kTileCols]
  float* staged;   // [kKeyBlock, max(head_dim, v_head_dim)]

  SGL_MEMBER Rows(const AttentionArgs& args, float* scratch) {
    const int64_t rows = args.block_rows(), padded = args.padded_v(), depth = args.padded_k();
    const auto take = [&scratch](int64_t floats) {
      float* p = scratch;
      scratch += floats;
      return p;
    };
    scores = take(kKeyBlock * kRowGroup);
    k_panel = take(kKeyBlock * depth);
    v_panel = take(kKeyBlock * padded);
    q = take(args.query_panel_rows() * depth);
    total = take(rows * padded);
    total_largest = take(rows);
    total_sum = take(rows);
    first_keys = reinterpret_cast<int64_t*>(take(2 * rows));
    end_keys = reinterpret_cast<int64_t*>(take(2 * rows));
    queries = reinterpret_cast<const void**>(take(2 * rows));
    staged = take(kKeyBlock * max_i64(depth, padded));
  }
};

// Keys [begin, begin + count) of a request.
struct Keys {
  int64_t begin;
  int64_t count;
};

SGL_INLINE Keys keys_of_block(int64_t block, int64_t end) {
  return {block * kKeyBlock, min_i64(kKeyBlock, end - block * kKeyBlock)};
}

SGL_INLINE float minus_infinity() {
  return bits_float(0xFF800000u);
}

// Notes where the rows of queries are and what they see.
static inline void find_queries(const AttentionArgs& args, const Rows& rows) {
  const int64_t group = args.group();
  const int64_t prefix = args.seq_lens[rows.request] - args.extend_lens[rows.request];
  for (int64_t r = 0, inside = rows.first_token; r < rows.count; ++inside) {
    const int64_t first_key = args.first_key(rows.request, inside);
    const int64_t at = (args.extend_starts[rows.request] + inside) * args.q_token_stride +
                       rows.kv_head * group * args.q_head_stride;
    for (int64_t head = 0; head < group; ++head, ++r) {
      rows.first_keys[r] = first_key;
      rows.end_keys[r] = prefix + inside + 1;
      rows.queries[r] = element_at(args.q, args.q_dtype, at + head * args.q_head_stride);
    }
  }
}

template <typename T>
static inline void load_queries_of(const AttentionArgs& args, const Rows& rows) {
  find_queries(args, rows);
  for (int64_t first = 0; first < rows.count; first += kRowGroup) {
    transpose_queries<T>(rows.queries + first, min_i64(kRowGroup, rows.count - first),
                         args.head_dim, rows.q + first * args.head_dim);
  }
}

static inline void load_queries(const AttentionArgs& args, const Rows& rows) {
  switch (args.q_dtype) {
    case DType::f32:
      return load_queries_of<float>(args, rows);
    case DType::bf16:
      return load_queries_of<bf16_t>(args, rows);
    case DType::fp16:
      return load_queries_of<fp16_t>(args, rows);
    case DType::e4m3:
      return load_queries_of<e4m3_t>(args, rows);
  }
}

template <typename index_t>
static inline void find_cached(const AttentionArgs& args, const AttentionArgs::Cache& cache,
                               int64_t request, int64_t kv_head, Keys keys, const void** found) {
  const index_t* slots = static_cast<const index_t*>(args.req_to_token) +
                         args.req_pool_indices[request] * args.req_stride + keys.begin;
  const char* base =
      static_cast<const char*>(element_at(cache.data, cache.type, kv_head * cache.head_stride));
  const int64_t bytes = cache.slot_stride * dtype_bytes(cache.type);
  for (int64_t i = 0; i < keys.count; ++i) found[i] = base + slots[i] * bytes;
}

// Where the cached rows of keys (or values) are.
SGL_INLINE void find_cached_rows(const AttentionArgs& args, const AttentionArgs::Cache& cache,
                                 int64_t request, int64_t kv_head, Keys keys, const void** found) {
  args.wide_slots ? find_cached<int64_t>(args, cache, request, kv_head, keys, found)
                  : find_cached<int32_t>(args, cache, request, kv_head, keys, found);
}

// The same where new tokens' rows are not to be taken from the cache: a block that has any goes
// through f32 rows in `staged`.
static inline DType find_rows(const AttentionArgs& args, const AttentionArgs::Cache& cache,
                              const Rows& rows, Keys keys, int64_t width, const void** found,
                              float* scale) {
  const int64_t prefix = args.seq_lens[rows.request] - args.extend_lens[rows.request];
  const int64_t cached =
      cache.fresh == nullptr ? keys.count : min_i64(keys.count, max_i64(0, prefix - keys.begin));
  *scale = cache.scale;
  find_cached_rows(args, cache, rows.request, rows.kv_head, {keys.begin, cached}, found);
  if (cached == keys.count) return cache.type;
  const Vec factor = set1(cache.scale);
  for (int64_t i = 0; i < keys.count; ++i) {
    float* row = rows.staged + i * width;
    if (i < cached) {
      load_row(found[i], cache.type, width, row);
      for (int64_t d = 0; d < width; d += kLanes) {
        const int64_t n = min_i64(kLanes, width - d);
        store_first(row + d, mul(load_first(row + d, n), factor), n);
      }
    } else {
      const int64_t at = args.extend_starts[rows.request] + keys.begin + i - prefix;
      load_row(element_at(cache.fresh, cache.fresh_dtype,
                          at * cache.fresh_token_stride + rows.kv_head * cache.fresh_head_stride),
               cache.fresh_dtype, width, row);
    }
    found[i] = row;
  }
  *scale = 1.f;
  return DType::f32;
}

// Keys (or values) of a block as f32, times the cache's scale.
static inline void load_panel(const AttentionArgs& args, const AttentionArgs::Cache& cache,
                              const Rows& rows, Keys keys, int64_t width, int64_t padded,
                              int64_t part, float* panel) {
  const void* found[kKeyBlock];
  float scale;
  switch (find_rows(args, cache, rows, keys, width, found, &scale)) {
    case DType::f32:
      return copy_panel<float>(found, keys.count, width, padded, part, scale, panel);
    case DType::bf16:
      return copy_panel<bf16_t>(found, keys.count, width, padded, part, scale, panel);
    case DType::fp16:
      return copy_panel<fp16_t>(found, keys.count, width, padded, part, scale, panel);
    case DType::e4m3:
      return copy_panel<e4m3_t>(found, keys.count, width, padded, part, scale, panel);
  }
}

static inline void load_panels(const AttentionArgs& args, const Rows& rows, Keys keys) {
  load_panel(args, args.k, rows, keys, args.head_dim, args.padded_k(), args.padded_k(),
             rows.k_panel);
  load_panel(args, args.v, rows, keys, args.v_head_dim, args.padded_v(), kTileCols, rows.v_panel);
}

static inline void start_totals(const AttentionArgs& args, const Rows& rows) {
  for (int64_t r = 0; r < round_up(rows.count, kLanes); ++r) {
    rows.total_largest[r] = minus_infinity();
    rows.total_sum[r] = 0.f;
  }
  memset(rows.total, 0, static_cast<size_t>(rows.count * args.padded_v()) * sizeof(float));
}

// total * weight to an output row of n elements.
template <typename T>
static inline void store_total(const float* total, float weight, int64_t n, T* out) {
  const Vec factor = set1(weight);
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes) store_out(out + c, mul(load(total + c), factor));
  if (c < n) store_first(out + c, mul(load(total + c), factor), n - c);
}

static inline void store_total(const float* total, float weight, int64_t n, DType type, void* out) {
  switch (type) {
    case DType::f32:
      return store_total(total, weight, n, static_cast<float*>(out));
    case DType::bf16:
      return store_total(total, weight, n, static_cast<bf16_t*>(out));
    case DType::fp16:
      return store_total(total, weight, n, static_cast<fp16_t*>(out));
    case DType::e4m3: {
      uint8_t* codes = static_cast<uint8_t*>(out);
      for (int64_t i = 0; i < n; ++i) codes[i] = e4m3_code(total[i] * weight);
      return;
    }
  }
}

// Totals to outputs: the sink joins the sum, and the weights are divided by it.
static inline void store_outputs(const AttentionArgs& args, const Rows& rows) {
  const int64_t group = args.group(), padded = args.padded_v();
  // Padding sees nothing and gives zeros.
  const bool empty = args.seq_lens[rows.request] == 0;
  int64_t at = (args.extend_starts[rows.request] + rows.first_token) * args.out_token_stride +
               rows.kv_head * group * args.out_head_stride;
  for (int64_t r = 0; r < rows.count; at += args.out_token_stride) {
    for (int64_t head = 0; head < group; ++head, ++r) {
      float factor = 1.f, sum = rows.total_sum[r];
      if (args.sinks != nullptr) {
        const int64_t at_sink = rows.kv_head * group + head;
        const float sink = load_element(args.sinks, args.sinks_dtype, at_sink);
        const float before = rows.total_largest[r];
        const float m = sink > before ? sink : before;
        const float shift = m == minus_infinity() ? 0.f : m;
        factor = exp_scalar(before - shift);
        sum = sum * factor + exp_scalar(sink - shift);
      }
      store_total(rows.total + r * padded, empty ? 0.f : factor / sum, args.v_head_dim,
                  args.out_dtype,
                  element_at(args.out, args.out_dtype, at + head * args.out_head_stride));
    }
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
