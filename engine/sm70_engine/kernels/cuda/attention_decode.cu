// Paged decode attention, one query token per sequence: split-KV, FP32 softmax state and partials, ordered combine.
//
// A CTA takes a share of one sequence's tokens for one KV head and all query heads of its group (up to 8 * MT rows), so that K and V are read
// once. Both products run on the tensor core (m8n8k4) and K and V go from global memory to B fragments without shared memory:
//   QK: the four quadpairs of a warp take interleaved 16-byte chunks of the head dimension for the same 8 tokens (64 contiguous bytes of a
//       token per load); their partial scores are added by shuffles.     PV: B is row-major (a lane holds one token, 4 columns).
// Every warp runs its own softmax over its tiles of T tokens; the warps of a CTA are merged in order through shared memory.
//
// Each CTA leaves an unnormalised partial and its (max, sum). Up to kFused splits, the last CTA of a head to finish adds the partials in the
// order of the splits; with more, a second launch does (combine_*), as one CTA would take too long. Which CTA adds depends on timing, the sum
// does not.
// Compiled once per storage format: -DFORMAT=E4M3 | E5M2 | F16.
#include "attention.cuh"
DEVICE constexpr int tile_tokens(int d, int mt) { return (d == 256 && mt == 2) || (FORMAT == F16 && d > 64) ? 8 : 16; }

template <int D, int MT>
struct Decode {
  static constexpr int T = tile_tokens(D, MT), WP = kWarps;
  static constexpr int BYTES = FORMAT == F16 ? 2 : 1, ROW = D * BYTES;
  static constexpr int KJ = ROW / 64, KG = T / 8;                                // K: KG groups of 8 tokens, KJ chunks of 16 bytes per lane
  static constexpr int CHUNK = ROW >= 128 ? 16 : 8, VS = T / 4, VG = ROW / (8 * CHUNK);  // V: VS steps of 4 tokens, VG chunks per lane
  static constexpr int NT = D / 32, PIECES = NT / VG;                            // accumulator tiles of 32 columns; tiles per V chunk
  static constexpr int QH = FORMAT == F16 ? 1 : 2;                               // 16-byte pieces of Q per K chunk
  static constexpr bool Q_SHARED = MT * D > 256 || D == 128;                       // Q fragments in shared memory: where registers are short
  static constexpr int TILES = MT * NT, CHUNK_TILES = TILES < 4 ? TILES : 4;     // tiles merged at a time
  static constexpr int ROWS = MT * 8, SLOT = TILES * 128;                        // float2 per partial
  static constexpr int ROUNDS = WP > kFused ? WP : kFused;

