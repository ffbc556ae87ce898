// FP8 on a machine without FP8: E4M3 (fn: no infinity, NaN = s1111111) and E5M2 by bit arithmetic.
//
// Encoding rounds to nearest, ties to even, and saturates: finite values and infinities beyond the largest finite code become that code
// (+-448, +-57344); NaN becomes 0x7f. Decoding is exact for all 256 codes, NaN and infinities included.
// Attention reads E4M3 with fp8_half2, which costs no multiply: halves of value * 2^-8, and the two NaN codes read as +-480.
#pragma once
#include "sm70.cuh"
enum Format { E4M3 = 0, E5M2 = 1, F16 = 2 };

// MANTISSA bits of mantissa, smallest normal 2^MIN_EXPONENT, largest finite code MAX_CODE. The rounding of a normal value is an integer
// addition; below the smallest normal it is done by adding the FP32 whose last bit is worth the format's step.
template <int MANTISSA, int MIN_EXPONENT, int MAX_CODE>
DEVICE u32 encode_fp8(float x) {
  const u32 bits = float_bits(x), sign = bits >> 24 & 0x80u, u = bits & 0x7fffffffu;
  constexpr int DROP = 23 - MANTISSA;
  constexpr u32 MIN_NORMAL = (u32)(MIN_EXPONENT + 127) << 23, STEP_ONE = (u32)(MIN_EXPONENT - MANTISSA + 23 + 127) << 23;
  if (u > 0x7f800000u) return 0x7fu;
  if (u < MIN_NORMAL) return sign | (float_bits(magnitude(x) + float_of(STEP_ONE)) - STEP_ONE);
  const u32 rounded = (u + (1u << (DROP - 1)) - 1u + (u >> DROP & 1u)) >> DROP;
  return sign | (u32)min((int)(rounded - ((u32)(MIN_EXPONENT + 126) << MANTISSA)), MAX_CODE);
}
template <int FORMAT>
DEVICE u32 encode(float x) {
  return FORMAT == E4M3 ? encode_fp8<3, -6, 0x7e>(x) : encode_fp8<2, -14, 0x7b>(x);
}
// Bits of the half that one code stands for, exactly.
template <int FORMAT>
DEVICE u16 decode(u32 code) {
  if (FORMAT == E5M2) return (u16)(code << 8);
  const u32 sign = code << 8 & 0x8000u, m = code & 0x7fu;
  if (m == 0x7fu) return (u16)(sign | 0x7e00u);
  return (u16)(hmul2(sign | m << 7, 0x5c00u) & 0xffffu);  // * 256
}
// Four codes in one word -> two half2: (byte 0, byte 2) and (byte 1, byte 3). E4M3 comes out as value * 2^-8.
template <int FORMAT>
DEVICE void fp8_half2(u32 w, u32& a, u32& b) {
  if (FORMAT == E4M3) {
    // A code times 128 has its sign one bit too low; adding that bit carries a sign up and leaves its inverse, which the mask clears.
    a = (prmt(w, 0, 0x4240) * 128u + 0x40004000u) & 0xbf80bf80u;
    b = (prmt(w, 0, 0x4341) * 128u + 0x40004000u) & 0xbf80bf80u;
  } else {
    a = prmt(w, 0, 0x2404);
    b = prmt(w, 0, 0x3414);
  }
}
// Position i = 0..3 inside a group of four FP8 values, as fp8_half2 delivers them, is element {0,2,1,3}[i].
DEVICE int fp8_position(int i) { return ((i & 1) << 1) | (i >> 1); }
