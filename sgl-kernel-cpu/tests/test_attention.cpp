// Attention on every tier against a double reference, in memory with guard pages, scratch included.
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

struct Case {
  int64_t heads, kv_heads, head_dim, v_head_dim;
  int64_t window = 0;
  float logit_cap = 0.f;
  bool sinks = false;
};

// Two requests over a cache whose last slot they use; every buffer ends at a guard page.
template <typename act_t, typename cache_t>
class Problem {
 public:
  static constexpr int64_t kRequests = 2, kContext = 140, kSlots = 300;

  Problem(const Case& c, std::vector<int64_t> seq_lens, std::vector<int64_t> extend_lens)
      : case_(c),
        seq_lens_(std::move(seq_lens)),
        extend_lens_(std::move(extend_lens)),
        tokens_(extend_lens_[0] + extend_lens_[1]),
        q_(tokens_ * c.heads * c.head_dim),
        k_(kSlots * c.kv_heads * c.head_dim),
        v_(kSlots * c.kv_heads * c.v_head_dim),
        out_(tokens_ * c.heads * c.v_head_dim),
        table_(kRequests * kContext),
        sinks_(c.heads) {
    std::mt19937 random(static_cast<unsigned>(c.heads * 100 + c.head_dim));
    std::normal_distribution<float> normal;
    for (auto* buffer : {&k_, &v_}) {
      for (int64_t i = 0; i < buffer->size(); ++i) from_float(normal(random), &(*buffer)[i]);
    }
    for (int64_t i = 0; i < q_.size(); ++i) from_float(normal(random), &q_[i]);
    for (int64_t i = 0; i < sinks_.size(); ++i) sinks_[i] = normal(random);
    for (int64_t i = 0; i < table_.size(); ++i) {
      table_[i] = static_cast<int32_t>(kSlots - 1 - i);
    }
  }

  AttentionArgs args() {
    AttentionArgs a;
    a.requests = kRequests;
    a.num_heads = case_.heads;
    a.num_kv_heads = case_.kv_heads;
    a.head_dim = case_.head_dim;
    a.v_head_dim = case_.v_head_dim;
    a.q = q_.data();
    a.q_dtype = a.out_dtype = dtype_of<act_t>;
    a.q_token_stride = case_.heads * case_.head_dim;
    a.q_head_stride = case_.head_dim;
    a.out = out_.data();
    a.out_token_stride = case_.heads * case_.v_head_dim;
    a.out_head_stride = case_.v_head_dim;
    a.k = side(k_, case_.head_dim, k_scale());
    a.v = side(v_, case_.v_head_dim, v_scale());
    a.req_to_token = table_.data();
    a.req_stride = kContext;
    a.req_pool_indices = pools_;
    a.seq_lens = seq_lens_.data();
    a.extend_lens = extend_lens_.data();
    starts_ = {0, extend_lens_[0]};
    a.extend_starts = starts_.data();
    a.scale = 0.3f;
    a.logit_cap = case_.logit_cap;
    a.sliding_window = case_.window;
    a.sinks = case_.sinks ? sinks_.data() : nullptr;
    return a;
  }

  void extend(const std::string& tier) {
    const AttentionArgs a = args();
    GuardedBuffer<char> scratch(scratch_bytes<AttentionScratch>(a));
    for (int64_t r = kRequests - 1; r >= 0; --r) {
      for (int64_t b = 0; b < a.query_blocks(r); ++b) {
        for (int64_t h = 0; h < a.num_kv_heads; ++h) {
          kernels_of(tier).extend_attention(a, {r, h, b}, scratch.data());
        }
      }
    }
  }

  // In `chunks` ranges of splits, as that many threads would, and in as many waves as the workspace
  // makes. Returns how many.
  int decode(const std::string& tier, int64_t chunks, int64_t workspace_bytes) {
    AttentionArgs a = args();
    a.workspace_bytes = workspace_bytes;
    GuardedBuffer<char> scratch(scratch_bytes<AttentionScratch>(a));
    std::vector<int64_t> begins(kRequests + 1, 0);
    for (int64_t r = 0; r < kRequests; ++r) {
      begins[static_cast<size_t>(r + 1)] =
          begins[static_cast<size_t>(r)] + a.num_kv_heads * a.key_blocks(r);
    }
    GuardedBuffer<char> workspace(split_workspace_bytes(a, begins.back()));
    DecodePlan plan;
    plan.split_begins = begins.data();
    first_wave(a, workspace.data(), &plan);
    int waves = 0;
    do {
      ++waves;
      const int64_t first = plan.first_split, splits = plan.end_split - first;
      for (int64_t i = 0; i < chunks; ++i) {
        kernels_of(tier).decode_attention(
            a, plan, {first + splits * i / chunks, first + splits * (i + 1) / chunks},
            scratch.data());
      }
      const int64_t pairs = (plan.end_request - plan.first_request) * a.num_kv_heads;
      kernels_of(tier).combine_splits(a, plan, {0, pairs}, scratch.data());
    } while (next_wave(a, &plan));
    return waves;
  }

