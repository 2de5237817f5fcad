// The few plain C functions that the Python package calls through ctypes; they need no Torch.
#include <stdexcept>
#include <string>

#include "dispatch/dispatch.h"
#include "torch/c_api.h"

namespace sgl_kernel {

const char* keep_text(std::string text) {
  static thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

}  // namespace sgl_kernel

using sgl_kernel::keep_text;

// Selects a tier by name; null or "" selects the best. Returns null, or the error message.
SGL_EXPORT const char* sgl_kernel_set_isa(const char* name) {
  try {
    sgl_kernel::set_active_tier(name);
    return nullptr;
  } catch (const std::exception& e) {
    return keep_text(e.what());
  }
}

// Null when the tier could be chosen from the machine and SGL_KERNEL_ISA, else the error message.
SGL_EXPORT const char* sgl_kernel_check_isa() {
  try {
    sgl_kernel::active_tier();
    return nullptr;
  } catch (const std::exception& e) {
    return keep_text(e.what());
  }
}

SGL_EXPORT const char* sgl_kernel_cpu_info() {
  return keep_text(sgl_kernel::cpu_info_json());
}
