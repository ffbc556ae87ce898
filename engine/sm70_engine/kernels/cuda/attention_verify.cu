// Paged attention for a few query tokens per sequence: the verifier of speculative decoding (causal), and the draft model (not causal, window).
//
// R = group * queries rows in MT tiles of 8, row = head * queries + query; one CTA of 4 warps per (split, KV head, sequence). A tile is 32 tokens:
// QK by token group (8 tokens a warp), softmax by 2 threads a row, PV by column slice (D/4 a warp); K and V go from global memory to B
// fragments. FP32 softmax state and partials; combine_* (attention.cuh) adds the splits in order.
#include "attention.cuh"
template <int D, int MT>
struct Verify {
  static constexpr int BYTES = FORMAT == F16 ? 2 : 1, ROW = D * BYTES, KJ = ROW / 64, QH = FORMAT == F16 ? 1 : 2, NV = D / 128;  // NV: n32 tiles in a warp's slice
  static constexpr int SP = 36, PP = 40;  // pitches: scores (floats), probabilities (halves)
  static constexpr int VB = ROW / 32;     // bytes of V that a lane takes per token: 4, 8 or 16
  MEMBER void run(const AttentionArgs& a, u8* sm) {
    u8* sq = sm;
    float* scores = reinterpret_cast<float*>(sm + MT * 8 * D * 2);
    u16* probabilities = reinterpret_cast<u16*>(scores + MT * 8 * SP);
    float* fades = reinterpret_cast<float*>(probabilities + MT * 8 * PP);
    int* changed = reinterpret_cast<int*>(fades + MT * 8);
    const int lane = threadIdx.x & 31, w = threadIdx.x >> 5, qp = quadpair(lane), r = row_a(lane), s = blockIdx.x, h = blockIdx.y, b = blockIdx.z,
              nq = a.queries, R = a.group * nq;
    const Share share(a, b, 32, 1);
    const int L = share.length, begin = share.begin;
    if (s >= share.splits || L <= 0) return;
    const int* table = a.block_table + (size_t)b * a.table_stride;
    const int t0 = share.first + (int)((long long)share.tiles * s / share.splits), t1 = share.first + (int)((long long)share.tiles * (s + 1) / share.splits);
    // Q to shared memory in fragment order: [MT][KJ][QH][lane] 16 bytes; by lane, or a quarter warp's four rows of two quadpairs meet in banks
#pragma unroll
    for (int k = 0; k < MT * KJ * QH / 4; k++) {
      const int e = k * 128 + threadIdx.x, rr = r, qq = qp, c = k * 4 + w, half = c % QH, j = c / QH % KJ, m = c / QH / KJ,
                row = min(m * 8 + rr, R - 1);
      const u16* from = a.q + ((size_t)b * nq + row % nq) * a.q_stride + (size_t)(h * a.group + row / nq) * D +
                        (FORMAT == F16 ? (4 * j + qq) * 8 : (4 * j + qq) * 16 + 8 * half);
      uint4 v = ldg128(from);
      if (FORMAT != F16) v = make_uint4(prmt(v.x, v.y, 0x5410), prmt(v.x, v.y, 0x7632), prmt(v.z, v.w, 0x5410), prmt(v.z, v.w, 0x7632));
      *reinterpret_cast<uint4*>(sq + (size_t)e * 16) = v;
    }
    float acc[MT][NV][8];
#pragma unroll
    for (int x = 0; x < MT; x++)
#pragma unroll
      for (int y = 0; y < NV; y++)
#pragma unroll
        for (int k = 0; k < 8; k++) acc[x][y][k] = 0.f;
    const int srow = threadIdx.x >> 1, sh = threadIdx.x & 1;
    float m_run = -1e30f, l_run = 0.f;
    // The query at position L - nq + i sees tokens from .. to - 1.
    const int position = L - nq + (srow < R ? srow % nq : 0), to = a.causal ? position + 1 : L, from = a.window > 0 ? position - a.window + 1 : 0;
    uint4 K[KJ];
    // A tile may span two pages; its two halves of 16 tokens never do. A half that no query sees is read where a seen one lies.
    const u8 *next0 = nullptr, *next1 = nullptr;
    auto find = [&](int t) {
      next0 = token_row(a, table, max(t * 32, begin & ~15), h);
      next1 = token_row(a, table, min(t * 32 + 16, L - 1) & ~15, h);
    };
    auto load_k = [&]() {
#pragma unroll
      for (int j = 0; j < KJ; j++)
        K[j] = stream128((w >> 1 ? next1 : next0) + (size_t)((w & 1) * 8 + r) * a.token_stride + 64 * SPREAD * j + 16 * qp);
    };
    find(t0);
    load_k();
    if (threadIdx.x == 0) changed[0] = changed[1] = changed[2] = 0;
    syncblock();
    for (int t = t0; t < t1; t++) {
      uint4 V[8];
#pragma unroll
      for (int k = 0; k < 8; k++) {
        const u8* x = (k >> 2 ? next1 : next0) + a.value_offset + (size_t)(4 * (k & 3) + (lane & 3)) * a.token_stride +
                      spread(w * (ROW / 4) + (2 * qp + (lane >> 4)) * VB);
        if (VB == 4) V[k].x = stream32(x);
        else if (VB == 8) {
          const uint2 y = stream64(x);
          V[k].x = y.x;
          V[k].y = y.y;
        } else V[k] = stream128(x);
      }
      if (t + 1 < t1) find(t + 1);
      float c[MT][8];
#pragma unroll
      for (int x = 0; x < MT; x++)
#pragma unroll
        for (int i = 0; i < 8; i++) c[x][i] = 0.f;
#pragma unroll
      for (int j = 0; j < KJ; j++)
#pragma unroll
        for (int e = 0; e < QH; e++) {
          u32 b0, b1, b2, b3;
          if (FORMAT == F16) {
            b0 = K[j].x;
            b1 = K[j].y;
            b2 = K[j].z;
            b3 = K[j].w;
          } else {
            fp8_half2<FORMAT>(e ? K[j].z : K[j].x, b0, b1);
            fp8_half2<FORMAT>(e ? K[j].w : K[j].y, b2, b3);
          }
#pragma unroll
          for (int y = 0; y < MT; y++) {
            const uint4 f = lds128(sq + (size_t)(((y * KJ + j) * QH + e) * 32 + lane) * 16);
            mma884(c[y], f.x, f.y, b0, b1);
            mma884(c[y], f.z, f.w, b2, b3);
          }
        }
      if (t + 1 < t1) load_k();
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
        *reinterpret_cast<float2*>(scores + (size_t)(y * 8 + row_c(lane, 2 * qp)) * SP + w * 8 + col_c(lane, 2 * qp)) = make_float2(e0, e1);
      }
      syncblock();
      // Three flags in turn, since a warp may be one barrier ahead: this tile's, the next one's (zero), and the one to clear.
      int* flag = changed + (t - t0) % 3;
      if (threadIdx.x == 0) changed[(t - t0 + 1) % 3] = 0;
      if (srow < MT * 8) {
        float p[16];
        const float* x = scores + (size_t)srow * SP + 16 * sh;
        float top = -1e30f;
        const int token = t * 32 + 16 * sh;
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
          const float4 y = *reinterpret_cast<const float4*>(x + i);
          p[i] = y.x * a.score_scale;
          p[i + 1] = y.y * a.score_scale;
          p[i + 2] = y.z * a.score_scale;
          p[i + 3] = y.w * a.score_scale;
        }
        const bool edge = token + 16 > to || token < from;
        if (edge)
#pragma unroll
          for (int i = 0; i < 16; i++)
            if (token + i >= to || token + i < from) p[i] = -1e30f;
#pragma unroll
        for (int i = 0; i < 16; i++) top = fmaxf(top, p[i]);
        top = fmaxf(top, shfl_xor(top, 1));
        const float now = fmaxf(m_run, top), fade = ex2(m_run - now), base = now - 14.f;
        m_run = now;
        float sum = 0.f;
        u32 P[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const float x0 = p[2 * i] <= -1e29f ? 0.f : ex2(p[2 * i] - base), x1 = p[2 * i + 1] <= -1e29f ? 0.f : ex2(p[2 * i + 1] - base);
          sum += x0 + x1;
          P[i] = pack2(x0, x1);
        }
        sum += shfl_xor(sum, 1);
        l_run = l_run * fade + sum;
        if (fade != 1.f) *flag = 1;
        if (sh == 0) fades[srow] = fade;
        uint4* o = reinterpret_cast<uint4*>(probabilities + (size_t)srow * PP + 16 * sh);
        o[0] = make_uint4(P[0], P[1], P[2], P[3]);
        o[1] = make_uint4(P[4], P[5], P[6], P[7]);
      }
      syncblock();
      if (*flag)
#pragma unroll
        for (int y = 0; y < MT; y++) {
          const float f0 = fades[y * 8 + row_c(lane, 0)], f1 = fades[y * 8 + row_c(lane, 2)];
#pragma unroll
          for (int z = 0; z < NV; z++)
#pragma unroll
            for (int k = 0; k < 8; k++) acc[y][z][k] *= (k & 2) ? f1 : f0;
        }
      if (FORMAT != E4M3 && ((t + 1) * 32 > L || t * 32 < begin))
#pragma unroll
        for (int k = 0; k < 8; k++) {
          const int token = t * 32 + 4 * k + (lane & 3);
          if (token >= L || token < begin) V[k] = make_uint4(0, 0, 0, 0);
        }
#pragma unroll
      for (int k = 0; k < 8; k += 2) {
        u32 B[2][NV][2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const u32 x[4] = {V[k + e].x, V[k + e].y, V[k + e].z, V[k + e].w};
#pragma unroll
          for (int z = 0; z < NV; z++) {
            if (FORMAT == F16) {
              B[e][z][0] = x[2 * z];
              B[e][z][1] = x[2 * z + 1];
            } else {
              fp8_half2<FORMAT>(x[z], B[e][z][0], B[e][z][1]);
            }
          }
        }
#pragma unroll
        for (int y = 0; y < MT; y++) {
          const uint4 f = lds128(probabilities + (size_t)(y * 8 + r) * PP + 4 * k);
#pragma unroll
          for (int z = 0; z < NV; z++) {
            mma884_rr(acc[y][z], f.x, f.y, B[0][z][0], B[0][z][1]);
            mma884_rr(acc[y][z], f.z, f.w, B[1][z][0], B[1][z][1]);
          }
        }
      }
    }
    const size_t slot = ((size_t)b * gridDim.y + h) * a.splits + s;
    float2* partial = reinterpret_cast<float2*>(a.partial) + slot * MT * (D / 32) * 128 + lane;
