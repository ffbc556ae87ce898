// NVFP4 for many rows: weights unpacked to FP16, exactly and without the global scale, for a library's matrix product; and silu(gate) * up.
#include "nvfp4.cuh"
struct ExpandArgs {
  const u8* weight;
  u16* out;              // [tiles * 32, 64 * units] halves
  int units, tiles;      // units of 64 along K; tiles of 32 columns to unpack
  int first, step;       // the tile that comes first, and from one to the next (2: gate or up of a gated pair)
};
// A warp a unit; 8 warps. A lane holds a column, so the halves go through shared memory: rows of 128 bytes leave in one piece.
KERNEL(nvfp4_expand, 256, 4)(ExpandArgs a) {
  SHARED_BYTES(sm);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, i = blockIdx.x * 8 + warp, tile = i / a.units, unit = i - tile * a.units;
  if (tile >= a.tiles) return;
  constexpr int PITCH = 144;
  const u8* from = a.weight + ((size_t)(a.first + tile * a.step) * a.units + unit) * 1152 + lane * 16;
  const uint4 codes[2] = {stream128(from), stream128(from + 512)};
  u32 S[4];
  scale_halves(stream32(from + 1024 - 12 * lane), S);
  u8* mine = sm + warp * 32 * PITCH;
  const u32 row = smem_base(mine) + (quadpair(lane) * 8 + row_a(lane)) * PITCH;
#pragma unroll
  for (int q = 0; q < 8; q++) {
    const uint4& x = codes[q >> 2];
    u32 h[4];
    e2m1x8((q & 3) == 0 ? x.x : (q & 3) == 1 ? x.y : (q & 3) == 2 ? x.z : x.w, S[q >> 1], h);
#pragma unroll
    for (int k = 0; k < 4; k++) h[k] = hmul2(h[k], 0x58005800u);  // 128: what comes out of the bits is weight * 2^-7
    sst128(row + q * 16, make_uint4(h[0], h[1], h[2], h[3]));
  }
  syncwarp();
  u16* to = a.out + ((size_t)tile * 32 * a.units + unit) * 64 + (lane & 7) * 8;
#pragma unroll
  for (int r = 0; r < 32; r += 4) {
    const int column = r + (lane >> 3);
    *reinterpret_cast<uint4*>(to + (size_t)column * a.units * 64) = sld128(smem_base(mine) + column * PITCH + (lane & 7) * 16);
  }
}
EXPORT(nvfp4_expand)

struct SiluArgs {
  const u16 *gate, *up;  // [m, n] halves, `stride` from row to row
  u16* out;              // `out_stride` from row to row
  int n, stride, out_stride;  // multiples of 8
};
// grid (rows); FP32 inside, rounded once.
KERNEL(silu_times, 256, 4)(SiluArgs a) {
  for (int i = threadIdx.x * 8; i < a.n; i += blockDim.x * 8) {
    const uint4 x = ldg128(a.gate + (size_t)blockIdx.x * a.stride + i), y = ldg128(a.up + (size_t)blockIdx.x * a.stride + i);
    const u32 g[4] = {x.x, x.y, x.z, x.w}, u[4] = {y.x, y.y, y.z, y.w};
    u32 r[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const float g0 = lof(g[k]), g1 = hif(g[k]);
      r[k] = pack2(g0 / (1.f + ex2(g0 * -1.44269504f)) * lof(u[k]), g1 / (1.f + ex2(g1 * -1.44269504f)) * hif(u[k]));
    }
    *reinterpret_cast<uint4*>(a.out + (size_t)blockIdx.x * a.out_stride + i) = make_uint4(r[0], r[1], r[2], r[3]);
  }
}
EXPORT(silu_times)
