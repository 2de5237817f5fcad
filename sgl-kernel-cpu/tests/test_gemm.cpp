// Every kernel shape of every tier against a double reference, in memory with guard pages.
#include <atomic>
#include <cmath>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "dispatch.h"
#include "gemm.h"
#include "guarded_buffer.h"

using namespace sgl_kernel;

namespace {

template <typename T>
constexpr bool is_bf16 = std::is_same<T, bf16_t>::value;

struct Case {
  int64_t M, N, K;
  bool packed = true;
  bool bias = false;
  int64_t block_n = 0;  // of a scale; 0: all of N
  int64_t block_k = 0;  // 0: all of K
  FloatType out = FloatType::f32;
  int64_t row_padding = 0;  // elements between rows of mat1 and of out
};

// A product with its own inputs, outputs and reference.
template <typename act_t, typename weight_t>
class Product {
 public:
  Product(const Case& c, unsigned seed)
      : case_(c),
        mat1_((c.M - 1) * (c.K + c.row_padding) + c.K),
        weight_(c.N * c.K),
        packed_(c.N * c.K),
        scales_(div_up(c.N, block_n()) * div_up(c.K, block_k())),
        bias_(c.N) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < mat1_.size(); ++i) from_float(normal(random), &mat1_[i]);
    for (int64_t i = 0; i < weight_.size(); ++i) set_weight(&weight_[i], normal(random), random());
    for (int64_t i = 0; i < scales_.size(); ++i)
      scales_[i] = 0.25f + 0.01f * static_cast<float>(random() % 100);
    for (int64_t i = 0; i < bias_.size(); ++i) bias_[i] = normal(random);
    pack_weight_blocks(weight_.data(), packed_.data(), sizeof(weight_t), c.N, c.K, 0,
                       div_up(c.N, kBlockN));
  }

  GemmArgs args() {
    GemmArgs a;
    a.M = case_.M;
    a.N = case_.N;
    a.K = case_.K;
    a.mat1 = mat1_.data();
    a.mat1_stride = case_.K + case_.row_padding;
    a.mat1_type = is_bf16<act_t> ? ActType::bf16 : ActType::fp16;
    a.mat2 = case_.packed ? packed_.data() : weight_.data();
    a.mat2_type = is_bf16<weight_t> ? WeightType::bf16 : WeightType::e4m3;
    a.is_vnni = case_.packed;
    a.scales = scales_.data();
    a.block_n = block_n();
    a.block_k = block_k();
    a.bias = case_.bias ? bias_.data() : nullptr;
    a.out_type = case_.out;
    return a;
  }

  act_t* mat1_row(int64_t m) { return mat1_.data() + m * (case_.K + case_.row_padding); }
  weight_t* weight() { return weight_.data(); }
  void negate_scales() {
    const int64_t count = div_up(case_.N, block_n()) * div_up(case_.K, block_k());
    for (int64_t i = 0; i < count; ++i) scales_[i] = -scales_[i];
  }
  void repack() {
    pack_weight_blocks(weight_.data(), packed_.data(), sizeof(weight_t), case_.N, case_.K, 0,
                       div_up(case_.N, kBlockN));
  }

  // Value, and a bound on the error of K f32 additions plus the roundings that follow.
  void reference(int64_t m, int64_t n, double* value, double* bound) {
    double sum = 0, magnitude = 0;
    const float* scales = scales_.data() + n / block_n() * div_up(case_.K, block_k());
    for (int64_t k = 0; k < case_.K; ++k) {
      const double product = static_cast<double>(to_float(mat1_row(m)[k])) *
                             to_float(weight_[n * case_.K + k]) * scales[k / block_k()];
      sum += product;
      magnitude += std::fabs(product);
    }
    const double bias = case_.bias ? bias_[n] : 0.0;
    *value = sum + bias;
    const double roundings = static_cast<double>(case_.K + 2 * div_up(case_.K, block_k()) + 1);
    *bound = 0x1p-24 * (roundings * magnitude + std::fabs(*value) + std::fabs(bias));
  }

 private:
  static void set_weight(bf16_t* w, float normal, unsigned) { from_float(normal, w); }
  static void set_weight(e4m3_t* w, float, unsigned random) {
    const uint8_t code = static_cast<uint8_t>(random);
    w->bits = (code & 0x7F) == 0x7F ? static_cast<uint8_t>(code ^ 1) : code;  // every finite code
  }

  int64_t block_n() const { return case_.block_n == 0 ? case_.N : case_.block_n; }
  int64_t block_k() const { return case_.block_k == 0 ? case_.K : case_.block_k; }

  Case case_;
  GuardedBuffer<act_t> mat1_;
  GuardedBuffer<weight_t> weight_;
  GuardedBuffer<weight_t> packed_;
  GuardedBuffer<float> scales_;
  GuardedBuffer<float> bias_;
};

