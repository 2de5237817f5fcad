#include "packing.h"

namespace sgl_kernel {
namespace {

// A k pair of one column moves as one unit, so packing a block is a transpose of units.
template <typename unit_t, typename element_t>
void pack_block(const element_t* src, element_t* dst, int64_t K, int64_t width) {
  // 32 pairs x 32 columns at a time: 64 bytes of each source row, and a destination that stays in
  // L1.
  constexpr int64_t kTile = 32;
  const int64_t pairs = K / 2;
  for (int64_t p0 = 0; p0 < pairs; p0 += kTile) {
    const int64_t p1 = min_i64(p0 + kTile, pairs);
    for (int64_t column = 0; column < width; ++column) {
      const element_t* row = src + column * K;
      for (int64_t p = p0; p < p1; ++p) {
        unit_t unit;
        memcpy(&unit, row + 2 * p, sizeof(unit));
        memcpy(dst + (p * width + column) * 2, &unit, sizeof(unit));
      }
    }
  }
  if (K % 2 != 0) {
    element_t* tail = dst + (K - 1) * width;
    for (int64_t column = 0; column < width; ++column) tail[column] = src[column * K + K - 1];
  }
}

}  // namespace

void pack_weight_blocks(const void* src, void* dst, int64_t element_size, int64_t N, int64_t K,
                        int64_t block_begin, int64_t block_end) {
  for (int64_t block = block_begin; block < block_end; ++block) {
    const int64_t n0 = block * kBlockN;
    const int64_t width = min_i64(kBlockN, N - n0);
    if (element_size == 1) {
      pack_block<uint16_t>(static_cast<const uint8_t*>(src) + n0 * K,
                           static_cast<uint8_t*>(dst) + n0 * K, K, width);
    } else {
      pack_block<uint32_t>(static_cast<const uint16_t*>(src) + n0 * K,
                           static_cast<uint16_t*>(dst) + n0 * K, K, width);
    }
  }
}

}  // namespace sgl_kernel
