#include "runtime/overlap.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace sgl_kernel {
namespace {

// Offsets stride * x for x in [0, last].
struct Term {
  int64_t stride;
  int64_t last;
};

bool is_empty(const MemoryView& view) {
  for (int64_t i = 0; i < view.dims; ++i) {
    if (view.sizes[i] == 0) return true;
  }
  return false;
}

// The byte offsets of a view are the sums of its terms; the last one walks the bytes of an element.
void append_terms(const MemoryView& view, std::vector<Term>* terms) {
  for (int64_t i = 0; i < view.dims; ++i) {
    if (view.sizes[i] > 1 && view.strides[i] > 0) {
      terms->push_back({view.strides[i] * view.element_bytes, view.sizes[i] - 1});
    }
  }
  terms->push_back({1, view.element_bytes - 1});
}

// Whether terms can add up to a number: a bounded Diophantine equation. Strides of tensors nest, so
// of each term, the longest first, one or two multiples come into question.
class Sums {
 public:
  explicit Sums(std::vector<Term> terms) {
    std::sort(terms.begin(), terms.end(),
              [](const Term& a, const Term& b) { return a.stride > b.stride; });
    for (const Term& term : terms) {
      if (!terms_.empty() && terms_.back().stride == term.stride) {
        terms_.back().last += term.last;
      } else if (term.last > 0) {
        terms_.push_back(term);
      }
    }
    reach_.assign(terms_.size() + 1, 0);
    divisor_.assign(terms_.size() + 1, 0);
    for (size_t i = terms_.size(); i-- > 0;) {
      reach_[i] = reach_[i + 1] + terms_[i].stride * terms_[i].last;
      divisor_[i] = std::gcd(divisor_[i + 1], terms_[i].stride);
    }
  }

  bool contain(int64_t target) { return target >= 0 && contain(0, target); }

 private:
  static constexpr int kMostLooks = 4096;

  bool contain(size_t i, int64_t target) {
    if (target == 0) return true;
    if (target > reach_[i] || target % divisor_[i] != 0) return false;
    const Term term = terms_[i];
    const int64_t missing = target - reach_[i + 1];  // what this term has to give at least
    const int64_t least = missing <= 0 ? 0 : (missing - 1) / term.stride + 1;
    for (int64_t x = std::min(term.last, target / term.stride); x >= least; --x) {
      if (++looks_ > kMostLooks || contain(i + 1, target - x * term.stride)) return true;
    }
    return false;
  }

  std::vector<Term> terms_;
  std::vector<int64_t> reach_;    // the greatest sum of the terms from i on
  std::vector<int64_t> divisor_;  // and what divides all of them
  int looks_ = 0;
};

}  // namespace

ByteRange byte_range(const MemoryView& view) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(view.data);
  int64_t last = 0;
  for (int64_t i = 0; i < view.dims; ++i) {
    if (view.sizes[i] == 0) return {begin, begin};
    last += (view.sizes[i] - 1) * view.strides[i];
  }
  return {begin, begin + static_cast<uintptr_t>((last + 1) * view.element_bytes)};
}

bool overlaps_itself(const MemoryView& view) {
  if (is_empty(view)) return false;
  // Dimensions from the shortest stride on; views have a handful.
  int64_t inside = 1;  // elements from the first to behind the last of the dimensions so far
  int64_t before = -1;
  for (;;) {
    int64_t next = -1;
    for (int64_t i = 0; i < view.dims; ++i) {
      if (view.sizes[i] <= 1 || view.strides[i] <= before) continue;
      if (next < 0 || view.strides[i] < view.strides[next]) next = i;
    }
    if (next < 0) return false;
    for (int64_t i = 0; i < view.dims; ++i) {
      if (i != next && view.sizes[i] > 1 && view.strides[i] == view.strides[next]) return true;
    }
    if (view.strides[next] < inside) return true;
    inside += (view.sizes[next] - 1) * view.strides[next];
    before = view.strides[next];
  }
}

bool overlap(const MemoryView& a, const MemoryView& b) {
  const ByteRange in_a = byte_range(a), in_b = byte_range(b);
  if (in_a.begin == in_a.end || in_b.begin == in_b.end) return false;
  if (in_a.end <= in_b.begin || in_b.end <= in_a.begin) return false;
  // a + x = b + y, where y = (its greatest) - z and so all terms are added.
  std::vector<Term> terms;
  append_terms(a, &terms);
  append_terms(b, &terms);
  return Sums(std::move(terms)).contain(static_cast<int64_t>(in_b.end - 1 - in_a.begin));
}

}  // namespace sgl_kernel