void run_tasks(const KernelTable& table, const GemmArgs& args, int64_t chunks) {
  const int64_t tasks = gemm_task_count(args);
  for (int64_t i = 0; i < chunks; ++i) {
    const TaskRange range{tasks * i / chunks, tasks * (i + 1) / chunks};
    if (range.begin == range.end) continue;
    void* scratch =
        std::aligned_alloc(64, static_cast<size_t>(round_up(gemm_scratch_bytes(args), 64)));
    std::memset(scratch, 0xFF, static_cast<size_t>(gemm_scratch_bytes(args)));
    run_gemm(table, args, range, scratch);
    std::free(scratch);
  }
}

const KernelTable& table_of(const std::string& tier) {
  return kernel_table(choose_tier(tier.c_str(), detect_cpu_features()));
}

template <typename act_t, typename weight_t, typename out_t>
void check_case(const std::string& tier, const Case& c) {
  Product<act_t, weight_t> product(c, static_cast<unsigned>(c.M * 131 + c.N * 17 + c.K));
  GemmArgs args = product.args();
  const int64_t stride = c.N + c.row_padding;
  GuardedBuffer<out_t> out((c.M - 1) * stride + c.N);
  args.out = out.data();
  args.out_stride = stride;
  run_tasks(table_of(tier), args, 1);

  const double out_epsilon = sizeof(out_t) == 4 ? 0.0 : is_bf16<out_t> ? 0x1p-8 : 0x1p-11;
  for (int64_t m = 0; m < c.M; ++m) {
    for (int64_t n = 0; n < c.N; ++n) {
      double expected, bound;
      product.reference(m, n, &expected, &bound);
      // 2^-25 covers outputs that are subnormal halves.
      bound += out_epsilon * std::fabs(expected) * 1.01 + (out_epsilon > 0 ? 0x1p-25 : 0);
      const double got = to_float(out[m * stride + n]);
      CHECK(std::fabs(got - expected) <= bound,
            "%s M=%ld N=%ld K=%ld packed=%d bias=%d block=%ldx%ld at (%ld, %ld): expected %.9g, "
            "got %.9g, bound %g",
            tier.c_str(), (long)c.M, (long)c.N, (long)c.K, c.packed, c.bias, (long)c.block_n,
            (long)c.block_k, (long)m, (long)n, expected, got, bound);
    }
    // Padding between rows is not ours to write.
    for (int64_t n = c.N; n < stride && m + 1 < c.M; ++n) {
      CHECK(std::isnan(to_float(out[m * stride + n])), "%s wrote padding at (%ld, %ld)",
            tier.c_str(), (long)m, (long)n);
    }
  }
}

const int64_t kRows[] = {1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25};

}  // namespace

TEST(products_match_the_double_reference) {
  for (const std::string& tier : tiers_under_test()) {
    for (const int64_t M : kRows) {
      for (const int64_t N : {1, 15, 31, 32, 33, 64, 97}) {
        for (const int64_t K : {1, 2, 3, 31, 64, 130}) {
          Case c{M, N, K};
          c.bias = (M + N) % 2 == 0;
          c.block_n = (N + K) % 3 == 0 ? 1 : 0;
          c.row_padding = M % 3 == 0 ? 5 : 0;
          for (const bool packed : {true, false}) {
            c.packed = packed;
            c.out = FloatType::f32;
            check_case<bf16_t, e4m3_t, float>(tier, c);
            check_case<fp16_t, e4m3_t, float>(tier, c);
            check_case<bf16_t, bf16_t, float>(tier, c);
            check_case<fp16_t, bf16_t, float>(tier, c);
          }
          c.out = FloatType::bf16;
          check_case<bf16_t, e4m3_t, bf16_t>(tier, c);
          c.out = FloatType::fp16;
          check_case<fp16_t, bf16_t, fp16_t>(tier, c);
        }
      }
    }
  }
}

