// Puts the results of several products side by side, for a merged layer whose shards are held in
// different ways and so have a product each.
#include <cstring>
#include <optional>
#include <vector>

#include "torch/common.h"
#include "torch/registration.h"

namespace sgl_kernel {
namespace {

// A thread should copy at least this many bytes; starting one costs a few microseconds.
constexpr int64_t kMinBytesPerThread = int64_t{1} << 17;

struct Part {
  const char* data;
  int64_t row_stride;  // bytes from row to row
  int64_t row_bytes;
  int64_t offset;  // bytes of the parts before it in a row of the result
};

Tensor concat_columns_cpu(const Tensor& first, const Tensor& second,
                          const std::optional<Tensor>& third) {
  const Checker check("concat_columns_cpu");
  std::vector<Tensor> parts = {first, second};
  if (third.has_value()) parts.push_back(*third);
  constexpr const char* kNames[] = {"first", "second", "third"};
  int64_t columns = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Tensor& part = parts[i];
    check_float_dtype(check, part, kNames[i]);
    check.dtype(part, kNames[i], {first.scalar_type()});
    check.rank(part, kNames[i], 2, "[M, N]");
    check.size(part, kNames[i], 0, first.size(0), "M of first");
    check.unit_last_stride(part, kNames[i]);
    columns += part.size(1);
  }
  const int64_t rows = first.size(0);
  const int64_t shape[2] = {rows, columns};
  Tensor out = new_output(first, {shape, 2}, first.scalar_type());
  const int64_t element = static_cast<int64_t>(out.element_size());
  std::vector<Part> sources;
  int64_t offset = 0;
  for (const Tensor& part : parts) {
    const int64_t bytes = part.size(1) * element;
    if (bytes > 0) {
      sources.push_back({static_cast<const char*>(part.const_data_ptr()), part.stride(0) * element,
                         bytes, offset});
    }
    offset += bytes;
  }
  char* target = static_cast<char*>(out.mutable_data_ptr());
  const int64_t row_bytes = columns * element;
  run_step(rows, max_i64(1, kMinBytesPerThread / max_i64(1, row_bytes)),
           [sources, target, row_bytes](TaskRange tasks) {
             for (int64_t row = tasks.begin; row < tasks.end; ++row) {
               for (const Part& part : sources) {
                 std::memcpy(target + row * row_bytes + part.offset,
                             part.data + row * part.row_stride,
                             static_cast<size_t>(part.row_bytes));
               }
             }
           });
  return out;
}

}  // namespace
}  // namespace sgl_kernel

STABLE_TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) {
  m.def("concat_columns_cpu(Tensor first, Tensor second, Tensor? third=None) -> Tensor");
}

// Not the CPU key, see torch_extension_cpu.cpp.
STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CompositeExplicitAutograd, m) {
  SGL_IMPL(m, concat_columns_cpu);
}
