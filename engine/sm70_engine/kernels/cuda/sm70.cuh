// The few instructions that the kernels are made of. Two back ends share every kernel source: CUDA (NVRTC, nvcc or clang)
// and, with -DEMULATE, a CPU (g++, one fiber per thread; see emulator.hpp).
//
// Two switches exist for timing on a GPU newer than Volta only; builds with them compute garbage on purpose:
//   -DSTAND_IN=2|3  replaces every m8n8k4, which newer drivers translate into a subroutine of about 85 scalar instructions.
//                   2: four FFMA in two chains (the four issue slots of HMMA.884 and its latency; the tensor pipe stays free)
//                   3: two m16n8k8 and two FFMA (issue slots and tensor pipe as on Volta, twice the latency)
//   -DSTRETCH       weights and KV lie in pieces of 64 bytes every 256 bytes and are loaded with an L2 prefetch of 256 bytes, so that a
//                   useful byte costs four bytes of DRAM traffic: the bytes per cycle and SM of a V100 when 80 SMs of an H200 run.
#pragma once
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#ifdef STRETCH
#define SPREAD 4
#define L2_HINT ".L2::256B"
#else
#define SPREAD 1
#define L2_HINT
#endif
#ifndef STAND_IN
#define STAND_IN 0
#endif
#ifdef EMULATE
#include "emulator.hpp"
#else
#define DEVICE __device__ __forceinline__
#define MEMBER DEVICE
#define KERNEL(name, threads, ctas) extern "C" __global__ void __launch_bounds__(threads, ctas) name
#define EXPORT(name)
#define SHARED_BYTES(p) extern __shared__ __align__(16) u8 p[]
#if STAND_IN == 3
#define MMA_BEGIN asm volatile(".reg .f32 dmy0,dmy1; mov.f32 dmy0,0f3f800000; mov.f32 dmy1,0f3f800000;");
#define MMA_END(o)                                   \
  {                                                  \
    float f;                                         \
    asm volatile("add.f32 %0,dmy0,dmy1;" : "=f"(f)); \
    if (f == 1.25e-9f) *(volatile float*)(o) = f;    \
  }
