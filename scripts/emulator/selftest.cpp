// Checks of the emulated machine itself, against scalar code: what the kernels' results rest on.
// Compiled for Sapphire Rapids. Exit status 1 when a check fails.
#include <immintrin.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>

namespace {

int failures = 0;

void check(bool ok, const char* what) {
  std::printf("%s %s\n", ok ? "ok    " : "FAILED", what);
  failures += ok ? 0 : 1;
}

std::mt19937 generator(1);

uint8_t random_byte() {
  return static_cast<uint8_t>(generator());
}

float to_float(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// Of magnitude 0.5 to 2, so that no sum below overflows or is subnormal.
uint16_t random_bf16() {
  return static_cast<uint16_t>((generator() & 0x8000) | (0x3F00 + generator() % 256));
}

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int row_count, int columns) {  // columns of 32 bits
    rows[tile] = static_cast<uint8_t>(row_count);
    bytes_per_row[tile] = static_cast<uint16_t>(columns * 4);
  }
};

TileConfig product_config(int M, int N, int K) {  // K in 32-bit elements
  TileConfig config;
  config.set(0, M, N);
  config.set(1, M, K);
  config.set(2, K, N);
  return config;
}

bool tiles_need_permission() {
  const pid_t child = fork();
  if (child == 0) {
    const TileConfig config = product_config(16, 16, 16);
    _tile_loadconfig(&config);
    _tile_zero(0);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGILL;
}

bool request_tiles() {
  constexpr long kArchReqXcompPerm = 0x1023, kXfeatureXtiledata = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
}

// TDPBF16PS is two accumulators of f32 FMA, over the even and the odd k, added at the end.
bool tile_dot_bf16(int M, int N, int K) {
  alignas(64) uint16_t a[16 * 32], b[16 * 32];
  alignas(64) float c[16 * 16];
  for (uint16_t& x : a) x = random_bf16();
  for (uint16_t& x : b) x = random_bf16();
  const TileConfig config = product_config(M, N, K);
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_loadd(1, a, K * 4);
  _tile_loadd(2, b, N * 4);
  _tile_dpbf16ps(0, 1, 2);
  _tile_stored(0, c, N * 4);
  TileConfig stored;
  _tile_storeconfig(&stored);
  _tile_release();
  bool same = std::memcmp(&stored, &config, sizeof config) == 0;
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) {
      float even = 0, odd = 0;
      for (int k = 0; k < K; ++k) {
        const uint16_t* x = a + (m * K + k) * 2;
        const uint16_t* y = b + (k * N + n) * 2;
        even = std::fma(to_float(x[0]), to_float(y[0]), even);
        odd = std::fma(to_float(x[1]), to_float(y[1]), odd);
      }
      same = same && c[m * N + n] == even + odd;
    }
  }
  return same;
}

// `dot` is one of TDPB{SS,SU,US,UU}D on tiles 0, 1, 2; a_t and b_t tell the signs of its bytes.
template <typename a_t, typename b_t, typename Dot>
bool tile_dot_int8(int M, int N, int K, Dot dot) {
  alignas(64) a_t a[16 * 64];
  alignas(64) b_t b[16 * 64];
  alignas(64) int32_t c[16 * 16] = {};
  for (a_t& x : a) x = static_cast<a_t>(random_byte());
  for (b_t& x : b) x = static_cast<b_t>(random_byte());
  const TileConfig config = product_config(M, N, K);
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_loadd(1, a, K * 4);
  _tile_loadd(2, b, N * 4);
  dot();
  _tile_stored(0, c, N * 4);
  _tile_release();
  bool same = true;
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) {
      int32_t sum = 0;
      for (int k = 0; k < K; ++k) {
        for (int i = 0; i < 4; ++i) sum += a[(m * K + k) * 4 + i] * b[(k * N + n) * 4 + i];
      }
      same = same && c[m * N + n] == sum;
    }
  }
  return same;
}

bool tile_dots() {
  bool same = true;
  const int shapes[][3] = {{16, 16, 16}, {7, 3, 5}, {1, 16, 16}, {16, 1, 1}};
  for (const auto& [M, N, K] : shapes) {
    same = same && tile_dot_bf16(M, N, K);
    same = same && tile_dot_int8<int8_t, int8_t>(M, N, K, [] { _tile_dpbssd(0, 1, 2); });
    same = same && tile_dot_int8<int8_t, uint8_t>(M, N, K, [] { _tile_dpbsud(0, 1, 2); });
    same = same && tile_dot_int8<uint8_t, int8_t>(M, N, K, [] { _tile_dpbusd(0, 1, 2); });
    same = same && tile_dot_int8<uint8_t, uint8_t>(M, N, K, [] { _tile_dpbuud(0, 1, 2); });
  }
  return same;
}

volatile int signals = 0;

void count_signal(int) {
  signals = signals + 1;
}

