// Which memory an op reads and which it writes. The rule for all ops: what is written overlaps
// nothing else that the op is given, not in part, and not itself. An argument that is read and
// written, like the residual of a norm, is given once, as written.
#pragma once

#include <optional>

#include "runtime/overlap.h"
#include "torch/checks.h"

namespace sgl_kernel {

class MemoryUse {
 public:
  void reads(const Tensor& t, const char* argument) { add(t, argument, false); }
  void reads(const std::optional<Tensor>& t, const char* argument) {
    if (t.has_value()) add(*t, argument, false);
  }
  void writes(const Tensor& t, const char* argument) { add(t, argument, true); }

  // Throws, naming two arguments, if the rule does not hold.
  void check(const Checker& check) const;

 private:
  struct Use {
    const Tensor* tensor;
    const char* argument;
    bool written;
    MemoryView view;
    ByteRange range;
  };
  static constexpr int kMostTensors = 24;  // more than any op takes

  void add(const Tensor& t, const char* argument, bool written);

  Use uses_[kMostTensors];
  int count_ = 0;
};

}  // namespace sgl_kernel