TEST(blocks_of_rows_and_of_k) {
  for (const std::string& tier : tiers_under_test()) {
    for (const Case& c : {Case{97, 40, 515}, Case{193, 33, 70}, Case{5, 32 * kChunkBlocks + 7, 64},
                          Case{2, 32, 1100}}) {
      check_case<bf16_t, e4m3_t, float>(tier, c);
      check_case<fp16_t, e4m3_t, float>(tier, c);
      check_case<bf16_t, bf16_t, float>(tier, c);
    }
  }
}

template <typename bias_t>
static void check_bias(const std::string& tier, FloatType type, int64_t M) {
  // Sums are zero, so the output is the bias.
  const Case c{M, 37, 8};
  Product<bf16_t, e4m3_t> product(c, 2);
  for (int64_t m = 0; m < M; ++m) {
    for (int64_t k = 0; k < c.K; ++k) product.mat1_row(m)[k].bits = 0;
  }
  GuardedBuffer<bias_t> bias(c.N);
  for (int64_t n = 0; n < c.N; ++n) from_float(0.37f * static_cast<float>(n - 11), &bias[n]);
  GuardedBuffer<float> out(M * c.N);
  GemmArgs args = product.args();
  args.bias = bias.data();
  args.bias_type = type;
  args.out = out.data();
  args.out_stride = c.N;
  run_tasks(table_of(tier), args, 1);
  for (int64_t i = 0; i < out.size(); ++i) {
    CHECK(out[i] == to_float(bias[i % c.N]), "%s M=%ld element %ld: expected %g, got %g",
          tier.c_str(), (long)M, (long)i, to_float(bias[i % c.N]), out[i]);
  }
}

TEST(bias_of_every_float_type_is_added_exactly) {
  for (const std::string& tier : tiers_under_test()) {
    for (const int64_t M : {1, 7}) {
      check_bias<float>(tier, FloatType::f32, M);
      check_bias<bf16_t>(tier, FloatType::bf16, M);
      check_bias<fp16_t>(tier, FloatType::fp16, M);
    }
  }
}

