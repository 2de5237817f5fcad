// Scratch for the kernels of a test: as many bytes as they ask for and not one more, because it
// ends at an unmapped page.
#pragma once

#include <memory>

#include "guarded_buffer.h"
#include "runtime/scratch.h"

// Memory of the calling thread until its next call, filled with 0xFF bytes. `bytes` is a multiple
// of kScratchAlignment, and so the scratch begins at one.
inline void* guarded_scratch(int64_t bytes) {
  // One buffer that grows, because to map and touch megabytes for each product would take longer
  // than the products.
  static thread_local std::unique_ptr<GuardedBuffer<char>> buffer;
  if (buffer == nullptr || buffer->size() < bytes) buffer.reset(new GuardedBuffer<char>(bytes));
  char* scratch = buffer->data() + buffer->size() - bytes;
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(scratch, static_cast<size_t>(bytes));
#endif
  std::memset(scratch, 0xFF, static_cast<size_t>(bytes));
  return scratch;
}
