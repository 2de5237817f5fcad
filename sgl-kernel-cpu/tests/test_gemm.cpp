// Every kernel shape of every tier against a double reference, in memory with guard pages.
#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "gemm/bmm.h"
#include "gemm_product.h"

using namespace sgl_kernel;

namespace {

template <typename act_t, typename weight_t, typename out_t>
void check_case(const std::string& tier, const Case& c) {
  Product<act_t, weight_t> product(c, static_cast<unsigned>(c.M * 131 + c.N * 17 + c.K));
  const int64_t stride = c.N + c.row_padding;
  GuardedBuffer<out_t> out((c.M - 1) * stride + c.N);
  const GemmArgs args = product.args(out.data());
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
            c.out = DType::f32;
            check_case<bf16_t, e4m3_t, float>(tier, c);
            check_case<fp16_t, e4m3_t, float>(tier, c);
            check_case<bf16_t, bf16_t, float>(tier, c);
            check_case<fp16_t, bf16_t, float>(tier, c);
            check_case<bf16_t, fp16_t, float>(tier, c);
            check_case<fp16_t, fp16_t, float>(tier, c);
          }
          c.out = DType::bf16;
          check_case<bf16_t, e4m3_t, bf16_t>(tier, c);
          c.out = DType::fp16;
          check_case<fp16_t, bf16_t, fp16_t>(tier, c);
        }
      }
    }
  }
}

TEST(blocks_of_rows_and_of_k) {
  for (const std::string& tier : tiers_under_test()) {
    for (const Case& c : {Case{97, 40, 515}, Case{193, 33, 70}, Case{5, 32 * kNCBlocks + 7, 64},
                          Case{2, 32, 1100}}) {
      check_case<bf16_t, e4m3_t, float>(tier, c);
      check_case<fp16_t, e4m3_t, float>(tier, c);
      check_case<bf16_t, bf16_t, float>(tier, c);
      check_case<fp16_t, fp16_t, float>(tier, c);
    }
  }
}

template <typename bias_t>
static void check_bias(const std::string& tier, DType type, int64_t M) {
  // Sums are zero, so the output is the bias.
  const Case c{M, 37, 8};
  Product<bf16_t, e4m3_t> product(c, 2);
  for (int64_t m = 0; m < M; ++m) {
    for (int64_t k = 0; k < c.K; ++k) product.mat1_row(m)[k].bits = 0;
  }
  GuardedBuffer<bias_t> bias(c.N);
  for (int64_t n = 0; n < c.N; ++n) from_float(0.37f * static_cast<float>(n - 11), &bias[n]);
  GuardedBuffer<float> out(M * c.N);
  GemmArgs args = product.args(out.data());
  args.bias = bias.data();
  args.bias_dtype = type;
  run_tasks(table_of(tier), args, 1);
  for (int64_t i = 0; i < out.size(); ++i) {
    CHECK(out[i] == to_float(bias[i % c.N]), "%s M=%ld element %ld: expected %g, got %g",
          tier.c_str(), (long)M, (long)i, to_float(bias[i % c.N]), out[i]);
  }
}

TEST(bias_of_every_float_type_is_added_exactly) {
  for (const std::string& tier : tiers_under_test()) {
    for (const int64_t M : {1, 7}) {
      check_bias<float>(tier, DType::f32, M);
      check_bias<bf16_t>(tier, DType::bf16, M);
      check_bias<fp16_t>(tier, DType::fp16, M);
    }
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
    Case c{9, 32 * kNCBlocks + 40, 1300};
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
          GuardedBuffer<float> out(M * 256);
          GemmArgs args = product.args(out.data());
          args.scales = nullptr;
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

TEST(every_fp16_weight_is_exact_through_every_path) {
  for (const std::string& tier : tiers_under_test()) {
    for (const int64_t M : {1, 2, 4, 8, 20}) {
      for (const bool packed : {true, false}) {
        Case c{M, 65536, 1};
        c.packed = packed;
        Product<fp16_t, fp16_t> product(c, 1);
        for (int64_t n = 0; n < c.N; ++n) product.weight()[n].bits = static_cast<uint16_t>(n);
        product.repack();
        for (int64_t m = 0; m < M; ++m) from_float(1.f, product.mat1_row(m));
        GuardedBuffer<float> out(M * c.N);
        GemmArgs args = product.args(out.data());
        args.scales = nullptr;
        run_tasks(table_of(tier), args, 1);
        for (int64_t i = 0; i < M * c.N; ++i) {
          const float expected = to_float(fp16_t{static_cast<uint16_t>(i % c.N)});
          CHECK(out[i] == expected || (std::isnan(out[i]) && std::isnan(expected)),
                "%s M=%ld packed=%d code 0x%04X: expected %g, got %g", tier.c_str(), (long)M,
                packed, static_cast<unsigned>(i % c.N), expected, out[i]);
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
  GuardedBuffer<float> out(M * N);
  const GemmArgs args = product.args(out.data());
  run_tasks(table_of(tier), args, 1);
  for (int64_t i = 0; i < M * N; ++i) {
    CHECK(std::isnan(out[i]) == (i % N == n), "%s M=%ld K=%ld/%ld NaN at (%ld, %ld): out[%ld] = %g",
          tier.c_str(), (long)M, (long)K, (long)block_k, (long)n, (long)k, (long)i, out[i]);
  }
}

TEST(one_nan_code_reaches_its_column_only) {
  for (const std::string& tier : tiers_under_test()) {
    for (const int64_t M : {1, 2, 3, 4, 5, 8}) {
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
      GemmArgs args = product.args(out.data());
      run_tasks(table_of(tier), args, 1);
      if (power == 0) base.assign(out.data(), out.data() + out.size());
      for (int64_t i = 0; i < out.size(); ++i) {
        CHECK(out[i] == std::ldexp(base[i], power), "%s 2^%d: expected %a, got %a", tier.c_str(),
              power, std::ldexp(base[i], power), out[i]);
      }
    }
  }
}

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
    args.gemm.out_dtype = DType::f32;
    args.gemm.out = batched.data();
    args.gemm.out_stride = B * N;
    const int64_t tasks = bmm_task_count(args);
    void* scratch = guarded_scratch(gemm_scratch_bytes(args.gemm));
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
  }
}
