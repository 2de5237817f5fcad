// Argument checks of the ops. Every message names the op, the argument, what was expected and what
// came.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cfloat>
#include <cmath>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace sgl_kernel {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// As Python calls it, without "torch.".
inline std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::UInt16:
      return "uint16";
    case ScalarType::UInt32:
      return "uint32";
    case ScalarType::UInt64:
      return "uint64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::ComplexHalf:
      return "complex32";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e5m2fnuz:
      return "float8_e5m2fnuz";
    case ScalarType::Float8_e4m3fnuz:
      return "float8_e4m3fnuz";
    case ScalarType::Float8_e8m0fnu:
      return "float8_e8m0fnu";
    case ScalarType::Float4_e2m1fn_x2:
      return "float4_e2m1fn_x2";
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
    case torch::headeronly::DeviceType::XPU:
      return "xpu";
    case torch::headeronly::DeviceType::MPS:
      return "mps";
    case torch::headeronly::DeviceType::HPU:
      return "hpu";
    case torch::headeronly::DeviceType::XLA:
      return "xla";
    default:
      return "another device";
  }
}

// Whether a gradient would have to flow into a tensor. The stable ABI cannot be asked that, but a
// view of such a tensor has a history.
bool tracks_gradient(const Tensor& t);

// While this thread records a graph: notes that its steps use the tensor's memory.
void note_memory(const Tensor& t);

// What an op accepts of a number.
enum class NumberRange { any, not_negative, positive };

// There is no memory; registered ops add their name.
class OutOfMemory : public std::runtime_error {
 public:
  OutOfMemory(const std::string& use, int64_t bytes)
      : std::runtime_error("out of memory: there are no " + std::to_string(bytes) + " bytes for " +
                           use) {}
};

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

  // Every tensor that an op is given comes by here.
  void dense_cpu(const Tensor& t, const char* argument) const {
    if (!t.defined()) fail(argument, "a tensor", "None");
    if (!t.is_cpu()) fail(argument, "a tensor on cpu", device_name(t));
    if (t.layout() != torch::headeronly::Layout::Strided) {
      fail(argument, "a dense (strided) tensor", "another layout");
    }
    if (aoti_torch_grad_mode_is_enabled() && tracks_gradient(t)) {
      fail(argument, "a tensor without gradient, or a call under torch.no_grad()",
           "one that requires grad: the op has none");
    }
    note_memory(t);
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

  // Numbers come as double and are used as float32, so that is what is checked: finite, and of a
  // size that float32 holds with all its bits.
  float number(double value, const char* argument, NumberRange range,
               const char* expected = nullptr) const {
    const float used = static_cast<float>(value);
    const bool held = std::isfinite(used) && (value == 0 || std::fabs(used) >= FLT_MIN);
    const bool inside =
        range == NumberRange::any || used > 0 || (range == NumberRange::not_negative && used == 0);
    if (held && inside) return used;
    std::string what = expected != nullptr                  ? expected
                       : range == NumberRange::any          ? "a finite number"
                       : range == NumberRange::not_negative ? "a finite number of at least 0"
                                                            : "a finite number above 0";
    if (std::isfinite(value)) what += ", 1.2e-38 to 3.4e38 in size (float32)";
    fail(argument, what, value);
  }

  void positive(const Tensor& t, const char* argument, int64_t dim, const char* meaning) const {
    if (t.size(dim) < 1) {
      fail(argument, std::string(meaning) + " >= 1 in dimension " + std::to_string(dim),
           t.size(dim), " in shape ", shape_name(t));
    }
  }

  const char* op() const { return op_; }

  static std::string strides_name(const Tensor& t) {
    std::ostringstream s;
    s << '[';
    for (int64_t i = 0; i < t.dim(); ++i) s << (i == 0 ? "" : ", ") << t.stride(i);
    s << "] for shape " << shape_name(t);
    return s.str();
  }

 private:
  const char* op_;
};

}  // namespace sgl_kernel
