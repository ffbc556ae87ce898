// NVFP4 W4A16 linear: out[M, N] FP16 = global scale * A[M, K] FP16 x (E2M1 codes x E4M3 scale per 16 of K)[N, K]^T, FP32 accumulate, M <= 64.
// Rounded once, at the end. K is split over the warps of a CTA and added in order; the result does not depend on timing.
// Gated: the weights hold a gate and an up projection in turn, tile by tile, and out = silu(gate) * up, in FP32 and rounded once.
#include "nvfp4.cuh"
struct LinearArgs {
  const u8* weight;  // packed, see nvfp4.cuh; tiles of 32 columns, the last one filled up with zero codes
  const u16* a;
  u16* out;
  float scale, up_scale;     // global scales; the second one of the up projection, gated only
  int m, n, k;               // n: logical columns of the output, a multiple of 8; k: a multiple of 64
  int a_stride, out_stride;  // halves from row to row, multiples of 8
};
DEVICE float silu(float x) { return x / (1.f + ex2(x * -1.44269504f)); }
constexpr int tiles_at_once(int tiles, int warps) {  // of the final reduction: at most 32 KB
  while (tiles * warps > 32) tiles /= 2;
  return tiles;
}
// CTA = NW * KW warps: NW column groups of 32 * NT columns, KW slices of K (units kw, kw + KW, ...), MT row tiles of 8.
// Weights: two register buffers per column tile, the next unit is always in flight. Activations: staged in shared memory, two buffers, one
// barrier per unit for the NW warps that share a K slice.
template <int MT, int NT, int NW, int KW, bool GATED>
DEVICE void linear(const LinearArgs& p) {
  SHARED_BYTES(sm);
  constexpr int TILE = MT * 1152, CH = (MT * 2 + NW - 1) / NW, UNIT = 1152 * SPREAD;  // A tile: [MT][8 k8][8 rows + 1 pad] 16 bytes; CH chunks per thread and unit
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, nw = warp % NW, kw = warp / NW, M = p.m, U = p.k >> 6, T = ((p.n + 31) >> 5) * (GATED ? 2 : 1),
            n = (U - kw + KW - 1) / KW;  // units of this warp
  const u8* at[NT];
  const int to_scale = SPREAD == 1 ? 1024 - 12 * lane : 1024 * SPREAD + spread(4 * lane) - spread(16 * lane);
#pragma unroll
  for (int t = 0; t < NT; t++)
    at[t] = p.weight + ((size_t)min((int)(blockIdx.x * NW + nw) * NT + t, T - 1) * U + kw) * UNIT + spread(lane * 16);
  float acc[MT][NT][8];
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
      for (int i = 0; i < 8; i++) acc[m][t][i] = 0.f;
  Unit buf[2][NT];
  auto load = [&](Unit(&to)[NT]) {
#pragma unroll
    for (int t = 0; t < NT; t++) {
      to[t].a = stream128(at[t]);
      to[t].b = stream128(at[t] + 512 * SPREAD);
      to[t].s = stream32(at[t] + to_scale);
      at[t] += KW * UNIT;
    }
  };
  if (n > 0) load(buf[0]);
  const int g = nw * 32 + lane;
  const bool on = MT * 64 >= NW * 32 || g < MT * 64;
  // Rows past M: clamped to the last row (few chunks) or left zero (fewer registers). Either way their results are not stored.
  constexpr bool CLAMP = CH <= 2 && NW * KW < 24;
  uint4 staged[CH];
  u32 offset[CLAMP ? CH : 1];
  const u32 rows_apart = NW * 4 * p.a_stride;
  auto source = [&](int c) { return p.a + (CLAMP ? offset[CLAMP ? c : 0] : offset[0] + c * rows_apart); };
  auto present = [&](int c) { return CLAMP ? on : c * NW * 4 + (g >> 3) < M; };
  const u32 base = smem_base(sm) + kw * 2 * TILE;
  const u32 put = base + ((g >> 3) >> 3) * 1152 + ((g >> 3) & 7) * 16 + (g & 7) * 144, get = base + row_a(lane) * 16;
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
      if (on)
#pragma unroll
        for (int c = 0; c < CH; c++) sst128(put + b * TILE + (c * NW * 4 >> 3) * 1152 + (c * NW * 4 & 7) * 16, staged[c]);
      if (NW == 1) syncwarp();
      else named_bar(kw + 1, NW * 32);
#pragma unroll
      for (int c = 0; c < (CLAMP ? CH : 1); c++) offset[c] += KW * 64;
      if (i + 1 < n) {
#pragma unroll
        for (int c = 0; c < CH; c++)
          if (present(c)) staged[c] = ldg128(source(c));
        load(buf[1 - b]);
      }
      u32 S[NT][4];
#pragma unroll
      for (int t = 0; t < NT; t++) scale_halves(buf[b][t].s, S[t]);
#pragma unroll
      for (int q = 0; q < 8; q++) {
        u32 h[NT][4];
#pragma unroll
        for (int t = 0; t < NT; t++) {
          const uint4& x = q < 4 ? buf[b][t].a : buf[b][t].b;
          e2m1x8((q & 3) == 0 ? x.x : (q & 3) == 1 ? x.y : (q & 3) == 2 ? x.z : x.w, S[t][q >> 1], h[t]);
        }
#pragma unroll
        for (int m = 0; m < MT; m++) {
          const uint4 a = sld128(get + b * TILE + m * 1152 + q * 144);
#pragma unroll
          for (int t = 0; t < NT; t++) {
            mma884(acc[m][t], a.x, a.y, h[t][0], h[t][1]);
            mma884(acc[m][t], a.z, a.w, h[t][2], h[t][3]);
          }
        }
      }
      i++;
    }
  }
  // Ordered sum over the KW slices, in accumulator order (16-byte accesses without bank conflicts), CT tiles at a time.
  constexpr int TT = MT * NT, CT = tiles_at_once(TT, NW * KW);
  float4* part = reinterpret_cast<float4*>(sm);
  const float scale = p.scale * 128.f, up_scale = p.up_scale * 128.f;
  static_assert(!GATED || (NT == 1 ? NW % 2 == 0 : CT % 2 == 0), "a gate tile and its up tile must meet");