#pragma unroll
    for (int y = 0; y < MT; y++)
#pragma unroll
      for (int z = 0; z < NV; z++)
#pragma unroll
        for (int k = 0; k < 4; k++)
          if (y * 8 + row_c(lane, 2 * k) < R) partial[((y * (D / 32) + w * NV + z) * 4 + k) * 32] = make_float2(acc[y][z][2 * k], acc[y][z][2 * k + 1]);
    if (srow < MT * 8 && sh == 0) reinterpret_cast<float2*>(a.stats)[slot * MT * 8 + srow] = make_float2(m_run, l_run);
  }
};
#define VERIFY_(NAME, D, MT, CTAS)                                    \
  KERNEL(verify_##NAME##_d##D##_r##MT, 128, CTAS)(AttentionArgs a) {  \
    SHARED_BYTES(sm);                                                 \
    MMA_BEGIN Verify<D, MT> v;                                        \
    v.run(a, sm);                                                     \
    MMA_END(a.partial)                                                \
  }                                                                   \
  EXPORT(verify_##NAME##_d##D##_r##MT)
#define COMBINE_(NAME, D)                                             \
  KERNEL(verify_combine_##NAME##_d##D, 512, 1)(AttentionArgs a) {     \
    SHARED_BYTES(sm);                                                 \
    Combine<D, D / 128>().run(a, sm, 32, 1, max(2, row_tiles(a.group * a.queries)), true); \
  }                                                                   \
  EXPORT(verify_combine_##NAME##_d##D)
#define VERIFY(NAME, D, MT, CTAS) VERIFY_(NAME, D, MT, CTAS)
#define COMBINE(NAME, D) COMBINE_(NAME, D)
VERIFY(NAME, 128, 2, 3)
VERIFY(NAME, 128, 4, 2)
VERIFY(NAME, 128, 6, 2)
VERIFY(NAME, 128, 8, 2)
VERIFY(NAME, 256, 2, 2)
VERIFY(NAME, 256, 4, 2)
VERIFY(NAME, 256, 6, 2)
COMBINE(NAME, 128)
COMBINE(NAME, 256)
