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
// Weights: two register buffers, the next unit is always in flight. Activations: staged in shared memory, two buffers, one barrier per unit for the
// NW warps that share a slice of K.
template <int MT, int NT, int NW, int KW, bool WIDE, bool GATED>
DEVICE void linear(const LinearArgs& p) {
  SHARED_BYTES(sm);
  using T = Tile<MT, NT, NW, KW, WIDE>;
  constexpr int CH = T::CHUNKS;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, nw = warp % NW, kw = warp / NW, M = p.m, U = p.k >> 6, tiles = ((p.n + 31) >> 5) * (GATED ? 2 : 1),
            n = (U - kw + KW - 1) / KW;  // units of this warp
  T tile;
  tile.set(nw, kw, smem_base(sm));
  tile.seek(p.weight, (int)(blockIdx.x * NW + nw) * NT, tiles, U, kw);
  float acc[T::ROWS][T::PARTS][8];
#pragma unroll
  for (int m = 0; m < T::ROWS; m++)
#pragma unroll
    for (int t = 0; t < T::PARTS; t++)
#pragma unroll
      for (int i = 0; i < 8; i++) acc[m][t][i] = 0.f;
  typename T::Weights buf[2] = {};
  if (n > 0) tile.load(buf[0]);
  const int g = nw * 32 + lane;
  const bool on = MT * 64 >= NW * 32 || g < MT * 64;
  // Rows past M: clamped to the last row (few chunks) or left zero (fewer registers). Either way their results are not stored.
  constexpr bool CLAMP = CH <= 2 && NW * KW < 24;
  uint4 staged[CH];
  u32 offset[CLAMP ? CH : 1];
  const u32 rows_apart = NW * 4 * p.a_stride;
  auto source = [&](int c) { return p.a + (CLAMP ? offset[CLAMP ? c : 0] : offset[0] + c * rows_apart); };
  auto present = [&](int c) { return CLAMP ? on : c * NW * 4 + (g >> 3) < M; };
#pragma unroll
  for (int c = 0; c < CH; c++) staged[c] = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int c = 0; c < (CLAMP ? CH : 1); c++)
    offset[c] = (u32)(CLAMP ? min(c * NW * 4 + (g >> 3), M - 1) : g >> 3) * p.a_stride + (g & 7) * 8 + (kw << 6);
  if (n > 0)
