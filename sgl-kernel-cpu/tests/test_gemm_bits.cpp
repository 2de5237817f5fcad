// The bits of products: they depend neither on the other rows nor on how work is split, nor on
// threads, tiers or the caller's floating-point environment.
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "gemm_product.h"

using namespace sgl_kernel;

TEST(threads_on_one_product_do_not_disturb_each_other) {
  for (const std::string& tier : tiers_under_test()) {
    const Case c{21, 32 * 8, 160};
    Product<bf16_t, e4m3_t> product(c, 7);
    GuardedBuffer<float> alone(c.M * c.N);
    GemmArgs args = product.args(alone.data());
    run_tasks(table_of(tier), args, 1);
    // Every thread computes the whole product again and again into its own output, from shared
    // inputs.
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        GuardedBuffer<float> out(c.M * c.N);
        GemmArgs own = args;
        own.out = out.data();
        for (int i = 0; i < 6; ++i) {
          run_tasks(table_of(tier), own, 1 + (t + i) % 3);
          if (std::memcmp(out.data(), alone.data(), out.size() * sizeof(float)) != 0) ++wrong;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0, "%s: %d results differ", tier.c_str(), wrong.load());
  }
}

template <typename act_t, typename weight_t = e4m3_t>
static void check_batch_invariance(const std::string& tier, int64_t K, int64_t block_k) {
  const int64_t M = 101, N = 70;
  Case c{M, N, K};
  c.bias = K % 2 != 0;
  c.block_n = block_k == 0 ? 0 : 64;
  c.block_k = block_k;
  Product<act_t, weight_t> product(c, 5);
  if (!c.bias) {  // the signs of zeros are bits, too
    for (int64_t k = 0; k < K; ++k) from_float(0.f, product.mat1_row(0) + k);
    product.negate_scales();
  }
  GuardedBuffer<float> whole(M * N);
  GemmArgs args = product.args(whole.data());
  run_tasks(table_of(tier), args, 1);
  for (const int64_t chunks : {2, 3, 7}) {
    GuardedBuffer<float> split(M * N);
    args.out = split.data();
    run_tasks(table_of(tier), args, chunks);
    CHECK(std::memcmp(split.data(), whole.data(), M * N * sizeof(float)) == 0,
          "%s: %ld chunks differ", tier.c_str(), (long)chunks);
  }
  for (const int64_t rows : {1, 2, 3, 4, 5, 13, 96}) {
    GuardedBuffer<float> part(rows * N);
    args.out = part.data();
    args.M = rows;
    run_tasks(table_of(tier), args, 1);
    CHECK(std::memcmp(part.data(), whole.data(), rows * N * sizeof(float)) == 0,
          "%s: %ld rows differ from %ld", tier.c_str(), (long)rows, (long)M);
  }
}

TEST(bits_do_not_depend_on_rows_or_split) {
  for (const std::string& tier : tiers_under_test()) {
    for (const int64_t K : {1029, 1030}) {  // gathered, in place
      for (const int64_t block_k : {0, 32, 128, 75, 600}) {
        check_batch_invariance<bf16_t>(tier, K, block_k);
        check_batch_invariance<fp16_t>(tier, K, block_k);
      }
      check_batch_invariance<bf16_t, bf16_t>(tier, K, 0);
      check_batch_invariance<fp16_t, bf16_t>(tier, K, 0);
      check_batch_invariance<bf16_t, fp16_t>(tier, K, 0);
      check_batch_invariance<fp16_t, fp16_t>(tier, K, 0);
    }
  }
}

// Blocks of rows of another size, K in several runs, columns in several chunks.
template <typename act_t>
static void check_row_blocks(const std::string& tier, int64_t N, int64_t block_k) {
  Case c{261, N, 1100};
  c.bias = true;
  c.block_n = block_k == 0 ? 0 : 64;
  c.block_k = block_k;
  Product<act_t, e4m3_t> product(c, 13);
  GuardedBuffer<float> expected(c.M * N), got(c.M * N);
  GemmArgs args = product.args(expected.data());
  run_tasks(table_of(tier), args, 1);
  args.out = got.data();
  for (const int64_t rows : {int64_t{16}, kMaxBlockM}) {
    args.row_block = rows;
    run_tasks(table_of(tier), args, 3);
    CHECK(std::memcmp(got.data(), expected.data(), c.M * N * sizeof(float)) == 0,
          "%s N=%ld: %ld rows a block differ from %ld", tier.c_str(), (long)N, (long)rows,
          (long)kBlockM);
  }
}

