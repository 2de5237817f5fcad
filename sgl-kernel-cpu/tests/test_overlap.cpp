// Overlap of strided views, against a map of the bytes that each of them owns.
#include "runtime/overlap.h"

#include <random>
#include <set>
#include <vector>

#include "check.h"

using namespace sgl_kernel;

namespace {

char memory[4096];

struct View {
  int64_t offset = 0;  // bytes
  int64_t element_bytes = 1;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;

  MemoryView get() const {
    return {memory + offset, element_bytes, static_cast<int64_t>(sizes.size()), sizes.data(),
            strides.data()};
  }
};

// Every byte of every element, and whether one belongs to two elements.
std::set<int64_t> bytes_of(const View& view, bool* twice) {
  std::set<int64_t> bytes;
  *twice = false;
  int64_t count = 1;
  for (const int64_t size : view.sizes) count *= size;
  for (int64_t i = 0; i < count; ++i) {
    int64_t at = view.offset, left = i;
    for (size_t d = view.sizes.size(); d-- > 0;) {
      at += left % view.sizes[d] * view.strides[d] * view.element_bytes;
      left /= view.sizes[d];
    }
    for (int64_t b = 0; b < view.element_bytes; ++b) *twice |= !bytes.insert(at + b).second;
  }
  return bytes;
}

bool share_a_byte(const View& a, const View& b) {
  bool twice;
  const std::set<int64_t> in_a = bytes_of(a, &twice);
  for (const int64_t byte : bytes_of(b, &twice)) {
    if (in_a.count(byte) > 0) return true;
  }
  return false;
}

}  // namespace

TEST(columns_of_one_projection_do_not_overlap) {
  // q, k and v of [5, 24] bf16, as [tokens, heads, head_dim].
  const View q{0, 2, {5, 4, 3}, {24, 3, 1}}, k{24, 2, {5, 2, 3}, {24, 3, 1}};
  const View v{36, 2, {5, 2, 3}, {24, 3, 1}}, half_of_q{12, 2, {5, 9}, {24, 1}};
  CHECK(!overlap(q.get(), k.get()) && !overlap(k.get(), v.get()) && !overlap(v.get(), q.get()),
        "columns of one tensor");
  CHECK(overlap(q.get(), half_of_q.get()) && overlap(half_of_q.get(), k.get()), "shared columns");
  CHECK(!overlap(v.get(), half_of_q.get()), "columns before those of v");
}

TEST(rows_that_take_turns_do_not_overlap) {
  const View even{0, 4, {8, 16}, {32, 1}}, odd{64, 4, {8, 16}, {32, 1}};
  const View late{60, 4, {8, 16}, {32, 1}};
  CHECK(!overlap(even.get(), odd.get()), "even and odd rows");
  CHECK(overlap(even.get(), late.get()) && overlap(odd.get(), late.get()), "one element too early");
}

TEST(views_without_elements_overlap_nothing) {
  const View none{0, 4, {0, 16}, {16, 1}}, all{0, 4, {4, 16}, {16, 1}};
  CHECK(!overlap(none.get(), all.get()) && !overlap(all.get(), none.get()), "no elements");
  CHECK(!overlaps_itself(none.get()), "no elements");
}

TEST(neighbours_do_not_overlap) {
  const View first{0, 2, {16}, {1}}, second{32, 2, {16}, {1}}, misplaced{31, 1, {1}, {1}};
  CHECK(!overlap(first.get(), second.get()), "one behind the other");
  CHECK(overlap(first.get(), misplaced.get()), "the second byte of the last element");
}

TEST(expanded_views_overlap_themselves) {
  const View expanded{0, 4, {3, 8}, {0, 1}}, slipped{0, 4, {3, 8}, {7, 1}};
  const View rows{0, 4, {3, 8}, {8, 1}}, transposed{0, 4, {8, 3}, {1, 8}},
      one{0, 4, {1, 8}, {0, 1}};
  CHECK(overlaps_itself(expanded.get()) && overlaps_itself(slipped.get()), "shared rows");
  CHECK(!overlaps_itself(rows.get()) && !overlaps_itself(transposed.get()), "rows of their own");
  CHECK(!overlaps_itself(one.get()), "a row has no second one to overlap");
}

TEST(overlap_agrees_with_a_map_of_bytes) {
  std::mt19937 random(7);
  const auto draw = [&random](int64_t below) { return static_cast<int64_t>(random() % below); };
  int yes = 0;
  for (int i = 0; i < 20000; ++i) {
    View views[2];
    for (View& view : views) {
      view.element_bytes = int64_t{1} << draw(3);
      view.offset = draw(200);
      for (int64_t d = draw(4); d > 0; --d) {
        view.sizes.push_back(draw(10) == 0 ? 0 : 1 + draw(5));
        view.strides.push_back(draw(2) == 0 ? draw(8) : 5 * draw(10));
      }
    }
    const bool expected = share_a_byte(views[0], views[1]);
    yes += expected;
    CHECK(overlap(views[0].get(), views[1].get()) == expected, "pair %d: expected %d", i, expected);
    bool twice;
    bytes_of(views[0], &twice);
    // What does not nest may count as overlapping.
    CHECK(!twice || overlaps_itself(views[0].get()), "view %d overlaps itself", i);
  }
  CHECK(yes > 2000 && yes < 18000, "%d of 20000 pairs overlap", yes);
}
