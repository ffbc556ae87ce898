// Prefill attention: many query tokens per sequence against their context, from pages (E4M3, E5M2, FP16) or rows (FP16).
//
// One CTA of 8 warps per multiprocessor works through its items (prefill.py makes them): a row tile of 128 rows (row = token * group + head,
// all heads of a KV head) and a range of steps of 128 tokens. Both products are plain matrix products out of shared memory; a warp's
// m8n8k4 makes 16 x 16 x 4 (quadpair = two halves of rows, two of columns), so that a fragment serves several instructions:
//   S = Q K^T  2 x 4 warps of 64 rows x 32 tokens; Q stays in shared memory, K comes in panels of 32 columns of D
//   O += P V   2 x 4 warps of 64 rows x D/4 columns; P and V come in panels of 16 tokens, 4 of each token warp's
// A panel is fetched two panels ahead, converted to FP16 on its way to shared memory and double-buffered: one barrier a panel. The maxima of
// a step are exchanged once; then every warp makes its part of the next panel of P while the products of this one run.
// FP32 scores, maxima, sums and output; P is FP16 times 2^14. Ranges of a cut row tile leave partials, which prefill_combine adds in order.
// Compiled once per storage format: -DFORMAT=E4M3 | E5M2 | F16.
#include "fp8.cuh"
struct PrefillArgs {
  const u16* q;  // [query tokens, heads, D]
  u16* out;      // the same
  const u8 *key, *value;
  const int *block_table, *work, *merges;  // block_table null: rows, not pages
  float *partial, *stats;                  // [slots][128 * D] in accumulator order, [slots][128] of (max, sum)
  int page, table_stride, block_stride, token_stride, head_stride;  // strides of K and V in bytes
  int q_stride, out_stride, group, window, causal;                  // halves from token to token; as in attention.cuh
  float score_scale, out_scale;
};
struct BridgeArgs {
  const u8* cache;
  const int *block_table, *sequences;  // [sequences][2]: length, first row
  u16 *key, *value;                    // [rows, heads, D]
  int page, table_stride, block_stride, value_offset, token_stride, head_stride, heads;
};
// Forbids keeping what was computed from x: a few integer instructions are cheaper than a register here.
#ifdef EMULATE
#define FORGET(x)
#else
#define FORGET(x) asm volatile("" : "+r"(x))
#endif
constexpr int kItem = 12, kMerge = 8, kRows = 128, kStep = 128;
// Four codes in one word -> halves (byte 0, byte 1) and (byte 2, byte 3); E4M3 comes out as value * 2^-8, its NaN codes as +-480.
DEVICE void fp8_in_order(u32 w, u32& a, u32& b) {
  a = prmt(w, 0, 0x1404);
  b = prmt(w, 0, 0x3424);
  if (FORMAT == E4M3) {
    a = ((a >> 1) & 0x3f803f80u) | (a & 0x80008000u);
    b = ((b >> 1) & 0x3f803f80u) | (b & 0x80008000u);
  }
}
// Where row r of 16 lies among 16 pieces of 16 bytes: no bank conflicts for fragments (rows 0-3 and 8-11 of a quarter warp) nor for storing
// P from accumulators (rows that differ in bits 0, 2 and 3).
DEVICE int slot_of(int r) { return (r & 1) | (r >> 2 & 2) | ((r << 1 ^ r) & 4) | (r << 1 & 8); }
DEVICE int row_of(int s) { return (s & 1) | ((s >> 1 ^ s >> 2) & 2 ? 2 : 0) | (s >> 1 & 4) | (s << 2 & 8); }
// Token of a step whose probability and V are number i of panel p: from warp i / 4 (32 tokens each), the accumulators p & 3 of half p / 4.
DEVICE int panel_token(int p, int i) { return (i >> 2) * 32 + (p >> 2) * 16 + (i & 2) * 4 + (p & 1) + 2 * (i & 1) + 2 * (p & 2); }
template <int N>
struct Int {
  static constexpr int value = N;
};

