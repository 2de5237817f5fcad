// e4m3 weights: one instantiation of the family per tier.
#include "dispatch/kernel_list.h"
#include "gemm/gemm_template.h"

namespace sgl_kernel {
namespace SGL_TIER {

void fp8_scaled_mm_kernel_impl(const GemmArgs& args, TaskRange tasks, void* scratch) {
  gemm_kernel_impl<e4m3_t>(args, tasks, scratch);
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