TEST(threads_on_one_product_do_not_disturb_each_other) {
  for (const std::string& tier : tiers_under_test()) {
    const Case c{21, 32 * 8, 160};
    Product<bf16_t, e4m3_t> product(c, 7);
    GuardedBuffer<float> alone(c.M * c.N);
    GemmArgs args = product.args();
    args.out = alone.data();
    args.out_stride = c.N;
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

TEST(scales_per_block) {
  const struct {
    int64_t block_n, block_k;
  } blocks[] = {{128, 128}, {64, 128}, {1, 128}, {128, 64}, {32, 32},
                {48, 40},   {7, 5},    {1, 1},   {3, 1000}, {1000, 3}};
  for (const std::string& tier : tiers_under_test()) {
    for (const auto& block : blocks) {
      for (const int64_t M : {1, 2, 4, 5, 17, 33}) {
        for (const int64_t K : {1, 130, 131, 600}) {
          Case c{M, 77, K};
          c.bias = M % 2 == 0;
          c.packed = K != 600 || M != 5;
          c.block_n = min_i64(block.block_n, c.N);
          c.block_k = min_i64(block.block_k, c.K);
          check_case<bf16_t, e4m3_t, float>(tier, c);
          check_case<fp16_t, e4m3_t, float>(tier, c);
        }
      }
    }
    // Scale segments longer than a block of K, and several chunks of columns.
    Case c{9, 32 * kChunkBlocks + 40, 1300};
    c.block_n = 128;
    c.block_k = 700;
    check_case<bf16_t, e4m3_t, float>(tier, c);
  }
}

TEST(every_code_is_exact_through_every_path) {
  // K = 1 and an activation of 1: the output is the decoded code. M = 1 decodes without a panel, M
  // = 8 with one.
  for (const std::string& tier : tiers_under_test()) {
    for (const int64_t M : {1, 2, 3, 4, 8}) {
      for (const bool packed : {true, false}) {
        for (const int64_t K : {1, 2}) {
          Case c{M, 256, K};
          c.packed = packed;
          Product<bf16_t, e4m3_t> product(c, 1);
          for (int64_t n = 0; n < 256; ++n) {
            for (int64_t k = 0; k < K; ++k)
              product.weight()[n * K + k].bits = static_cast<uint8_t>(k == K - 1 ? n : 0);
          }
          product.repack();
          for (int64_t m = 0; m < M; ++m) {
            for (int64_t k = 0; k < K; ++k) from_float(1.f, product.mat1_row(m) + k);
          }
          GemmArgs args = product.args();
          args.scales = nullptr;
          GuardedBuffer<float> out(M * 256);
          args.out = out.data();
          args.out_stride = 256;
          run_tasks(table_of(tier), args, 1);
          for (int64_t m = 0; m < M; ++m) {
            for (int code = 0; code < 256; ++code) {
              const float expected = to_float(e4m3_t{static_cast<uint8_t>(code)});
              const float got = out[m * 256 + code];
              CHECK(got == expected || (std::isnan(got) && std::isnan(expected)),
                    "%s M=%ld packed=%d code 0x%02X: expected %g, got %g", tier.c_str(), (long)M,
                    packed, code, expected, got);
            }
          }
        }
      }
    }
  }
}

// Where the form that weights are widened from has no NaN, codes are watched on their way: in the
// chunk that is multiplied next, in the next block of columns, behind the last whole chunk.
static void check_one_nan(const std::string& tier, int64_t M, int64_t K, int64_t block_k, int64_t n,
                          int64_t k) {
  const int64_t N = 70;
  Case c{M, N, K};
  c.block_n = block_k == 0 ? 0 : 64;
  c.block_k = block_k;
  Product<bf16_t, e4m3_t> product(c, 3);
  product.weight()[n * K + k].bits = k % 2 == 0 ? 0x7F : 0xFF;
  product.repack();
  GemmArgs args = product.args();
  GuardedBuffer<float> out(M * N);
  args.out = out.data();
  args.out_stride = N;
  args.out_type = FloatType::f32;
  run_tasks(table_of(tier), args, 1);
  for (int64_t i = 0; i < M * N; ++i) {
    CHECK(std::isnan(out[i]) == (i % N == n), "%s M=%ld K=%ld/%ld NaN at (%ld, %ld): out[%ld] = %g",
          tier.c_str(), (long)M, (long)K, (long)block_k, (long)n, (long)k, (long)i, out[i]);
  }
}

TEST(one_nan_code_reaches_its_column_only) {
  for (const std::string& tier : tiers_under_test()) {
    for (const int64_t M : {1, 2, 3, 4, 8}) {
      for (const int64_t K : {300, 301}) {  // in place, gathered
        for (const int64_t n : {0, 37, 69}) {
          for (const int64_t k : {0, 15, 16, 31, 32, 33, 255, 256, 287, 288, 299}) {
            check_one_nan(tier, M, K, 0, n, k);
            check_one_nan(tier, M, K, 40, n, k);  // a short chunk after each whole one
          }
        }
      }
    }
  }
}

template <typename act_t>
static void check_batch_invariance(const std::string& tier, int64_t K, int64_t block_k) {
  const int64_t M = 101, N = 70;
  Case c{M, N, K};
  c.bias = K % 2 != 0;
  c.block_n = block_k == 0 ? 0 : 64;
  c.block_k = block_k;
  Product<act_t, e4m3_t> product(c, 5);
  if (!c.bias) {  // the signs of zeros are bits, too
    for (int64_t k = 0; k < K; ++k) from_float(0.f, product.mat1_row(0) + k);
    product.negate_scales();
  }
  GuardedBuffer<float> whole(M * N);
  GemmArgs args = product.args();
  args.out = whole.data();
  args.out_stride = N;
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
  GemmArgs args = product.args();
  args.out = expected.data();
  args.out_stride = N;
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
    const bool tiles = table_of(tier).row_block == kMaxBlockM;
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
    CHECK(args.row_block == table_of(tier).row_block, "%s", tier.c_str());
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
    GemmArgs args = product.args();
    args.out = out.data();
    args.out_stride = c.N;
    run_tasks(table_of(tier), args, 1);
    if (first.empty()) first.assign(out.data(), out.data() + out.size());
    CHECK(std::memcmp(first.data(), out.data(), first.size() * sizeof(float)) == 0,
          "%s differs from %s", tier.c_str(), tiers_under_test()[0].c_str());
  }
}

TEST(scaling_mat1_by_a_power_of_two_scales_the_result) {
  const Case c{3, 40, 64};
  for (const std::string& tier : tiers_under_test()) {
    std::vector<float> base;
    for (const int power : {0, -60, -20, -10, 10, 20, 60}) {
      Product<bf16_t, e4m3_t> product(c, 21);
      for (int64_t m = 0; m < c.M; ++m) {
        for (int64_t k = 0; k < c.K; ++k) {
          bf16_t* x = product.mat1_row(m) + k;
          from_float(std::ldexp(to_float(*x), power), x);
        }
      }
      GuardedBuffer<float> out(c.M * c.N);
      GemmArgs args = product.args();
      args.out = out.data();
      args.out_stride = c.N;
      run_tasks(table_of(tier), args, 1);
      if (power == 0) base.assign(out.data(), out.data() + out.size());
      for (int64_t i = 0; i < out.size(); ++i) {
        CHECK(out[i] == std::ldexp(base[i], power), "%s 2^%d: expected %a, got %a", tier.c_str(),
              power, std::ldexp(base[i], power), out[i]);
      }
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
    GemmArgs args = product.args();
    args.out_stride = c.N;
    args.out = plain.data();
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

TEST(batched_products_are_single_products) {
  const int64_t B = 3, M = 5, N = 45, K = 33;
  for (const std::string& tier : tiers_under_test()) {
    std::mt19937 random(3);
    GuardedBuffer<bf16_t> mat1(B * M * K);
    GuardedBuffer<e4m3_t> mat2(B * N * K);
    GuardedBuffer<float> scales(B), batched(M * B * N), single(M * N);
    for (int64_t i = 0; i < mat1.size(); ++i)
      from_float(static_cast<float>(random() % 17) - 8.f, &mat1[i]);
    for (int64_t i = 0; i < mat2.size(); ++i) mat2[i].bits = static_cast<uint8_t>(random() % 0x7F);
    for (int64_t b = 0; b < B; ++b) scales[b] = 1.f + static_cast<float>(b);
    // mat1 and out are [M, B, *] in memory, as attention holds them.
    BmmArgs args;
    args.batch = B;
    args.mat1_batch_stride = K;
    args.out_batch_stride = N;
    args.scale_batch_stride = 1;
    args.gemm.M = M;
    args.gemm.N = N;
    args.gemm.K = K;
    args.gemm.mat1 = mat1.data();
    args.gemm.mat1_stride = B * K;
    args.gemm.mat2 = mat2.data();
    args.gemm.scales = scales.data();
    args.gemm.block_n = N;
    args.gemm.block_k = K;
    args.gemm.out_type = FloatType::f32;
    args.gemm.out = batched.data();
    args.gemm.out_stride = B * N;
    const int64_t tasks = bmm_task_count(args);
    void* scratch =
        std::aligned_alloc(64, static_cast<size_t>(round_up(gemm_scratch_bytes(args.gemm), 64)));
    run_bmm(table_of(tier), args, {0, tasks / 2 + 1}, scratch);
    run_bmm(table_of(tier), args, {tasks / 2 + 1, tasks}, scratch);
    for (int64_t b = 0; b < B; ++b) {
      GemmArgs gemm = args.gemm;
      gemm.mat1 = mat1.data() + b * K;
      gemm.mat2 = mat2.data() + b * N * K;
      gemm.scales = scales.data() + b;
      gemm.out = single.data();
      gemm.out_stride = N;
      run_gemm(table_of(tier), gemm, {0, gemm_task_count(gemm)}, scratch);
      for (int64_t m = 0; m < M; ++m) {
        CHECK(std::memcmp(&batched[m * B * N + b * N], &single[m * N], N * sizeof(float)) == 0,
              "%s batch %ld row %ld", tier.c_str(), (long)b, (long)m);
      }
    }
    std::free(scratch);
  }
}
