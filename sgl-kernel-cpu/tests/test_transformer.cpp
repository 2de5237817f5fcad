// The kernels between a transformer's products, on every tier, in memory with guard pages.
#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "dispatch/dispatch.h"
#include "dispatch/kernel_table.h"
#include "guarded_buffer.h"

using namespace sgl_kernel;

namespace {

const KernelTable& kernels_of(const std::string& tier) {
  return kernel_table(choose_tier(tier.c_str(), detect_cpu_features()));
}

// Rounding of a stored number, and where it stops being relative.
template <typename T>
double rounding(double x) {
  if (sizeof(T) == 4) return 0x1p-24 * std::fabs(x) + 0x1p-149;
  if (sizeof(T) == 1) return 0x1p-4 * std::fabs(x) + 0x1p-10;
  return (std::is_same<T, bf16_t>::value ? 0x1p-8 : 0x1p-11) * std::fabs(x) + 0x1p-25;
}

template <typename T>
void fill(GuardedBuffer<T>* buffer, std::mt19937* random, float scale = 1.f) {
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < buffer->size(); ++i) from_float(normal(*random) * scale, &(*buffer)[i]);
}

const int64_t kSizes[] = {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 66, 130};

template <typename in_t, typename out_t>
void check_norm(const std::string& tier, int64_t n, bool add) {
  std::mt19937 random(static_cast<unsigned>(n));
  constexpr int64_t kRows = 3;
  const int64_t stride = n + 2;
  const int64_t room = (kRows - 1) * stride + n;
  GuardedBuffer<in_t> input(room);
  GuardedBuffer<float> residual(room), weight(n), before(room);
  GuardedBuffer<out_t> out(room);
  fill(&input, &random, 3.f);
  fill(&residual, &random);
  fill(&weight, &random);
  for (int64_t i = 0; i < room; ++i) before[i] = residual[i];
  RmsNormArgs args;
  args.rows = kRows;
  args.columns = n;
  args.eps = 1e-5f;
  args.input = input.data();
  args.input_dtype = dtype_of<in_t>;
  args.input_group_stride = args.residual_group_stride = args.out_group_stride = stride;
  args.residual = add ? residual.data() : nullptr;
  args.weight = weight.data();
  args.out = out.data();
  args.out_dtype = dtype_of<out_t>;
  GuardedBuffer<char> scratch(scratch_bytes<RmsNormScratch>(args));
  kernels_of(tier).rms_norm(args, {0, kRows}, scratch.data());
  for (int64_t r = 0; r < kRows; ++r) {
    std::vector<float> x(static_cast<size_t>(n));
    double squares = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = r * stride + i;
      float& v = x[static_cast<size_t>(i)];
      v = to_float(input[at]);
      if (add) {
        v = before[at] + v;
        CHECK(residual[at] == v, "%s residual %ld of %ld", tier.c_str(), (long)i, (long)n);
      }
      squares += static_cast<double>(v) * v;
    }
    const double factor = 1 / std::sqrt(squares / static_cast<double>(n) + 1e-5);
    for (int64_t i = 0; i < n; ++i) {
      const double expected = x[static_cast<size_t>(i)] * factor * weight[i];
      const double additions = static_cast<double>(n) / 16 + 8;
      const double bound =
          (additions / 2 + 6) * 0x1p-24 * std::fabs(expected) + rounding<out_t>(expected);
      const double got = to_float(out[r * stride + i]);
      CHECK(std::fabs(got - expected) <= bound, "%s n=%ld add=%d at (%ld, %ld): %.9g, got %.9g",
            tier.c_str(), (long)n, add, (long)r, (long)i, expected, got);
    }
    for (int64_t i = n; i < stride && r + 1 < kRows; ++i) {
      CHECK(std::isnan(to_float(out[r * stride + i])), "%s wrote padding", tier.c_str());
    }
  }
}

template <typename in_t, typename out_t>
void check_silu(const std::string& tier, int64_t n) {
  std::mt19937 random(static_cast<unsigned>(n));
  constexpr int64_t kRows = 3;
  GuardedBuffer<in_t> input(kRows * 2 * n);
  GuardedBuffer<out_t> out(kRows * n);
  fill(&input, &random, 20.f);
  SiluAndMulArgs args;
  args.rows = kRows;
  args.columns = n;
  args.input = input.data();
  args.input_dtype = dtype_of<in_t>;
  args.input_stride = 2 * n;
  args.out = out.data();
  args.out_dtype = dtype_of<out_t>;
  kernels_of(tier).silu_and_mul(args, {0, 1});
  kernels_of(tier).silu_and_mul(args, {1, kRows});
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t i = 0; i < n; ++i) {
      const double gate = to_float(input[r * 2 * n + i]);
      const double up = to_float(input[r * 2 * n + n + i]);
      const double expected = gate / (1 + std::exp(-gate)) * up;
      const double bound =
          10 * 0x1p-24 * std::fabs(expected) + 0x1p-119 * std::fabs(up) + rounding<out_t>(expected);
      const double got = to_float(out[r * n + i]);
      CHECK(std::fabs(got - expected) <= bound, "%s n=%ld at (%ld, %ld): %.9g, got %.9g",
            tier.c_str(), (long)n, (long)r, (long)i, expected, got);
    }
  }
}

