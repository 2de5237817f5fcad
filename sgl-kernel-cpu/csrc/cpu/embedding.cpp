#include "embedding.h"

namespace sgl_kernel {
namespace {

template <typename out_t>
void embed_rows_as(const EmbeddingArgs& args, TaskRange tokens) {
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    const int64_t row = args.rows[t];
    out_t* out = static_cast<out_t*>(args.out) + t * args.K;
    for (int64_t k = 0; k < args.K; ++k) {
      const int64_t place = args.is_vnni ? packed_index(args.N, args.K, row, k) : row * args.K + k;
      from_float(to_float(args.table[place]), out + k);
    }
  }
}

}  // namespace

void embed_rows(const EmbeddingArgs& args, TaskRange tokens) {
  switch (args.out_type) {
    case ElementType::f32:
      return embed_rows_as<float>(args, tokens);
    case ElementType::bf16:
      return embed_rows_as<bf16_t>(args, tokens);
    case ElementType::fp16:
      return embed_rows_as<fp16_t>(args, tokens);
    case ElementType::e4m3:
      return embed_rows_as<e4m3_t>(args, tokens);
  }
}

}  // namespace sgl_kernel
