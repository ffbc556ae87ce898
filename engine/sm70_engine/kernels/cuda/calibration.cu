// What a benchmark must know of the card it runs on: clock, useful read rate, launch cost, matrix rate. Not part of any product path.
#include "sm70.cuh"
KERNEL(spin, 32, 1)(u64* out, u32 cycles) {  // cycles and nanoseconds of one busy thread block
  const u64 c0 = clock64();
  u64 g0, g1;
  asm volatile("mov.u64 %0,%globaltimer;" : "=l"(g0));
  while (clock64() - c0 < cycles);
  const u64 c1 = clock64();
  asm volatile("mov.u64 %0,%globaltimer;" : "=l"(g1));
  if (threadIdx.x == 0) {
    out[0] = c1 - c0;
    out[1] = g1 - g0;
  }
}
KERNEL(nothing, 256, 1)(int* p) {
  if (p && threadIdx.x == 1000) *p = 0;
}
KERNEL(read_stream, 256, 1)(const u8* p, u64 pieces, u32* sink) {  // pieces of 16 useful bytes
  u32 s = 0;
  const u64 step = (u64)gridDim.x * 256;
  for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i + 3 * step < pieces; i += 4 * step) {
    uint4 a[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const u64 o = (i + k * step) * 16;
      a[k] = stream128(p + (SPREAD == 4 ? ((o >> 6) << 8) + (o & 63) : o));
    }
#pragma unroll
    for (int k = 0; k < 4; k++) s ^= a[k].x ^ a[k].y ^ a[k].z ^ a[k].w;
  }
  if (s == 0x12345) *sink = s;
}
template <int C>
DEVICE void matrix_rate(float* out, u64* cycles, int n) {
  float c[C][8];
  const u32 a = threadIdx.x * 7 + 1, b = threadIdx.x;
#pragma unroll
  for (int i = 0; i < C; i++)
#pragma unroll
    for (int k = 0; k < 8; k++) c[i][k] = k;
  syncblock();
  const u64 t0 = clock64();
  for (int j = 0; j < n; j++)
#pragma unroll
    for (int i = 0; i < C; i++) mma884(c[i], a, b, a, b);
  syncblock();
  const u64 t1 = clock64();
  float s = 0;
#pragma unroll
  for (int i = 0; i < C; i++)
#pragma unroll
    for (int k = 0; k < 8; k++) s += c[i][k];
  out[blockIdx.x * blockDim.x + threadIdx.x] = s;
  if (threadIdx.x == 0) cycles[blockIdx.x] = t1 - t0;
}
KERNEL(matrix_rate_dependent, 512, 1)(float* out, u64* cycles, int n) {
  MMA_BEGIN matrix_rate<1>(out, cycles, n);
  MMA_END(out)
}
KERNEL(matrix_rate_independent, 512, 1)(float* out, u64* cycles, int n) {
  MMA_BEGIN matrix_rate<4>(out, cycles, n);
  MMA_END(out)
}
