// Scalar conversions against the definitions of the formats.
#include <cmath>

#include "check.h"
#include "simd/types.h"

using namespace sgl_kernel;

// OCP 8-bit Floating Point Specification, E4M3: bias 7, S.1111.111 is NaN, no infinity.
static double e4m3_by_definition(int code) {
  const int exponent = (code >> 3) & 0xF;
  const int mantissa = code & 7;
  const double sign = (code & 0x80) ? -1.0 : 1.0;
  if (exponent == 15 && mantissa == 7) return std::nan("");
  if (exponent == 0) return sign * std::ldexp(mantissa, -9);
  return sign * std::ldexp(8 + mantissa, exponent - 10);
}

TEST(e4m3_decodes_every_code) {
  for (int code = 0; code < 256; ++code) {
    const double expected = e4m3_by_definition(code);
    const float got = to_float(e4m3_t{static_cast<uint8_t>(code)});
    if (std::isnan(expected)) {
      CHECK(std::isnan(got), "code 0x%02X: expected NaN, got %g", code, got);
    } else {
      CHECK(got == expected && std::signbit(got) == std::signbit(expected),
            "code 0x%02X: expected %g, got %g", code, expected, got);
    }
  }
}

TEST(fp16_round_trips_every_code) {
  for (int code = 0; code < 65536; ++code) {
    const float value = to_float(fp16_t{static_cast<uint16_t>(code)});
    fp16_t back;
    from_float(value, &back);
    if (std::isnan(value)) {
      CHECK(std::isnan(to_float(back)), "NaN code 0x%04X became 0x%04X", code, back.bits);
    } else {
      CHECK(back.bits == code, "code 0x%04X = %g became 0x%04X", code, value, back.bits);
    }
  }
}

TEST(fp16_rounds_to_nearest_even) {
  const struct {
    float value;
    uint16_t bits;
  } cases[] = {
      {1.f, 0x3C00},          {1.f + 0x1p-11f, 0x3C00},  {1.f + 3 * 0x1p-11f, 0x3C02},
      {65504.f, 0x7BFF},      {65519.9f, 0x7BFF},        {65520.f, 0x7C00},
      {-1e30f, 0xFC00},       {0x1p-24f, 0x0001},        {0x1p-25f, 0x0000},
      {0x1.8p-25f, 0x0001},   {0x1p-14f, 0x0400},        {0x1.FF8p-15f, 0x03FF},
      {0x1.FFCp-15f, 0x0400}, {0x1.FFFFFEp-15f, 0x0400},
  };
  for (const auto& c : cases) {
    fp16_t got;
    from_float(c.value, &got);
    CHECK(got.bits == c.bits, "%a: expected 0x%04X, got 0x%04X", c.value, c.bits, got.bits);
  }
}

TEST(bf16_rounds_to_nearest_even_and_keeps_nan) {
  const struct {
    uint32_t value;
    uint16_t bits;
  } cases[] = {
      {0x3F800000, 0x3F80}, {0x3F808000, 0x3F80}, {0x3F818000, 0x3F82}, {0x3F808001, 0x3F81},
      {0x7F7FFFFF, 0x7F80}, {0x7F800000, 0x7F80}, {0xFF800000, 0xFF80}, {0x7F800001, 0x7FC0},
      {0xFFFFFFFF, 0x7FC0}, {0x00008001, 0x0001}, {0x80000000, 0x8000},
  };
  for (const auto& c : cases) {
    bf16_t got;
    from_float(bits_float(c.value), &got);
    CHECK(got.bits == c.bits, "0x%08X: expected 0x%04X, got 0x%04X", c.value, c.bits, got.bits);
  }
}
