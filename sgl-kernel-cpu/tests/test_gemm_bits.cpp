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
  for (const int64_t rows : {int64_t{16}, kMaxMC}) {
    args.row_block = rows;
    run_tasks(table_of(tier), args, 3);
    CHECK(std::memcmp(got.data(), expected.data(), c.M * N * sizeof(float)) == 0,
          "%s N=%ld: %ld rows a block differ from %ld", tier.c_str(), (long)N, (long)rows,
          (long)kMC);
  }
}

TEST(bits_do_not_depend_on_the_block_of_rows) {
  for (const std::string& tier : tiers_under_test()) {
    const bool tiles = table_of(tier).gemm_row_block() == kMaxMC;
    for (const int64_t block_k : {0, 300}) {
      const int64_t N = tiles && block_k == 0 ? 32 * kTileNCBlocks + 7 : 39;
      check_row_blocks<bf16_t>(tier, N, block_k);
      check_row_blocks<fp16_t>(tier, N, block_k);
    }
  }
}

TEST(few_columns_are_cut_into_low_blocks_of_rows) {
  KernelTable table = table_of(tiers_under_test()[0]);
  table.gemm_row_block = [] { return kMaxMC; };  // as a tier with tiles has
  GemmArgs args;
  args.M = 512;
  args.N = 576;
  args.K = 64;
  // 2 high blocks of rows times 18 blocks of columns are enough for 9 threads, 4 tasks for each.
  choose_row_block(table, 9, &args);
  CHECK(args.row_block == kMaxMC && gemm_task_count(args) == 2 * 18, "%ld tasks of %ld rows",
        (long)gemm_task_count(args), (long)args.row_block);
  choose_row_block(table, 10, &args);
  CHECK(args.row_block == kMC && gemm_task_count(args) == 6 * 18, "%ld tasks of %ld rows",
        (long)gemm_task_count(args), (long)args.row_block);
  // fp16 weights are multiplied without tiles.
  args.mat2_dtype = DType::fp16;
  choose_row_block(table, 1, &args);
  CHECK(args.row_block == kMC, "%ld rows", (long)args.row_block);
}

TEST(tiers_with_tiles_take_high_blocks_of_rows) {
  for (const std::string& tier : tiers_under_test()) {
    const int64_t expected = tier == "amx" ? 256 : 96;
    const int64_t got = table_of(tier).gemm_row_block();
    CHECK(got == expected, "%s: %ld", tier.c_str(), (long)got);
  }
}

// A tier's product is that of the scalar tier, which every machine runs, to the last bit.
template <typename act_t, typename weight_t>
static void check_scalar_bits(const std::string& tier, int64_t M) {
  Case c{M, 65, 333};
  c.block_k = std::is_same<weight_t, e4m3_t>::value ? 100 : 0;
  Product<act_t, weight_t> product(c, 11);
  GuardedBuffer<float> expected(c.M * c.N), got(c.M * c.N);
  run_tasks(table_of("scalar"), product.args(expected.data()), 1);
  run_tasks(table_of(tier), product.args(got.data()), 1);
  CHECK(std::memcmp(got.data(), expected.data(), c.M * c.N * sizeof(float)) == 0,
        "%s M=%ld: %s rows, %ld-byte weights differ from scalar", tier.c_str(), (long)M,
        is_bf16<act_t> ? "bf16" : "fp16", (long)sizeof(weight_t));
}

// Few rows and many, one tile of rows and several, one block of rows and two.
const int64_t kRowsOfTiers[] = {1, 3, 9, 40, 97};

TEST(f32_tiers_agree_bit_for_bit) {
  for (const std::string& tier : tiers_under_test()) {
    if (tier == "amx") continue;  // splits fp16 into two bf16 numbers
    const bool multiplies_bf16 = tier == "avx512_bf16" || tier == "neon_bf16";
    for (const int64_t M : kRowsOfTiers) {
      check_scalar_bits<fp16_t, e4m3_t>(tier, M);
      check_scalar_bits<fp16_t, bf16_t>(tier, M);
      if (multiplies_bf16) continue;  // in pairs of products, with bf16 rows
      check_scalar_bits<bf16_t, e4m3_t>(tier, M);
      check_scalar_bits<bf16_t, bf16_t>(tier, M);
    }
  }
}

TEST(all_tiers_agree_on_fp16_weights_bit_for_bit) {
  for (const std::string& tier : tiers_under_test()) {
    for (const int64_t M : kRowsOfTiers) {
      check_scalar_bits<bf16_t, fp16_t>(tier, M);
      check_scalar_bits<fp16_t, fp16_t>(tier, M);
    }
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