template <int D>
struct Prefill {
  static constexpr int KP = D / 32, NC = D / 128, CHUNKS = D / 8;  // K panels a step; groups of 32 output columns a warp; pieces of 8 columns
  static constexpr int HALVES = FORMAT == F16 ? 2 : 1;             // a panel is fetched in so many turns, 16 bytes a thread in each
  static constexpr int TURN = FORMAT == E4M3 ? 2 : FORMAT == E5M2 ? 3 : 1;  // after how many of V's four tokens: where no register is spilled
  static constexpr int PAIRS = 4 * NC * 2 * 4;                     // float2 of accumulators a thread holds
  static constexpr int PANEL = 8192, P_PANEL = 4096;
  u8 *sq, *panels, *probabilities;
  float* reduced;         // [rows][4 token warps], where the second panel of probabilities lies at other times
  float *sums, *tops;     // [8 rows of a lane][warp, lane without bit 1]; [rows]: running maxima
  u64* offsets;           // [2][8]: bytes from K's (V's) base to each 16 tokens of a step
  int* limits;            // [2][8]: the last readable token of each 16
  int* info;              // the item, and positions: before the first query, of the first and the last row, the first that a row sees
  enum { SEQUENCE, HEAD, ROW0, ROWS, QUERY0, LENGTH, T0, T1, SLOT, START, PAST, FIRST, LAST, BEGIN, INDEX };
  MEMBER void carve(u8* sm) {
    sq = sm;
    panels = sq + kRows * D * 2;
    probabilities = panels + 2 * PANEL;
    reduced = reinterpret_cast<float*>(probabilities + P_PANEL);
    sums = reinterpret_cast<float*>(probabilities + 2 * P_PANEL);
    tops = sums + 8 * 128;
    offsets = reinterpret_cast<u64*>(tops + kRows);
    limits = reinterpret_cast<int*>(offsets + 16);
    info = limits + 16;
  }

