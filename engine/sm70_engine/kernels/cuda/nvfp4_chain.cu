// A chain of NVFP4 linears in one launch: each may read what an earlier one computed. One CTA a multiprocessor, all of them on the card at a
// time (a cooperative launch), without a barrier of the grid.
//
// Separate launches leave the memory idle for 2 to 3 us each: ramp, first access, reduction, the slowest CTA. A barrier of the grid between two
// linears costs nearly as much: fence, arrival, the look that sees the last one, and only then the first activations. Here nobody waits for more
// than it reads. A result that a later linear of the launch reads goes to a relay, memory that is all ones until then; the reader fetches 64 columns and
// fetches them again while a word of them is still all ones. Converting to FP16 never gives the half 0xFFFF (NaN becomes 0x7FFF), so nothing
// else can look like a missing word, and a word that is there needs no fence: it is the datum itself.
// Relays come in two sides; a launch uses one and fills the other one, which its predecessor used, with ones again.
// The weights of the next linear depend on nothing, so every warp keeps its next unit of them in flight across the end of a tile and the reduction, and
// with few rows, where that costs no register, two of them between two linears.
// Layout, tiles, precision and order of the sums as in nvfp4_linear.cu.
#include "nvfp4_tile.cuh"
constexpr int kInline = 8;  // linears whose table fits in the parameters
constexpr u32 kNoRelay = 1;
struct ChainOp {
  const u8* weight;
  const u16* a;  // null: the relay at byte `in`, rows a_stride halves apart
  u16* out;      // null: nobody but later linears reads the result
  float scale, up_scale;  // the second one: gated only
  int n, k, a_stride, out_stride, gated;
  u32 in, relay;  // bytes from the start of a side, multiples of 16; relay: where the result goes, rows n halves apart, or kNoRelay
};
// The front of a workspace. Zeros before the first launch; a launch with another layout fills both sides before it starts.
struct ChainState {
  u32 ticket, arrived, half, side, used;
};
struct ChainArgs {
  ChainOp op[kInline];
  const ChainOp* table;  // of more linears
  u8* workspace;         // ChainState in 256 bytes, then two sides of `half` bytes
  u32 half, used;        // used: bytes of a side that hold relays
  int ops, m;
};
#ifdef EMULATE
#define __grid_constant__
DEVICE u32 other_lane(u32 v, int l) { return float_bits(shfl(float_of(v), l)); }
DEVICE uint4 load_relay(const void* p) { return *(const uint4*)p; }
DEVICE void store_relay(void* p, u32 lo, u32 hi) {
  *(u64*)p = lo | (u64)hi << 32;
  emu::progress++;
}
DEVICE void others_run() { emu::yield(); }
DEVICE void grid_barrier(u32* counter) {
  syncblock();
  if (threadIdx.x == 0) {
    ++*counter;
    emu::progress++;
    while (*counter < gridDim.x) emu::yield();
  }
  syncblock();
}
#else
DEVICE u32 other_lane(u32 v, int l) { return __shfl_sync(0xffffffffu, v, l); }
// Relaxed, not just past L1: a compiler may take a weak load for one that never changes and drop a loop that waits for it.
DEVICE uint4 load_relay(const void* p) {
  uint4 r;  // four words, not two of 64 bits: splitting those costs moves that wait for the fetch
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p) : "memory");
  return r;
}
DEVICE void store_relay(void* p, u32 lo, u32 hi) {
  asm volatile("st.relaxed.gpu.global.u64 [%0],%1;" ::"l"(p), "l"(lo | (u64)hi << 32) : "memory");
}
DEVICE void others_run() {}
// What any thread of the grid wrote before it, every thread sees after it.
DEVICE void grid_barrier(u32* counter) {
  syncblock();
  if (threadIdx.x == 0) {
    u32 now;
    asm volatile("red.release.gpu.global.add.u32 [%0],1;" ::"l"(counter) : "memory");
    do asm volatile("ld.acquire.gpu.global.u32 %0,[%1];" : "=r"(now) : "l"(counter) : "memory");
    while (now < gridDim.x);
  }
  syncblock();
}
#endif
constexpr int sum_kb(int stage, int kw) {  // shared memory of the sum: what the staged activations leave of 96 KB
  const int left = 96 - (kw * 2 * stage + 1023) / 1024;
  return left < 40 ? left : 40;
}
DEVICE bool missing(const uint4& x) { return (x.x == ~0u) | (x.y == ~0u) | (x.z == ~0u) | (x.w == ~0u); }  // no order among words
template <int MT, int NT, int NW, int KW, bool WIDE>
struct ChainTile : Tile<MT, NT, NW, KW, WIDE> {
  using T = Tile<MT, NT, NW, KW, WIDE>;
  using T::lane;
  using T::PARTS;
  using T::ROWS;
  // As finish, to a relay, to memory or to both, eight bytes at a time.
  template <int AT>
  MEMBER void close(const float (&acc)[T::ROWS][T::PARTS][8], float4* part, int nw, int kw, const ChainOp& op, u16* relay, int group, int m_rows) {
    constexpr int TT = ROWS * PARTS, CT = tiles_at_once(TT, NW * KW, AT), TILES = WIDE ? 1 : NT;
    const float scale = op.scale * 128.f, up_scale = op.up_scale * 128.f;
    const int gated = op.gated, n = op.n;
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
        const int row = (WIDE ? 2 * m + (q >> 1) : m) * 8 + row_c(l, 0) + (l & 2);
        const int column = tile * 32 + (WIDE ? t * 16 + (q & 1) * 8 : q * 8) + 4 * k;
        // Lanes that hold columns 0, 1 and 2, 3 of rows r and r + 2: each takes a whole row of the four.
        const u32 upper = pack2(x.x, x.y), lower = pack2(x.z, x.w), got = other_lane(l & 2 ? upper : lower, l ^ 2);
        const u32 lo = l & 2 ? got : upper, hi = l & 2 ? lower : got;
        if (column < n && row < m_rows) {
          if (relay) store_relay(relay + (u32)(row * n + column), lo, hi);
          if (op.out) *reinterpret_cast<uint2*>(op.out + (size_t)row * op.out_stride + column) = make_uint2(lo, hi);
        }
      }
    }
  }
};
template <int MT, int NT, int NW, int KW, bool WIDE>
DEVICE void chain(const ChainArgs& p) {
  SHARED_BYTES(sm);
  using T = ChainTile<MT, NT, NW, KW, WIDE>;
  constexpr int CH = T::CHUNKS;
  constexpr bool AHEAD = MT == 1;  // two units in flight between two linears: more rows have no registers for it
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, nw = warp % NW, kw = warp / NW, M = p.m;
  T tile;
  tile.set(nw, kw, smem_base(sm));
  // The table moves to shared memory at once: the first look at a constant costs about as much as a read of memory.
  ChainOp* ops = reinterpret_cast<ChainOp*>(sm + KW * 2 * T::STAGE + tiles_at_once(T::ROWS * T::PARTS, NW * KW, sum_kb(T::STAGE, KW)) * NW * KW * 1024);
  constexpr int WORDS = sizeof(ChainOp) / 4;
  for (int i = threadIdx.x; i < p.ops * WORDS; i += NW * KW * 32)
    reinterpret_cast<u32*>(ops)[i] = p.ops <= kInline ? reinterpret_cast<const u32*>(p.op)[i] : reinterpret_cast<const u32*>(p.table)[i];
  ChainState* state = reinterpret_cast<ChainState*>(p.workspace);
  const u32 side = state->side, half = state->half, used = state->used;
  syncblock();
  // The front of the weights' stream: (linear, column group, unit)
  int fo = 0, ft = blockIdx.x, fu = kw, fU = 0;
  auto enter = [&]() {  // the first unit of (fo, ft), or of the next linear that has a column group and a unit for this warp
    for (; fo < p.ops; fo++, ft = blockIdx.x) {
      const ChainOp& op = ops[fo];
      const int tiles = ((op.n + 31) >> 5) << op.gated;
      fU = op.k >> 6;
      if (ft * NW * NT >= tiles || kw >= fU) continue;
      fu = kw;
      tile.seek(op.weight, (ft * NW + nw) * NT, tiles, fU, kw);
      return;
    }
  };
  enter();
  typename T::Weights next, now;
  bool ahead = false;  // whether `now` holds the next unit already
  auto load = [&]() {
    if (fo >= p.ops) return;
    tile.load(next);
    fu += KW;
    if (fu >= fU) {
      ft += gridDim.x;
      enter();
    }
  };
  load();
  u8* relays = p.workspace + 256;
  auto fill = [&](u8* from, u32 bytes) {
    for (u32 i = blockIdx.x * NW * KW * 32 + threadIdx.x; i < bytes / 16; i += gridDim.x * NW * KW * 32)
      reinterpret_cast<uint4*>(from)[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  };
  if (half != p.half) {
    fill(relays, 2 * p.half);
    grid_barrier(&state->arrived);
  } else {
    fill(relays + (side ^ 1) * half, used);
  }
  relays += side * p.half;
  const int g = nw * 32 + lane;
  const bool on = MT * 64 >= NW * 32 || g < MT * 64;
  constexpr bool CLAMP = CH <= 2;  // rows past M: clamped to the last row, or left zero; their results are not stored
  for (int o = 0; o < p.ops; o++) {
    const ChainOp& op = ops[o];
    const int U = op.k >> 6, tiles = ((op.n + 31) >> 5) << op.gated;
    bool wait = op.a == nullptr;  // in the first column group; then all of it is there
    const u16* a = op.a ? op.a : reinterpret_cast<const u16*>(relays + op.in);
    const u16* from[CLAMP ? CH : 1];
    const u32 rows_apart = NW * 4 * op.a_stride;
#pragma unroll
    for (int c = 0; c < (CLAMP ? CH : 1); c++)
      from[c] = a + (size_t)(CLAMP ? min(c * NW * 4 + (g >> 3), M - 1) : g >> 3) * op.a_stride + (g & 7) * 8;
    uint4 staged[CH];
    auto source = [&](int c, int u) { return (CLAMP ? from[CLAMP ? c : 0] : from[0] + c * rows_apart) + u * 64; };
    auto present = [&](int c) { return CLAMP ? on : c * NW * 4 + (g >> 3) < M; };
    auto fetch = [&](int u) {
#pragma unroll
      for (int c = 0; c < CH; c++)
        if (present(c)) staged[c] = load_relay(source(c, u));
    };
#pragma unroll
    for (int c = 0; c < CH; c++) staged[c] = make_uint4(0, 0, 0, 0);
    if (kw < U && (int)blockIdx.x * NW * NT < tiles) fetch(kw);
    int parity = 0;
    for (int group = blockIdx.x; group * NW * NT < tiles; group += gridDim.x) {
      float acc[T::ROWS][T::PARTS][8];
      clear(acc);
      for (int u = kw; u < U; u += KW) {
        if (wait) {
          auto late = [&]() {
            bool any = false;
#pragma unroll
            for (int c = 0; c < CH; c++) any |= present(c) & missing(staged[c]);
            return any;
          };
          while (late()) {
            others_run();
            fetch(u);
          }
        }
        if (on) tile.stage(staged, parity);
        if (NW == 1) syncwarp();
        else named_bar(kw + 1, NW * 32);
        fetch(u + KW < U ? u + KW : kw);  // the next unit's, or the next column group's first
        if (!AHEAD || !ahead) {
          now = next;
          load();
        }
        ahead = false;
        tile.multiply(acc, now, parity);
        parity ^= 1;
      }
#ifdef MEET_EQUALLY  // as in nvfp4_linear.cu
      if (NW > 1 && (U - kw + KW - 1) / KW < (U + KW - 1) / KW) named_bar(kw + 1, NW * 32);
#endif
      wait = false;
      tile.template close<sum_kb(T::STAGE, KW)>(acc, reinterpret_cast<float4*>(sm + KW * 2 * T::STAGE), nw, kw, op,
                                                  op.relay == kNoRelay ? nullptr : reinterpret_cast<u16*>(relays + op.relay), group, M);
      syncblock();
    }
    if (AHEAD && o + 1 < p.ops && !ahead) {
      now = next;
      load();
      ahead = true;
    }
  }
  syncblock();
  // The last CTA to finish leaves the state of the workspace to the next launch.
  if (threadIdx.x == 0 && take_ticket(&state->ticket) == gridDim.x - 1) {
    state->ticket = state->arrived = 0;
    state->half = p.half;
    state->side = side ^ 1;
    state->used = p.used;
  }
}
#define VARIANT(NAME, THREADS, ...)                                          \
  KERNEL(chain_##NAME, THREADS, 1)(const __grid_constant__ ChainArgs p) {    \
    MMA_BEGIN chain<__VA_ARGS__>(p);                                         \
    MMA_END(p.workspace)                                                     \
  }                                                                          \
  EXPORT(chain_##NAME)
#define CHAIN(MT, NT, NW, KW) VARIANT(MT##_##NT##_##NW##_##KW, NW* KW * 32, MT, NT, NW, KW, false)
#define WIDE(MT, NW, KW) VARIANT(MT##w_1_##NW##_##KW, NW* KW * 32, MT, 1, NW, KW, true)
#ifndef EXPLORE
CHAIN(1, 1, 2, 10)
CHAIN(2, 1, 2, 8)
CHAIN(4, 2, 1, 8)
WIDE(8, 2, 4)
#endif