// Keys of two heads: norm, rotation, and places in a cache.
template <typename in_t, typename cache_t>
void check_heads(const std::string& tier, int64_t head_dim, int64_t rotary_dim, bool is_neox) {
  std::mt19937 random(static_cast<unsigned>(head_dim));
  constexpr int64_t kTokens = 4, kHeads = 2, kSlots = 6;
  const int64_t slots[kTokens] = {5, 0, 3, 1};
  const int64_t positions[kTokens] = {0, 6, 2, 6};
  constexpr float kScale = 0.25f;
  const int64_t token_stride = kHeads * head_dim + 3;
  GuardedBuffer<in_t> src((kTokens - 1) * token_stride + kHeads * head_dim);
  GuardedBuffer<cache_t> cache(kSlots * kHeads * head_dim);
  GuardedBuffer<float> angles(7 * rotary_dim), weight(head_dim);
  fill(&src, &random);
  fill(&angles, &random);
  fill(&weight, &random);
  HeadsArgs args;
  args.tokens = kTokens;
  args.group_count = 1;
  args.eps = 1e-6f;
  args.rotary.positions = positions;
  args.rotary.cos_sin = angles.data();
  args.rotary.cos_sin_stride = args.rotary.rotary_dim = rotary_dim;
  args.rotary.is_neox = is_neox;
  HeadGroup& group = args.groups[0];
  group.heads = kHeads;
  group.head_dim = head_dim;
  group.src = src.data();
  group.src_dtype = dtype_of<in_t>;
  group.src_token_stride = token_stride;
  group.src_head_stride = head_dim;
  group.dst = cache.data();
  group.dst_dtype = dtype_of<cache_t>;
  group.dst_token_stride = kHeads * head_dim;
  group.dst_head_stride = head_dim;
  group.dst_slots = slots;
  group.dst_scale = kScale;
  group.weight = weight.data();
  group.rotate = true;
  GuardedBuffer<char> scratch(scratch_bytes<HeadsScratch>(args));
  kernels_of(tier).qk_norm_rope_store(args, {0, 1}, scratch.data());
  kernels_of(tier).qk_norm_rope_store(args, {1, kTokens}, scratch.data());

  const int64_t half = rotary_dim / 2;
  for (int64_t t = 0; t < kTokens; ++t) {
    const float* cos = angles.data() + positions[t] * rotary_dim;
    for (int64_t h = 0; h < kHeads; ++h) {
      std::vector<double> x(static_cast<size_t>(head_dim));
      double squares = 0;
      for (int64_t i = 0; i < head_dim; ++i) {
        const double v = to_float(src[t * token_stride + h * head_dim + i]);
        x[static_cast<size_t>(i)] = v;
        squares += v * v;
      }
      const double factor = 1 / std::sqrt(squares / static_cast<double>(head_dim) + 1e-6);
      for (int64_t i = 0; i < head_dim; ++i) x[static_cast<size_t>(i)] *= factor * weight[i];
      std::vector<double> y = x, bound = x;
      for (double& b : bound) b = std::fabs(b);
      for (int64_t i = 0; i < half; ++i) {
        const auto a = static_cast<size_t>(is_neox ? i : 2 * i);
        const auto b = static_cast<size_t>(is_neox ? half + i : 2 * i + 1);
        const double c = cos[i], s = cos[half + i];
        y[a] = x[a] * c - x[b] * s;
        y[b] = x[b] * c + x[a] * s;
        bound[a] = std::fabs(x[a] * c) + std::fabs(x[b] * s);
        bound[b] = std::fabs(x[b] * c) + std::fabs(x[a] * s);
      }
      for (int64_t i = 0; i < head_dim; ++i) {
        const double expected = y[static_cast<size_t>(i)] / kScale;
        const double roundings = (static_cast<double>(head_dim) / 16 + 8) / 2 + 9;
        const double allowed = roundings * 0x1p-24 * bound[static_cast<size_t>(i)] / kScale +
                               rounding<cache_t>(expected);
        const double got = to_float(cache[(slots[t] * kHeads + h) * head_dim + i]);
        CHECK(std::fabs(got - expected) <= allowed,
              "%s head_dim=%ld rotary=%ld neox=%d token %ld head %ld element %ld: %.9g, got %.9g",
              tier.c_str(), (long)head_dim, (long)rotary_dim, is_neox, (long)t, (long)h, (long)i,
              expected, got);
      }
    }
  }
  for (const int64_t slot : {2, 4}) {
    for (int64_t i = 0; i < kHeads * head_dim; ++i) {
      CHECK(std::isnan(to_float(cache[slot * kHeads * head_dim + i])), "%s wrote slot %ld",
            tier.c_str(), (long)slot);
    }
  }
}

}  // namespace

