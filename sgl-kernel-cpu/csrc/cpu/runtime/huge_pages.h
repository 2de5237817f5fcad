// Memory that is read once per call from end to end: fewer, larger pages.
#pragma once

#include <cstddef>

namespace sgl_kernel {

// Asks the system to back the whole huge pages inside [data, data + bytes) with such pages, before
// they are touched. A hint: where the system knows no such thing, or declines, nothing happens.
void advise_huge_pages(void* data, size_t bytes);

// Moves memory that has been written into huge pages now. Needed where an allocator hands out
// memory that was in use before, in small pages; costs next to nothing where it is in huge ones
// already.
void collapse_huge_pages(void* data, size_t bytes);

}  // namespace sgl_kernel
