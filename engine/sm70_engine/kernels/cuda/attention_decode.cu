// Paged decode attention, one query token per sequence: split-KV, FP32 softmax state and partials, ordered combine.
//
// A CTA takes a share of one sequence's tokens for one KV head and all query heads of its group (up to 8 * MT rows), so that K and V are read
// once. Both products run on the tensor core (m8n8k4) and K and V go from global memory to B fragments without shared memory:
//   QK: the four quadpairs of a warp take interleaved 16-byte chunks of the head dimension for the same 8 tokens (64 contiguous bytes of a
//       token per load); their partial scores are added by shuffles.     PV: B is row-major (a lane holds one token, 4 columns).
// Every warp runs its own softmax over its tiles of T tokens; the warps of a CTA are merged in order through shared memory, the CTAs of a head
// by the last of them (attention_combine.cuh).
// Compiled once per storage format: -DFORMAT=E4M3 | E5M2 | F16.
#include "attention_combine.cuh"
DEVICE constexpr int tile_tokens(int d) { return d == 256 || (FORMAT == F16 && d > 64) ? 8 : 16; }

template <int D, int MT>
struct Decode {
  static constexpr int T = tile_tokens(D), WP = kWarps;
  static constexpr int BYTES = FORMAT == F16 ? 2 : 1, ROW = D * BYTES;
  static constexpr int KJ = ROW / 64, KG = T / 8;                                // K: KG groups of 8 tokens, KJ chunks of 16 bytes per lane
  static constexpr int CHUNK = ROW >= 128 ? 16 : 8, VS = T / 4, VG = ROW / (8 * CHUNK);  // V: VS steps of 4 tokens, VG chunks per lane
  static constexpr int NT = D / 32, PIECES = NT / VG;                            // accumulator tiles of 32 columns; tiles per V chunk
  static constexpr int QH = FORMAT == F16 ? 1 : 2;                               // 16-byte pieces of Q per K chunk
  static constexpr bool Q_SHARED = MT * D > 256 || D == 128;                       // Q fragments in shared memory: where registers are short
  static constexpr int TILES = MT * NT, CHUNK_TILES = TILES < 8 ? TILES : 8;     // tiles merged at a time
  static constexpr int ROWS = MT * 8, ELEMENTS = TILES * 64;                     // float4 per partial
  using Last = Finish<D, PIECES, WP * 32, MT, 5>;

  // Shared memory: [Q fragments] [WP][CHUNK_TILES][2][32] float4, [WP][ROWS] maxima and sums. The combine uses it from the front.
  uint4* sq;
  float4* merged;
  float2* states;
  MEMBER void carve(u8* sm) {
    sq = reinterpret_cast<uint4*>(sm);
    merged = reinterpret_cast<float4*>(sm + (Q_SHARED ? ROWS * D * 2 : 0));
    states = reinterpret_cast<float2*>(merged + WP * CHUNK_TILES * 64);
  }
  MEMBER void run(const AttentionArgs& a, u8* sm) {
    carve(sm);
    const int lane = threadIdx.x & 31, w = threadIdx.x >> 5, qp = quadpair(lane), r = row_a(lane), h = blockIdx.y, b = blockIdx.z, G = a.group;
    const int s = blockIdx.x, asked = ldg32(a.lengths + b);
    Pages pages(a, b, h);
    pages.ask(a);
    // Q as A fragments, in the element order of the decoded K
    constexpr int QS = Q_SHARED ? (MT * KJ * QH + WP - 1) / WP : MT * KJ * QH;  // fragments that a warp takes
    const u16* q = a.q + (size_t)b * a.q_stride + (size_t)h * G * D;
    uint4 Q[QS];
#pragma unroll
    for (int i = 0; i < QS; i++) {
      const int f = Q_SHARED ? i * WP + w : i, m = f / (KJ * QH), j = f / QH % KJ, e = f % QH;
      if (Q_SHARED && f >= MT * KJ * QH) break;
      Q[i] = ldg128(q + (size_t)min(m * 8 + r, G - 1) * D + (FORMAT == F16 ? (4 * j + qp) * 8 : (4 * j + qp) * 16 + 8 * e));
    }
    const Divider by_splits(a.splits);
    const Share share(a, asked, T, WP, by_splits);
    const int length = share.length, begin = share.begin, splits = share.splits;
    // In rounds of a tile a warp, so that the CTAs of a head read side by side; the last round's tiles go to the CTAs in turn.
    const int all = share.tiles, rounds = share.rounds(WP);
    auto tile_of = [&](int i) { return share.first + (i < rounds ? (i * splits + s) * WP + w : rounds * WP * splits + w * splits + s); };
    const int turns = rounds + (rounds * WP * splits + w * splits + s < all);  // of this warp
    const bool any = s < splits && turns > 0;
    // K and V of this warp's tile; each register is asked for again, for its next tile, as soon as it is used up.
    uint4 K[KG][KJ], V[VS][VG];
    const u32 k_at = r * a.token_stride + 16 * qp, v_at = a.value_offset + (lane & 3) * a.token_stride + spread((2 * qp + (lane >> 4)) * CHUNK);
    auto load_k = [&](bool on, const u8* row, int g, int j) { stream128_if(on, row + (k_at + (u32)(g * 8 * a.token_stride)) + 64 * SPREAD * j, K[g][j]); };
    auto load_v = [&](bool on, const u8* row, int k, int g) {
      const u8* p = row + (v_at + (u32)(4 * k * a.token_stride)) + g * 128 * SPREAD;
      if (CHUNK == 16) stream128_if(on, p, V[k][g]);
      else stream64_if(on, p, V[k][g]);
    };
    const u8* next = pages.known(a, tile_of(0) * T, any);
#pragma unroll
    for (int g = 0; g < KG; g++)
#pragma unroll
      for (int j = 0; j < KJ; j++) {
        K[g][j] = make_uint4(0, 0, 0, 0);
        load_k(any, next, g, j);
      }
#pragma unroll
    for (int k = 0; k < VS; k++)
#pragma unroll
      for (int g = 0; g < VG; g++) {
        V[k][g] = make_uint4(0, 0, 0, 0);
        load_v(any, next, k, g);
      }
    if (s >= splits) return;
    const size_t head_index = (size_t)b * gridDim.y + h;
    u16* out = a.out + (size_t)b * a.out_stride + (size_t)h * G * D;
    if (length <= 0) {
      for (int i = threadIdx.x; i < G * D; i += WP * 32) out[i] = 0;
      return;
    }
    next = pages.known(a, tile_of(min(1, turns - 1)) * T, turns > 0);
#pragma unroll
    for (int i = 0; i < QS; i++) {
      const int f = i * WP + w;
      if (FORMAT != F16) Q[i] = make_uint4(prmt(Q[i].x, Q[i].y, 0x5410), prmt(Q[i].x, Q[i].y, 0x7632), prmt(Q[i].z, Q[i].w, 0x5410), prmt(Q[i].z, Q[i].w, 0x7632));
      if (Q_SHARED && f < MT * KJ * QH) sq[f * 32 + lane] = Q[i];
    }
    if (Q_SHARED) syncblock();
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
    auto locate = [&](int i) { return pages.row(a, tile_of(min(i, turns - 1)) * T); };
    for (int i = 0; i < turns; i++) {
      const int t = tile_of(i);
      const bool more = i + 1 < turns;
      const u8* after = locate(i + 2);
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
            if (e == QH - 1) load_k(more, next, g, j);
          }
        }
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
          load_v(more, next, k, g);
        }
      next = after;
    }

    // Merge the warps in order, in accumulator order (16-byte accesses without bank conflicts), CHUNK_TILES tiles at a time.
    if (Q_SHARED) syncblock();  // Q is no longer read
    if (qp == 0)
