#include "torch/memory.h"

#include <array>

namespace sgl_kernel {

bool tracks_gradient(const Tensor& t) {
  switch (t.scalar_type()) {  // others cannot
    case ScalarType::Byte:
    case ScalarType::Char:
    case ScalarType::Short:
    case ScalarType::Int:
    case ScalarType::Long:
    case ScalarType::Bool:
      return false;
    default:
      break;
  }
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  std::array<StableIValue, 1> stack{from(t)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::alias", "", stack.data(), TORCH_ABI_VERSION));
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::is_leaf", "", stack.data(), TORCH_ABI_VERSION));
  return !to<bool>(stack[0]);
}

void MemoryUse::add(const Tensor& t, const char* argument, bool written) {
  if (count_ == kMostTensors) throw std::logic_error("an op with more tensors than MemoryUse has");
  Use& use = uses_[count_++];
  const auto sizes = t.sizes();
  const auto strides = t.strides();
  use = {&t, argument, written, {}, {}};
  use.view = {t.const_data_ptr(), static_cast<int64_t>(t.element_size()),
              static_cast<int64_t>(sizes.size()), sizes.data(), strides.data()};
  use.range = byte_range(use.view);
}

void MemoryUse::check(const Checker& check) const {
  for (int i = 0; i < count_; ++i) {
    const Use& written = uses_[i];
    if (!written.written) continue;
    if (overlaps_itself(written.view)) {
      check.fail(written.argument, "rows that do not overlap in memory", "strides ",
                 Checker::strides_name(*written.tensor));
    }
    for (int j = 0; j < count_; ++j) {
      const Use& other = uses_[j];
      if (j == i || (other.written && j < i)) continue;
      if (other.range.end <= written.range.begin || written.range.end <= other.range.begin)
        continue;
      if (overlap(written.view, other.view)) {
        check.fail(written.argument,
                   std::string("memory of its own, since it is written while ") + other.argument +
                       " is " + (other.written ? "written" : "read"),
                   "tensors that overlap: ", shape_name(*written.tensor), " and ",
                   shape_name(*other.tensor));
      }
    }
  }
}

}  // namespace sgl_kernel
