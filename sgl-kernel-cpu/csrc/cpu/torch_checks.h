// Argument checks of the ops. Every message names the op, the argument, what was expected and what
// came.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace sgl_kernel {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float:
      return "float32";
    default:
      return torch::headeronly::toString(dtype);
  }
}

inline std::string shape_name(const Tensor& t) {
  std::ostringstream s;
  s << '[';
  for (int64_t i = 0; i < t.dim(); ++i) s << (i == 0 ? "" : ", ") << t.size(i);
  s << ']';
  return s.str();
}

inline std::string device_name(const Tensor& t) {
  switch (t.device().type()) {
    case torch::headeronly::DeviceType::CPU:
      return "cpu";
    case torch::headeronly::DeviceType::CUDA:
      return "cuda";
    case torch::headeronly::DeviceType::Meta:
      return "meta";
    default:
      return "device type " + std::to_string(static_cast<int>(t.device().type()));
  }
}

// The checks of one op; knows its name so that the callers below read as contracts.
class Checker {
 public:
  explicit Checker(const char* op) : op_(op) {}

  template <typename... Parts>
  [[noreturn]] void fail(const char* argument, const std::string& expected,
                         const Parts&... got) const {
    std::ostringstream s;
    s << "sgl_kernel::" << op_ << ": " << argument << ": expected " << expected << ", got ";
    (s << ... << got);
    throw std::runtime_error(s.str());
  }

  void dense_cpu(const Tensor& t, const char* argument) const {
    if (!t.defined()) fail(argument, "a tensor", "None");
    if (!t.is_cpu()) fail(argument, "a tensor on cpu", device_name(t));
    if (t.layout() != torch::headeronly::Layout::Strided) {
      fail(argument, "a dense (strided) tensor", "another layout");
    }
  }

  void rank(const Tensor& t, const char* argument, int64_t expected, const char* shape) const {
    if (t.dim() != expected) {
      fail(argument, std::string(shape) + " (" + std::to_string(expected) + "-D)", t.dim(), "-D ",
           shape_name(t));
    }
  }

  // `least` dimensions or more.
  void least_rank(const Tensor& t, const char* argument, int64_t least, const char* shape) const {
    if (t.dim() < least) {
      fail(argument, std::string(shape) + " (" + std::to_string(least) + "-D or more)", t.dim(),
           "-D ", shape_name(t));
    }
  }

  // The sizes of all dimensions but the last are those of `other`.
  void same_rows(const Tensor& t, const char* argument, const Tensor& other,
                 const char* other_argument) const {
    bool same = t.dim() == other.dim();
    for (int64_t d = 0; same && d + 1 < t.dim(); ++d) same = t.size(d) == other.size(d);
    if (!same) {
      fail(argument, std::string("the rows of ") + other_argument + ", " + shape_name(other),
           shape_name(t));
    }
  }

  void dtype(const Tensor& t, const char* argument,
             std::initializer_list<ScalarType> allowed) const {
    std::string expected;
    for (const ScalarType dtype : allowed) {
      if (t.scalar_type() == dtype) return;
      expected += (expected.empty() ? "" : " or ") + dtype_name(dtype);
    }
    fail(argument, "dtype " + expected, dtype_name(t.scalar_type()));
  }

  void size(const Tensor& t, const char* argument, int64_t dim, int64_t expected,
            const char* meaning) const {
    if (t.size(dim) != expected) {
      fail(argument,
           "size " + std::to_string(expected) + " (" + meaning + ") in dimension " +
               std::to_string(dim),
           t.size(dim), " in shape ", shape_name(t));
    }
  }

  void contiguous(const Tensor& t, const char* argument) const {
    if (!t.is_contiguous()) fail(argument, "a contiguous tensor", "strides ", strides_name(t));
  }

  // Rows may be strided, elements of a row may not.
  void unit_last_stride(const Tensor& t, const char* argument) const {
    const int64_t last = t.dim() - 1;
    if (t.size(last) > 1 && t.numel() > 0 && t.stride(last) != 1) {
      fail(argument, "unit stride in the last dimension", "strides ", strides_name(t));
    }
  }

  // For a tensor that is written: no two rows share memory.
  void rows_apart(const Tensor& t, const char* argument) const {
    if (t.numel() == 0) return;
    std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size, the innermost first
    for (int64_t d = 0; d + 1 < t.dim(); ++d) {
      if (t.size(d) > 1) dims.emplace_back(t.stride(d), t.size(d));
    }
    std::sort(dims.begin(), dims.end());
    int64_t extent = t.size(t.dim() - 1);
    for (const auto& [stride, size] : dims) {
      if (stride < extent) {
        fail(argument, "rows that do not overlap in memory", "strides ", strides_name(t));
      }
      extent += (size - 1) * stride;
    }
  }

  void positive(const Tensor& t, const char* argument, int64_t dim, const char* meaning) const {
    if (t.size(dim) < 1) {
      fail(argument, std::string(meaning) + " >= 1 in dimension " + std::to_string(dim),
           t.size(dim), " in shape ", shape_name(t));
    }
  }

 private:
  static std::string strides_name(const Tensor& t) {
    std::ostringstream s;
    s << '[';
    for (int64_t i = 0; i < t.dim(); ++i) s << (i == 0 ? "" : ", ") << t.stride(i);
    s << "] for shape " << shape_name(t);
    return s.str();
  }

  const char* op_;
};

}  // namespace sgl_kernel
