// How a kernel family lays out the scratch that its caller gives it.
//
// A family has one function that takes its arrays from a ScratchLayout, one after another. Over no
// memory the layout only counts, which gives the size that the caller has to bring; over memory the
// same function says where each array lies. So size and places cannot disagree.
//
//   struct NormScratch {
//     float* row;
//     float* weight;
//     SGL_MEMBER NormScratch(const NormArgs& args, ScratchLayout* layout) {
//       row = layout->take<float>(args.columns);
//       weight = layout->take<float>(args.columns);
//     }
//   };
//
//   const int64_t bytes = scratch_bytes<NormScratch>(args);  // the caller
//   ScratchLayout layout(memory);                            // the kernel
//   const NormScratch scratch(args, &layout);
#pragma once

#include "simd/int_math.h"
#include "simd/types.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace sgl_kernel {

// Arrays begin at multiples of this many bytes: a cache line, and the widest vector of any tier.
// Memory for scratch begins so, too.
constexpr int64_t kScratchAlignment = 64;

class ScratchLayout {
 public:
  SGL_MEMBER ScratchLayout() {}
  SGL_MEMBER explicit ScratchLayout(void* memory) : memory_(static_cast<char*>(memory)) {}

  // The next array, of `count` elements; null where the layout only counts.
  template <typename T>
  SGL_MEMBER T* take(int64_t count) {
    const int64_t begin = bytes_, size = count * static_cast<int64_t>(sizeof(T));
    bytes_ = round_up(begin + size, kScratchAlignment);
#if defined(__SANITIZE_ADDRESS__)
    // Between two arrays lie bytes that nobody may touch: without them a read or write behind one
    // array would quietly hit the next.
    bytes_ += kScratchAlignment;
    if (memory_ != nullptr) {
      __asan_unpoison_memory_region(memory_ + begin, static_cast<size_t>(size));
      __asan_poison_memory_region(memory_ + begin + size,
                                  static_cast<size_t>(bytes_ - begin - size));
    }
#endif
    return memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + begin);
  }

  // Of all arrays taken so far; a multiple of kScratchAlignment.
  SGL_MEMBER int64_t bytes() const { return bytes_; }

 private:
  char* memory_ = nullptr;
  int64_t bytes_ = 0;
};

// Bytes of scratch that a family's layout, whose constructor takes (args, &layout), needs.
template <typename Layout, typename Args>
static inline int64_t scratch_bytes(const Args& args) {
  ScratchLayout counted;
  const Layout unused(args, &counted);
  (void)unused;
  return counted.bytes();
}

}  // namespace sgl_kernel