#else
#define MMA_BEGIN
#define MMA_END(o)
#endif
DEVICE u32 prmt(u32 a, u32 b, u32 s) {
  u32 d;
  asm("prmt.b32 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(s));
  return d;
}
DEVICE u32 hmul2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEVICE u32 lo2(u32 a) {
  u32 d;
  asm("{.reg .b16 l,h; mov.b32 {l,h},%1; mov.b32 %0,{l,l};}" : "=r"(d) : "r"(a));
  return d;
}
DEVICE u32 hi2(u32 a) {
  u32 d;
  asm("{.reg .b16 l,h; mov.b32 {l,h},%1; mov.b32 %0,{h,h};}" : "=r"(d) : "r"(a));
  return d;
}
DEVICE float h2f(u16 h) {
  float f;
  asm("cvt.f32.f16 %0,%1;" : "=f"(f) : "h"(h));
  return f;
}
DEVICE u16 f2h(float f) {
  u16 h;
  asm("cvt.rn.f16.f32 %0,%1;" : "=h"(h) : "f"(f));
  return h;
}
DEVICE u32 pack2(float a, float b) {
  u32 d;
  u16 x = f2h(a), y = f2h(b);
  asm("mov.b32 %0,{%1,%2};" : "=r"(d) : "h"(x), "h"(y));
  return d;
}
DEVICE float lof(u32 a) {
  float f;
  asm("{.reg .b16 l,h; mov.b32 {l,h},%1; cvt.f32.f16 %0,l;}" : "=f"(f) : "r"(a));
  return f;
}
DEVICE float hif(u32 a) {
  float f;
  asm("{.reg .b16 l,h; mov.b32 {l,h},%1; cvt.f32.f16 %0,h;}" : "=f"(f) : "r"(a));
  return f;
}
DEVICE float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE int leading_zeros(u32 x) { return __clz((int)x); }
DEVICE u32 multiply_high(u32 a, u32 b) { return __umulhi(a, b); }
DEVICE u32 float_bits(float x) { return __float_as_uint(x); }
DEVICE float float_of(u32 u) { return __uint_as_float(u); }
DEVICE float magnitude(float x) { return fabsf(x); }
// 32-bit shared addresses, so that loads and stores take immediate offsets
DEVICE u32 smem_base(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE uint4 sld128(u32 a) {
  uint4 r;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(a));
  return r;
}
DEVICE void sst128(u32 a, uint4 v) { asm volatile("st.shared.v4.u32 [%0],{%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }
DEVICE uint4 lds128(const void* p) { return *reinterpret_cast<const uint4*>(p); }
// Streams that are read once must not push the activations out of L1.
DEVICE uint4 stream128(const void* p) {
  uint4 r;
  asm volatile("ld.global.nc.L1::no_allocate" L2_HINT ".v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
  return r;
}
DEVICE uint2 stream64(const void* p) {
  uint2 r;
  asm volatile("ld.global.nc.L1::no_allocate" L2_HINT ".v2.u32 {%0,%1},[%2];" : "=r"(r.x), "=r"(r.y) : "l"(p));
  return r;
}
DEVICE u32 stream32(const void* p) {
  u32 r;
  asm volatile("ld.global.nc.L1::no_allocate" L2_HINT ".u32 %0,[%1];" : "=r"(r) : "l"(p));
  return r;
}
// The same where `on`, else nothing changes: a predicate, not a branch, which a compiler may move a load behind.
DEVICE void stream128_if(bool on, const void* p, uint4& r) {
  asm volatile("{.reg .pred on; setp.ne.u32 on,%5,0; @on ld.global.nc.L1::no_allocate" L2_HINT ".v4.u32 {%0,%1,%2,%3},[%4];}"
               : "+r"(r.x), "+r"(r.y), "+r"(r.z), "+r"(r.w)
               : "l"(p), "r"((u32)on));
}
DEVICE void stream64_if(bool on, const void* p, uint4& r) {
  asm volatile("{.reg .pred on; setp.ne.u32 on,%3,0; @on ld.global.nc.L1::no_allocate" L2_HINT ".v2.u32 {%0,%1},[%2];}"
               : "+r"(r.x), "+r"(r.y)
               : "l"(p), "r"((u32)on));
}
DEVICE uint4 ldg128(const void* p) {
  uint4 r;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
  return r;
}
DEVICE int ldg32(const int* p) {
  int r;
  asm volatile("ld.global.nc.u32 %0,[%1];" : "=r"(r) : "l"(p));
  return r;
}
// Words that CTAs of one launch pass to each other: each is whole, and nothing else is promised.
DEVICE float4 shared_by_ctas(const float4* p) {
  float4 r;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3},[%4];" : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w) : "l"(p) : "memory");
  return r;
}
DEVICE void give_to_ctas(float4* p, float4 x) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0],{%1,%2,%3,%4};" ::"l"(p), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}
DEVICE void let_others_run() {}
// Counts one more; what the calling thread (and, by a barrier before, its CTA) wrote is visible to whoever sees the new count, and what the
// earlier callers wrote is visible afterwards.
DEVICE u32 take_ticket(u32* p) {
  u32 r;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0,[%1],1;" : "=r"(r) : "l"(p) : "memory");
  return r;
}
DEVICE float shfl_xor(float v, int m) { return __shfl_xor_sync(0xffffffffu, v, m); }
DEVICE int shfl(int v, int l) { return __shfl_sync(0xffffffffu, v, l); }
DEVICE float shfl(float v, int l) { return __shfl_sync(0xffffffffu, v, l); }
DEVICE int vote_any(int p) { return __any_sync(0xffffffffu, p); }
DEVICE void syncwarp() { __syncwarp(); }
DEVICE void syncblock() { __syncthreads(); }
DEVICE void named_bar(int id, int n) { asm volatile("bar.sync %0,%1;" ::"r"(id), "r"(n) : "memory"); }
#if STAND_IN == 2
DEVICE void mma884(float (&c)[8], u32 a0, u32 a1, u32 b0, u32 b1) {  // two chains of two: c0 needs the previous call's c2 (now c6), c2 needs c0
  asm volatile("fma.rn.f32 %0,%4,%6,%0; fma.rn.f32 %1,%5,%7,%1; fma.rn.f32 %2,%8,%0,%2; fma.rn.f32 %3,%9,%1,%3;"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "f"(__uint_as_float(a0)), "f"(__uint_as_float(a1)), "f"(c[6]), "f"(c[7]), "f"(__uint_as_float(b0)), "f"(__uint_as_float(b1)));
#pragma unroll
  for (int i = 0; i < 4; i++) {  // renaming only: keeps all eight accumulators live
    float t = c[i];
    c[i] = c[i + 4];
    c[i + 4] = t;
  }
}
DEVICE void mma884_rr(float (&c)[8], u32 a0, u32 a1, u32 b0, u32 b1) { mma884(c, a0, a1, b0, b1); }
#elif STAND_IN == 3
DEVICE void mma884(float (&c)[8], u32 a0, u32 a1, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(b0));
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
               : "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
               : "r"(a0), "r"(a1), "r"(b1));
  asm volatile("fma.rn.f32 dmy0,%0,%1,dmy0; fma.rn.f32 dmy1,%1,%0,dmy1;" ::"f"(__uint_as_float(a0)), "f"(__uint_as_float(b0)));
}
DEVICE void mma884_rr(float (&c)[8], u32 a0, u32 a1, u32 b0, u32 b1) { mma884(c, a0, a1, b0, b1); }
#else
#define MMA_ASM(LAYOUT)                                                                                                                    \
  asm volatile("mma.sync.aligned.m8n8k4." LAYOUT ".f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9},{%10,%11},{%0,%1,%2,%3,%4,%5,%6,%7};" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])                            \
               : "r"(a0), "r"(a1), "r"(b0), "r"(b1))
DEVICE void mma884(float (&c)[8], u32 a0, u32 a1, u32 b0, u32 b1) { MMA_ASM("row.col"); }     // B: a lane holds 4 k of one column
DEVICE void mma884_rr(float (&c)[8], u32 a0, u32 a1, u32 b0, u32 b1) { MMA_ASM("row.row"); }  // B: a lane holds 4 columns of one k
#endif
#endif
// Offset in a stream to offset in memory: the same, unless the data are stretched.
DEVICE int spread(int o) { return SPREAD == 4 ? ((o >> 6) << 8) + (o & 63) : o; }
// Fragment maps of m8n8k4: four independent 8x8 tiles, one per quadpair = lanes {4q..4q+3, 4q+16..4q+19}.
DEVICE int quadpair(int lane) { return (lane >> 2) & 3; }
DEVICE int row_a(int lane) { return (lane & 3) + ((lane >> 4) << 2); }                       // A (row): the lane's row; B (col): its column
DEVICE int row_c(int lane, int i) { return (lane & 1) + (i & 2) + ((lane >> 4) << 2); }      // C: row of accumulator i
DEVICE int col_c(int lane, int i) { return (i & 1) + (lane & 2) + (i & 4); }                 // C: column of accumulator i
