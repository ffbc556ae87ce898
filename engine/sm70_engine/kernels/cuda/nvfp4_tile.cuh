// What the NVFP4 linears share: the tile of a warp, its product with staged activations, and the ordered sum over the slices of K.
//
// CTA = NW * KW warps: NW column groups, KW slices of K (units kw, kw + KW, ...); MT row tiles of 8. Two ways to use the four quadpairs of m8n8k4:
//   plain  the same 8 rows, 8 columns each: 32 columns a product; NT column tiles of 32 a warp. An activation fragment serves 32 * NT columns.
//   WIDE   two groups of 8 rows by two groups of 8 columns: 16 x 16 a product. An activation fragment has 16 rows instead of 8, at the same cost
//          of shared memory; each weight is unpacked in two lanes. Pays where fragments of activations are the limit (many rows). NT = 1.
#pragma once
#include "nvfp4.cuh"
DEVICE float silu(float x) { return x / (1.f + ex2(x * -1.44269504f)); }
template <int ROWS, int PARTS>
DEVICE void clear(float (&acc)[ROWS][PARTS][8]) {
#pragma unroll
  for (int m = 0; m < ROWS; m++)
#pragma unroll
    for (int t = 0; t < PARTS; t++)
#pragma unroll
      for (int i = 0; i < 8; i++) acc[m][t][i] = 0.f;
}
constexpr int tiles_at_once(int tiles, int warps, int most) {  // of the sum: `most` KB of shared memory
  while (tiles * warps > most) tiles /= 2;
  return tiles;
}
template <int MT, int NT, int NW, int KW, bool WIDE>
struct Tile {
  static constexpr int PARTS = WIDE ? 2 : NT, ROWS = WIDE ? MT / 2 : MT, UNIT = 1152 * SPREAD;  // parts of a unit's columns; row tiles or pairs of them
  static constexpr int STAGE = MT * 1152, CHUNKS = (MT * 2 + NW - 1) / NW;  // staged: [MT][8 k8][8 rows + 1 pad] 16 bytes; chunks per thread and unit
  static_assert(!WIDE || (NT == 1 && MT % 2 == 0), "wide: pairs of row tiles, one column tile");
  struct Weights {
    Unit part[PARTS];
  };
  const u8* at[PARTS];  // the stream of each column tile
  int lane, qp, codes, to_scale;
  u32 put, get;
  MEMBER void set(int nw, int kw, u32 base) {  // base: of the staged activations
    lane = threadIdx.x & 31;
    qp = quadpair(lane);
    const int holder = WIDE ? (lane & 0x13) | (qp & 1) << 2 : lane;  // whose weights the lane reads; wide: of columns 0..15, then of 16..31
    codes = spread(holder * 16);
    to_scale = 1024 * SPREAD + spread(4 * holder) - codes;
    const int g = nw * 32 + lane;
    base += kw * 2 * STAGE;
    put = base + ((g >> 3) >> 3) * 1152 + ((g >> 3) & 7) * 16 + (g & 7) * 144;
    get = base + (WIDE ? qp >> 1 : 0) * 1152 + row_a(lane) * 16;
  }
  // The weights of column tile `first` (and those behind it) from unit `unit` on; tiles past the last one read the last one.
  MEMBER void seek(const u8* weight, int first, int tiles, int units, int unit) {
#pragma unroll
    for (int t = 0; t < (WIDE ? 1 : NT); t++) at[t] = weight + ((size_t)min(first + t, tiles - 1) * units + unit) * UNIT + codes;
  }
  MEMBER void load(Weights& to) {
    each(to, [](auto& x, const u8* from) { stream(x, from); });
  }
  template <class Read>
  MEMBER void each(Weights& to, const Read& read) {
#pragma unroll
    for (int t = 0; t < PARTS; t++) {
      const u8* from = WIDE ? at[0] + t * 128 * SPREAD : at[t];
      read(to.part[t].a, from);
      read(to.part[t].b, from + 512 * SPREAD);
      read(to.part[t].s, WIDE ? at[0] + to_scale + t * 32 : at[t] + to_scale);
    }
#pragma unroll
    for (int t = 0; t < (WIDE ? 1 : NT); t++) at[t] += KW * UNIT;
  }
  // The same in halves, unless `on` is false, without a branch: k 0..31 with the scales, or the rest, behind which the stream moves on either way.
  MEMBER void load_half_if(bool on, Weights& to, int half) {
#pragma unroll
    for (int t = 0; t < PARTS; t++) {
      const u8* from = WIDE ? at[0] + t * 128 * SPREAD : at[t];
      stream_if(on, half ? to.part[t].b : to.part[t].a, from + half * 512 * SPREAD);
      if (!half) stream_if(on, to.part[t].s, WIDE ? at[0] + to_scale + t * 32 : at[t] + to_scale);
    }
    if (half)
#pragma unroll
      for (int t = 0; t < (WIDE ? 1 : NT); t++) at[t] += KW * UNIT;
  }
  // Into L2: the unit that lies `ahead` units of this warp behind the one that is loaded next.
  MEMBER void prefetch(int ahead) {
#pragma unroll
    for (int t = 0; t < (WIDE ? 1 : NT); t++)
#pragma unroll
      for (int i = 0; i < 18 * SPREAD; i += 32)  // 64 bytes a lane; of stretched data all that lies between, as loads fetch it
        if (i + lane < 18 * SPREAD) prefetch_l2(at[t] + ahead * KW * UNIT - codes + (i + lane) * 64);
  }
  MEMBER void stage_one(const uint4& x, int c, int parity) { sst128(put + parity * STAGE + (c * NW * 4 >> 3) * 1152 + (c * NW * 4 & 7) * 16, x); }
  MEMBER void stage(const uint4 (&x)[CHUNKS], int parity) {
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) stage_one(x[c], c, parity);
  }
  MEMBER void multiply(float (&acc)[ROWS][PARTS][8], const Weights& w, int parity) {
    multiply(acc, w, parity, [](int) {});
  }
  // `between(q)`: what to do behind the products of eighth q of the unit.
  template <class Between>
  MEMBER void multiply(float (&acc)[ROWS][PARTS][8], const Weights& w, int parity, const Between& between) {
    u32 S[PARTS][4];
#pragma unroll
    for (int t = 0; t < PARTS; t++) scale_halves(w.part[t].s, S[t]);
#pragma unroll
    for (int q = 0; q < 8; q++) {
      u32 h[PARTS][4];
#pragma unroll
      for (int t = 0; t < PARTS; t++) {
        const uint4& x = q < 4 ? w.part[t].a : w.part[t].b;
        e2m1x8((q & 3) == 0 ? x.x : (q & 3) == 1 ? x.y : (q & 3) == 2 ? x.z : x.w, S[t][q >> 1], h[t]);
      }
#pragma unroll
      for (int m = 0; m < ROWS; m++) {
        const uint4 a = sld128(get + parity * STAGE + m * (WIDE ? 2 : 1) * 1152 + q * 144);
#pragma unroll
        for (int t = 0; t < PARTS; t++) mma884(acc[m][t], a.x, a.y, h[t][0], h[t][1]);
#pragma unroll
        for (int t = 0; t < PARTS; t++) mma884(acc[m][t], a.z, a.w, h[t][2], h[t][3]);
      }
      between(q);
    }
  }
  // Adds the slices of K in order, at most AT accumulator tiles at a time (16-byte accesses without bank conflicts), and stores row by row.
  // Gated: a gate tile lies in front of its up tile, out = silu(gate) * up. Every thread of the CTA comes here, behind a barrier.
  template <int AT>
  MEMBER void finish(const float (&acc)[ROWS][PARTS][8], float4* part, int nw, int kw, int gated, float scale, float up_scale, u16* out, int stride,
                     int group, int m_rows, int n) {
    constexpr int TT = ROWS * PARTS, CT = tiles_at_once(TT, NW * KW, AT), TILES = WIDE ? 1 : NT;
    static_assert(TILES == 1 ? NW % 2 == 0 || NW == 1 : CT % 2 == 0, "a gate tile and its up tile must meet");
    scale *= 128.f;
    up_scale *= 128.f;
#pragma unroll
    for (int c0 = 0; c0 < TT; c0 += CT) {
      if (c0) syncblock();
#pragma unroll
      for (int c = 0; c < CT; c++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const float(&x)[8] = acc[(c0 + c) / PARTS][(c0 + c) % PARTS];
          part[((kw * NW + nw) * CT + c) * 64 + k * 32 + lane] = make_float4(x[4 * k], x[4 * k + 1], x[4 * k + 2], x[4 * k + 3]);
        }
      syncblock();
      auto sum = [&](int e, float by) {
        float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int k = 0; k < KW; k++) {
          const float4 y = part[k * NW * CT * 64 + e];
          x.x += y.x;
          x.y += y.y;
          x.z += y.z;
          x.w += y.w;
        }
        return make_float4(x.x * by, x.y * by, x.z * by, x.w * by);
      };
      constexpr int STEP = TILES == 1 ? CT * 64 : 64;  // from a gate's element to its up's
      for (int i = threadIdx.x; i < (NW * CT * 64 >> gated); i += NW * KW * 32) {
        const int e = gated ? i / STEP * 2 * STEP + i % STEP : i;
        float4 x = sum(e, scale);
        if (gated) {
          const float4 y = sum(e + STEP, up_scale);
          x = make_float4(silu(x.x) * y.x, silu(x.y) * y.y, silu(x.z) * y.z, silu(x.w) * y.w);
        }
        const int l = e & 31, k = e >> 5 & 1, c = c0 + (e >> 6) % CT, m = c / PARTS, t = c % PARTS, q = quadpair(l);
        const int tile = ((group * NW + (e >> 6) / CT) * TILES + (WIDE ? 0 : t)) >> gated;
        const int row = (WIDE ? 2 * m + (q >> 1) : m) * 8 + row_c(l, 0);
        const int column = tile * 32 + (WIDE ? t * 16 + (q & 1) * 8 : q * 8) + col_c(l, 4 * k);
        if (column < n) {
          if (row < m_rows) *reinterpret_cast<u32*>(out + (size_t)row * stride + column) = pack2(x.x, x.y);
          if (row + 2 < m_rows) *reinterpret_cast<u32*>(out + (size_t)(row + 2) * stride + column) = pack2(x.z, x.w);
        }
      }
    }
  }
};