  // Shared memory: [Q fragments] [WP][CHUNK_TILES][2][32] float4, then maxima, sums, factors, common maxima, flag.
  uint4* sq;
  float4* merged;
  float *maxima, *sums, *factors, *tops;
  int* flag;
  MEMBER void carve(u8* sm) {
    sq = reinterpret_cast<uint4*>(sm);
    merged = reinterpret_cast<float4*>(sm + (Q_SHARED ? ROWS * D * 2 : 0));
    maxima = reinterpret_cast<float*>(merged + WP * CHUNK_TILES * 64);
    sums = maxima + ROUNDS * ROWS;
    factors = sums + ROUNDS * ROWS;
    tops = factors + ROUNDS * ROWS;
    flag = reinterpret_cast<int*>(tops + ROWS);
  }
  // For n parts: from maxima[n][row] and sums[n][row] to factors[n][row], weighted sums and the common maxima. n * ROWS threads do it.
  MEMBER void weigh(int n) {
    const int i = threadIdx.x;
    if (i >= n * ROWS) return;
    float top = -1e30f;
    for (int k = 0; k < n; k++) top = fmaxf(top, maxima[k * ROWS + i % ROWS]);
    const float f = ex2(maxima[i] - top);
    factors[i] = f;
    sums[i] *= f;
    if (i < ROWS) tops[i] = top;
  }
  MEMBER float total(int n, int row) {
    float x = 0.f;
    for (int k = 0; k < n; k++) x += sums[k * ROWS + row];
    return x;
  }
  // Element e of a partial: tile, half k of its accumulators and lane; two rows, two columns.
  MEMBER void store_out(const AttentionArgs& a, u16* out, int n_parts, int e, float4 o) {
    const int lane = e & 31, k = e >> 5 & 1, tile = e >> 6, m = tile / NT, nt = tile - m * NT, r0 = m * 8 + row_c(lane, 0), n = col_c(lane, 4 * k);
    const int c0 = out_column<PIECES>(nt, lane, n), c1 = out_column<PIECES>(nt, lane, n + 1);
    if (r0 < a.group) {
      const float g = a.out_scale / total(n_parts, r0);
      out[(size_t)r0 * D + c0] = f2h(o.x * g);
      out[(size_t)r0 * D + c1] = f2h(o.y * g);
    }
    if (r0 + 2 < a.group) {
      const float g = a.out_scale / total(n_parts, r0 + 2);
      out[(size_t)(r0 + 2) * D + c0] = f2h(o.z * g);
      out[(size_t)(r0 + 2) * D + c1] = f2h(o.w * g);
    }
  }
  MEMBER void store_partial(float2* to, int group, int e, float4 o) {
    const int lane = e & 31, r0 = (e >> 6) / NT * 8 + row_c(lane, 0);
    float2* d = to + (e >> 6) * 128 + (e >> 5 & 1) * 64 + lane;
    if (r0 < group) d[0] = make_float2(o.x, o.y);
    if (r0 + 2 < group) d[32] = make_float2(o.z, o.w);
  }
  // Adds the n <= kFused partials in order, into the output. A thread has its piece of all partials and its part of the statistics in flight
  // at once: the latency of the L2 is paid once.
  MEMBER void combine(const AttentionArgs& a, const float2* partial, const float2* stats, u16* out, int n) {
    constexpr int ROUND = WP * 32;
    bool weighed = false;
    for (int e = threadIdx.x; e < (TILES * 64 + ROUND - 1) / ROUND * ROUND; e += ROUND) {
      const int lane = e & 31, r0 = (e >> 6) / NT * 8 + row_c(lane, 0);
      const bool on = e < TILES * 64, on0 = on && r0 < a.group, on1 = on && r0 + 2 < a.group;
      const float2* p = partial + (e >> 6) * 128 + (e >> 5 & 1) * 64 + lane;
      float2 x[kFused], y[kFused];
#pragma unroll
      for (int k = 0; k < kFused; k++) {
        x[k] = y[k] = make_float2(0.f, 0.f);
        if (on0 && k < n) x[k] = shared_by_ctas(p + k * SLOT);
        if (on1 && k < n) y[k] = shared_by_ctas(p + k * SLOT + 32);
      }
      if (!weighed) {
        weighed = true;
        if (threadIdx.x < n * ROWS) {
          const float2 z = shared_by_ctas(stats + threadIdx.x);
          maxima[threadIdx.x] = z.x;
          sums[threadIdx.x] = z.y;
        }
        syncblock();
        weigh(n);
        syncblock();
      }
      if (!on) continue;
      float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int k = 0; k < kFused; k++)
        if (k < n) {
          const float f0 = factors[k * ROWS + r0], f1 = factors[k * ROWS + r0 + 2];
          o.x += f0 * x[k].x;
          o.y += f0 * x[k].y;
          o.z += f1 * y[k].x;
          o.w += f1 * y[k].y;
        }
      store_out(a, out, n, e, o);
    }
  }
  // True in the CTA that comes last of `n`; the counter is zero again then. What the others wrote before is visible.
  MEMBER bool last_of(u32* counter, int n) {
    syncblock();
    if (threadIdx.x == 0) {
      *flag = take_ticket(counter) == (u32)n - 1;
      if (*flag) *counter = 0;
    }
    syncblock();
    return *flag;
  }

  MEMBER void run(const AttentionArgs& a, u8* sm) {
    carve(sm);
    const int lane = threadIdx.x & 31, w = threadIdx.x >> 5, qp = quadpair(lane), r = row_a(lane), h = blockIdx.y, b = blockIdx.z, G = a.group;
    const Share share(a, b, T, WP);
    const int length = share.length, begin = share.begin, tile0 = share.first, tiles = share.tiles, splits = share.splits, s = blockIdx.x;
    if (s >= splits) return;
    const size_t head_index = (size_t)b * gridDim.y + h;
    u16* out = a.out + (size_t)b * a.out_stride + (size_t)h * G * D;
    if (length <= 0) {
      for (int i = threadIdx.x; i < G * D; i += WP * 32) out[i] = 0;
      return;
    }
    const int* table = a.block_table + (size_t)b * a.table_stride;
    const int t0 = tile0 + (int)((long long)tiles * s / splits), t1 = tile0 + (int)((long long)tiles * (s + 1) / splits);
    // Q as A fragments, in the element order of the decoded K
    const u16* q = a.q + (size_t)b * a.q_stride + (size_t)h * G * D;
    auto q_fragment = [&](int m, int j, int e) {
      const uint4 x = ldg128(q + (size_t)min(m * 8 + r, G - 1) * D + (FORMAT == F16 ? (4 * j + qp) * 8 : (4 * j + qp) * 16 + 8 * e));
      if (FORMAT == F16) return x;
      return make_uint4(prmt(x.x, x.y, 0x5410), prmt(x.x, x.y, 0x7632), prmt(x.z, x.w, 0x5410), prmt(x.z, x.w, 0x7632));
    };
    uint4 Q[Q_SHARED ? 1 : MT * KJ * QH];
    if (Q_SHARED) {  // [MT][KJ][QH][lane]
      for (int f = w; f < MT * KJ * QH; f += WP) sq[f * 32 + lane] = q_fragment(f / (KJ * QH), f / QH % KJ, f % QH);
      syncblock();
    } else {
#pragma unroll
      for (int f = 0; f < MT * KJ * QH; f++) Q[Q_SHARED ? 0 : f] = q_fragment(f / (KJ * QH), f / QH % KJ, f % QH);
    }
    auto q_at = [&](int f) { return Q_SHARED ? lds128(sq + f * 32 + lane) : Q[Q_SHARED ? 0 : f]; };

    float acc[MT][NT][8], m_run[MT], l_run[MT];
#pragma unroll
    for (int m = 0; m < MT; m++) {
      m_run[m] = -1e30f;
      l_run[m] = 0.f;
#pragma unroll
      for (int i = 0; i < NT; i++)
#pragma unroll
        for (int k = 0; k < 8; k++) acc[m][i][k] = 0.f;
    }
    uint4 K[KG][KJ];
    auto load_k = [&](const u8* row) {
#pragma unroll
      for (int g = 0; g < KG; g++)
#pragma unroll
        for (int j = 0; j < KJ; j++) K[g][j] = stream128(row + (size_t)(g * 8 + r) * a.token_stride + 64 * SPREAD * j + 16 * qp);
    };
    const u8* here = nullptr;
    if (t0 + w < t1) {
      here = token_row(a, table, (t0 + w) * T, h);
      load_k(here);
    }
    for (int t = t0 + w; t < t1; t += WP) {
      uint4 V[VS][VG];
#pragma unroll
      for (int k = 0; k < VS; k++)
#pragma unroll
        for (int g = 0; g < VG; g++) {
          const u8* p = here + a.value_offset + (size_t)(4 * k + (lane & 3)) * a.token_stride + g * 128 * SPREAD + spread((2 * qp + (lane >> 4)) * CHUNK);
          if (CHUNK == 16) V[k][g] = stream128(p);
          else {
            const uint2 x = stream64(p);
            V[k][g].x = x.x;
            V[k][g].y = x.y;
          }
        }
      const u8* next = nullptr;
      if (t + WP < t1) next = token_row(a, table, (t + WP) * T, h);
      float c[MT][KG][8];
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int g = 0; g < KG; g++)
#pragma unroll
          for (int i = 0; i < 8; i++) c[m][g][i] = 0.f;
#pragma unroll
      for (int j = 0; j < KJ; j++)
#pragma unroll
        for (int e = 0; e < QH; e++) {
          uint4 f[MT];
#pragma unroll
          for (int m = 0; m < MT; m++) f[m] = q_at((m * KJ + j) * QH + e);
#pragma unroll
          for (int g = 0; g < KG; g++) {
            const uint4 x = K[g][j];
            u32 b0, b1, b2, b3;
            if (FORMAT == F16) {
              b0 = x.x;
              b1 = x.y;
              b2 = x.z;
              b3 = x.w;
            } else {
              fp8_half2<FORMAT>(e ? x.z : x.x, b0, b1);
              fp8_half2<FORMAT>(e ? x.w : x.y, b2, b3);
            }
#pragma unroll
            for (int m = 0; m < MT; m++) {
              mma884(c[m][g], f[m].x, f[m].y, b0, b1);
              mma884(c[m][g], f[m].z, f[m].w, b2, b3);
            }
          }
        }
      if (t + WP < t1) load_k(next);
      const bool edge = (t + 1) * T > length || t * T < begin;
      // A masked token's V may be poison; E4M3 has no code that decodes to NaN or infinity here.
      if (FORMAT != E4M3 && edge)
#pragma unroll
        for (int k = 0; k < VS; k++) {
          const int token = t * T + 4 * k + (lane & 3);
          if (token >= length || token < begin)
#pragma unroll
            for (int g = 0; g < VG; g++) V[k][g] = make_uint4(0, 0, 0, 0);
        }
      u32 P[MT][T / 2];
      const bool odd = lane & 2;
#pragma unroll
      for (int m = 0; m < MT; m++) {
        // swap with lane^2 so that a lane owns row r of all T tokens, then add the quadpairs
        float p[T], top = -1e30f;
#pragma unroll
        for (int g = 0; g < KG; g++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int ia = (i & 1) + ((i & 2) << 1), ib = ia + 2;  // accumulators of rows +0 and +2
            const float keep = odd ? c[m][g][ib] : c[m][g][ia], other = shfl_xor(odd ? c[m][g][ia] : c[m][g][ib], 2);
            p[g * 8 + ia] = odd ? other : keep;
            p[g * 8 + ib] = odd ? keep : other;
          }
#pragma unroll
        for (int i = 0; i < T; i++) {
          p[i] += shfl_xor(p[i], 4);
          p[i] += shfl_xor(p[i], 8);
          p[i] *= a.score_scale;
        }
        if (edge)
#pragma unroll
          for (int i = 0; i < T; i++)
            if (t * T + i >= length || t * T + i < begin) p[i] = -1e30f;
#pragma unroll
        for (int i = 0; i < T; i++) top = fmaxf(top, p[i]);
        const float now = fmaxf(m_run[m], top), fade = ex2(m_run[m] - now);
        m_run[m] = now;
        // Probabilities go to FP16 times 2^14: the small ones of a long context keep their bits. Sums carry the same factor.
        const float base = now - 14.f;
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < T / 2; i++) {
          const float x = ex2(p[2 * i] - base), y = ex2(p[2 * i + 1] - base);
          sum += x + y;
          P[m][i] = pack2(x, y);
        }
        l_run[m] = l_run[m] * fade + sum;
        if (vote_any(fade != 1.f)) {
          const float f0 = shfl(fade, lane & ~2), f1 = shfl(fade, lane | 2);
#pragma unroll
          for (int i = 0; i < NT; i++)
#pragma unroll
            for (int k = 0; k < 8; k++) acc[m][i][k] *= (k & 2) ? f1 : f0;
        }
      }
