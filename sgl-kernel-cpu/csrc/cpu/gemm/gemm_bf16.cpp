// bf16 weights: one instantiation of the family per tier.
#include "dispatch/kernel_list.h"
#include "gemm/gemm_template.h"

namespace sgl_kernel {
namespace SGL_TIER {

int64_t gemm_row_block_kernel_impl() {
  return DotFor<bf16_t, bf16_t>::kTiles ? kMaxMC : kMC;
}

void weight_packed_linear_kernel_impl(const GemmArgs& args, TaskRange tasks, void* scratch) {
  gemm_kernel_impl<bf16_t>(args, tasks, scratch);
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
