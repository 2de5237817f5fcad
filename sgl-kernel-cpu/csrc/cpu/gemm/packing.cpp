#include "gemm/packing.h"

namespace sgl_kernel {
namespace {

// A k pair of one column moves as one unit, so packing a block is a transpose of units. Vectors of
// 16 bytes are the compiler's own: it has instructions for them on every machine we run on.
typedef uint16_t Units2 __attribute__((vector_size(16)));
typedef uint32_t Units4 __attribute__((vector_size(16)));

#if defined(__clang__)
#define SGL_SHUFFLE16(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define SGL_SHUFFLE32(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SGL_SHUFFLE16(a, b, ...) __builtin_shuffle(a, b, Units2{__VA_ARGS__})
#define SGL_SHUFFLE32(a, b, ...) __builtin_shuffle(a, b, Units4{__VA_ARGS__})
#endif

// Alternates the lower (or upper) halves of two vectors, in units.
SGL_INLINE Units2 zip_low(Units2 a, Units2 b) {
  return SGL_SHUFFLE16(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
}
SGL_INLINE Units2 zip_high(Units2 a, Units2 b) {
  return SGL_SHUFFLE16(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}
SGL_INLINE Units4 zip_low(Units4 a, Units4 b) {
  return SGL_SHUFFLE32(a, b, 0, 4, 1, 5);
}
SGL_INLINE Units4 zip_high(Units4 a, Units4 b) {
  return SGL_SHUFFLE32(a, b, 2, 6, 3, 7);
}

// Square transpose: interleaving row i with row i + n/2, log2(n) times, swaps rows and columns.
template <typename Units, int COUNT>
SGL_INLINE void transpose(Units* rows) {
  for (int round = 1; round < COUNT; round *= 2) {
    Units zipped[COUNT];
    for (int i = 0; i < COUNT / 2; ++i) {
      zipped[2 * i] = zip_low(rows[i], rows[i + COUNT / 2]);
      zipped[2 * i + 1] = zip_high(rows[i], rows[i + COUNT / 2]);
    }
    for (int i = 0; i < COUNT; ++i) rows[i] = zipped[i];
  }
}

// 32 columns x `pairs` pairs, a multiple of 16 bytes of each column. Columns are read a cache line
// at a time, and few together: where K is a multiple of 4 KiB they share their place in L1.
template <typename Units, typename element_t>
void pack_square_tiles(const element_t* src, element_t* dst, int64_t K, int64_t pairs) {
  constexpr int kCount = sizeof(Units) / (2 * sizeof(element_t));
  constexpr int64_t kLinePairs = 64 / (2 * sizeof(element_t));
  for (int64_t p0 = 0; p0 < pairs; p0 += kLinePairs) {
    const int64_t p1 = min_i64(p0 + kLinePairs, pairs);
    for (int64_t column = 0; column < kBlockN; column += kCount) {
      for (int64_t p = p0; p < p1; p += kCount) {
        Units rows[kCount];
        for (int i = 0; i < kCount; ++i) {
          memcpy(&rows[i], src + (column + i) * K + 2 * p, sizeof(Units));
        }
        transpose<Units, kCount>(rows);
        for (int i = 0; i < kCount; ++i) {
          memcpy(dst + ((p + i) * kBlockN + column) * 2, &rows[i], sizeof(Units));
        }
      }
    }
  }
}

template <typename Units, typename element_t>
void pack_block(const element_t* src, element_t* dst, int64_t K, int64_t width) {
  constexpr int64_t kCount = sizeof(Units) / (2 * sizeof(element_t));
  const int64_t pairs = K / 2;
  int64_t p = 0;
  if (width == kBlockN) {
    p = pairs / kCount * kCount;
    pack_square_tiles<Units>(src, dst, K, p);
  }
  for (; p < pairs; ++p) {
    for (int64_t column = 0; column < width; ++column) {
      memcpy(dst + (p * width + column) * 2, src + column * K + 2 * p, 2 * sizeof(element_t));
    }
  }
  if (K % 2 != 0) {
    element_t* tail = dst + (K - 1) * width;
    for (int64_t column = 0; column < width; ++column) tail[column] = src[column * K + K - 1];
  }
}

}  // namespace

void pack_weight_blocks(const PackArgs& args, int64_t block_begin, int64_t block_end) {
  for (int64_t block = block_begin; block < block_end; ++block) {
    const int64_t n0 = block * kBlockN;
    const int64_t width = min_i64(kBlockN, args.N - n0);
    const int64_t first = n0 * args.K;
    if (args.element_bytes == 1) {
      pack_block<Units2>(static_cast<const uint8_t*>(args.src) + first,
                         static_cast<uint8_t*>(args.dst) + first, args.K, width);
    } else {
      pack_block<Units4>(static_cast<const uint16_t*>(args.src) + first,
                         static_cast<uint16_t*>(args.dst) + first, args.K, width);
    }
  }
}

}  // namespace sgl_kernel
