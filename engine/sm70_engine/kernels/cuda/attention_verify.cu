// Paged attention for a few query tokens per sequence: the verifier of speculative decoding (causal), and the draft model (not causal, window).
//
// R = group * queries rows in MT tiles of 8, row = head * queries + query; one CTA per (split, KV head, sequence), alone on its multiprocessor.
// Its warps have two roles, so that what one waits for the other hides, and neither holds the registers of both:
//   8 warps score: QK of a step's 64 tokens, 8 a warp, and between the products the softmax of the step before, by 4 threads a row or more;
//   4 warps multiply the probabilities of the step before that one with V, by column slice (D/4 a warp).
// One barrier a step. K and V go from global memory to B fragments, each register being asked for again as soon as it is used up: always, also
// behind the last step (then where the last unit lies). A load under a condition is merged with the old register's value, and the compilers then
// wait for the memory in the step that asks, through copies and through counters that loads of shared memory also use.
// FP32 softmax state and partials; verify_combine_* (attention.cuh) adds the splits in order.
#include "attention.cuh"
#ifdef EMULATE
DEVICE void prefetch_l2(const void* p) { (void)*(volatile const u8*)p; }  // stricter than a GPU: the address must be there
#else
DEVICE void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
#endif
constexpr int kUnit = 16, kStepTokens = 64, kLeast = 4;  // tokens that are shared out at a time (never of two pages), and at least so many for a CTA
template <int D, int MT>
struct Verify {
  static constexpr int SCORE = 8, PV = 4, WARPS = SCORE + PV;  // by number: first those that multiply, one for each sub-partition
  static constexpr int BYTES = FORMAT == F16 ? 2 : 1, ROW = D * BYTES, KJ = ROW / 64, QH = FORMAT == F16 ? 1 : 2, NV = D / 32 / PV;  // NV: n32 tiles in a slice
  static constexpr int TR = MT > 4 ? 4 : MT > 2 ? 8 : 16, PT = kStepTokens / TR;  // softmax: threads a row, tokens a thread
  static constexpr int SP = 80, PP = 72;       // pitches: scores (floats), probabilities (halves)
  static constexpr int VB = ROW / PV / 8;      // bytes of V that a lane takes per token: 4, 8 or 16
  static constexpr int VP = VB == 16 || MT * NV >= 8 ? 1 : 2;  // parts of a step (32 tokens) whose V is in registers
  u8* sq;
  float* scores;       // [2][rows][SP]
  u16* probabilities;  // [2][rows][PP]
  float* fades;        // [2][rows]
  int* changed;        // [4]: some row's reference grew
  u64* where;          // [8 steps][4 units]: where the keys of 16 tokens lie; then the block table
  int* limits;         // [rows][2]: a row sees the tokens from [1] to [0] - 1; then this CTA's units and the first token that a query sees
  MEMBER void carve(u8* sm) {
    sq = sm;
    scores = reinterpret_cast<float*>(sm + MT * 8 * D * 2);
    probabilities = reinterpret_cast<u16*>(scores + 2 * MT * 8 * SP);
    where = reinterpret_cast<u64*>(probabilities + 2 * MT * 8 * PP);
    limits = reinterpret_cast<int*>(where + 33);
    fades = reinterpret_cast<float*>(limits + MT * 16 + 3);
    changed = reinterpret_cast<int*>(fades + 2 * MT * 8);
  }
  MEMBER void run(const AttentionArgs& a, u8* sm) {
    carve(sm);
    const int lane = threadIdx.x & 31, w = threadIdx.x >> 5, qp = quadpair(lane), r = row_a(lane), s = blockIdx.x, h = blockIdx.y, b = blockIdx.z,
              nq = a.queries, R = a.group * nq;
    // Q comes first, while the length and then the block table are on their way. WARPS / MT warps share a row tile: a thread has one row.
    constexpr int SHARE = WARPS / MT, CHUNKS = KJ * QH, QN = (CHUNKS + SHARE - 1) / SHARE;  // chunks: 16 bytes of A fragments a lane
    const int tile = w % MT, row = min(tile * 8 + r, R - 1);
    const u16* q_at = a.q + ((size_t)b * nq + row % nq) * a.q_stride + (size_t)(h * a.group + row / nq) * D + (FORMAT == F16 ? 8 : 16) * qp;
    uint4 q[QN];
#pragma unroll
    for (int k = 0; k < QN; k++) {
      const int c = min(w / MT + k * SHARE, CHUNKS - 1);
      q[k] = ldg128(q_at + (FORMAT == F16 ? 32 : 64) * (c / QH) + 8 * (c % QH));
    }
    const Share share(a, b, kUnit, kLeast);
    const int L = share.length;
    if (s >= share.splits || L <= 0) return;
    const int* table = a.block_table + (size_t)b * a.table_stride;
    // 32 bits do for 2^27 tokens, and a division of 64 takes long when nothing else runs yet.
    const int u0 = share.first + (int)((u32)share.tiles * (u32)s / (u32)share.splits),
              u1 = share.first + (int)((u32)share.tiles * (u32)(s + 1) / (u32)share.splits);
    const int steps = (u1 - u0 + 3) / 4, first = u0 * kUnit, stop = min(L, u1 * kUnit);  // this CTA's tokens: first .. stop - 1
    // Scoring: this warp's 8 tokens of a step lie in one unit. A unit past the end is read where the last one lies.
    const int sw = w - PV;
    const bool scoring = w >= PV;
    // What is needed once a step waits in shared memory: registers are short.
    if (threadIdx.x < MT * 8) {  // the query at position L - nq + i
      const int position = L - nq + (threadIdx.x < R ? threadIdx.x % nq : 0);
      limits[threadIdx.x * 2] = min(stop, a.causal ? position + 1 : L);
      limits[threadIdx.x * 2 + 1] = max(first, a.window > 0 ? position - a.window + 1 : 0);
    }
    if (threadIdx.x == 0) {
      limits[MT * 16] = u0;
      limits[MT * 16 + 1] = u1;
      limits[MT * 16 + 2] = share.begin;
      where[32] = (u64)(size_t)table;
    }
    auto find = [&](const int* pages, int begin_unit, int end_unit, int unit) {
      return token_row(a, pages, min(begin_unit + unit, end_unit - 1) * kUnit, blockIdx.y);
    };
    auto publish = [&](int step) {  // by four lanes
      const int* pages = reinterpret_cast<const int*>((size_t)where[32]);
      where[(step & 7) * 4 + lane] = (u64)(size_t)find(pages, limits[MT * 16], limits[MT * 16 + 1], step * 4 + lane);
    };
    uint4 K[KJ];
    const int k_at = ((sw & 1) * 8 + r) * a.token_stride + 16 * qp;
    auto load_k = [&](const u8* p, int j) { K[j] = stream128(p + (size_t)k_at + 64 * SPREAD * j); };
    if (scoring) {
      const u8* here = find(table, u0, u1, sw / 2);
#pragma unroll
      for (int j = 0; j < KJ; j++) load_k(here, j);
      if (threadIdx.x < PV * 32 + 4) changed[threadIdx.x - PV * 32] = 0;
    }
    if (threadIdx.x < 12) where[threadIdx.x] = (u64)(size_t)find(table, u0, u1, threadIdx.x);  // the first three steps
    // Q to shared memory in fragment order: [MT][KJ][QH][lane] 16 bytes; by lane, or a quarter warp's four rows of two quadpairs meet in banks
#pragma unroll
    for (int k = 0; k < QN; k++) {
      const int c = w / MT + k * SHARE;
      uint4 v = q[k];
      if (FORMAT != F16) v = make_uint4(prmt(v.x, v.y, 0x5410), prmt(v.x, v.y, 0x7632), prmt(v.z, v.w, 0x5410), prmt(v.z, v.w, 0x7632));
      if (w < MT * SHARE && c < CHUNKS) *reinterpret_cast<uint4*>(sq + (size_t)((tile * CHUNKS + c) * 32 + lane) * 16) = v;
    }
    syncblock();
    if (scoring) score(a, steps, first, stop, publish, K, load_k);
    else multiply(a, steps, first, stop);
  }
  // The barrier at which the two roles meet, from two places of the program: so not __syncthreads, which all threads must reach in one place.
  static MEMBER void meet() { named_bar(1, WARPS * 32); }
  static MEMBER size_t slot_of(const AttentionArgs& a) { return ((size_t)blockIdx.z * gridDim.y + blockIdx.y) * a.splits + blockIdx.x; }
  template <class Publish, class Load>
  MEMBER void score(const AttentionArgs& a, int steps, int first, int stop, const Publish& publish, uint4 (&K)[KJ], const Load& load_k) {
    const int lane = threadIdx.x & 31, sw = (threadIdx.x >> 5) - PV, qp = quadpair(lane);
    const int part = threadIdx.x % TR, row = (threadIdx.x - PV * 32) / TR, srow = min(row, MT * 8 - 1);  // rows past the last one: the last one again
    const bool keeps = row < MT * 8;
    float m_run = -1e30f, l_run = 0.f;
    const u8* fragments = sq + lane * 16;
    // In turn x: the scores of step x, and between their products, piece by piece, the softmax of step x - 1. In turn 0 that one sees no token.
    for (int x = 0; x <= steps; x++) {
      const int base = first + x * kStepTokens;
      if (threadIdx.x == PV * 32) changed[x & 3] = 0;
      if (sw == (x & (SCORE - 1)) && lane < 4) publish(x + 3);
      const u8* next = reinterpret_cast<const u8*>((size_t)where[((x + 1) & 7) * 4 + sw / 2]);
      {  // V of this warp's tokens of the next step to the L2: a load of it is too short before its use to wait for memory
        const u8* v = next + a.value_offset;
#pragma unroll
        for (int i = lane; i < ROW / 8 * SPREAD; i += 32)  // 64 bytes a lane; of stretched data all that lies between, as loads fetch it
          prefetch_l2(v + (size_t)(((sw & 1) * 8 + i / (KJ * SPREAD)) * a.token_stride) + 64 * (i % (KJ * SPREAD)));
      }
      const int old = (x + 1) & 1;
      float p[PT], sum = 0.f, top = 0.f, now = 0.f, fade = 0.f, shift = 0.f;
      auto piece = [&](int i) {
        if (i == 0) {
          const float* from_scores = scores + (size_t)(old * MT * 8 + srow) * SP + 4 * part;
#pragma unroll
          for (int k = 0; k < PT / 4; k++) {
            const float4 y = *reinterpret_cast<const float4*>(from_scores + 4 * TR * k);
            p[4 * k] = y.x;
            p[4 * k + 1] = y.y;
            p[4 * k + 2] = y.z;
            p[4 * k + 3] = y.w;
          }
        }
        if (i == 1) {
          const int end = limits[srow * 2], begin = limits[srow * 2 + 1];
          if (base > end || base - kStepTokens < begin) {
#pragma unroll
            for (int k = 0; k < PT; k++) {
              const int token = base - kStepTokens + 4 * TR * (k >> 2) + 4 * part + (k & 3);
              if (token >= end || token < begin) p[k] = float_of(0xff800000u);
            }
          }
          top = p[0];
#pragma unroll
          for (int k = 1; k < PT; k++) top = fmaxf(top, p[k]);
        }
        if (i == 2) {
#pragma unroll
          for (int k = 1; k < TR; k *= 2) top = fmaxf(top, shfl_xor(top, k));
        }
        if (i == 3) {
          // The row's reference follows its maximum only when that is 2^1.875 above it: seldom does anything have to be rescaled.
          now = top * a.score_scale;
          if (!(now > m_run + 1.875f)) now = m_run;
          fade = ex2(m_run - now);
          // Probabilities go to FP16 times 2^14, at most 2^15.875: the small ones of a long context keep their bits. Sums carry the same factor.
          shift = 14.f - now;
          m_run = now;
        }
        if (i >= 4) {
          u16* to_probabilities = probabilities + (size_t)(old * MT * 8 + srow) * PP + 4 * part;
#pragma unroll
          for (int k = 4 * (i - 4); k < 4 * (i - 3) && k < PT; k += 4) {
            float y[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
              y[e] = ex2(fmaf(p[k + e], a.score_scale, shift));
              sum += y[e];
            }
            if (keeps) *reinterpret_cast<uint2*>(to_probabilities + TR * k) = make_uint2(pack2(y[0], y[1]), pack2(y[2], y[3]));
          }
        }
        if (i == 7) {
          l_run = l_run * fade + sum;
          if (fade != 1.f) changed[(x + 3) & 3] = 1;
          if (part == 0 && keeps) fades[old * MT * 8 + srow] = fade;
        }
      };
      if (x < steps && base + sw * 8 < stop) {
        float c[MT][8];
#pragma unroll
        for (int y = 0; y < MT; y++)
#pragma unroll
          for (int i = 0; i < 8; i++) c[y][i] = 0.f;
#pragma unroll
        for (int j = 0; j < KJ; j++) {
#pragma unroll
          for (int e = 0; e < QH; e++) {
            u32 b0 = K[j].x, b1 = K[j].y, b2 = K[j].z, b3 = K[j].w;
            if (FORMAT != F16) {
              const u32 low = e ? b2 : b0, high = e ? b3 : b1;
              fp8_half2<FORMAT>(low, b0, b1);
              fp8_half2<FORMAT>(high, b2, b3);
              if (e == 1) load_k(next, j);
            }
#pragma unroll
            for (int y = 0; y < MT; y += 2) {  // two row tiles at a time: a product does not wait for the one before it
              uint4 f[2];
#pragma unroll
              for (int i = 0; i < 2; i++) f[i] = lds128(fragments + (size_t)(((y + i) * KJ + j) * QH + e) * 512);
#pragma unroll
              for (int i = 0; i < 2; i++) mma884(c[y + i], f[i].x, f[i].y, b0, b1);
#pragma unroll
              for (int i = 0; i < 2; i++) mma884(c[y + i], f[i].z, f[i].w, b2, b3);
            }
            if (FORMAT == F16) load_k(next, j);
            constexpr int TURNS = KJ * QH;
#pragma unroll
            for (int i = 0; i < 8 / TURNS; i++) piece((j * QH + e) * (8 / TURNS) + i);
          }
        }
        // Add the quadpairs (lanes ^8, ^4: quadpair q ends with accumulators 2q, 2q + 1); scores to shared memory.
#pragma unroll
        for (int y = 0; y < MT; y++) {
          const bool h1 = lane & 8, h0 = lane & 4;
          float d[4];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const float mine = h1 ? c[y][i + 4] : c[y][i], other = h1 ? c[y][i] : c[y][i + 4];
            d[i] = mine + shfl_xor(other, 8);
          }
          const float e0 = (h0 ? d[2] : d[0]) + shfl_xor(h0 ? d[0] : d[2], 4), e1 = (h0 ? d[3] : d[1]) + shfl_xor(h0 ? d[1] : d[3], 4);
          *reinterpret_cast<float2*>(scores + (size_t)((x & 1) * MT * 8 + y * 8 + row_c(lane, 2 * qp)) * SP + sw * 8 + col_c(lane, 2 * qp)) = make_float2(e0, e1);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 8; i++) piece(i);
      }
      meet();
    }
#pragma unroll
    for (int k = 1; k < TR; k *= 2) l_run += shfl_xor(l_run, k);
    if (keeps && part == 0) reinterpret_cast<float2*>(a.stats)[slot_of(a) * MT * 8 + srow] = make_float2(m_run, l_run);
  }
  MEMBER void multiply(const AttentionArgs& a, int steps, int first, int stop) {
    const int lane = threadIdx.x & 31, w = threadIdx.x >> 5, qp = quadpair(lane), r = row_a(lane), R = a.group * a.queries;
    float acc[MT][NV][8];
#pragma unroll
    for (int x = 0; x < MT; x++)
#pragma unroll
      for (int y = 0; y < NV; y++)
#pragma unroll
        for (int k = 0; k < 8; k++) acc[x][y][k] = 0.f;
    uint4 V[VP][8];
    const int v_at = a.value_offset + (lane & 3) * a.token_stride + spread(w * (ROW / PV) + (2 * qp + (lane >> 4)) * VB);
    const u8* from = nullptr;
    auto load_v = [&](int step, int part, int k) {  // 4 tokens; called in order within a unit
      if (k % 4 == 0) from = reinterpret_cast<const u8*>((size_t)where[(step & 7) * 4 + part * 2 + (k >> 2)]) + v_at;
      else from += 4 * a.token_stride;
      uint4& to = V[part % VP][k];
      if (VB == 4) to.x = stream32(from);
      else if (VB == 8) {
        const uint2 y = stream64(from);
        to.x = y.x;
        to.y = y.y;
      } else to = stream128(from);
    };
#pragma unroll
    for (int part = 0; part < VP; part++)
#pragma unroll
      for (int k = 0; k < 8; k++) load_v(0, part, k);
    meet();
    for (int x = 0; x < steps; x++) {
      const int base = first + x * kStepTokens;
      meet();
      if (changed[x & 3]) {
        const float* fade = fades + (x & 1) * MT * 8;
#pragma unroll
        for (int y = 0; y < MT; y++) {
          const float f0 = fade[y * 8 + row_c(lane, 0)], f1 = fade[y * 8 + row_c(lane, 2)];
#pragma unroll
          for (int z = 0; z < NV; z++)
#pragma unroll
            for (int k = 0; k < 8; k++) acc[y][z][k] *= (k & 2) ? f1 : f0;
        }
      }
      const u16* p = probabilities + (size_t)((x & 1) * MT * 8 + r) * PP;
#pragma unroll
      for (int part = 0; part < 2; part++) {
        if (base + part * 32 >= stop) break;
        // Tokens that no query sees may hold anything; E4M3 has no code that reads as NaN or infinity here.
        if (FORMAT != E4M3 && (base + part * 32 + 32 > stop || x + part == 0)) {
          const int token = base + part * 32 + (threadIdx.x & 3);
#pragma unroll
          for (int k = 0; k < 8; k++)
            if (token + 4 * k >= stop || (x + part == 0 && token + 4 * k < limits[MT * 16 + 2])) V[part % VP][k] = make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int k = 0; k < 8; k += 2) {
          u32 B[2][NV][2];
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const uint4 v = V[part % VP][k + e];
            const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int z = 0; z < NV; z++) {
              if (FORMAT == F16) {
                B[e][z][0] = words[2 * z];
                B[e][z][1] = words[2 * z + 1];
              } else {
                fp8_half2<FORMAT>(words[z], B[e][z][0], B[e][z][1]);
              }
            }
          }
          auto refill = [&]() {
#pragma unroll
            for (int e = 0; e < 2; e++) load_v(VP == 2 ? x + 1 : x + part, VP == 2 ? part : 1 - part, k + e);
          };
          if (FORMAT != F16) refill();
#pragma unroll
          for (int y = 0; y < MT; y++) {
            const uint4 f = lds128(p + y * 8 * PP + part * 32 + 4 * k);
#pragma unroll
            for (int z = 0; z < NV; z++) mma884_rr(acc[y][z], f.x, f.y, B[0][z][0], B[0][z][1]);
#pragma unroll
            for (int z = 0; z < NV; z++) mma884_rr(acc[y][z], f.z, f.w, B[1][z][0], B[1][z][1]);
          }
          if (FORMAT == F16) refill();
        }
      }
    }
    float2* partial = reinterpret_cast<float2*>(a.partial) + slot_of(a) * MT * (D / 32) * 128 + lane;
