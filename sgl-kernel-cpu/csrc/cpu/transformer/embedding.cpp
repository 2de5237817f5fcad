#include "transformer/embedding.h"

#include "gemm/packing.h"

namespace sgl_kernel {
namespace {

template <typename table_t, typename out_t>
void embed_rows_as(const EmbeddingArgs& args, TaskRange tokens) {
  const table_t* table = static_cast<const table_t*>(args.table);
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    const int64_t row = args.rows[t];
    out_t* out = static_cast<out_t*>(args.out) + t * args.K;
    for (int64_t k = 0; k < args.K; ++k) {
      const int64_t place = args.is_vnni ? packed_index(args.N, args.K, row, k) : row * args.K + k;
      from_float(to_float(table[place]), out + k);
    }
  }
}

template <typename table_t>
void embed_rows_of(const EmbeddingArgs& args, TaskRange tokens) {
  switch (args.out_dtype) {
    case DType::f32:
      return embed_rows_as<table_t, float>(args, tokens);
    case DType::bf16:
      return embed_rows_as<table_t, bf16_t>(args, tokens);
    case DType::fp16:
      return embed_rows_as<table_t, fp16_t>(args, tokens);
    case DType::e4m3:
      return embed_rows_as<table_t, e4m3_t>(args, tokens);
  }
}

}  // namespace

void embed_rows(const EmbeddingArgs& args, TaskRange tokens) {
  args.table_dtype == DType::fp16 ? embed_rows_of<fp16_t>(args, tokens)
                                  : embed_rows_of<bf16_t>(args, tokens);
}

}  // namespace sgl_kernel
