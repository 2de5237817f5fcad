// How ops are registered: SGL_IMPL(m, name) registers sgl_kernel::name, whose errors then read
// well, whoever raised them.
#pragma once

#include <torch/csrc/stable/library.h>

#include "torch/checks.h"

namespace sgl_kernel {

// Throws on what has been caught, as a message that names the op: memory that is not there, and
// dtypes that the stable ABI of this Torch only has a number for.
[[noreturn]] void rethrow_from(const char* op);

template <typename Named, typename Function, Function* function>
struct NamedOp {
  static void boxed(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
    try {
      torch::stable::detail::boxer<Function, function>::boxed_fn(stack, inputs, outputs);
    } catch (...) {
      rethrow_from(Named::name());
    }
  }
};

}  // namespace sgl_kernel

#define SGL_IMPL(m, op)                                                                     \
  do {                                                                                      \
    struct Named {                                                                          \
      static const char* name() { return #op; }                                             \
    };                                                                                      \
    using Op = sgl_kernel::NamedOp<Named, std::remove_pointer_t<decltype(&sgl_kernel::op)>, \
                                   &sgl_kernel::op>;                                        \
    m.impl(#op, &Op::boxed);                                                                \
  } while (false)