#pragma unroll
      for (int k = 0; k < VS; k++)
#pragma unroll
        for (int g = 0; g < VG; g++) {
          const u32 x[4] = {V[k][g].x, V[k][g].y, V[k][g].z, V[k][g].w};
#pragma unroll
          for (int i = 0; i < PIECES; i++) {
            u32 y, z;
            if (FORMAT == F16) {
              y = x[2 * i & 3];
              z = x[(2 * i + 1) & 3];
            } else {
              fp8_half2<FORMAT>(x[i], y, z);
            }
#pragma unroll
            for (int m = 0; m < MT; m++) mma884_rr(acc[m][g * PIECES + i], P[m][2 * k], P[m][2 * k + 1], y, z);
          }
        }
      here = next;
    }

    // Merge the warps in order, in accumulator order (16-byte accesses without bank conflicts), CHUNK_TILES tiles at a time.
    float2* partial = reinterpret_cast<float2*>(a.partial) + head_index * a.splits * SLOT;
    float2* stats = reinterpret_cast<float2*>(a.stats) + head_index * a.splits * ROWS;
    if (qp == 0)
#pragma unroll
      for (int m = 0; m < MT; m++) {
        maxima[w * ROWS + m * 8 + r] = m_run[m];
        sums[w * ROWS + m * 8 + r] = l_run[m];
      }
