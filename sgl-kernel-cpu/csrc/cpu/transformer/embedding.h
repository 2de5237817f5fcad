// Rows of a token table, which may be packed for the output projection that shares it.
#pragma once

#include "runtime/task_range.h"
#include "simd/dtype.h"

namespace sgl_kernel {

struct EmbeddingArgs {
  const int64_t* rows = nullptr;    // of the table, one a token
  const void* table = nullptr;      // [N, K]
  DType table_dtype = DType::bf16;  // or fp16
  int64_t N = 0;
  int64_t K = 0;
  bool is_vnni = false;  // packed by pack_weight_blocks, else row-major
  void* out = nullptr;   // [tokens, K] contiguous
  DType out_dtype = DType::bf16;
};

void embed_rows(const EmbeddingArgs& args, TaskRange tokens);

}  // namespace sgl_kernel