  void check(const std::string& tier, const char* what) {
    int64_t token = 0;
    for (int64_t r = 0; r < kRequests; ++r) {
      const auto request = static_cast<size_t>(r);
      for (int64_t t = 0; t < extend_lens_[request]; ++t, ++token) {
        const int64_t position = seq_lens_[request] - extend_lens_[request] + t;
        for (int64_t h = 0; h < case_.heads; ++h) check_head(tier, what, r, token, position, h);
      }
    }
  }

  const GuardedBuffer<act_t>& out() const { return out_; }
  void clear() { std::memset(static_cast<void*>(out_.data()), 0xFF, out_.size() * sizeof(act_t)); }

 private:
  static float k_scale() { return sizeof(cache_t) == 1 ? 0.7f : 1.f; }
  static float v_scale() { return sizeof(cache_t) == 1 ? 1.3f : 1.f; }

  AttentionArgs::Cache side(const GuardedBuffer<cache_t>& buffer, int64_t width, float scale) {
    AttentionArgs::Cache cache;
    cache.data = buffer.data();
    cache.dtype = dtype_of<cache_t>;
    cache.slot_stride = case_.kv_heads * width;
    cache.head_stride = width;
    cache.scale = scale;
    return cache;
  }

  void check_head(const std::string& tier, const char* what, int64_t r, int64_t token,
                  int64_t position, int64_t h) {
    const int64_t kv = h / (case_.heads / case_.kv_heads);
    const int64_t first = case_.window > 0 ? max_i64(0, position + 1 - case_.window) : 0;
    const int32_t* slots = table_.data() + pools_[r] * kContext;
    const act_t* q = q_.data() + (token * case_.heads + h) * case_.head_dim;
    std::vector<double> scores;
    double largest = case_.sinks ? sinks_[h] : -INFINITY, error = 0;
    for (int64_t j = first; j <= position; ++j) {
      const cache_t* k = k_.data() + (slots[j] * case_.kv_heads + kv) * case_.head_dim;
      double score = 0, magnitude = 0;
      for (int64_t d = 0; d < case_.head_dim; ++d) {
        const double product = static_cast<double>(to_float(q[d])) * to_float(k[d]) * k_scale();
        score += product * 0.3f;
        magnitude += std::fabs(product * 0.3f);
      }
      error = std::fmax(error, static_cast<double>(case_.head_dim + 4) * 0x1p-24 * magnitude);
      if (case_.logit_cap > 0) score = case_.logit_cap * std::tanh(score / case_.logit_cap);
      scores.push_back(score);
      largest = std::fmax(largest, score);
    }
    error += 16 * 0x1p-24 * case_.logit_cap;
    double sum = case_.sinks ? std::exp(sinks_[h] - largest) : 0;
    for (double& score : scores) sum += score = std::exp(score - largest);
    for (int64_t c = 0; c < case_.v_head_dim; ++c) {
      double expected = 0, magnitude = 0;
      for (int64_t j = first; j <= position; ++j) {
        const double v =
            to_float(v_[(slots[j] * case_.kv_heads + kv) * case_.v_head_dim + c]) * v_scale();
        const double weight = scores[static_cast<size_t>(j - first)] / sum;
        expected += weight * v;
        magnitude += weight * std::fabs(v);
      }
      const double rounding = sizeof(act_t) == 4                   ? 0x1p-24
                              : std::is_same<act_t, bf16_t>::value ? 0x1p-8
                                                                   : 0x1p-11;
      const double bound = (std::expm1(2 * error) + 150 * 0x1p-24) * magnitude +
                           rounding * std::fabs(expected) * 1.01 + 0x1p-25;
      const double got = to_float(out_[(token * case_.heads + h) * case_.v_head_dim + c]);
      CHECK(
          std::fabs(got - expected) <= bound,
          "%s %s heads %ld/%ld dims %ld, %ld window %ld: token %ld head %ld element %ld: expected "
          "%.9g, got %.9g, bound %g",
          tier.c_str(), what, (long)case_.heads, (long)case_.kv_heads, (long)case_.head_dim,
          (long)case_.v_head_dim, (long)case_.window, (long)token, (long)h, (long)c, expected, got,
          bound);
    }
  }

