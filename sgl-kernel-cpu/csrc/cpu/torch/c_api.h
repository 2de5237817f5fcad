// What the plain C functions share.
#pragma once

#include <string>

#define SGL_EXPORT extern "C" __attribute__((visibility("default")))

namespace sgl_kernel {

// A string for the caller of a C function, who copies it before the thread's next call.
const char* keep_text(std::string text);

}  // namespace sgl_kernel
