// The query rows of a task: where their queries, keys and values are, what they see, how they are
// packed into panels, and how their accumulators become outputs. Compiled once per tier.
#pragma once

#include "attention/attention.h"
#include "attention/packed_tile.h"
#include "simd/row_convert.h"

namespace sgl_kernel {
namespace SGL_TIER {

// Query rows that see the same head of keys: tokens [first_token, ...) of a request, each with all
// query heads of the group, and the scratch in which they are computed.
struct QueryRows : AttentionScratch {
  int64_t request = 0;
  int64_t kv_head = 0;
  int64_t first_token = 0;
  int64_t count = 0;  // tokens times group

  SGL_MEMBER QueryRows(const AttentionArgs& args, ScratchLayout layout)
      : AttentionScratch(args, &layout) {}
};

// Keys [begin, begin + count) of a request: a block, of which the sequence's last may be shorter.
struct KeyBlock {
  int64_t begin;
  int64_t count;
};

SGL_INLINE KeyBlock key_block(int64_t index, int64_t end) {
  return {index * kKeyBlock, min_i64(kKeyBlock, end - index * kKeyBlock)};
}

SGL_INLINE float minus_infinity() {
  return bits_float(0xFF800000u);
}

// Notes where the queries are and what they see.
static inline void find_queries(const AttentionArgs& args, const QueryRows& rows) {
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

// Queries as f32 panels, a query tile after the other.
template <typename T>
static inline void pack_query_rows_of(const AttentionArgs& args, const QueryRows& rows) {
  find_queries(args, rows);
  for (int64_t first = 0; first < rows.count; first += kQueryTile) {
    pack_queries<T>(rows.queries + first, min_i64(kQueryTile, rows.count - first), args.head_dim,
                    rows.q + first * args.head_dim);
  }
}

static inline void pack_query_rows(const AttentionArgs& args, const QueryRows& rows) {
  switch (args.q_dtype) {
    case DType::f32:
      return pack_query_rows_of<float>(args, rows);
    case DType::bf16:
      return pack_query_rows_of<bf16_t>(args, rows);
    case DType::fp16:
      return pack_query_rows_of<fp16_t>(args, rows);
    case DType::e4m3:
      return pack_query_rows_of<e4m3_t>(args, rows);
  }
}

// One side of the cache, keys or values, and a head of it.
struct CachedHead {
  const AttentionArgs::Cache& cache;
  int64_t request;
  int64_t kv_head;
};

template <typename index_t>
static inline void find_slots(const AttentionArgs& args, CachedHead head, KeyBlock keys,
                              const void** found) {
  const AttentionArgs::Cache& cache = head.cache;
  const index_t* slots = static_cast<const index_t*>(args.req_to_token) +
                         args.req_pool_indices[head.request] * args.req_stride + keys.begin;
  const char* base = static_cast<const char*>(
      element_at(cache.data, cache.dtype, head.kv_head * cache.head_stride));
  const int64_t bytes = cache.slot_stride * dtype_bytes(cache.dtype);
  for (int64_t i = 0; i < keys.count; ++i) found[i] = base + slots[i] * bytes;
}

// Where the rows of a block's keys (or values) are in the cache.
SGL_INLINE void find_cached_rows(const AttentionArgs& args, CachedHead head, KeyBlock keys,
                                 const void** found) {
  args.wide_slots ? find_slots<int64_t>(args, head, keys, found)
                  : find_slots<int32_t>(args, head, keys, found);
}

// Rows of a block and what they are: of the cache, or staged as f32.
struct FoundRows {
  const void* rows[kKeyBlock];
  DType dtype;
  float scale;
};

// The same where the rows of the tokens that extend the sequence are not to be taken from the
// cache: a block that has any of them goes through f32 rows in `staged`, its cached rows too.
static inline void find_rows(const AttentionArgs& args, const AttentionArgs::Cache& cache,
                             const QueryRows& rows, KeyBlock keys, int64_t width,
                             FoundRows* found) {
  const int64_t prefix = args.seq_lens[rows.request] - args.extend_lens[rows.request];
  const int64_t cached =
      cache.extend == nullptr ? keys.count : min_i64(keys.count, max_i64(0, prefix - keys.begin));
  find_cached_rows(args, {cache, rows.request, rows.kv_head}, {keys.begin, cached}, found->rows);
  found->dtype = cache.dtype;
  found->scale = cache.scale;
  if (cached == keys.count) return;
  const Vec factor = set1(cache.scale);
  for (int64_t i = 0; i < keys.count; ++i) {
    float* row = rows.staged + i * width;
    if (i < cached) {
      load_row(found->rows[i], cache.dtype, width, row);
      for (int64_t d = 0; d < width; d += kLanes) {
        const int64_t n = min_i64(kLanes, width - d);
        store_first(row + d, mul(load_first(row + d, n), factor), n);
      }
    } else {
      const int64_t at = args.extend_starts[rows.request] + keys.begin + i - prefix;
      load_row(element_at(cache.extend, cache.extend_dtype,
                          at * cache.extend_token_stride + rows.kv_head * cache.extend_head_stride),
               cache.extend_dtype, width, row);
    }
    found->rows[i] = row;
  }
  found->dtype = DType::f32;
  found->scale = 1.f;
}

// Keys (or values) of a block as an f32 panel, times the cache's scale.
static inline void pack_side(const AttentionArgs& args, const AttentionArgs::Cache& cache,
                             const QueryRows& rows, KeyBlock keys, PanelShape shape, float* panel) {
  FoundRows found;
  find_rows(args, cache, rows, keys, shape.columns, &found);
  const PackedRows packed = {found.rows, keys.count, found.scale};
  switch (found.dtype) {
    case DType::f32:
      return pack_panel<float>(packed, shape, panel);
    case DType::bf16:
      return pack_panel<bf16_t>(packed, shape, panel);
    case DType::fp16:
      return pack_panel<fp16_t>(packed, shape, panel);
    case DType::e4m3:
      return pack_panel<e4m3_t>(packed, shape, panel);
  }
}

static inline void pack_block(const AttentionArgs& args, const QueryRows& rows, KeyBlock keys) {
  pack_side(args, args.k, rows, keys, {args.head_dim, args.padded_k(), args.padded_k()},
            rows.k_panel);
  pack_side(args, args.v, rows, keys, {args.v_head_dim, args.padded_v(), kTileCols}, rows.v_panel);
}

static inline void clear_accumulators(const AttentionArgs& args, const QueryRows& rows) {
  for (int64_t r = 0; r < round_up(rows.count, kLanes); ++r) {
    rows.running_max[r] = minus_infinity();
    rows.running_sum[r] = 0.f;
  }
  memset(rows.accumulator, 0, static_cast<size_t>(rows.count * args.padded_v()) * sizeof(float));
}

// accumulator * factor to an output row of n elements.
template <typename T>
static inline void store_scaled(const float* accumulator, float factor, int64_t n, T* out) {
  const Vec f = set1(factor);
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes) store_out(out + c, mul(load(accumulator + c), f));
  if (c < n) store_first(out + c, mul(load(accumulator + c), f), n - c);
}

static inline void store_scaled(const float* accumulator, float factor, int64_t n, DType dtype,
                                void* out) {
  switch (dtype) {
    case DType::f32:
      return store_scaled(accumulator, factor, n, static_cast<float*>(out));
    case DType::bf16:
      return store_scaled(accumulator, factor, n, static_cast<bf16_t*>(out));
    case DType::fp16:
      return store_scaled(accumulator, factor, n, static_cast<fp16_t*>(out));
    case DType::e4m3: {
      uint8_t* codes = static_cast<uint8_t*>(out);
      for (int64_t i = 0; i < n; ++i) codes[i] = e4m3_code(accumulator[i] * factor);
      return;
    }
  }
}

// Accumulators to outputs: the sink joins the sum, and the accumulators are divided by it.
static inline void store_outputs(const AttentionArgs& args, const QueryRows& rows) {
  const int64_t group = args.group(), padded = args.padded_v();
  // Padding sees nothing and gives zeros.
  const bool empty = args.seq_lens[rows.request] == 0;
  int64_t at = (args.extend_starts[rows.request] + rows.first_token) * args.out_token_stride +
               rows.kv_head * group * args.out_head_stride;
  for (int64_t r = 0; r < rows.count; at += args.out_token_stride) {
    for (int64_t head = 0; head < group; ++head, ++r) {
      float factor = 1.f, sum = rows.running_sum[r];
      if (args.sinks != nullptr) {
        const int64_t at_sink = rows.kv_head * group + head;
        const float sink = load_element(args.sinks, args.sinks_dtype, at_sink);
        const float before = rows.running_max[r];
        const float m = sink > before ? sink : before;
        const float shift = m == minus_infinity() ? 0.f : m;
        factor = exp_scalar(before - shift);
        sum = sum * factor + exp_scalar(sink - shift);
      }
      store_scaled(rows.accumulator + r * padded, empty ? 0.f : factor / sum, args.v_head_dim,
                   args.out_dtype,
                   element_at(args.out, args.out_dtype, at + head * args.out_head_stride));
    }
  }
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