#pragma unroll
  for (int c0 = 0; c0 < TT; c0 += CT) {
    syncblock();
#pragma unroll
    for (int c = 0; c < CT; c++) {
      const int m = (c0 + c) / NT, t = (c0 + c) % NT;
#pragma unroll
      for (int k = 0; k < 2; k++)
        part[((kw * NW + nw) * CT + c) * 64 + k * 32 + lane] =
            make_float4(acc[m][t][4 * k], acc[m][t][4 * k + 1], acc[m][t][4 * k + 2], acc[m][t][4 * k + 3]);
    }
    syncblock();
    auto sum = [&](int e) {
      float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int k = 0; k < KW; k++) {
        const float4 y = part[k * NW * CT * 64 + e];
        x.x += y.x;
        x.y += y.y;
        x.z += y.z;
        x.w += y.w;
      }
      return x;
    };
    constexpr int STEP = NT == 1 ? CT * 64 : 64;  // from a gate's element to its up's
    for (int i = threadIdx.x; i < NW * CT * 64 / (GATED ? 2 : 1); i += NW * KW * 32) {
      const int e = GATED ? i / STEP * 2 * STEP + i % STEP : i;
      float4 x = sum(e);
      if (GATED) {
        const float4 u = sum(e + STEP);
        x.x = silu(x.x * scale) * (u.x * up_scale);
        x.y = silu(x.y * scale) * (u.y * up_scale);
        x.z = silu(x.z * scale) * (u.z * up_scale);
        x.w = silu(x.w * scale) * (u.w * up_scale);
      } else {
        x.x *= scale;
        x.y *= scale;
        x.z *= scale;
        x.w *= scale;
      }
      const int ln = e & 31, k4 = (e >> 5) & 1, c = c0 + (e >> 6) % CT, tile = ((int)blockIdx.x * NW + (e >> 6) / CT) * NT + c % NT,
                r = c / NT * 8 + row_c(ln, 0), col = (GATED ? tile / 2 : tile) * 32 + quadpair(ln) * 8 + col_c(ln, 4 * k4);
      if (col < p.n) {
        if (r < M) *reinterpret_cast<u32*>(p.out + (size_t)r * p.out_stride + col) = pack2(x.x, x.y);
        if (r + 2 < M) *reinterpret_cast<u32*>(p.out + (size_t)(r + 2) * p.out_stride + col) = pack2(x.z, x.w);
      }
    }
  }
}
#define LINEAR(MT, NT, NW, KW, CTAS)                                                        \
  KERNEL(linear_##MT##_##NT##_##NW##_##KW, NW* KW * 32, CTAS)(LinearArgs p) {               \
    MMA_BEGIN linear<MT, NT, NW, KW, false>(p);                                             \
    MMA_END(p.out)                                                                          \
  }                                                                                         \
  EXPORT(linear_##MT##_##NT##_##NW##_##KW)                                                  \
  KERNEL(swiglu_##MT##_##NT##_##NW##_##KW, NW* KW * 32, CTAS)(LinearArgs p) {               \
    MMA_BEGIN linear<MT, NT, NW, KW, true>(p);                                              \
    MMA_END(p.out)                                                                          \
  }                                                                                         \
  EXPORT(swiglu_##MT##_##NT##_##NW##_##KW)
LINEAR(1, 1, 2, 8, 2)
LINEAR(2, 1, 2, 8, 1)
LINEAR(2, 1, 4, 4, 1)
LINEAR(4, 2, 1, 8, 1)
LINEAR(4, 1, 4, 4, 1)
LINEAR(8, 1, 2, 4, 1)
LINEAR(8, 2, 2, 4, 1)
