// The machine's own limits, measured with the same instructions that the kernels of this tier use.
// Benchmarks print their results as a share of these. Compiled once per tier.
#include "tiers.h"
#include "vec.h"

namespace sgl_kernel {
namespace SGL_TIER {

// Reads `count` floats, 32 vectors in flight, and returns a value that depends on all of them.
float read_probe(const float* data, int64_t count) {
  constexpr int kStreams = 8;
  Vec sums[kStreams];
  for (int i = 0; i < kStreams; ++i) sums[i] = zero();
  const int64_t step = int64_t{kStreams} * kLanes;
  for (int64_t p = 0; p + step <= count; p += step) {
    for (int i = 0; i < kStreams; ++i) sums[i] = add(sums[i], load(data + p + i * kLanes));
  }
  for (int i = 1; i < kStreams; ++i) sums[0] = add(sums[0], sums[i]);
  float lanes[kLanes];
  store(lanes, sums[0]);
  return lanes[0];
}

// `steps` rounds of independent multiply-adds in registers; returns how many f32 multiply-adds it
// did. `sink` keeps the compiler from dropping them.
int64_t fma_probe(int64_t steps, float* sink) {
  constexpr int kChains = kMicroRows * kMicroVecs;
  Vec sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = set1(static_cast<float>(i));
  const Vec a = set1(sink[0]);
  const Vec b = set1(sink[1]);
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i) sums[i] = fma(a, b, sums[i]);
  }
  for (int i = 1; i < kChains; ++i) sums[0] = add(sums[0], sums[i]);
  float lanes[kLanes];
  store(lanes, sums[0]);
  sink[0] = lanes[0] == 12345.f ? 1.f : sink[0];
  return steps * kChains * kLanes;
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
