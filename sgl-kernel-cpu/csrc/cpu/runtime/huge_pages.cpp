#include "runtime/huge_pages.h"

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace sgl_kernel {

namespace {

// Kernels that do not know an advice, or have no huge pages, refuse; there is nothing to do about
// it.
void advise_whole_pages(void* data, size_t bytes, int advice) {
#if defined(__linux__)
  constexpr uintptr_t kHugePage = uintptr_t{1} << 21;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(kHugePage - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, advice);
#else
  (void)data;
  (void)bytes;
  (void)advice;
#endif
}

}  // namespace

void advise_huge_pages(void* data, size_t bytes) {
  constexpr int kHugePages = 14;  // MADV_HUGEPAGE, Linux 2.6.38
  advise_whole_pages(data, bytes, kHugePages);
}

void collapse_huge_pages(void* data, size_t bytes) {
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, Linux 6.1
  advise_whole_pages(data, bytes, kCollapse);
}

}  // namespace sgl_kernel