// Fills all tiles, lets the other process and signal handlers run, and looks whether they are
// intact.
bool tiles_survive(int seed) {
  static uint8_t before[8][1024], after[8][1024];
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.set(tile, 16, 16);
    for (int i = 0; i < 1024; ++i)
      before[tile][i] = static_cast<uint8_t>(seed + tile * 37 + i * 11 + (i >> 3));
  }
  _tile_loadconfig(&config);
  // Tile numbers are part of the instruction.
  _tile_loadd(0, before[0], 64);
  _tile_loadd(1, before[1], 64);
  _tile_loadd(2, before[2], 64);
  _tile_loadd(3, before[3], 64);
  _tile_loadd(4, before[4], 64);
  _tile_loadd(5, before[5], 64);
  _tile_loadd(6, before[6], 64);
  _tile_loadd(7, before[7], 64);
  for (int i = 0; i < 5000; ++i) sched_yield();
  for (volatile int i = 0; i < 30000000; i = i + 1) continue;
  _tile_stored(0, after[0], 64);
  _tile_stored(1, after[1], 64);
  _tile_stored(2, after[2], 64);
  _tile_stored(3, after[3], 64);
  _tile_stored(4, after[4], 64);
  _tile_stored(5, after[5], 64);
  _tile_stored(6, after[6], 64);
  _tile_stored(7, after[7], 64);
  TileConfig stored;
  _tile_storeconfig(&stored);
  _tile_release();
  return std::memcmp(before, after, sizeof before) == 0 &&
         std::memcmp(&config, &stored, sizeof config) == 0;
}

bool tiles_survive_switches_and_signals() {
  struct sigaction action = {};
  action.sa_handler = count_signal;
  sigaction(SIGALRM, &action, nullptr);
  const pid_t child = fork();
  const itimerval every_20_ms = {{0, 20000}, {0, 20000}};
  setitimer(ITIMER_REAL, &every_20_ms, nullptr);
  const bool intact = tiles_survive(child == 0 ? 77 : 1);
  const itimerval off = {};
  setitimer(ITIMER_REAL, &off, nullptr);
  if (child == 0) _exit(intact ? 0 : 1);
  int status = 1;
  waitpid(child, &status, 0);
  return intact && status == 0 && signals > 0;
}

bool vector_dot_bf16() {
  alignas(64) uint16_t x[32], y[32];
  alignas(64) float sums[16];
  for (uint16_t& v : x) v = random_bf16();
  for (uint16_t& v : y) v = random_bf16();
  for (int i = 0; i < 16; ++i) sums[i] = static_cast<float>(i);
  const __m512 result =
      _mm512_dpbf16_ps(_mm512_load_ps(sums), reinterpret_cast<__m512bh>(_mm512_load_si512(x)),
                       reinterpret_cast<__m512bh>(_mm512_load_si512(y)));
  alignas(64) float got[16];
  _mm512_store_ps(got, result);
  bool close = true;
  for (int i = 0; i < 16; ++i) {
    const double expected = sums[i] + static_cast<double>(to_float(x[2 * i])) * to_float(y[2 * i]) +
                            static_cast<double>(to_float(x[2 * i + 1])) * to_float(y[2 * i + 1]);
    close = close && std::fabs(got[i] - expected) < 1e-5;
  }
  return close;
}

void random_floats(float* values) {
  for (int i = 0; i < 16; ++i) values[i] = static_cast<float>(generator() % 20000) / 777.0f - 10.0f;
}

bool vector_bf16_conversions() {
  alignas(64) float low[16], high[16];
  random_floats(low);
  random_floats(high);
  uint16_t pair[32];
  const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_load_ps(high), _mm512_load_ps(low));
  std::memcpy(pair, &both, sizeof pair);
  bool same = true;
  for (int i = 0; i < 32; ++i) same = same && pair[i] == to_bf16(i < 16 ? low[i] : high[i - 16]);

  constexpr __mmask16 kMask = 0x0FF5;
  uint16_t old[16], masked[16];
  for (int i = 0; i < 16; ++i) old[i] = static_cast<uint16_t>(1000 + i);
  __m256bh old_vector;
  std::memcpy(&old_vector, old, sizeof old);
  const __m256bh merged = _mm512_mask_cvtneps_pbh(old_vector, kMask, _mm512_load_ps(low));
  std::memcpy(masked, &merged, sizeof masked);
  for (int i = 0; i < 16; ++i)
    same = same && masked[i] == ((kMask >> i) & 1 ? to_bf16(low[i]) : old[i]);
  return same;
}

bool vector_byte_permutation() {
  alignas(64) uint8_t table[64], index[64], got[64];
  for (uint8_t& v : table) v = random_byte();
  for (uint8_t& v : index) v = random_byte();
  _mm512_store_si512(got,
                     _mm512_permutexvar_epi8(_mm512_load_si512(index), _mm512_load_si512(table)));
  bool same = true;
  for (int i = 0; i < 64; ++i) same = same && got[i] == table[index[i] % 64];
  return same;
}

bool vector_fma() {
  constexpr __mmask16 kMask = 0x5A5A;
  alignas(64) float x[16], y[16], got[16];
  random_floats(x);
  random_floats(y);
  const __m512 masked =
      _mm512_mask_fmadd_ps(_mm512_load_ps(x), kMask, _mm512_load_ps(y), _mm512_set1_ps(2));
  _mm512_store_ps(got, masked);
  bool same = true;
  for (int i = 0; i < 16; ++i)
    same = same && got[i] == ((kMask >> i) & 1 ? std::fma(x[i], y[i], 2.0f) : x[i]);
  return same;
}

}  // namespace

int main() {
  check(tiles_need_permission(), "tiles raise SIGILL without the system's permission");
  check(request_tiles(), "the system permits tiles");
  check(tile_dots(), "tile products, bf16 and int8, whole and partial tiles, stored configuration");
  check(tiles_survive_switches_and_signals(), "tiles survive context switches and signals");
  check(vector_dot_bf16(), "VDPBF16PS");
  check(vector_bf16_conversions(), "VCVTNE2PS2BF16 and masked VCVTNEPS2BF16");
  check(vector_byte_permutation(), "VPERMB");
  check(vector_fma(), "masked VFMADD");
  return failures == 0 ? 0 : 1;
}
