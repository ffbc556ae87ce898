// Packed NVFP4 weights and their way into half2.
//
// A "unit" is 32 columns x 64 k = 1152 bytes, 0.5625 bytes a weight, one contiguous stream per tile of 32 columns:
//   unit(tile, u) at W + (tile * K/64 + u) * 1152: [2][32 lanes] uint4 of codes, then [32 lanes] u32 of scales (E4M3, sign clear, not NaN)
//   lane -> column quadpair(lane) * 8 + row_a(lane); uint4 i holds k = 32i..32i+31, word j of it k = 8j..8j+7; scale byte i covers k = 16i..16i+15
//   word: low half = even k, high half = odd k; in each half, element f = 0..3 (k = 2f or 2f+1) has its magnitude at bits 11-3f..9-3f and its
//   sign at bit {15,12,14,13}[f], so that the four half2 (k0,k1)(k2,k3)(k4,k5)(k6,k7) cost 6 LOP3, 2 multiplies and 1 shift.
// Raw half = e2m1 * 2^-14, scale half = e4m3 * 2^7, product = weight * 2^-7. A weight e2m1 * e4m3 has at most 6 significant bits and lies in
// 2^-10..2688: exact in FP16, so the tensor core sees exact products.
#pragma once
#include "sm70.cuh"
DEVICE void stream(uint4& r, const void* p) { r = stream128(p); }
DEVICE void stream(u32& r, const void* p) { r = stream32(p); }
// Loads that stay where they stand: under a predicate, since compilers move work in front of a branch, and not `nc`, since those move across a barrier.
#ifdef EMULATE
DEVICE void stream_if(bool on, auto& r, const void* p) {
  if (on) stream(r, p);
}
DEVICE void ldg128_if(bool on, uint4& r, const void* p) {
  if (on) r = ldg128(p);
}
#else
#define LOAD128_IF(KIND)                                                                              \
  asm volatile("{.reg .pred q; setp.ne.u32 q,%5,0; @q ld.global" KIND ".v4.u32 {%0,%1,%2,%3},[%4];}" \
               : "+r"(r.x), "+r"(r.y), "+r"(r.z), "+r"(r.w)                                           \
               : "l"(p), "r"((u32)on)                                                               \
               : "memory")
DEVICE void stream_if(bool on, uint4& r, const void* p) { LOAD128_IF(".L1::no_allocate" L2_HINT); }
DEVICE void ldg128_if(bool on, uint4& r, const void* p) { LOAD128_IF(""); }
DEVICE void stream_if(bool on, u32& r, const void* p) {
  asm volatile("{.reg .pred q; setp.ne.u32 q,%2,0; @q ld.global.L1::no_allocate" L2_HINT ".u32 %0,[%1];}" : "+r"(r) : "l"(p), "r"((u32)on) : "memory");
}
#endif
#ifdef EMULATE
DEVICE void prefetch_l2(const void*) {}
#else
DEVICE void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory"); }
#endif
struct Unit {
  uint4 a, b;
  u32 s;
};
DEVICE void e2m1x8(u32 w, u32 s, u32 (&h)[4]) {  // a multiply makes two shifts at once, the last mask drops what it smears
  h[0] = w & 0x8E008E00u;
  h[1] = (w << 3) & 0x8E008E00u;
  h[2] = ((w & 0x40384038u) * 66u) & 0x8E008E00u;
  h[3] = ((w & 0x20072007u) * 516u) & 0x8E008E00u;
#pragma unroll
  for (int i = 0; i < 4; i++) h[i] = hmul2(h[i], s);
}
DEVICE void scale_halves(u32 s, u32 (&S)[4]) {  // 4 E4M3 bytes -> 4 half2 of value * 2^7
  const u32 p = hmul2((s << 7) & 0x7f807f80u, 0x78007800u), q = hmul2((s >> 1) & 0x7f807f80u, 0x78007800u);
  S[0] = lo2(p);
  S[1] = lo2(q);
  S[2] = hi2(p);
  S[3] = hi2(q);
}