  MEMBER void item(const PrefillArgs& a, const int* w_item) {
    int me = threadIdx.x;
    auto w = [&]() { return me >> 5; };
    auto wm = [&]() { return me >> 5 & 1; };
    auto wn = [&]() { return me >> 6; };
    const int t0 = w_item[T0];
    // What is needed now and then only waits in shared memory: registers are short.
    if (threadIdx.x == 0) {
      const int row0 = w_item[2], rows = w_item[3], past = w_item[5] - rows / a.group, first = past + row0 / a.group;
      for (int i = 0; i < 10; i++) info[i] = w_item[i];
      info[INDEX] = (int)(w_item - a.work - gridDim.x - 1) / kItem;
      info[PAST] = past;
      info[FIRST] = first;
      info[LAST] = past + min(rows - 1, row0 + kRows - 1) / a.group;
      info[BEGIN] = a.window > 0 ? max(0, first - a.window + 1) : 0;
    }
    syncblock();
    // Threads 0..7 find the 16-token groups of a step; a group that no row sees is read where a seen one lies.
    auto find = [&](int t) {
      if (threadIdx.x < 8) {
        const int token = max(min(t * kStep + (int)threadIdx.x * 16, (info[LENGTH] - 1) & ~15), info[BEGIN] & ~15), i = (t & 1) * 8 + threadIdx.x;
        u64 at = (u64)info[HEAD] * a.head_stride;
        if (a.block_table) {
          const int block = token / a.page;
          at += (u64)a.block_table[(size_t)info[SEQUENCE] * a.table_stride + block] * a.block_stride + (u64)(token - block * a.page) * a.token_stride;
        } else {
          at += (u64)(info[START] + token) * a.token_stride;
        }
        offsets[i] = at;
        limits[i] = min(15, info[LENGTH] - 1 - token);
      }
    };
    // Panel j of K: warp w fetches its 16 tokens.
    uint4 x = make_uint4(0, 0, 0, 0);
    auto fetch_k = [&](int t, int j, int half) {
      FORGET(me);
      const int hi = me >> 4 & 1, i = (t & 1) * 8 + w(), at = FORMAT == F16 ? j * 64 * SPREAD + half * 32 + hi * 16 : spread(j * 32 + hi * 16);
      x = stream128(a.key + (offsets[i] + (u32)(min(row_of(me & 15), limits[i]) * a.token_stride + at)));
    };
    auto convert = [&](u8* to, int apart) {
      uint4 y;
      fp8_in_order(x.x, y.x, y.y);
      fp8_in_order(x.y, y.z, y.w);
      *reinterpret_cast<uint4*>(to) = y;
      fp8_in_order(x.z, y.x, y.y);
      fp8_in_order(x.w, y.z, y.w);
      *reinterpret_cast<uint4*>(to + apart) = y;
    };
    auto store_k = [&](int buffer, int half) {  // [16 tokens][4 pieces][slot]
      FORGET(me);
      const int hi = me >> 4 & 1;
      u8* to = panels + buffer * PANEL + w() * 1024 + (me & 15) * 16;
      if (FORMAT == F16) *reinterpret_cast<uint4*>(to + half * 512 + hi * 256) = x;
      else convert(to + hi * 512, 256);
    };
    // Panel p of V: the 16 tokens whose scores lie in accumulators i of half n of all warps, so that every warp has its part in every panel of
    // P (panel_token). A warp takes D/8 columns of each.
    auto fetch_v = [&](int t, int p, int half) {
      if (FORMAT == F16 && NC == 1 && half) return;
      FORGET(me);
      const int hi = me >> 4 & 1, at = FORMAT == F16 ? w() * (D / 4) + half * 32 + hi * 16 : w() * (D / 8) + hi * 16, place = panel_token(p, me & 15),
                i = (t & 1) * 8 + (place >> 4);
      if (FORMAT == F16 || NC == 2 || hi == 0) x = stream128(a.value + (offsets[i] + (u32)(min(place & 15, limits[i]) * a.token_stride + spread(at))));
    };
    auto store_v = [&](int buffer, int half, int p) {  // [pieces of 8 columns][16 tokens]
      if (FORMAT == F16 && NC == 1 && half) return;
      FORGET(me);
      const int hi = me >> 4 & 1;
      // Tokens that no row of this tile sees may hold anything; E4M3 has no code that reads as NaN or infinity here.
      if (FORMAT != E4M3) {
        const int token = info[T0] * kStep + panel_token(p, me & 15);
        if (token >= info[LENGTH] || token < info[BEGIN]) x = make_uint4(0, 0, 0, 0);
      }
      u8* to = panels + buffer * PANEL + w() * (CHUNKS / 8) * 256 + (me & 15) * 16;
      if (FORMAT == F16) *reinterpret_cast<uint4*>(to + half * 512 + hi * 256) = x;
      else if (NC == 2 || hi == 0) convert(to + 2 * hi * 256, 256);
    };

    find(t0);
    // Q in fragment order: [16 rows][pieces of 8 columns][slot]
    for (int k = 0; k < D / 16; k++) {
      const int lane = me & 31, hi = lane >> 4, e = k * 8 + w(), m = e / (D / 16), piece = e % (D / 16) * 2 + hi, row = min(info[ROW0] + m * 16 + row_of(lane & 15), info[ROWS] - 1);
      const u16* from = a.q + (size_t)(info[QUERY0] + row / a.group) * a.q_stride + (size_t)(info[HEAD] * a.group + row % a.group) * D + piece * 8;
      *reinterpret_cast<uint4*>(sq + ((m * CHUNKS + piece) * 16 + (lane & 15)) * 16) = ldg128(from);
    }
    if (threadIdx.x < kRows) tops[threadIdx.x] = -1e30f;
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i * 256 + me] = 0.f;
    float acc[4][NC * 2][8];
#pragma unroll
    for (int m = 0; m < 4; m++) {
#pragma unroll
      for (int n = 0; n < NC * 2; n++)
#pragma unroll
        for (int i = 0; i < 8; i++) acc[m][n][i] = 0.f;
    }
    syncblock();
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      fetch_k(t0, 0, half);
      store_k(0, half);
    }
    fetch_k(t0, 1, 0);
    syncblock();
    // Lane-dependent parts of shared addresses, made anew where they are used. A row of this lane: wm() * 64 + m * 16 + lane_row() + 2 * k.
    auto lane_row = [&]() { return (me >> 2 & 1) * 8 + (me & 1) + (me >> 2 & 4); };
    auto sum_place = [&]() { return (me >> 1 & ~1) | (me & 1); };
    auto row_frag = [&]() { return slot_of((me & 3) + (me >> 2 & 4) + (me << 1 & 8)) * 16; };  // quadpair & 1: which 8 rows
    auto token_frag = [&]() { return slot_of((me & 3) + (me >> 2 & 4) + (me & 8)) * 16; };     // quadpair >> 1: which 8 tokens
    for (; info[T0] < info[T1];) {  // info[T0]: the step at work
      float s[4][2][8];
#pragma unroll
      for (int m = 0; m < 4; m++)
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
          for (int i = 0; i < 8; i++) s[m][n][i] = 0.f;
      if (info[T0] + 1 < info[T1]) find(info[T0] + 1);
      // STAGE: how many panels of K follow this one, if no more than 2.
      auto multiply_k = [&](int j, auto stage) {
        constexpr int STAGE = decltype(stage)::value;
        // Between the products: the next panel to shared memory; what comes after it from global memory.
        auto turn = [&](int half) {
          if (STAGE >= 1) store_k(1 - (j & 1), half);
          else store_v(0, half, 0);
          if (half + 1 < HALVES) {
            if (STAGE >= 1) fetch_k(info[T0], j + 1, half + 1);
            else fetch_v(info[T0], 0, half + 1);
          } else {
            if (STAGE >= 2) fetch_k(info[T0], j + 2, 0);
            else fetch_v(info[T0], 1 - STAGE, 0);
          }
        };
#pragma unroll
        for (int c = 0; c < 4; c++) {
          if (c == 2 || (c == 1 && HALVES == 2) || c == 0) {
            if (c == 1 || (c == 2 && HALVES == 1)) turn(0);
            FORGET(me);
          }
          if (c == 3 && HALVES == 2) turn(1);
          const u8 *b = panels + (j & 1) * PANEL + wn() * 2048 + token_frag(), *f = sq + wm() * 4 * CHUNKS * 256 + row_frag() + j * 1024;
#pragma unroll
          for (int e = 0; e < 16; e += 8) {  // 8 bytes at a time: there are no registers for 16
            const uint2 b0 = *reinterpret_cast<const uint2*>(b + c * 256 + e), b1 = *reinterpret_cast<const uint2*>(b + 1024 + c * 256 + e);
#pragma unroll
            for (int m = 0; m < 4; m++) {
              const uint2 y = *reinterpret_cast<const uint2*>(f + (m * CHUNKS + c) * 256 + e);
              mma884(s[m][0], y.x, y.y, b0.x, b0.y);
              mma884(s[m][1], y.x, y.y, b1.x, b1.y);
            }
          }
        }
        if (STAGE >= 1) syncblock();
      };
#pragma unroll 2
      for (int j = 0; j + 2 < KP; j++) multiply_k(j, Int<2>());
      multiply_k(KP - 2, Int<1>());
      multiply_k(KP - 1, Int<0>());
      FORGET(me);
      const int lane = me & 31;
      const int t = info[T0];
      // Mask where some row does not see the whole step, then the maxima of this warp's 32 tokens.
      if ((a.causal ? info[FIRST] + 1 : info[LENGTH]) < (t + 1) * kStep || (a.window > 0 && info[LAST] - a.window + 1 > t * kStep)) {
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
          for (int k = 0; k < 2; k++) {
            const int position = info[PAST] + min(info[ROWS] - 1, info[ROW0] + wm() * 64 + m * 16 + lane_row() + 2 * k) / a.group;
            const int to = (a.causal ? position + 1 : info[LENGTH]) - (t * kStep + wn() * 32 + (me & 8)),
                      from = (a.window > 0 ? position - a.window + 1 : 0) - (t * kStep + wn() * 32 + (me & 8));
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
              for (int i = 0; i < 4; i++) {
                const int e = (i & 1) + 2 * k + ((i & 2) << 1), token = n * 16 + col_c(lane, e);
                if (token >= to || token < from) s[m][n][e] = float_of(0xff800000u);
              }
          }
      }
#pragma unroll
      for (int m = 0; m < 4; m++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
          float top = s[m][0][2 * k];
#pragma unroll
          for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) top = fmaxf(top, s[m][n][(i & 1) + 2 * k + ((i & 2) << 1)]);
          top = fmaxf(top, shfl_xor(top, 2));
          top = fmaxf(top, shfl_xor(top, 8));
          if ((lane & 10) == 0) reduced[(wm() * 64 + m * 16 + lane_row() + 2 * k) * 4 + wn()] = top;
        }
      syncblock();
      float fades[4][2], base[4][2];
      int fade_any = 0;
