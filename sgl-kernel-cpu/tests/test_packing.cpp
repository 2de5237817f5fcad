// The packed layout: a permutation of the weight, for every shape.
#include <vector>

#include "check.h"
#include "gemm/packing.h"
#include "guarded_buffer.h"

using namespace sgl_kernel;

template <typename element_t>
static void check_pack(int64_t N, int64_t K) {
  GuardedBuffer<element_t> weight(N * K);
  GuardedBuffer<element_t> packed(N * K);
  for (int64_t i = 0; i < N * K; ++i) weight[i] = static_cast<element_t>((i * 2654435761u) >> 16);
  pack_weight_blocks({weight.data(), packed.data(), sizeof(element_t), N, K}, 0,
                     div_up(N, kBlockN));

  std::vector<bool> seen(N * K, false);
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t k = 0; k < K; ++k) {
      const int64_t i = packed_index(N, K, n, k);
      CHECK(i >= 0 && i < N * K && !seen[i], "N=%ld K=%ld: index %ld of (%ld, %ld)", (long)N,
            (long)K, (long)i, (long)n, (long)k);
      seen[i] = true;
      CHECK(packed[i] == weight[n * K + k], "N=%ld K=%ld element (%ld, %ld)", (long)N, (long)K,
            (long)n, (long)k);
    }
  }
}

TEST(packing_is_a_permutation) {
  for (const int64_t N : {1, 2, 31, 32, 33, 63, 64, 65, 96}) {
    for (const int64_t K : {1, 2, 3, 31, 32, 63, 64, 65, 130}) {
      check_pack<uint8_t>(N, K);
      check_pack<uint16_t>(N, K);
    }
  }
}

TEST(full_blocks_are_vnni_pairs) {
  // [K/2, 32, 2]: the layout that SGLang's kernels read.
  const int64_t N = 64, K = 6;
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t k = 0; k < K; ++k) {
      const int64_t expected = (n / 32) * 32 * K + (k / 2) * 64 + (n % 32) * 2 + k % 2;
      CHECK(packed_index(N, K, n, k) == expected, "(%ld, %ld)", (long)n, (long)k);
    }
  }
}
