// Rows of tensors of any rank. Their leading dimensions are merged where all tensors allow it; a
// kernel walks the innermost one or two of what is left, and each place of the others is a run of
// the kernel.
#pragma once

#include <utility>
#include <vector>

#include "torch/checks.h"

namespace sgl_kernel {

// Rows of several tensors, numbered as they were given: row r is at
// offsets[t] + (r / rows) * group_strides[t] + (r % rows) * row_strides[t], in elements.
struct RowSlab {
  int64_t groups = 1;
  int64_t rows = 1;
  int64_t first_row = 0;  // of all rows, the last dimension fastest
  std::vector<int64_t> offsets;
  std::vector<int64_t> group_strides;
  std::vector<int64_t> row_strides;

  int64_t count() const { return groups * rows; }
};

class RowDims {
 public:
  // Dimensions [0, dims) of tensors that have the same sizes there.
  RowDims(const std::vector<Tensor>& tensors, int64_t dims) : tensors_(tensors.size()) {
    for (int64_t d = 0; d < dims; ++d) {
      const int64_t size = tensors[0].size(d);
      rows_ *= size;
      if (size == 1) continue;
      Dim dim{size, {}};
      for (const Tensor& t : tensors) dim.strides.push_back(t.stride(d));
      if (!dims_.empty() && merges(dims_.back(), dim)) {
        dim.size *= dims_.back().size;
        dims_.back() = std::move(dim);
      } else {
        dims_.push_back(std::move(dim));
      }
    }
  }

  int64_t rows() const { return rows_; }

  // Calls run(const RowSlab&) for all rows; a slab takes `levels` dimensions, 1 or 2.
  template <typename Run>
  void for_each_slab(int levels, const Run& run) const {
    if (rows_ == 0) return;
    const int64_t none = 0;
    const std::vector<int64_t> zeros(tensors_, none);
    RowSlab slab;
    slab.offsets = slab.group_strides = slab.row_strides = zeros;
    size_t outer = dims_.size();
    if (outer > 0) {
      --outer;
      slab.rows = dims_[outer].size;
      slab.row_strides = dims_[outer].strides;
    }
    if (levels > 1 && outer > 0) {
      --outer;
      slab.groups = dims_[outer].size;
      slab.group_strides = dims_[outer].strides;
    }
    for (; slab.first_row < rows_; slab.first_row += slab.count()) {
      int64_t place = slab.first_row / slab.count();
      slab.offsets = zeros;
      for (size_t d = outer; d-- > 0; place /= dims_[d].size) {
        for (size_t t = 0; t < tensors_; ++t) {
          slab.offsets[t] += place % dims_[d].size * dims_[d].strides[t];
        }
      }
      run(slab);
    }
  }

 private:
  struct Dim {
    int64_t size;
    std::vector<int64_t> strides;  // by tensor
  };

  static bool merges(const Dim& outer, const Dim& inner) {
    for (size_t t = 0; t < inner.strides.size(); ++t) {
      if (outer.strides[t] != inner.size * inner.strides[t]) return false;
    }
    return true;
  }

  size_t tensors_;
  int64_t rows_ = 1;
  std::vector<Dim> dims_;
};

// The sizes of `t` with `last` in place of its last one.
inline std::vector<int64_t> sizes_with_last(const Tensor& t, int64_t last) {
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) sizes.push_back(t.size(d));
  sizes.push_back(last);
  return sizes;
}

}  // namespace sgl_kernel