#pragma unroll
      for (int m = 0; m < 4; m++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const int row = wm() * 64 + m * 16 + lane_row() + 2 * k;
          const float4 r = *reinterpret_cast<const float4*>(reduced + row * 4);
          const float before = tops[row];
          const float now = fmaxf(before, fmaxf(fmaxf(r.x, r.y), fmaxf(r.z, r.w)) * a.score_scale);
          base[m][k] = 14.f - now;
          fades[m][k] = ex2(before - now);
          fade_any |= fades[m][k] != 1.f;
        }
      if (vote_any(fade_any)) {
#pragma unroll
        for (int m = 0; m < 4; m++) {
          if (!(me & 2)) {
            sums[m * 256 + sum_place()] *= fades[m][0];
            sums[m * 256 + 128 + sum_place()] *= fades[m][1];
          }
#pragma unroll
          for (int n = 0; n < NC * 2; n++)
#pragma unroll
            for (int i = 0; i < 8; i++) acc[m][n][i] *= fades[m][i >> 1 & 1];
        }
      }
      // This warp's part of panel p of P: [16 rows][2 pieces of 8 tokens][slot].
      float more_sums[4][2];
      auto produce = [&](int p) {
        FORGET(me);
        u8* to = probabilities + (p & 1) * P_PANEL + wm() * 2048 + (me >> 7) * 256 + (me >> 6 & 1) * 8 + (me >> 3 & 1) * 4 + (me >> 1 & 1) * 2;
        const int place = slot_of(lane_row()) * 16;  // slot_of(row + 2) is slot_of(row) ^ 4
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
          for (int k = 0; k < 2; k++) {
            const float y = ex2(fmaf(s[m][p >> 2][(p & 1) + 2 * k + ((p & 2) << 1)], a.score_scale, base[m][k]));
            more_sums[m][k] = p ? more_sums[m][k] + y : y;
            *reinterpret_cast<u16*>(to + m * 512 + (place ^ (64 * k))) = f2h(y);
          }
      };
      produce(0);
      syncblock();
      if (wn() == 0 && (lane & 10) == 0)
