// NVFP4 W4A16 linear: out[M, N] FP16 = global scale * A[M, K] FP16 x (E2M1 codes x E4M3 scale per 16 of K)[N, K]^T, FP32 accumulate, M <= 64.
// Rounded once, at the end. K is split over the warps of a CTA and added in order; the result does not depend on timing.
// Gated: the weights hold a gate and an up projection in turn, tile by tile, and out = silu(gate) * up, in FP32 and rounded once.
#include "nvfp4_tile.cuh"
struct LinearArgs {
  const u8* weight;  // packed, see nvfp4.cuh; tiles of 32 columns, the last one filled up with zero codes
  const u16* a;
  u16* out;
  float scale, up_scale;     // global scales; the second one of the up projection, gated only
  int m, n, k;               // n: logical columns of the output, a multiple of 8; k: a multiple of 64
  int a_stride, out_stride;  // halves from row to row, multiples of 8
};
// Registers decide how many warps there are, so half a unit of weights is fetched into the registers that its predecessor has just left. Where that
// is too late to wait for memory, the unit goes to L2 before (AHEAD 1: when its predecessor's turn begins; 2: one unit earlier; 0: not at all).
// Activations: staged in shared memory, two buffers, one barrier a unit for the NW warps that share a slice of K; stored between the products, a
// quarter at a time, or (WHOLE) all at the end of a unit at whose start they were fetched.
template <int MT, int NT, int NW, int KW, bool WIDE, bool WHOLE, int AHEAD, bool GATED>
DEVICE void linear(const LinearArgs& p) {
  SHARED_BYTES(sm);
  using T = Tile<MT, NT, NW, KW, WIDE>;
  constexpr int CH = T::CHUNKS, PER = WHOLE ? CH : (CH + 3) / 4;  // pieces of the activations at a time, in one turn or four
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, nw = warp % NW, kw = warp / NW, M = p.m, U = p.k >> 6, tiles = ((p.n + 31) >> 5) * (GATED ? 2 : 1),
            n = (U - kw + KW - 1) / KW;  // units of this warp
  T tile;
  tile.set(nw, kw, smem_base(sm));
  tile.seek(p.weight, (int)(blockIdx.x * NW + nw) * NT, tiles, U, kw);
  float acc[T::ROWS][T::PARTS][8];
  clear(acc);
  typename T::Weights w = {};
  const int g = nw * 32 + lane;
  const bool on = MT * 64 >= NW * 32 || g < MT * 64;
  const u32 rows_apart = NW * 4 * p.a_stride;
  const u16* from = p.a + (size_t)(g >> 3) * p.a_stride + (g & 7) * 8 + (kw << 6);
  auto fetch = [&](uint4& to, int c, bool more) { ldg128_if(more && on && c * NW * 4 + (g >> 3) < M, to, from + c * rows_apart); };
  uint4 piece[WHOLE ? 1 : 2][PER] = {};  // of rows past M: anything, their results are not stored
  tile.load_half_if(n > 0, w, 0);
  tile.load_half_if(n > 0, w, 1);
#pragma unroll
  for (int c = 0; c < CH; c++) {
    fetch(piece[0][0], c, n > 0);
    if (on) tile.stage_one(piece[0][0], c, 0);
  }
  from += KW * 64;
  for (int i = 0; i < n; i++) {
    const bool more = i + 1 < n;
    const int parity = i & 1;
    if (WHOLE)
#pragma unroll
      for (int c = 0; c < CH; c++) fetch(piece[0][c], c, more);
    if (NW == 1) syncwarp();
    else named_bar(kw + 1, NW * 32);
    tile.multiply(acc, w, parity, [&](int q) {
      if (AHEAD && q == 0 && i + AHEAD < n) tile.prefetch(AHEAD - 1);
      if (q == 3) tile.load_half_if(more, w, 0);
      if (q == 7) tile.load_half_if(more, w, 1);
      if (WHOLE) {
        if (q == 7 && on)
#pragma unroll
          for (int c = 0; c < CH; c++) tile.stage_one(piece[0][c], c, 1 - parity);
        return;
      }
#pragma unroll
      for (int u = 0; u < 4; u++) {
#pragma unroll
        for (int j = 0; j < PER; j++)
          if (q == (u == 3 ? 7 : 2 * u + 2) && u * PER + j < CH && on) tile.stage_one(piece[u & 1][j], u * PER + j, 1 - parity);
      }
#pragma unroll
      for (int j = 0; j < PER; j++)
        if (q % 2 == 0 && q / 2 * PER + j < CH) fetch(piece[q / 2 & 1][j], q / 2 * PER + j, more);
    });
    from += KW * 64;
  }
#ifdef MEET_EQUALLY
  if (NW > 1 && n < (U + KW - 1) / KW) named_bar(kw + 1, NW * 32);
#endif
  syncblock();
  tile.template finish<32>(acc, reinterpret_cast<float4*>(sm), nw, kw, GATED, p.scale, p.up_scale, p.out, p.out_stride, blockIdx.x, M, p.n);
}
#define VARIANT(NAME, THREADS, ...)                 \
  KERNEL(linear_##NAME, THREADS, 1)(LinearArgs p) { \
    MMA_BEGIN linear<__VA_ARGS__, false>(p);        \
    MMA_END(p.out)                                  \
  }                                                 \
  EXPORT(linear_##NAME)                             \
  KERNEL(swiglu_##NAME, THREADS, 1)(LinearArgs p) { \
    MMA_BEGIN linear<__VA_ARGS__, true>(p);         \
    MMA_END(p.out)                                  \
  }                                                 \
  EXPORT(swiglu_##NAME)
#define LINEAR(MT, NT, NW, KW, WHOLE, AHEAD) VARIANT(MT##_##NT##_##NW##_##KW, NW* KW * 32, MT, NT, NW, KW, false, WHOLE, AHEAD)
#define WIDE(MT, NW, KW, WHOLE, AHEAD) VARIANT(MT##w_1_##NW##_##KW, NW* KW * 32, MT, 1, NW, KW, true, WHOLE, AHEAD)
#ifndef EXPLORE
LINEAR(1, 1, 2, 8, false, 1)
LINEAR(2, 1, 2, 8, false, 0)
LINEAR(2, 1, 4, 4, false, 0)
LINEAR(4, 2, 1, 8, true, 1)
LINEAR(4, 2, 2, 4, true, 1)
WIDE(8, 2, 4, true, 0)
WIDE(8, 4, 2, true, 0)
#endif
