// What the bindings share besides the checks: scratch, element types, indices.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "simd/dtype.h"
#include "simd/int_math.h"
#include "torch/memory.h"
#include "torch/steps.h"

namespace sgl_kernel {

// Memory of the calling thread, 64-byte aligned: grows to the largest call seen, and is reused.
// Each Purpose has its own.
template <typename Purpose>
void* thread_buffer(int64_t bytes) {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  static thread_local std::unique_ptr<void, Free> buffer;
  static thread_local int64_t capacity = 0;
  if (capacity < bytes) {
    const int64_t rounded = round_up(bytes, 4096);
    buffer.reset();
    capacity = 0;
    buffer.reset(std::aligned_alloc(64, static_cast<size_t>(rounded)));
    if (buffer == nullptr) throw OutOfMemory("a thread's scratch", rounded);
    capacity = rounded;
  }
  return buffer.get();
}

struct RowScratch;
inline void* row_scratch(int64_t bytes) {
  return thread_buffer<RowScratch>(bytes);
}

inline DType to_dtype(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::BFloat16:
      return DType::bf16;
    case ScalarType::Half:
      return DType::fp16;
    case ScalarType::Float8_e4m3fn:
    case ScalarType::Byte:  // its codes, moved as bytes
      return DType::e4m3;
    default:
      return DType::f32;
  }
}

inline void check_float_dtype(const Checker& check, const Tensor& t, const char* argument) {
  check.dense_cpu(t, argument);
  check.dtype(t, argument, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half});
}

inline void check_float_out_dtype(const Checker& check, ScalarType dtype) {
  if (dtype != ScalarType::Float && dtype != ScalarType::BFloat16 && dtype != ScalarType::Half) {
    check.fail("out_dtype", "float32, bfloat16 or float16", dtype_name(dtype));
  }
}

// How many indices there are and what they are below, with the names that messages give the two.
struct IndexRange {
  int64_t count;
  const char* count_of;
  int64_t limit;
  const char* limit_of;
};

// A 1-D int64 or int32 tensor as int64, each element checked to be in [0, range.limit).
class Indices {
 public:
  Indices(const Checker& check, const Tensor& t, const char* argument, const IndexRange& range)
      : check_(check), argument_(argument), range_(range) {
    check.dense_cpu(t, argument);
    check.dtype(t, argument, {ScalarType::Long, ScalarType::Int});
    check.rank(t, argument, 1, range.count_of);
    check.size(t, argument, 0, range.count, range.count_of);
    check.contiguous(t, argument);
    if (t.scalar_type() == ScalarType::Long) {
      data_ = static_cast<const int64_t*>(t.const_data_ptr());
    } else {
      narrow_ = static_cast<const int32_t*>(t.const_data_ptr());
      owned_.resize(static_cast<size_t>(range.count));
      data_ = owned_.data();
    }
    refresh();
  }
  Indices(const Indices&) = delete;
  Indices& operator=(const Indices&) = delete;

  // Reads and checks the tensor's elements as they are now; data() stays where it is.
  void refresh() {
    if (narrow_ != nullptr) owned_.assign(narrow_, narrow_ + range_.count);
    for (int64_t i = 0; i < range_.count; ++i) {
      if (data_[i] < 0 || data_[i] >= range_.limit) {
        check_.fail(argument_,
                    std::string("indices in [0, ") + std::to_string(range_.limit) + ") (" +
                        range_.limit_of + ")",
                    data_[i], " at ", i);
      }
    }
  }

  const int64_t* data() const { return data_; }
  int64_t operator[](int64_t i) const { return data_[i]; }

 private:
  const Checker check_;
  const char* argument_;
  IndexRange range_;
  const int64_t* data_ = nullptr;
  const int32_t* narrow_ = nullptr;
  std::vector<int64_t> owned_;
};

// Indices of a step, shared with the graph that may keep it.
using SharedIndices = std::shared_ptr<Indices>;

// A thread should have at least this many elements; starting one costs a few microseconds.
constexpr int64_t kMinElementsPerThread = int64_t{1} << 14;

inline int64_t row_grain(int64_t elements_a_row) {
  return max_i64(1, kMinElementsPerThread / max_i64(1, elements_a_row));
}

}  // namespace sgl_kernel
