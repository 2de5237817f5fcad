// Tables of the byte-shuffle decoders of e4m3 to bf16: nibble tables (NEON), and whole ones (VBMI).
//
// For a code s.eeee.mmm with e > 0 the bf16 pattern is s.00000000.0000000 | ((code & 0x7F) << 4) +
// 0x3C00, whose high byte depends on the code's high nibble alone and whose low byte is low nibble
// << 4. Codes with eee == 0 (subnormals, and e == 1) take their high byte from the low nibble
// instead, and subnormals correct the low byte. Three 16-entry lookups and a shift therefore
// decode every finite code exactly.
#pragma once

#include <cstdint>

#include "simd/types.h"

namespace sgl_kernel {

// Indexed by the high nibble: sign and exponent byte; for eee == 0 the sign alone.
alignas(16) static const uint8_t kHighByHighNibble[16] = {
    0x00, 0x3D, 0x3E, 0x3F, 0x40, 0x41, 0x42, 0x43, 0x80, 0xBD, 0xBE, 0xBF, 0xC0, 0xC1, 0xC2, 0xC3};
// Indexed by the low nibble, used where eee == 0: the high byte ...
alignas(16) static const uint8_t kHighByLowNibble[16] = {
    0x00, 0x3B, 0x3B, 0x3B, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C};
// ... and what to XOR into the low byte (m * 2^-9 has fraction bits of its own).
alignas(16) static const uint8_t kLowFixByLowNibble[16] = {
    0x00, 0x10, 0xA0, 0xF0, 0x40, 0x70, 0x20, 0x10, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00};

// Indexed by the low seven bits of a code: both bytes of the bf16 magnitude.
struct MagnitudeBytes {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];
  constexpr MagnitudeBytes() : low(), high() {
    for (int code = 0; code < 128; ++code) {
      const uint16_t bits = e4m3_to_bf16_bits(static_cast<uint8_t>(code));
      low[code] = static_cast<uint8_t>(bits & 0xFF);
      high[code] = static_cast<uint8_t>(bits >> 8);
    }
  }
};
static constexpr MagnitudeBytes kMagnitudeBytes;

}  // namespace sgl_kernel
