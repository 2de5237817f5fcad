// A product with its own inputs, outputs and double reference, for the tests of the GEMM family.
#pragma once

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <type_traits>

#include "dispatch/dispatch.h"
#include "dispatch/kernel_table.h"
#include "gemm/blocking.h"
#include "gemm/gemm.h"
#include "guarded_buffer.h"
#include "guarded_scratch.h"

namespace sgl_kernel {

template <typename T>
constexpr bool is_bf16 = std::is_same<T, bf16_t>::value;

struct Case {
  int64_t M, N, K;
  bool packed = true;
  bool bias = false;
  int64_t block_n = 0;  // of a scale; 0: all of N
  int64_t block_k = 0;  // 0: all of K
  DType out = DType::f32;
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
    repack();
  }

  // Of the whole product, into `out` [M, N], whose rows are padded as those of mat1.
  GemmArgs args(void* out) {
    GemmArgs a;
    a.M = case_.M;
    a.N = case_.N;
    a.K = case_.K;
    a.mat1 = mat1_.data();
    a.mat1_stride = case_.K + case_.row_padding;
    a.mat1_dtype = dtype_of<act_t>;
    a.mat2 = case_.packed ? packed_.data() : weight_.data();
    a.mat2_dtype = dtype_of<weight_t>;
    a.is_vnni = case_.packed;
    a.scales = scales_.data();
    a.block_n = block_n();
    a.block_k = block_k();
    a.bias = case_.bias ? bias_.data() : nullptr;
    a.out = out;
    a.out_stride = case_.N + case_.row_padding;
    a.out_dtype = case_.out;
    return a;
  }

  act_t* mat1_row(int64_t m) { return mat1_.data() + m * (case_.K + case_.row_padding); }
  weight_t* weight() { return weight_.data(); }
  void negate_scales() {
    const int64_t count = div_up(case_.N, block_n()) * div_up(case_.K, block_k());
    for (int64_t i = 0; i < count; ++i) scales_[i] = -scales_[i];
  }
  void repack() {
    pack_weight_blocks({weight_.data(), packed_.data(), sizeof(weight_t), case_.N, case_.K}, 0,
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
  static void set_weight(fp16_t* w, float normal, unsigned random) {
    from_float(std::ldexp(normal, -static_cast<int>(random % 20)), w);  // subnormal ones, too
  }
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

inline void run_tasks(const KernelTable& table, const GemmArgs& args, int64_t chunks) {
  const int64_t tasks = gemm_task_count(args);
  for (int64_t i = 0; i < chunks; ++i) {
    const TaskRange range{tasks * i / chunks, tasks * (i + 1) / chunks};
    if (range.begin == range.end) continue;
    run_gemm(table, args, range, guarded_scratch(gemm_scratch_bytes(args)));
  }
}

inline const KernelTable& table_of(const std::string& tier) {
  return kernel_table(choose_tier(tier.c_str(), detect_cpu_features()));
}

}  // namespace sgl_kernel
