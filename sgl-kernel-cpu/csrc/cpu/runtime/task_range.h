// Work is cut into numbered tasks, which threads may do in any order; a kernel says what its task
// is.
#pragma once

#include <cstdint>

namespace sgl_kernel {

// Tasks [begin, end).
struct TaskRange {
  int64_t begin;
  int64_t end;
};

}  // namespace sgl_kernel
