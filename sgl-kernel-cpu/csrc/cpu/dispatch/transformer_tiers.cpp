#include "dispatch/transformer_tiers.h"

#include <stdexcept>

namespace sgl_kernel {

const TransformerKernels& transformer_kernels(Tier tier) {
#define SGL_TABLE_OF(name)                                                        \
  if (tier == Tier::name) {                                                       \
    static const TransformerKernels table = {                                     \
        &name::rms_norm_kernel_impl,         &name::silu_and_mul_kernel_impl,     \
        &name::topk_softmax_kernel_impl,     &name::heads_kernel_impl,            \
        &name::extend_attention_kernel_impl, &name::decode_attention_kernel_impl, \
        &name::merge_attention_kernel_impl,  &name::exp_probe};                   \
    return table;                                                                 \
  }
  SGL_FOR_EACH_TIER(SGL_TABLE_OF)
#undef SGL_TABLE_OF
  throw std::logic_error(std::string("no kernels for tier ") + tier_name(tier));
}

}  // namespace sgl_kernel