#pragma unroll
        for (int m = 0; m < 4; m++) {
          tops[wm() * 64 + m * 16 + lane_row()] = 14.f - base[m][0];
          tops[wm() * 64 + m * 16 + lane_row() + 2] = 14.f - base[m][1];
        }
#pragma unroll
      for (int p = 0; p < 8; p++) {
        auto turn = [&](int half) {
          const bool more = info[T0] + 1 < info[T1];
          if (p < 7) store_v(1 - (p & 1), half, p + 1);
          else if (more) store_k(0, half);
          if (half + 1 < HALVES) {
            if (p < 7) fetch_v(info[T0], p + 1, half + 1);
            else if (more) fetch_k(info[T0] + 1, 0, half + 1);
          } else {
            if (p < 6) fetch_v(info[T0], p + 2, 0);
            else if (more) fetch_k(info[T0] + 1, p & 1, 0);
          }
        };
#pragma unroll
        for (int c = 0; c < 4; c++) {  // four tokens
          if (c == TURN) turn(0);
          if (c == 1 && p < 7) produce(p + 1);
          if (c == 3 && HALVES == 2) turn(1);
          FORGET(me);
          const u8 *v = panels + (p & 1) * PANEL + (wn() * NC * 4 + (me >> 2 & 2) + (me >> 4 & 1)) * 256 + (me & 3) * 16,
                   *f = probabilities + (p & 1) * P_PANEL + wm() * 2048 + row_frag();
          uint4 y[NC];
#pragma unroll
          for (int g = 0; g < NC; g++) y[g] = lds128(v + g * 1024 + c * 64);
#pragma unroll
          for (int m = 0; m < 4; m++) {
            const uint2 z = *reinterpret_cast<const uint2*>(f + m * 512 + (c >> 1) * 256 + (c & 1) * 8);
#pragma unroll
            for (int g = 0; g < NC; g++) {
              mma884_rr(acc[m][2 * g], z.x, z.y, y[g].x, y[g].y);
              mma884_rr(acc[m][2 * g + 1], z.x, z.y, y[g].z, y[g].w);
            }
          }
        }
        syncblock();
      }
