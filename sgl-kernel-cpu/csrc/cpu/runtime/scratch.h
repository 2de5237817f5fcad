// Carves the caller's scratch into arrays. Part of the GEMM family, compiled per tier.
#pragma once

#include "gemm/gemm.h"

namespace sgl_kernel {
namespace SGL_TIER {

struct Scratch {
  char* next;
  template <typename T>
  SGL_INLINE T* take(Scratch* scratch, int64_t count) {
    T* p = reinterpret_cast<T*>(scratch->next);
    scratch->next += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return p;
  }
};

}  // namespace SGL_TIER
}  // namespace sgl_kernel
