// e4m3 weights as words: a 16-bit form that costs two instructions a vector to make and one to
// widen to f32. Part of the GEMM family, compiled per tier.
//
// Words hold the weight divided by kWordScale, a power of two that goes into mat1 instead; the
// products are the same, bit for bit. The form has no NaN: codes are watched on the way, and in the
// rare chunk that has one its words are marked afterwards.
#pragma once

#include <type_traits>

#include "gemm/gemm.h"
#include "simd/vec.h"

namespace sgl_kernel {
namespace SGL_TIER {

constexpr int64_t kPairElements = kBlockN * 2;  // one k pair of a block of columns

// Hardware prefetchers stop at page borders and start anew behind them, and do not get far enough
// ahead. A line is asked for twice: far ahead into L2, where many requests can wait, then into L1.
// Distances into L2 that are multiples of 1 KiB read a tenth slower, measured.
constexpr int64_t kPrefetchL1 = 1024;
constexpr int64_t kPrefetchL2 = 4608;

// Asks for the cache lines of the k pairs that many bytes ahead. May point past the weight: a
// prefetch reads nothing and cannot fault.
template <typename packed_t>
SGL_INLINE void prefetch_pair(const packed_t* pair) {
  const char* line = reinterpret_cast<const char*>(pair);
  for (size_t byte = 0; byte < kPairElements * sizeof(packed_t); byte += 64) {
    __builtin_prefetch(line + byte + kPrefetchL1, 0, 3);
    __builtin_prefetch(line + byte + kPrefetchL2, 0, 2);
  }
}

// Words of NaN codes are 480 / kWordScale, with either sign: makes them NaN.
static inline void mark_nan_words(int64_t count, Word* words) {
  constexpr uint16_t k480 = 0x3F80;
  for (int64_t i = 0; i < count; ++i) {
    if ((words[i].bits & 0x7FFF) == k480) words[i].bits |= 0x7FFF;
  }
}

// Makes words of the k pairs of some e4m3 codes.
class WordMaker {
 public:
  SGL_MEMBER WordMaker(const e4m3_t* codes, Word* words) : codes_(codes), words_(words) {}
  SGL_MEMBER void make(int64_t pair) {
    codes_to_words(codes_ + pair * kPairElements, words_ + pair * kPairElements, &watch_);
  }
  // The rest of `pairs`, of which `made` have been made.
  SGL_MEMBER void finish(int64_t made, int64_t pairs) {
    for (; made < pairs; ++made) make(made);
    if (__builtin_expect(watch_.seen(), 0)) mark_nan_words(pairs * kPairElements, words_);
  }

 private:
  const e4m3_t* codes_;
  Word* words_;
  NanWatch watch_;
};

// The power of two by which a row of mat1 is multiplied to make up for words: kWordScale, or 1
// where the row has an element so large that it would leave f32's range. The row's sums are then
// multiplied by kWordScale / this.
SGL_INLINE float row_scale(const fp16_t*, int64_t) {
  return kWordScale;
}
SGL_INLINE float row_scale(const bf16_t* row, int64_t k) {
  if (kWordScale == 1.f) return 1.f;
  constexpr uint16_t kLimit = 0x7B80;  // 2^120 in bf16
  uint16_t largest = 0;
  for (int64_t i = 0; i < k; ++i) {
    const uint16_t magnitude = row[i].bits & 0x7FFF;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest < kLimit ? kWordScale : 1.f;
}

// The same for the policy Dot and a weight type: 1 where the weights are not words.
template <typename Dot, typename packed_t, typename scalar_t>
SGL_INLINE float scale_of_row(const scalar_t* row, int64_t k) {
  constexpr bool kIsWords = Dot::kWords && std::is_same<packed_t, e4m3_t>::value;
  return kIsWords ? row_scale(row, k) : 1.f;
}
template <typename Dot, typename packed_t>
SGL_INLINE float factor_of_row(float scale) {
  constexpr bool kIsWords = Dot::kWords && std::is_same<packed_t, e4m3_t>::value;
  return kIsWords ? kWordScale / scale : 1.f;
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
