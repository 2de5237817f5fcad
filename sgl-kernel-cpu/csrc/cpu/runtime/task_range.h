// Work is cut into numbered tasks, which threads may do in any order; what a task is says each kernel.
#pragma once

#include <cstdint>

namespace sgl_kernel {

// Tasks [begin, end).
struct TaskRange {
  int64_t begin;
  int64_t end;
};

}  // namespace sgl_kernel