#pragma unroll
      for (int m = 0; m < MT; m++) states[w * ROWS + m * 8 + r] = make_float2(m_run[m], l_run[m]);
    const size_t part = head_index * a.splits + s;
    float4* partial = reinterpret_cast<float4*>(a.partial) + part * ELEMENTS;
    float f0[MT][WP], f1[MT][WP], sum0[MT], sum1[MT];  // of this lane's rows: the warps' factors, and the sums
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
#pragma unroll
        for (int m = 0; m < MT; m++) {
          const int row = m * 8 + row_c(lane, 0);
          float2 x[WP], y[WP];
          float top0 = -1e30f, top1 = -1e30f;
#pragma unroll
          for (int k = 0; k < WP; k++) {
            x[k] = states[k * ROWS + row];
            y[k] = states[k * ROWS + row + 2];
            top0 = fmaxf(top0, x[k].x);
            top1 = fmaxf(top1, y[k].x);
          }
          sum0[m] = sum1[m] = 0.f;
#pragma unroll
          for (int k = 0; k < WP; k++) {
            f0[m][k] = ex2(x[k].x - top0);
            f1[m][k] = ex2(y[k].x - top1);
            sum0[m] += f0[m][k] * x[k].y;
            sum1[m] += f1[m][k] * y[k].y;
          }
          if (splits > 1 && (lane & 14) == 0)
            for (int u = w; u < NT * 2; u += WP)
              give_to_ctas(reinterpret_cast<float4*>(a.stats) + (part * TILES * 2 + m * NT * 2 + u) * 4 + Last::pair_of(lane), arriving(make_float4(top0, sum0[m], top1, sum1[m])));
        }
      }
#pragma unroll
      for (int e0 = 0; e0 < CHUNK_TILES * 64; e0 += WP * 32) {
        const int e = e0 + threadIdx.x;
        if (CHUNK_TILES * 64 % (WP * 32) && e >= CHUNK_TILES * 64) break;
        const bool second = MT == 2 && (c0 + (e >> 6)) / NT;
        float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int k = 0; k < WP; k++) {
          const float4 x = merged[k * CHUNK_TILES * 64 + e];
          const float g0 = second ? f0[MT - 1][k] : f0[0][k], g1 = second ? f1[MT - 1][k] : f1[0][k];
          o.x += g0 * x.x;
          o.y += g0 * x.y;
          o.z += g1 * x.z;
          o.w += g1 * x.w;
        }
        if (splits > 1) give_to_ctas(partial + c0 * 64 + e, arriving(o));
        else {
          const float s0 = a.out_scale * reciprocal(second ? sum0[MT - 1] : sum0[0]), s1 = a.out_scale * reciprocal(second ? sum1[MT - 1] : sum1[0]);
          Last::store(a, c0 * 64 + e, make_float4(o.x * s0, o.y * s0, o.z * s1, o.w * s1));
        }
      }
    }
    if (splits > 1) Last::run(a, sm, splits);
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
#define DECODE(NAME, D, MT, CTAS) DECODE_(NAME, D, MT, CTAS)
// r1: up to 8 query heads per KV head, r2: up to 16. Two CTAs share a multiprocessor where registers allow.
DECODE(NAME, 64, 1, 2)
DECODE(NAME, 64, 2, 1)
DECODE(NAME, 128, 1, 2)
DECODE(NAME, 128, 2, 1)
DECODE(NAME, 256, 2, 1)
DECODE(NAME, 256, 1, 1)