  Case case_;
  std::vector<int64_t> seq_lens_, extend_lens_, starts_;
  int64_t tokens_;
  GuardedBuffer<act_t> q_;
  GuardedBuffer<cache_t> k_, v_;
  GuardedBuffer<act_t> out_;
  GuardedBuffer<int32_t> table_;
  GuardedBuffer<float> sinks_;
  const int64_t pools_[kRequests] = {1, 0};
};

const Case kCases[] = {
    {1, 1, 64, 64},
    {2, 2, 1, 1},
    {6, 2, 17, 33, 5},
    {8, 2, 32, 16, 70, 4.f},
    {9, 3, 20, 40, 0, 0.f, true},
    {5, 1, 130, 7, 64, 0.f, true},
    {13, 1, 31, 65, 1},
    {14, 2, 48, 24, 33},
    {8, 1, 36, 80, 0, 2.f, true},
};

// Blocks that both requests of a step skip because their window begins behind them.
int64_t first_blocks(const AttentionArgs& args) {
  return args.first_block(0) + args.first_block(1);
}

template <typename act_t, typename cache_t>
void check_case(const std::string& tier, const Case& c) {
  Problem<act_t, cache_t> prefill(c, {65, 131}, {65, 9});
  prefill.extend(tier);
  prefill.check(tier, "extend");

  Problem<act_t, cache_t> step(c, {64, 140}, {1, 1});
  step.extend(tier);
  step.check(tier, "extend by one");
  std::vector<float> extended;
  for (int64_t i = 0; i < step.out().size(); ++i) extended.push_back(to_float(step.out()[i]));
  // In one wave, a block of keys at a time, and two blocks.
  const int64_t block_bytes = c.kv_heads * partial_floats(step.args()) * 4;
  const int64_t blocks = 1 + 3 - (c.window > 0 ? first_blocks(step.args()) : 0);
  const struct {
    int64_t bytes;
    int64_t waves;
  } workspaces[] = {{kSplitWorkspaceBytes, 1}, {1, blocks}, {2 * block_bytes, div_up(blocks, 2)}};
  for (const auto& workspace : workspaces) {
    for (const int64_t chunks : {1, 2, 3, 7}) {
      step.clear();
      const int waves = step.decode(tier, chunks, workspace.bytes);
      CHECK(waves == workspace.waves, "%d waves of %ld bytes, expected %ld", waves,
            (long)workspace.bytes, (long)workspace.waves);
      for (int64_t i = 0; i < step.out().size(); ++i) {
        CHECK(to_float(step.out()[i]) == extended[static_cast<size_t>(i)],
              "%s: decode in %d waves of %ld ranges differs from extend at %ld", tier.c_str(),
              waves, (long)chunks, (long)i);
      }
    }
  }
}

}  // namespace

TEST(attention_matches_the_double_reference) {
  for (const std::string& tier : tiers_under_test()) {
    for (const Case& c : kCases) {
      check_case<float, float>(tier, c);
      check_case<fp16_t, fp16_t>(tier, c);
      check_case<bf16_t, bf16_t>(tier, c);
      check_case<fp16_t, e4m3_t>(tier, c);
    }
  }
}