TEST(norms_match_the_double_reference) {
  for (const std::string& tier : tiers_under_test()) {
    for (const int64_t n : kSizes) {
      for (const bool add : {false, true}) {
        check_norm<float, fp16_t>(tier, n, add);
        check_norm<fp16_t, fp16_t>(tier, n, add);
        check_norm<bf16_t, float>(tier, n, add);
        check_norm<fp16_t, bf16_t>(tier, n, add);
      }
    }
  }
}

TEST(silu_and_mul_matches_the_double_reference) {
  for (const std::string& tier : tiers_under_test()) {
    for (const int64_t n : kSizes) {
      check_silu<float, fp16_t>(tier, n);
      check_silu<fp16_t, float>(tier, n);
      check_silu<bf16_t, bf16_t>(tier, n);
    }
  }
}

TEST(heads_match_the_double_reference) {
  for (const std::string& tier : tiers_under_test()) {
    for (const int64_t n : kSizes) {
      for (const bool is_neox : {false, true}) {
        check_heads<fp16_t, fp16_t>(tier, n, n / 2 * 2, is_neox);
        check_heads<float, bf16_t>(tier, n, n / 4 * 2, is_neox);
        check_heads<bf16_t, e4m3_t>(tier, n, n / 2 * 2, is_neox);
      }
    }
  }
}

TEST(exp_is_within_three_units_in_the_last_place) {
  for (const std::string& tier : tiers_under_test()) {
    const auto exp = kernels_of(tier).exp_probe;
    double worst = 0;
    std::vector<float> x, y;
    for (float v = -87.335f; v < 88.72f; v += 0.0007f) x.push_back(v);
    for (float v = 1e-8f; v < 1.f; v *= 1.001f) {
      x.push_back(v);
      x.push_back(-v);
    }
    y.resize(x.size());
    exp(x.data(), static_cast<int64_t>(x.size()), y.data());
    for (size_t i = 0; i < x.size(); ++i) {
      const double expected = std::exp(static_cast<double>(x[i]));
      worst = std::fmax(worst, std::fabs(y[i] - expected) / expected);
    }
    CHECK(worst <= 3 * 0x1p-24, "%s: relative error %g", tier.c_str(), worst / 0x1p-24);

    const float inf = bits_float(0x7F800000u), nan = bits_float(0x7FFFFFFFu);
    const float edge[] = {-inf, -1e30f, -87.4f, -0.f, 0.f, 88.73f, 1e30f, inf, nan};
    float got[9];
    exp(edge, 9, got);
    const float expected[] = {0.f, 0.f, 0.f, 1.f, 1.f, inf, inf, inf};
    for (int i = 0; i < 8; ++i) {
      CHECK(got[i] == expected[i], "%s: exp(%g) = %g", tier.c_str(), edge[i], got[i]);
    }
    CHECK(std::isnan(got[8]), "%s: exp(NaN) = %g", tier.c_str(), got[8]);
  }
}

// The nearest of all finite codes, ties to the even one.
TEST(e4m3_codes_are_the_nearest) {
  for (int low = 0; low < 0x7E; ++low) {
    const float a = to_float(e4m3_t{static_cast<uint8_t>(low)});
    const float b = to_float(e4m3_t{static_cast<uint8_t>(low + 1)});
    const float middle = (a + b) / 2;
    const int even = low % 2 == 0 ? low : low + 1;
    for (const int sign : {0, 0x80}) {
      const auto code = [sign](float x) { return int{e4m3_code(sign == 0 ? x : -x)}; };
      CHECK(code(a) == (low | sign), "code %d", low);
      CHECK(code(middle) == (even | sign), "tie above code %d", low);
      CHECK(code(std::nextafter(middle, 0.f)) == (low | sign), "below the tie above %d", low);
      CHECK(code(std::nextafter(middle, 1e9f)) == ((low + 1) | sign), "above the tie of %d", low);
    }
  }
  const float inf = bits_float(0x7F800000u);
  CHECK(e4m3_code(448.f) == 0x7E && e4m3_code(465.f) == 0x7E && e4m3_code(3e38f) == 0x7E,
        "saturation");
  CHECK(e4m3_code(-1e5f) == 0xFE, "saturation below");
  CHECK(e4m3_code(inf) == 0x7F && e4m3_code(-inf) == 0xFF, "infinity");
  CHECK((e4m3_code(bits_float(0x7FC00001u)) & 0x7F) == 0x7F, "NaN");
  CHECK(e4m3_code(1e-30f) == 0 && e4m3_code(-1e-30f) == 0x80, "zeros");
}
