// The ordered combine of split attention, in the launch that made the partials: a second launch costs more than the combine itself.
//
// Every CTA of a head writes an unnormalised partial and its (max, sum). The head's last few CTAs then wait for all partials and add them in the
// order of the splits, each its own rows and columns. There is neither a fence nor a counter: a word of the workspace is zero until its value has
// been written (a value of zero is written as -0), and whoever has read it writes the zero back. So a workspace holds zeros before and after every
// launch, and no order of the writes matters.
//
// A CTA waits for CTAs with lower numbers, which a GPU starts first, and for the other waiting ones of its head, fewer than the card holds
// (AttentionArgs::combiners, plans.py): there is always one that can go on, whatever runs beside it, and no cooperative launch is needed.
#pragma once
#include "attention.cuh"
DEVICE bool arrived(float4 x) { return float_bits(x.x) && float_bits(x.y) && float_bits(x.z) && float_bits(x.w); }
DEVICE float4 arriving(float4 x) {
  return make_float4(x.x == 0.f ? -0.f : x.x, x.y == 0.f ? -0.f : x.y, x.z == 0.f ? -0.f : x.z, x.w == 0.f ? -0.f : x.w);
}
// Partials lie in accumulator order: [split][row tile][tile of 32 columns][half][lane] float4: accumulators 4 * half .. + 3 of a lane, which are two
// columns of row row_c(lane, 0) and of row + 2. Statistics: [split][row tile][tile][half][pair] float4: max (log2 units) and sum of these two rows,
// pair = lane % 2 + 2 * (lane / 16), repeated for every 32 elements so that each is read by one CTA.
// PIECES as in out_column; MT: row tiles; AHEAD: splits of a thread that are in flight at once.
template <int D, int PIECES, int THREADS, int MT, int AHEAD>
struct Finish {
  static constexpr int ELEMENTS = MT * D * 2, MOST = ELEMENTS < THREADS ? ELEMENTS : THREADS, BYTES = THREADS * 32;
  static MEMBER int pair_of(int lane) { return (lane & 1) + 2 * (lane >> 4); }
  // Called by all threads after they have stored their part of the partial; shared memory is free after a barrier. S: splits of this sequence.
  static MEMBER void run(const AttentionArgs& a, u8* sm, int S) {
    // Elements that a CTA adds at a time, and threads that share one: a thread has all its splits in flight at once if it can.
    const int each = 1 << (31 - leading_zeros((u32)max(16, min(MOST, THREADS * AHEAD / S)))), slots = min(16, THREADS / each), jobs = ELEMENTS / each;
    const int combiners = min(min(a.combiners, S), jobs), mine = S - 1 - (int)blockIdx.x;
    if (mine >= combiners) return;
    float4* parts = reinterpret_cast<float4*>(sm);  // [slots][each]
    float4* states = parts + THREADS;               // the same: max and sum of the two rows
    const int slot = threadIdx.x / each;
    const size_t first = (((size_t)blockIdx.z * gridDim.y + blockIdx.y) * a.splits + slot) * ELEMENTS, apart = (size_t)slots * ELEMENTS;
    for (int job = mine; job < jobs; job += combiners) {
      const int e = job * each + threadIdx.x % each, lane = e & 31;
      float4* p = reinterpret_cast<float4*>(a.partial) + first + e;
      float4* q = reinterpret_cast<float4*>(a.stats) + first / 8 + e / 32 * 4 + pair_of(lane);
      float4 o = make_float4(0.f, 0.f, 0.f, 0.f), state = make_float4(-1e30f, 0.f, -1e30f, 0.f);
      for (int s = 0; s < S; s += AHEAD * slots) {
        const int n = slot < slots ? (S - s - slot + slots - 1) / slots : 0;  // splits that are left
        // All that comes from memory is asked for at once, and what had not been written yet again.
        float4 x[AHEAD], y[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
          x[i] = y[i] = make_float4(-0.f, -0.f, -0.f, -0.f);
          if (i < n) {
            y[i] = shared_by_ctas(q + i * (apart / 8));
            x[i] = shared_by_ctas(p + i * apart);
          }
        }
        for (;;) {
          bool missing = false;
#pragma unroll
          for (int i = 0; i < AHEAD; i++) {
            if (!arrived(y[i])) {
              missing = true;
              y[i] = shared_by_ctas(q + i * (apart / 8));
            }
            if (!arrived(x[i])) {
              missing = true;
              x[i] = shared_by_ctas(p + i * apart);
            }
          }
          if (!vote_any(missing)) break;  // before anything is made zero again: lanes share statistics
          let_others_run();
        }
        float top0 = state.x, top1 = state.z;
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
          if (i < n) {
            top0 = fmaxf(top0, y[i].x);
            top1 = fmaxf(top1, y[i].z);
          }
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f), sums = make_float4(top0, 0.f, top1, 0.f);
        auto add = [&](float4 v, float4 z) {
          const float f0 = ex2(z.x - top0), f1 = ex2(z.z - top1);
          sums.y += f0 * z.y;
          sums.w += f1 * z.w;
          sum.x += f0 * v.x;
          sum.y += f0 * v.y;
          sum.z += f1 * v.z;
          sum.w += f1 * v.w;
        };
        if (s) add(o, state);
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
          if (i < n) {
            add(x[i], y[i]);
            give_to_ctas(p + i * apart, make_float4(0.f, 0.f, 0.f, 0.f));
            if ((lane & 14) == 0) give_to_ctas(q + i * (apart / 8), make_float4(0.f, 0.f, 0.f, 0.f));
          }
        o = sum;
        state = sums;
        p += AHEAD * apart;
        q += AHEAD * (apart / 8);
      }
      syncblock();  // also before the first job: the CTA's own merge has been read
      parts[threadIdx.x] = o;
      states[threadIdx.x] = state;
      syncblock();
        if ((int)threadIdx.x < each) {
        float4 z = states[threadIdx.x], y = make_float4(0.f, 0.f, 0.f, 0.f);
        float top0 = z.x, top1 = z.z, sum0 = 0.f, sum1 = 0.f;
#pragma unroll 4
        for (int k = 1; k < slots; k++) {
          z = states[k * each + threadIdx.x];
          top0 = fmaxf(top0, z.x);
          top1 = fmaxf(top1, z.z);
        }
#pragma unroll 4
        for (int k = 0; k < slots; k++) {
          z = states[k * each + threadIdx.x];
          const float4 x = parts[k * each + threadIdx.x];
          const float f0 = ex2(z.x - top0), f1 = ex2(z.z - top1);
          sum0 += f0 * z.y;
          sum1 += f1 * z.w;
          y.x += f0 * x.x;
          y.y += f0 * x.y;
          y.z += f1 * x.z;
          y.w += f1 * x.w;
        }
        // A query before the sequence's first token sees nothing.
        const float scale0 = sum0 > 0.f ? a.out_scale * reciprocal(sum0) : 0.f, scale1 = sum1 > 0.f ? a.out_scale * reciprocal(sum1) : 0.f;
        store(a, e, make_float4(y.x * scale0, y.y * scale0, y.z * scale1, y.w * scale1));
      }
    }
  }
  // Element e of the finished output.
  static MEMBER void store(const AttentionArgs& a, int e, float4 y) {
    const int lane = e & 31, tile = e >> 6, m = tile / (D / 32), nt = tile % (D / 32), row = m * 8 + row_c(lane, 0), n = col_c(lane, e / 32 % 2 * 4);
    const int c0 = out_column<PIECES>(nt, lane, n), c1 = out_column<PIECES>(nt, lane, n + 1);
    if (row < a.group * a.queries) {
      u16* to = output(a, row);
      to[c0] = f2h(y.x);
      to[c1] = f2h(y.y);
    }
    if (row + 2 < a.group * a.queries) {
      u16* to = output(a, row + 2);
      to[c0] = f2h(y.z);
      to[c1] = f2h(y.w);
    }
  }
  // Row = head * queries + query.
  static MEMBER u16* output(const AttentionArgs& a, int row) {
    const int head = a.queries == 1 ? row : row / a.queries;
    return a.out + ((size_t)blockIdx.z * a.queries + (row - head * a.queries)) * a.out_stride + (size_t)(blockIdx.y * a.group + head) * D;
  }
};