TEST(waves_carry_accumulators_and_pass_padding) {
  // Blocks of keys of the requests, 0 for padding, and blocks a wave.
  const struct {
    std::vector<int64_t> blocks;
    int64_t wave_blocks;
    std::vector<std::vector<int64_t>> requests;  // of each wave: first and end
  } cases[] = {
      {{1, 2, 1}, 8, {{0, 3}}},
      {{0, 0}, 2, {{0, 2}}},
      {{2, 2}, 2, {{0, 1}, {1, 2}}},
      {{5}, 2, {{0, 1}, {0, 1}, {0, 1}}},
      {{2, 0, 3, 0}, 2, {{0, 2}, {2, 3}, {2, 4}}},
      {{0, 3, 0, 1, 4}, 4, {{0, 4}, {4, 5}}},
      {{1, 4, 1}, 3, {{0, 2}, {1, 3}}},
  };
  for (const auto& c : cases) {
    AttentionArgs args;
    args.requests = static_cast<int64_t>(c.blocks.size());
    args.num_heads = 6;
    args.num_kv_heads = 3;
    args.head_dim = args.v_head_dim = 32;
    args.workspace_bytes = c.wave_blocks * 3 * partial_floats(args) * 4;
    std::vector<int64_t> begins = {0};
    for (const int64_t blocks : c.blocks) begins.push_back(begins.back() + 3 * blocks);
    DecodePlan plan;
    plan.split_begins = begins.data();
    GuardedBuffer<char> workspace(split_workspace_bytes(args, begins.back()));
    first_wave(args, workspace.data(), &plan);
    int64_t done = 0;
    size_t wave = 0;
    const float* written = nullptr;
    do {
      CHECK(wave < c.requests.size() && plan.first_request == c.requests[wave][0] &&
                plan.end_request == c.requests[wave][1],
            "wave %zu: requests %ld to %ld", wave, (long)plan.first_request,
            (long)plan.end_request);
      CHECK(plan.first_split == done && plan.end_split - done <= 3 * c.wave_blocks,
            "wave %zu: its splits", wave);
      CHECK(wave == 0 || plan.carried == written, "wave %zu: what the wave before carried", wave);
      done = plan.end_split;
      written = plan.to_carry;
      ++wave;
    } while (next_wave(args, &plan) && wave < 10);
    CHECK(done == begins.back() && wave == c.requests.size(), "%zu waves", wave);
  }
}

TEST(attention_scratch_is_bounded) {
  const struct {
    int64_t heads, kv_heads, k, v;
  } cases[] = {{1, 1, 1, 1},          {1 << 20, 1 << 20, 1, 1},         {1 << 15, 1, 1, 1},
               {64, 1, 16384, 16384}, {1 << 16, 1 << 16, 16384, 16384}, {128, 1, 576, 512}};
  for (const auto& c : cases) {
    AttentionArgs args;
    args.requests = 1 << 20;
    args.num_heads = c.heads;
    args.num_kv_heads = c.kv_heads;
    args.head_dim = c.k;
    args.v_head_dim = c.v;
    const int64_t bytes = scratch_bytes<AttentionScratch>(args);
    CHECK(bytes < int64_t{64} << 20, "%ld heads of %ld: %ld bytes", (long)c.heads, (long)c.k,
          (long)bytes);
    // All splits of a long context, but for a block of all heads and what two waves carry.
    const int64_t block = 3 * c.kv_heads * partial_floats(args) * 4 + 6 * kScratchAlignment;
    CHECK(split_workspace_bytes(args, int64_t{1} << 50) <= kSplitWorkspaceBytes + block,
          "%ld heads", (long)c.heads);
  }
}

// Without bytes between them, the arrays are as long as they have to be, and where they are said to
// be.
TEST(a_scratch_layout_counts_what_it_hands_out) {
  AttentionArgs args;
  args.num_heads = 6;
  args.num_kv_heads = 2;
  args.head_dim = 17;
  args.v_head_dim = 33;
  GuardedBuffer<char> memory(scratch_bytes<AttentionScratch>(args));
  ScratchLayout layout(memory.data());
  const AttentionScratch scratch(args, &layout);
  CHECK(layout.bytes() == memory.size(), "%ld bytes, counted %ld", (long)layout.bytes(),
        (long)memory.size());
  const char* const places[] = {
      reinterpret_cast<const char*>(scratch.scores), reinterpret_cast<const char*>(scratch.k_panel),
      reinterpret_cast<const char*>(scratch.v_panel), reinterpret_cast<const char*>(scratch.q),
      reinterpret_cast<const char*>(scratch.accumulator)};
  const int64_t floats[] = {kKeyBlock * kQueryTile, kKeyBlock * 32, kKeyBlock * 64,
                            kQueryBlock * 32};
  CHECK(places[0] == memory.data(), "the first array begins elsewhere");
  for (int i = 0; i < 4; ++i) {
    CHECK(places[i + 1] - places[i] >= floats[i] * 4 &&
              places[i + 1] - places[i] <= floats[i] * 4 + 2 * kScratchAlignment,
          "array %d takes %ld bytes", i, (long)(places[i + 1] - places[i]));
  }
  const char* end = reinterpret_cast<const char*>(scratch.staged + kKeyBlock * 64);
  CHECK(end <= memory.data() + memory.size(), "the last array ends outside");
}