TEST(bits_do_not_depend_on_the_block_of_rows) {
  for (const std::string& tier : tiers_under_test()) {
    const bool tiles = table_of(tier).gemm_row_block() == kMaxBlockM;
    for (const int64_t block_k : {0, 300}) {
      const int64_t N = tiles && block_k == 0 ? 32 * kTileChunkBlocks + 7 : 39;
      check_row_blocks<bf16_t>(tier, N, block_k);
      check_row_blocks<fp16_t>(tier, N, block_k);
    }
  }
}

TEST(few_columns_are_cut_into_low_blocks_of_rows) {
  for (const std::string& tier : tiers_under_test()) {
    GemmArgs args;
    args.M = 512;
    args.N = 576;
    args.K = 64;
    choose_row_block(table_of(tier), 2, &args);
    CHECK(args.row_block == table_of(tier).gemm_row_block(), "%s", tier.c_str());
    choose_row_block(table_of(tier), 64, &args);
    CHECK(args.row_block == kBlockM, "%s", tier.c_str());
  }
}

TEST(f32_tiers_agree_bit_for_bit) {
  const Case c{9, 65, 333};
  std::vector<float> first;
  for (const std::string& tier : tiers_under_test()) {
    if (tier == "amx") continue;  // multiplies fp16 as two bf16 planes
    Product<fp16_t, e4m3_t> product(c, 11);
    GuardedBuffer<float> out(c.M * c.N);
    GemmArgs args = product.args(out.data());
    run_tasks(table_of(tier), args, 1);
    if (first.empty()) first.assign(out.data(), out.data() + out.size());
    CHECK(std::memcmp(first.data(), out.data(), first.size() * sizeof(float)) == 0,
          "%s differs from %s", tier.c_str(), tiers_under_test()[0].c_str());
  }
}

template <typename act_t>
static void check_fp16_weights_on_all_tiers(int64_t M) {
  const Case c{M, 65, 333};
  std::vector<float> first;
  for (const std::string& tier : tiers_under_test()) {
    Product<act_t, fp16_t> product(c, 12);
    GuardedBuffer<float> out(c.M * c.N);
    run_tasks(table_of(tier), product.args(out.data()), 1);
    if (first.empty()) first.assign(out.data(), out.data() + out.size());
    CHECK(std::memcmp(first.data(), out.data(), first.size() * sizeof(float)) == 0,
          "%s differs from %s", tier.c_str(), tiers_under_test()[0].c_str());
  }
}

TEST(all_tiers_agree_on_fp16_weights_bit_for_bit) {
  for (const int64_t M : {1, 3, 9, 40}) {
    check_fp16_weights_on_all_tiers<bf16_t>(M);
    check_fp16_weights_on_all_tiers<fp16_t>(M);
  }
}

#if defined(__x86_64__)
TEST(ftz_and_daz_change_nothing) {
  const Case c{5, 40, 65};
  for (const std::string& tier : tiers_under_test()) {
    Product<bf16_t, e4m3_t> product(c, 31);
    // Subnormal activations and sums, which FTZ or DAZ would turn to zero.
    for (int64_t k = 0; k < c.K; ++k)
      product.mat1_row(0)[k].bits = static_cast<uint16_t>(1 + k % 64);
    GuardedBuffer<float> plain(c.M * c.N), flushed(c.M * c.N);
    GemmArgs args = product.args(plain.data());
    run_tasks(table_of(tier), args, 1);
    const unsigned saved = __builtin_ia32_stmxcsr();
    const unsigned ftz_daz_round_down = saved | 0x8040u | 0x2000u;
    __builtin_ia32_ldmxcsr(ftz_daz_round_down);
    args.out = flushed.data();
    run_tasks(table_of(tier), args, 1);
    const unsigned after = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(saved);
    CHECK((after & 0xFFC0u) == (ftz_daz_round_down & 0xFFC0u),
          "%s: the caller's MXCSR changed to 0x%x", tier.c_str(), after);
    CHECK(std::memcmp(plain.data(), flushed.data(), c.M * c.N * sizeof(float)) == 0, "%s",
          tier.c_str());
  }
}
#endif