#pragma unroll
    for (int y = 0; y < MT; y++)
#pragma unroll
      for (int z = 0; z < NV; z++)
#pragma unroll
        for (int k = 0; k < 4; k++)
          if (y * 8 + row_c(lane, 2 * k) < R) partial[((y * (D / 32) + w * NV + z) * 4 + k) * 32] = make_float2(acc[y][z][2 * k], acc[y][z][2 * k + 1]);
  }
};
#define VERIFY_(NAME, D, MT)                                         \
  KERNEL(verify_##NAME##_d##D##_r##MT, 384, 1)(AttentionArgs a) {    \
    SHARED_BYTES(sm);                                                \
    MMA_BEGIN Verify<D, MT> v;                                       \
    v.run(a, sm);                                                    \
    MMA_END(a.partial)                                               \
  }                                                                  \
  EXPORT(verify_##NAME##_d##D##_r##MT)
#define COMBINE_(NAME, D)                                                                                    \
  KERNEL(verify_combine_##NAME##_d##D, 512, 1)(AttentionArgs a) {                                            \
    SHARED_BYTES(sm);                                                                                        \
    Combine<D, D / 128>().run(a, sm, kUnit, kLeast, max(2, row_tiles(a.group * a.queries)), true);           \
  }                                                                                                          \
  EXPORT(verify_combine_##NAME##_d##D)
#define VERIFY(NAME, D, MT) VERIFY_(NAME, D, MT)
#define COMBINE(NAME, D) COMBINE_(NAME, D)
VERIFY(NAME, 128, 2)
VERIFY(NAME, 128, 4)
VERIFY(NAME, 128, 6)
VERIFY(NAME, 128, 8)
VERIFY(NAME, 256, 2)
VERIFY(NAME, 256, 4)
VERIFY(NAME, 256, 6)
COMBINE(NAME, 128)
COMBINE(NAME, 256)
