// The machine's own limits, measured with the same instructions that the kernels of this tier use.
// Benchmarks print their results as a share of these. Compiled once per tier.
#include "dispatch/kernel_list.h"
#include "simd/dot.h"

namespace sgl_kernel {
namespace SGL_TIER {
namespace {

// Of 1 to 8 streams and 0 to 4 KiB ahead, two streams and 1 KiB read fastest: hardware prefetchers
// stop at page borders, and each stream keeps its own running.
constexpr int64_t kReadStreams = 2;
constexpr int64_t kReadAhead = 1024;
constexpr int64_t kReadVecs = 8;

// Returns a value that depends on all accumulators, so that none is dropped.
SGL_INLINE float reduce(Vec* sums, int count) {
  for (int i = 1; i < count; ++i) sums[0] = add(sums[0], sums[i]);
  float lanes[kLanes];
  store(lanes, sums[0]);
  return lanes[0];
}

// Enough independent accumulators to hide the latency of two units, few enough to stay in
// registers.
constexpr int kAccumulators = kLanes == 8 ? 12 : 16;

// As many multiplications of a dot policy as the machine can do; returns how many multiply-adds.
template <typename Dot>
SGL_INLINE int64_t repeat_multiplication(int64_t steps, float* sink) {
  if constexpr (Dot::kTiles) {
    return Dot::repeat_multiplication(steps);
  } else {
    constexpr int kProducts = 2 / Dot::kAccumulators;  // of a lane
    Vec sums[kAccumulators];
    for (int i = 0; i < kAccumulators; ++i) sums[i] = set1(static_cast<float>(i));
    const Vec a = set1(sink[0]);
    const Vec b = set1(sink[1]);
    for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 16
      for (int i = 0; i < kAccumulators; ++i) sums[i] = Dot::dot(a, b, sums[i]);
    }
    sink[0] = reduce(sums, kAccumulators) == 12345.f ? 1.f : sink[0];
    return steps * kAccumulators * kLanes * kProducts;
  }
}

}  // namespace

float read_probe_kernel_impl(const float* data, int64_t count) {
  Vec sums[kReadVecs];
  for (int64_t i = 0; i < kReadVecs; ++i) sums[i] = zero();
  const int64_t step = kReadVecs * kLanes;
  const int64_t part = count / kReadStreams / step * step;
  for (int64_t p = 0; p < part; p += step) {
    for (int64_t stream = 0; stream < kReadStreams; ++stream) {
      const float* from = data + stream * part + p;
      for (int64_t byte = 0; byte < step * 4; byte += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(from) + kReadAhead + byte);
      }
      for (int64_t i = 0; i < kReadVecs; ++i) sums[i] = add(sums[i], load(from + i * kLanes));
    }
  }
  return reduce(sums, kReadVecs);
}

int64_t multiply_probe_kernel_impl(bool bf16, int64_t steps, float* sink) {
  return bf16 ? repeat_multiplication<ActDotFor<bf16_t>>(steps, sink)
              : repeat_multiplication<DotF32>(steps, sink);
}

}  // namespace SGL_TIER
}  // namespace sgl_kernel
