// What the attention kernels share: their arguments, the split of a sequence's tokens over CTAs, and the ordered combine of the partials.
#pragma once
#include "fp8.cuh"
constexpr int kWarps = 8, kMaxSplits = 256;
struct AttentionArgs {
  const u16* q;  // [sequences, heads, D]
  u16* out;      // the same
  const u8* cache;
  const int *block_table, *lengths;  // [sequences, table_stride], [sequences]; length 0: a padded sequence, its output is zero
  float *partial, *stats;            // workspace, see plan.py
  int page, table_stride;            // tokens per page (a multiple of 16), block table entries per sequence
  int block_stride, value_offset, token_stride, head_stride;  // of the cache, in bytes, multiples of 16
  int q_stride, out_stride;          // halves from token to token
  int group, window, splits;         // query heads per KV head; tokens that a query sees (itself included), 0: all; CTAs per head
  int queries, causal;               // query tokens per sequence, the last ones of its length; whether one sees those behind it
  int combiners;                     // CTAs per head that add the partials, and wait for those before them (attention_combine.cuh)
  float score_scale, out_scale;      // softmax scale * log2(e) * K scale (* 2^8 for E4M3); V scale (* 2^8 for E4M3)
};
DEVICE const u8* token_row(const AttentionArgs& a, const int* table, int token, int head) {
  const int block = token / a.page;
  return a.cache + (size_t)table[block] * a.block_stride + (size_t)(token - block * a.page) * a.token_stride + (size_t)head * a.head_stride;
}
// n / d without a division where many n meet one d, or where n comes late.
struct Divider {
  u32 d, inverse;
  MEMBER Divider(int by) : d((u32)by), inverse(0xffffffffu / (u32)by) {}
  MEMBER u32 quotient(u32 n, u32& rest) const {
    u32 q = multiply_high(n, inverse);  // at most one too small
    rest = n - q * d;
    if (rest >= d) q++, rest -= d;
    return q;
  }
};
// Where a token's row lies. The first entries of a table are asked for together with the length that says which of them matters: two accesses to
// memory at the start of a CTA instead of three.
struct Pages {
  const u8* cache;
  const int* table;
  Divider units;  // of 16 tokens, in a page
  int entries[2];  // of a lane
  MEMBER Pages(const AttentionArgs& a, int sequence, int head)
      : cache(a.cache + (size_t)head * a.head_stride), table(a.block_table + (size_t)sequence * a.table_stride), units(a.page >> 4) {}
  MEMBER void ask(const AttentionArgs& a) {
    const int lane = threadIdx.x & 31;
    entries[0] = ldg32(table + max(0, min(lane, a.table_stride - 1)));
    entries[1] = ldg32(table + max(0, min(lane + 32, a.table_stride - 1)));
  }
  MEMBER const u8* at(const AttentionArgs& a, int page, u32 rest, int token) const {
    return cache + (size_t)page * a.block_stride + (size_t)(rest * 16 + (token & 15)) * a.token_stride;
  }
  // A whole warp, with one token; after `ask`. Not `on`: nowhere in particular, and no branch.
  MEMBER const u8* known(const AttentionArgs& a, int token, bool on) const {
    u32 rest;
    const u32 block = units.quotient((u32)token >> 4, rest);
    int page = shfl(block < 32 ? entries[0] : entries[1], block & 31);
    if (on && block >= (u32)min(64, a.table_stride)) page = table[block];  // rows may overlap
    return at(a, page, rest, token);
  }
  MEMBER const u8* row(const AttentionArgs& a, int token) const {
    u32 rest;
    const u32 block = units.quotient((u32)token >> 4, rest);
    return at(a, table[block], rest, token);
  }
};
// The tiles of `tokens` tokens that any query of a sequence sees, and how many CTAs share them: each has `least` tiles or more.
struct Share {
  int length, begin, first, tiles, splits;
  Divider all;
  MEMBER Share(const AttentionArgs& a, int sequence_length, int tokens, int least, const Divider& by) : length(sequence_length), all(by) {
    begin = a.window > 0 ? max(0, length - a.queries - a.window + 1) : 0;
    first = begin / tokens;
    tiles = (length + tokens - 1) / tokens - first;
    splits = max(1, min(a.splits, (tiles + least - 1) / least));
  }
  MEMBER Share(const AttentionArgs& a, int sequence, int tokens, int least) : Share(a, a.lengths[sequence], tokens, least, Divider(a.splits)) {}
  // How often every split has `at_a_time` tiles.
  MEMBER int rounds(int at_a_time) const {
    u32 rest;
    const u32 n = (u32)max(0, tiles) / (u32)at_a_time;
    return (int)(splits == (int)all.d ? all.quotient(n, rest) : n / (u32)splits);
  }
};
// Column of accumulator 4 * k of a lane in tile nt; `pieces`: tiles per 16-byte chunk of V.
template <int PIECES>
DEVICE int out_column(int nt, int lane, int n) {
  return (nt / PIECES) * (32 * PIECES) + (2 * quadpair(lane) + (n >> 2)) * (4 * PIECES) + 4 * (nt % PIECES) +
         (FORMAT == F16 ? n & 3 : fp8_position(n & 3));
}
// Row tiles of 8 that partials have: as many as the kernels for so many rows.
DEVICE int row_tiles(int rows) { return rows <= 8 ? 1 : (rows + 15) / 16 * 2; }