#pragma unroll
      for (int m = 0; m < 4; m++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
          more_sums[m][k] += shfl_xor(more_sums[m][k], 2);
          if (!(me & 2)) sums[m * 256 + k * 128 + sum_place()] += more_sums[m][k];
        }
      if (threadIdx.x == 0) info[T0]++;
      syncblock();
    }
    const int lane = me & 31;
    // Sums over the lanes and the token warps, then the output or a partial.
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
      for (int k = 0; k < 2; k++) {
        float sum = sums[m * 256 + k * 128 + sum_place()];
        sum += shfl_xor(sum, 8);
        if ((lane & 10) == 0) reduced[(wm() * 64 + m * 16 + lane_row() + 2 * k) * 4 + wn()] = sum;
      }
    syncblock();
    const int slot = info[SLOT], row0 = info[ROW0], rows = info[ROWS], query0 = info[QUERY0], head = info[HEAD], G = a.group;
    float2* partial = reinterpret_cast<float2*>(a.partial) + ((size_t)slot * 8 + w()) * PAIRS * 32 + lane;
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const int row = wm() * 64 + m * 16 + lane_row() + 2 * k;
        const float4 r = *reinterpret_cast<const float4*>(reduced + row * 4);
        const float total = ((r.x + r.y) + r.z) + r.w;
        if (slot >= 0) {
          if (wn() == 0 && (lane & 10) == 0)
            reinterpret_cast<float2*>(a.stats)[(size_t)slot * kRows + row] = make_float2(tops[row], total);
#pragma unroll
          for (int n = 0; n < NC * 2; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) partial[((m * NC * 2 + n) * 4 + 2 * i + k) * 32] = make_float2(acc[m][n][2 * k + 4 * i], acc[m][n][2 * k + 4 * i + 1]);
        } else if (row0 + row < rows) {
          const float scale = total > 0.f ? a.out_scale / total : 0.f;
          u16* out = a.out + (size_t)(query0 + (row0 + row) / G) * a.out_stride + (size_t)(head * G + (row0 + row) % G) * D;
#pragma unroll
          for (int n = 0; n < NC * 2; n++)
#pragma unroll
            for (int i = 0; i < 2; i++)
              *reinterpret_cast<u32*>(out + column(n, lane, 2 * k + 4 * i, wn())) = pack2(acc[m][n][2 * k + 4 * i] * scale, acc[m][n][2 * k + 4 * i + 1] * scale);
        }
      }
    syncblock();
  }
  // Output column of accumulator i of tile n.
  static MEMBER int column(int n, int lane, int i, int wn) {
    const int c = col_c(lane, i);
    return (wn * NC + (n >> 1)) * 32 + (quadpair(lane) >> 1) * 16 + (c >> 2) * 8 + (n & 1) * 4 + (c & 3);
  }
  MEMBER void run(const PrefillArgs& a, u8* sm) {
    carve(sm);
    for (int i = a.work[blockIdx.x]; i < a.work[blockIdx.x + 1]; i++) {
      item(a, a.work + gridDim.x + 1 + i * kItem);
      i = info[INDEX];
      syncblock();
    }
  }
  // Grid (cut row tiles, 8): the partials of what warp blockIdx.y held, in the order of their slots.
  MEMBER void combine(const PrefillArgs& a) {
    const int *z = a.merges + blockIdx.x * kMerge, lane = threadIdx.x & 31, w = blockIdx.y, wm = w & 1, wn = w >> 1;
    const int head = z[0], row0 = z[1], rows = z[2], query0 = z[3], slot = z[4], count = z[5], G = a.group;
    for (int e = threadIdx.x >> 5; e < PAIRS; e += 8) {
      const int i = e & 3, n = (e >> 2) % (NC * 2), m = (e >> 2) / (NC * 2), k = i & 1,
                row = wm * 64 + m * 16 + (quadpair(lane) & 1) * 8 + (lane & 1) + 4 * (lane >> 4) + 2 * k;
      if (row0 + row >= rows) continue;
      const float2* stats = reinterpret_cast<const float2*>(a.stats) + (size_t)slot * kRows + row;
      const float2* partial = reinterpret_cast<const float2*>(a.partial) + (((size_t)slot * 8 + w) * PAIRS + e) * 32 + lane;
      float top = -1e30f, total = 0.f;
      for (int c = 0; c < count; c++) top = fmaxf(top, stats[c * kRows].x);
      float2 o = make_float2(0.f, 0.f);
      for (int c = 0; c < count; c++) {
        const float2 y = stats[c * kRows], x = partial[(size_t)c * 8 * PAIRS * 32];
        const float f = ex2(y.x - top);
        total += f * y.y;
        o.x += f * x.x;
        o.y += f * x.y;
      }
      const float scale = total > 0.f ? a.out_scale / total : 0.f;
      u16* out = a.out + (size_t)(query0 + (row0 + row) / G) * a.out_stride + (size_t)(head * G + (row0 + row) % G) * D;
      *reinterpret_cast<u32*>(out + column(n, lane, 2 * k + 4 * (i >> 1), wn)) = pack2(o.x * scale, o.y * scale);
    }
  }
};
// The context as FP16 rows. Grid (16 tokens, 2 * KV heads, sequences), D threads: 16 codes each, K or V.
template <int D>
DEVICE void bridge(const BridgeArgs& a) {
  const int length = a.sequences[blockIdx.z * 2], start = a.sequences[blockIdx.z * 2 + 1], token0 = blockIdx.x * 16, head = blockIdx.y >> 1,
            is_value = blockIdx.y & 1, token = threadIdx.x / (D / 16), piece = threadIdx.x % (D / 16);
  if (token0 >= length) return;
  const int block = token0 / a.page;
  uint4 x = make_uint4(0, 0, 0, 0);
  if (token0 + token < length)
    x = stream128(a.cache + (size_t)a.block_table[(size_t)blockIdx.z * a.table_stride + block] * a.block_stride + (is_value ? a.value_offset : 0) +
                  (size_t)(token0 - block * a.page + token) * a.token_stride + (size_t)head * a.head_stride + spread(piece * 16));
  const u32 codes[4] = {x.x, x.y, x.z, x.w};
  u32 y[8];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    fp8_in_order(codes[i], y[2 * i], y[2 * i + 1]);
    if (FORMAT == E4M3) {
      y[2 * i] = hmul2(y[2 * i], 0x5c005c00u);  // * 2^8
      y[2 * i + 1] = hmul2(y[2 * i + 1], 0x5c005c00u);
    }
  }
  uint4* to = reinterpret_cast<uint4*>((is_value ? a.value : a.key) + ((size_t)(start + token0 + token) * a.heads + head) * D + piece * 16);
  to[0] = make_uint4(y[0], y[1], y[2], y[3]);
  to[1] = make_uint4(y[4], y[5], y[6], y[7]);
}
#define PREFILL_(NAME, D)                                         \
  KERNEL(prefill_##NAME##_d##D, 256, 1)(PrefillArgs a) {          \
    SHARED_BYTES(sm);                                             \
    MMA_BEGIN Prefill<D> p;                                       \
    p.run(a, sm);                                                 \
    MMA_END(a.partial)                                            \
  }                                                               \
  EXPORT(prefill_##NAME##_d##D)                                   \
  KERNEL(prefill_combine_##NAME##_d##D, 256, 1)(PrefillArgs a) {  \
    Prefill<D>().combine(a);                                      \
  }                                                               \
  EXPORT(prefill_combine_##NAME##_d##D)
#define BRIDGE_(NAME, D)                                                                 \
  KERNEL(prefill_bridge_##NAME##_d##D, D, 1)(BridgeArgs a) { bridge<D>(a); }             \
  EXPORT(prefill_bridge_##NAME##_d##D)
#define PREFILL(NAME, D) PREFILL_(NAME, D)
#define BRIDGE(NAME, D) BRIDGE_(NAME, D)
PREFILL(NAME, 128)
PREFILL(NAME, 256)
#ifdef BRIDGED
BRIDGE(NAME, 128)
BRIDGE(NAME, 256)
#endif