#pragma unroll
    for (int c0 = 0; c0 < TILES; c0 += CHUNK_TILES) {
      if (c0) syncblock();
#pragma unroll
      for (int i = 0; i < CHUNK_TILES; i++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const float* x = acc[(c0 + i) / NT][(c0 + i) % NT] + 4 * k;
          merged[((w * CHUNK_TILES + i) * 2 + k) * 32 + lane] = make_float4(x[0], x[1], x[2], x[3]);
        }
      syncblock();
      if (c0 == 0) {
        weigh(WP);
        syncblock();
        if (splits > 1 && threadIdx.x < ROWS) stats[s * ROWS + threadIdx.x] = make_float2(tops[threadIdx.x], total(WP, threadIdx.x));
      }
      for (int e = threadIdx.x; e < CHUNK_TILES * 64; e += WP * 32) {
        const int r0 = (c0 + (e >> 6)) / NT * 8 + row_c(e & 31, 0);
        float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int k = 0; k < WP; k++) {
          const float f0 = factors[k * ROWS + r0], f1 = factors[k * ROWS + r0 + 2];
          const float4 x = merged[k * CHUNK_TILES * 64 + e];
          o.x += f0 * x.x;
          o.y += f0 * x.y;
          o.z += f1 * x.z;
          o.w += f1 * x.w;
        }
        if (splits > 1) store_partial(partial + (size_t)s * SLOT, G, c0 * 64 + e, o);
        else store_out(a, out, WP, c0 * 64 + e, o);
      }
    }
    if (splits == 1 || a.splits > kFused) return;
    if (last_of(a.tickets + head_index, splits)) combine(a, partial, stats, out, splits);
  }
};