// The second launch: grid (row tiles * D / 32, KV heads, sequences), 16 warps; warp w adds splits w, w + 16, ...; the warps are added in order.
// PIECES as in out_column; `tokens` and `least` as in Share; MT: row tiles of a partial; `always`: also for one split.
template <int D, int PIECES>
struct Combine {
  static constexpr int CW = 16, NT = D / 32;
  // Row = head * queries + query.
  MEMBER u16* output(const AttentionArgs& a, int b, int h, int row, int column) {
    return a.out + ((size_t)b * a.queries + row % a.queries) * a.out_stride + (size_t)(h * a.group + row / a.queries) * D + column;
  }
  MEMBER void run(const AttentionArgs& a, u8* sm, int tokens, int least, int MT, bool always) {
    float2* part = reinterpret_cast<float2*>(sm);  // [CW][128], then [2][CW][8] reductions, [splits][8] factors
    float *reduced = reinterpret_cast<float*>(part + CW * 128), *factors = reduced + CW * 16;
    const int R = a.group * a.queries, m = blockIdx.x / NT, nt = blockIdx.x % NT, h = blockIdx.y, b = blockIdx.z, lane = threadIdx.x & 31,
              w = threadIdx.x >> 5;
    const Share share(a, b, tokens, least);
    if (share.splits == 1 && !always) return;  // the first launch has written the output
    if (share.length <= 0) {  // only with `always`
      for (int i = threadIdx.x; i < 8 * 32; i += CW * 32)
        if (m * 8 + i / 32 < R) *output(a, b, h, m * 8 + i / 32, nt * 32 + i % 32) = 0;
      return;
    }
    const int S = share.splits, row = threadIdx.x & 7, j = threadIdx.x >> 3;
    const size_t base = ((size_t)b * gridDim.y + h) * a.splits;
    const float2* stats = reinterpret_cast<const float2*>(a.stats) + (base * MT + m) * 8 + row;
    // All that comes from memory is asked for at once: statistics, and the first of this warp's partials.
    constexpr int AHEAD = 5;  // * CW = 80 splits
    const int r0 = row_c(lane, 0);
    const bool on0 = m * 8 + r0 < R, on1 = m * 8 + r0 + 2 < R;
    const float2* p = reinterpret_cast<const float2*>(a.partial) + ((base * MT + m) * NT + nt) * 128 + lane;
    const size_t apart = (size_t)MT * NT * 128;
    float2 x[AHEAD][4];
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
#pragma unroll
      for (int k = 0; k < 4; k++) {
        x[i][k] = make_float2(0.f, 0.f);
        if (w + i * CW < S && (k & 1 ? on1 : on0)) x[i][k] = p[(w + i * CW) * apart + k * 32];
      }
    float2 stat[kMaxSplits / (CW * 4)];
    float top = -1e30f;
#pragma unroll
    for (int i = 0; i < kMaxSplits / (CW * 4); i++) {
      stat[i] = make_float2(-1e30f, 0.f);
      if (j + i * CW * 4 < S) stat[i] = stats[(size_t)(j + i * CW * 4) * MT * 8];
      top = fmaxf(top, stat[i].x);
    }
    top = fmaxf(top, shfl_xor(top, 8));
    top = fmaxf(top, shfl_xor(top, 16));
    if (lane < 8) reduced[w * 8 + row] = top;
    syncblock();
#pragma unroll
    for (int k = 0; k < CW; k++) top = fmaxf(top, reduced[k * 8 + row]);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kMaxSplits / (CW * 4); i++)
      if (j + i * CW * 4 < S) {
        const float f = ex2(stat[i].x - top);
        factors[(j + i * CW * 4) * 8 + row] = f;
        sum += f * stat[i].y;
      }
    sum += shfl_xor(sum, 8);
    sum += shfl_xor(sum, 16);
    if (lane < 8) reduced[CW * 8 + w * 8 + row] = sum;
    syncblock();
    float2 o[4];
#pragma unroll
    for (int k = 0; k < 4; k++) o[k] = make_float2(0.f, 0.f);
    auto add = [&](const float2(&v)[4], int s) {
      const float f0 = factors[s * 8 + r0], f1 = factors[s * 8 + r0 + 2];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        o[k].x += (k & 1 ? f1 : f0) * v[k].x;
        o[k].y += (k & 1 ? f1 : f0) * v[k].y;
      }
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      if (w + i * CW < S) add(x[i], w + i * CW);
    for (int s = w + AHEAD * CW; s < S; s += CW) {
      float2 v[4];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        v[k] = make_float2(0.f, 0.f);
        if (k & 1 ? on1 : on0) v[k] = p[s * apart + k * 32];
      }
      add(v, s);
    }
#pragma unroll
    for (int k = 0; k < 4; k++) part[w * 128 + k * 32 + lane] = o[k];
    syncblock();
    if (threadIdx.x < 128) {
      const int k = w * 2, rr = row_c(lane, k), out_row = m * 8 + rr;
      if (out_row < R) {
        float2 y = make_float2(0.f, 0.f);
        float total = 0.f;
#pragma unroll
        for (int i = 0; i < CW; i++) {
          y.x += part[i * 128 + threadIdx.x].x;
          y.y += part[i * 128 + threadIdx.x].y;
          total += reduced[CW * 8 + i * 8 + rr];
        }
        const float g = total > 0.f ? a.out_scale / total : 0.f;  // a query before the sequence's first token sees nothing
        const int n = col_c(lane, k);
        *output(a, b, h, out_row, out_column<PIECES>(nt, lane, n)) = f2h(y.x * g);
        *output(a, b, h, out_row, out_column<PIECES>(nt, lane, n + 1)) = f2h(y.y * g);
      }
    }
  }
};
