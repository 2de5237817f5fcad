// How ops are registered: a family's table has one SGL_OP line for each op, its name and its
// schema, and SGL_REGISTER_OPS(table) gives Torch both the schemas and the functions of these
// names. Errors of a registered op name it, whoever raised them.
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

// One op: what a family's table consists of.
struct RegisteredOp {
  const char* name;
  const char* schema;
  void (*boxed)(StableIValue* stack, uint64_t inputs, uint64_t outputs);
};

}  // namespace sgl_kernel

// The function `op` with its schema, which is written without the name: "(Tensor x) -> Tensor".
#define SGL_OP(op, schema)                                                            \
  [] {                                                                                \
    struct Named {                                                                    \
      static const char* name() { return #op; }                                       \
    };                                                                                \
    using Op = sgl_kernel::NamedOp<Named, std::remove_pointer_t<decltype(&op)>, &op>; \
    return sgl_kernel::RegisteredOp{#op, #op schema, &Op::boxed};                     \
  }()

// Not the CPU key: a tensor of another device then reaches the checks of the op, and gets their
// message.
#define SGL_REGISTER_OPS(table)                                                 \
  STABLE_TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) {                                \
    for (const sgl_kernel::RegisteredOp& op : table) m.def(op.schema);          \
  }                                                                             \
  STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CompositeExplicitAutograd, m) {         \
    for (const sgl_kernel::RegisteredOp& op : table) m.impl(op.name, op.boxed); \
  }