#define DECODE_(NAME, D, MT, CTAS)                                    \
  KERNEL(decode_##NAME##_d##D##_r##MT, 256, CTAS)(AttentionArgs a) {  \
    SHARED_BYTES(sm);                                                 \
    MMA_BEGIN Decode<D, MT> d;                                        \
    d.run(a, sm);                                                     \
    MMA_END(a.partial)                                                \
  }                                                                   \
  EXPORT(decode_##NAME##_d##D##_r##MT)
#define COMBINE_(NAME, D)                                             \
  KERNEL(combine_##NAME##_d##D, 512, 1)(AttentionArgs a) {            \
    SHARED_BYTES(sm);                                                 \
    using K = Decode<D, 1>;                                           \
    const int tokens = a.group <= 8 ? tile_tokens(D, 1) : tile_tokens(D, 2); \
    Combine<D, K::PIECES>().run(a, sm, tokens, kWarps, row_tiles(a.group), false); \
  }                                                                   \
  EXPORT(combine_##NAME##_d##D)
#define DECODE(NAME, D, MT, CTAS) DECODE_(NAME, D, MT, CTAS)
#define COMBINE(NAME, D) COMBINE_(NAME, D)
// r1: up to 8 query heads per KV head, r2: up to 16. Two CTAs share a multiprocessor where registers allow.
DECODE(NAME, 64, 1, 2)
DECODE(NAME, 64, 2, 1)
DECODE(NAME, 128, 1, 2)
DECODE(NAME, 128, 2, 1)
DECODE(NAME, 256, 1, 1)
DECODE(NAME, 256, 2, 1)
COMBINE(NAME, 64)
COMBINE(NAME, 128)
COMBINE(NAME, 256)
