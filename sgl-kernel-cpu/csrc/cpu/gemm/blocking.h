// How a product is cut: the loops around the micro-kernel, with the names that BLIS and oneDNN give
// their blocks. gemm_template.h says how the loops nest, and what a tier has for each number.
#pragma once

#include "gemm/gemm.h"

namespace sgl_kernel {

// Up to this many rows, or fewer on tiers with tiles, are multiplied straight from the packed
// weight (tinygemm_kernel2); more rows share panels of widened weights (brgemm2).
constexpr int64_t kTinyRows = 4;

// MC: rows that share a panel; GemmArgs::row_block may ask for others, up to kMaxMC.
constexpr int64_t kMC = 96;
constexpr int64_t kMaxMC = 256;

// KC: elements of K that go through a kernel at once. Each way to multiply has its own (dot.h)
// between these.
constexpr int64_t kMinKC = 128;
constexpr int64_t kMaxKC = 512;

// NC in blocks of 32 columns: those that share the conversion of a run of mat1's K. Tiers with
// tiles take several blocks of K in a run, up to kTileRunFloats: 1 MiB, half of the second-level
// cache that their processors have.
constexpr int64_t kNCBlocks = 16;
constexpr int64_t kTileNCBlocks = 64;
constexpr int64_t kTileRunFloats = int64_t{256} << 10;

// Up to this many rows mat1 is converted once, whole, so that the weight is read from end to end; a
// long K goes by in several runs of this many floats.
constexpr int64_t kSmallM = 16;
constexpr int64_t kSmallRunFloats = int64_t{1} << 20;

SGL_INLINE int64_t row_block_count(const GemmArgs& args) {
  return args.M <= kTinyRows ? 1 : div_up(args.M, args.row_block == 0 ? kMC : args.row_block);
}

// Rows per block, balanced so that the last block is not a sliver that re-reads the whole weight.
SGL_INLINE int64_t rows_per_block(const GemmArgs& args) {
  if (args.M <= kTinyRows) return args.M;
  return min_i64(args.M, round_up(div_up(args.M, row_block_count(args)), 16));
}

// K falls into segments that share a scale.
SGL_INLINE int64_t segment_length(const GemmArgs& args) {
  return args.scales == nullptr ? args.K : min_i64(args.block_k, args.K);
}

// A block of K: [begin, begin + depth) of one segment.
struct KBlock {
  int64_t begin;
  int64_t depth;
  int64_t segment;
  bool starts_segment;
  bool ends_segment;
  bool ends;  // K
};

// Blocks that K falls into: of at most `kc` elements, whole ones inside each segment.
SGL_INLINE int64_t k_block_count(const GemmArgs& args, int64_t kc) {
  const int64_t segment = segment_length(args);
  const int64_t full = (args.K - 1) / segment;  // segments before the last, which may be shorter
  return full * div_up(segment, kc) + div_up(args.K - full * segment, kc);
}

// The index-th of them.
SGL_INLINE KBlock k_block_at(const GemmArgs& args, int64_t kc, int64_t index) {
  const int64_t length = segment_length(args);
  const int64_t per_segment = div_up(length, kc);
  const int64_t segment = index / per_segment;
  const int64_t inside = (index - segment * per_segment) * kc;
  const int64_t end = min_i64(length, args.K - segment * length);
  const int64_t depth = min_i64(kc, end - inside);
  const int64_t begin = segment * length + inside;
  return {begin, depth, segment, inside == 0, inside + depth == end, begin + depth == args.K};
}

}  // namespace sgl_kernel