#pragma unroll
    for (int c = 0; c < CH; c++)
      if (present(c)) staged[c] = ldg128(source(c));
  for (int i = 0; i < n;) {
#pragma unroll
    for (int b = 0; b < 2; b++) {
      if (b && i >= n) break;
      if (on) tile.stage(staged, b);
      auto together = [&]() {
        if (MT == 1 && NW == 1) syncwarp();
        else named_bar(kw + 1, NW * 32);
      };
      if (MT == 1) together();
#pragma unroll
      for (int c = 0; c < (CLAMP ? CH : 1); c++) offset[c] += KW * 64;
      const bool more = i + 1 < n;
      if (MT == 1) {  // few products: the loads are early anyway, and a predicate more spills at 64 registers
        if (more) {
#pragma unroll
          for (int c = 0; c < CH; c++)
            if (present(c)) staged[c] = ldg128(source(c));
          tile.load(buf[1 - b]);
        }
      } else {  // in front of the barrier, across which neither they nor the products move
#pragma unroll
        for (int c = 0; c < CH; c++) ldg128_if(more && present(c), staged[c], source(c));
        tile.load_if(more, buf[1 - b]);
        together();
      }
      tile.multiply(acc, buf[b], b);
      i++;
    }
  }
  syncblock();
  tile.template finish<32>(acc, reinterpret_cast<float4*>(sm), nw, kw, GATED, p.scale, p.up_scale, p.out, p.out_stride, blockIdx.x, M, p.n);
}
// For many rows, where registers decide how many warps there are: activations go to shared memory a few pieces at a time, between the products,
// and a half of the weights is fetched into the registers that its predecessor has just left.
template <int MT, int NT, int NW, int KW, bool WIDE, bool GATED>
DEVICE void linear_pieces(const LinearArgs& p) {
  SHARED_BYTES(sm);
  using T = Tile<MT, NT, NW, KW, WIDE>;
  constexpr int CH = T::CHUNKS, PER = (CH + 3) / 4;  // pieces at a time, in four turns
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, nw = warp % NW, kw = warp / NW, M = p.m, U = p.k >> 6, tiles = ((p.n + 31) >> 5) * (GATED ? 2 : 1),
            n = (U - kw + KW - 1) / KW;
  T tile;
  tile.set(nw, kw, smem_base(sm));
  tile.seek(p.weight, (int)(blockIdx.x * NW + nw) * NT, tiles, U, kw);
  float acc[T::ROWS][T::PARTS][8];
#pragma unroll
  for (int m = 0; m < T::ROWS; m++)
#pragma unroll
    for (int t = 0; t < T::PARTS; t++)
#pragma unroll
      for (int i = 0; i < 8; i++) acc[m][t][i] = 0.f;
  typename T::Weights w = {};
  const int g = nw * 32 + lane;
  const bool on = MT * 64 >= NW * 32 || g < MT * 64;
  const u32 rows_apart = NW * 4 * p.a_stride;
  const u16* from = p.a + (size_t)(g >> 3) * p.a_stride + (g & 7) * 8 + (kw << 6);
  auto fetch = [&](uint4& to, int c, bool more) { ldg128_if(more && on && c * NW * 4 + (g >> 3) < M, to, from + c * rows_apart); };
  uint4 piece[2][PER] = {};  // of rows past M: anything, their results are not stored
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
    if (NW == 1) syncwarp();
    else named_bar(kw + 1, NW * 32);
    tile.multiply(acc, w, parity, [&](int q) {
      if (q == 3) tile.load_half_if(more, w, 0);
      if (q == 7) tile.load_half_if(more, w, 1);
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
  syncblock();
  tile.template finish<32>(acc, reinterpret_cast<float4*>(sm), nw, kw, GATED, p.scale, p.up_scale, p.out, p.out_stride, blockIdx.x, M, p.n);
}
#define VARIANT(HOW, NAME, THREADS, CTAS, ...)                                  \
  KERNEL(linear_##NAME, THREADS, CTAS)(LinearArgs p) {                          \
    MMA_BEGIN HOW<__VA_ARGS__, false>(p);                                       \
    MMA_END(p.out)                                                              \
  }                                                                             \
  EXPORT(linear_##NAME)                                                         \
  KERNEL(swiglu_##NAME, THREADS, CTAS)(LinearArgs p) {                          \
    MMA_BEGIN HOW<__VA_ARGS__, true>(p);                                        \
    MMA_END(p.out)                                                              \
  }                                                                             \
  EXPORT(swiglu_##NAME)
#define LINEAR(MT, NT, NW, KW, CTAS) VARIANT(linear, MT##_##NT##_##NW##_##KW, NW* KW * 32, CTAS, MT, NT, NW, KW, false)
#define WIDE(MT, NW, KW) VARIANT(linear, MT##w_1_##NW##_##KW, NW* KW * 32, 1, MT, 1, NW, KW, true)
#define PIECES(MT, NT, NW, KW) VARIANT(linear_pieces, MT##p_##NT##_##NW##_##KW, NW* KW * 32, 1, MT, NT, NW, KW, false)
#define WIDE_PIECES(MT, NW, KW) VARIANT(linear_pieces, MT##wp_1_##NW##_##KW, NW* KW * 32, 1, MT, 1, NW, KW, true)
#ifndef EXPLORE
LINEAR(1, 1, 2, 8, 2)
PIECES(2, 1, 2, 8)
PIECES(2, 1, 4, 4)
WIDE(4, 2, 6)
WIDE_PIECES(4, 4, 4)
WIDE(8, 2, 4)
WIDE_PIECES(8, 4, 3)
#endif
