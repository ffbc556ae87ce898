// A chain of NVFP4 linears in one launch: each may read what an earlier one wrote. One CTA a multiprocessor, all of them on the card at a
// time (a cooperative launch), and a barrier of the grid between two linears.
//
// Separate launches leave the memory idle for 2 to 3 us each: ramp, first access, reduction, the slowest CTA. The weights of the next linear
// depend on nothing, so every warp keeps its next unit of weights in flight across the end of a tile, the reduction and the barrier.
// Layout, tiles, precision and order of the sums as in nvfp4_linear.cu.
#include "nvfp4_tile.cuh"
constexpr int kMaxOps = 8;
struct ChainOp {
  const u8* weight;
  const u16* a;
  u16* out;
  float scale, up_scale;  // the second one: gated only
  int n, k, a_stride, out_stride, gated;
};
struct ChainArgs {
  ChainOp op[kMaxOps];
  u32* counters;  // two, zero before the first launch; every launch leaves zeros
  int ops, m;
};
#ifdef EMULATE
#define __grid_constant__
DEVICE uint4 ldcg128(const void* p) { return *(const uint4*)p; }
DEVICE void grid_barrier(u32* counter, u32 target) {
  syncblock();
  if (threadIdx.x == 0) {
    ++*counter;
    emu::progress++;
    while (*counter < target) emu::yield();
  }
  syncblock();
}
#else
DEVICE uint4 ldcg128(const void* p) {  // past L1: another CTA may have written it in this launch
  uint4 r;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p) : "memory");
  return r;
}
// What any thread of the grid wrote before it, every thread sees after it.
DEVICE void grid_barrier(u32* counter, u32 target) {
  syncblock();
  if (threadIdx.x == 0) {
    u32 now;
    asm volatile("red.release.gpu.global.add.u32 [%0],1;" ::"l"(counter) : "memory");
    do asm volatile("ld.acquire.gpu.global.u32 %0,[%1];" : "=r"(now) : "l"(counter) : "memory");
    while (now < target);
  }
  syncblock();
}
#endif
constexpr int sum_kb(int stage, int kw) {  // shared memory of the sum: what the staged activations leave of 96 KB
  const int left = 96 - (kw * 2 * stage + 1023) / 1024;
  return left < 40 ? left : 40;
}
template <int MT, int NT, int NW, int KW, bool WIDE>
DEVICE void chain(const ChainArgs& p) {
  SHARED_BYTES(sm);
  using T = Tile<MT, NT, NW, KW, WIDE>;
  constexpr int CH = T::CHUNKS;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, nw = warp % NW, kw = warp / NW, M = p.m;
  T tile;
  tile.set(nw, kw, smem_base(sm));
  // The table moves to shared memory at once: the first look at a constant costs about as much as a read of memory, and a warp would take it at
  // the end of every linear, in front of the sum and the barrier.
  ChainOp* ops = reinterpret_cast<ChainOp*>(sm + KW * 2 * T::STAGE + tiles_at_once(T::ROWS * T::PARTS, NW * KW, sum_kb(T::STAGE, KW)) * NW * KW * 1024);
  constexpr int WORDS = sizeof(ChainOp) / 4;
  for (int i = threadIdx.x; i < p.ops * WORDS; i += NW * KW * 32) reinterpret_cast<u32*>(ops)[i] = reinterpret_cast<const u32*>(p.op)[i];
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
  typename T::Weights next;
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
  const int g = nw * 32 + lane;
  const bool on = MT * 64 >= NW * 32 || g < MT * 64;
  constexpr bool CLAMP = CH <= 2;  // rows past M: clamped to the last row, or left zero; their results are not stored
  for (int o = 0; o < p.ops; o++) {
    const ChainOp op = ops[o];
    const int U = op.k >> 6, tiles = ((op.n + 31) >> 5) << op.gated;
    const u16* from[CLAMP ? CH : 1];
    const u32 rows_apart = NW * 4 * op.a_stride;
#pragma unroll
    for (int c = 0; c < (CLAMP ? CH : 1); c++)
      from[c] = op.a + (size_t)(CLAMP ? min(c * NW * 4 + (g >> 3), M - 1) : g >> 3) * op.a_stride + (g & 7) * 8;
    uint4 staged[CH];
    auto fetch = [&](int u) {
#pragma unroll
      for (int c = 0; c < CH; c++)
        if (CLAMP ? on : c * NW * 4 + (g >> 3) < M) staged[c] = ldcg128((CLAMP ? from[CLAMP ? c : 0] : from[0] + c * rows_apart) + u * 64);
    };
#pragma unroll
    for (int c = 0; c < CH; c++) staged[c] = make_uint4(0, 0, 0, 0);
    if (kw < U) fetch(kw);
    int parity = 0;
    for (int group = blockIdx.x; group * NW * NT < tiles; group += gridDim.x) {
      float acc[T::ROWS][T::PARTS][8];
      clear(acc);
      for (int u = kw; u < U; u += KW) {
        if (on) tile.stage(staged, parity);
        if (NW == 1) syncwarp();
        else named_bar(kw + 1, NW * 32);
        fetch(u + KW < U ? u + KW : kw);  // the next unit's, or the next column group's first
        const typename T::Weights now = next;
        load();
        tile.multiply(acc, now, parity);
        parity ^= 1;
      }
      tile.template finish<sum_kb(T::STAGE, KW)>(acc, reinterpret_cast<float4*>(sm + KW * 2 * T::STAGE), nw, kw, op.gated, op.scale, op.up_scale, op.out,
                                       op.out_stride, group, M, op.n);
      syncblock();
    }
    if (o + 1 < p.ops) grid_barrier(p.counters, (u32)(o + 1) * gridDim.x);
  }
  // The last CTA to finish leaves the counters as it found them.
  if (threadIdx.x == 0 && take_ticket(p.counters + 1) == gridDim.x - 1) p.counters[0] = p.counters[1] = 0;
}
#define VARIANT(NAME, THREADS, ...)                                          \
  KERNEL(chain_##NAME, THREADS, 1)(const __grid_constant__ ChainArgs p) {    \
    MMA_BEGIN chain<__VA_ARGS__>(p);                                         \
    MMA_END(p.counters)                                                      \
  }                                                                          \
  EXPORT(chain_##NAME)
#define CHAIN(MT, NT, NW, KW) VARIANT(MT##_##NT##_##NW##_##KW, NW* KW * 32, MT, NT, NW, KW, false)
#define WIDE(MT, NW, KW) VARIANT(MT##w_1_##NW##_##KW, NW* KW * 32, MT, 1, NW, KW, true)
#ifndef EXPLORE
CHAIN(1, 1, 2, 10)
CHAIN(2, 1, 2, 8)
WIDE(4, 2, 6)
WIDE(8, 2, 4)
#endif
