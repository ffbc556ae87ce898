// One CUDA device on a CPU: blocks run one after another (those of a cooperative launch together; of a launch whose blocks may wait for others, as
// many as it says that there must be room for), every thread is a fiber, warp operations and barriers really wait for their
// partners. A wrong lane map, a missing exchange or an index past a buffer is wrong here as on a GPU. What it catches:
//   - access outside a buffer (the caller puts guard pages behind each one) and outside shared memory, misaligned vector access, bad
//     shifts and array indices (-fsanitize=undefined with traps): reported with block and thread, the process lives on;
//   - a barrier or warp operation that not all threads reach, or that they reach with different operations;
//   - a missing barrier, when a kernel gives other bits in another order: threads and blocks run forwards, backwards or shuffled.
//   - with -DRACES and -fsanitize=thread: two accesses to shared memory, one of them a write, that no barrier orders (races.hpp).
// Shared memory starts as NaN in every block. Atomics need nothing: one fiber runs at a time.
#pragma once
#ifndef __x86_64__
#error "the emulator switches fibers with x86-64 code"
#endif
#include <immintrin.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>
struct alignas(16) uint4 {
  u32 x, y, z, w;
};
struct alignas(8) uint2 {
  u32 x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

namespace emu {
extern "C" void sm70_emulator_switch(void** from, void* to) __attribute__((visibility("hidden")));
asm(R"(
.text
.hidden sm70_emulator_switch
.globl sm70_emulator_switch
.type sm70_emulator_switch, @function
sm70_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size sm70_emulator_switch, .-sm70_emulator_switch
)");
constexpr size_t kStack = 1 << 17, kPage = 4096, kShared = 96 << 10, kKept = 2048;  // stacks that are kept from launch to launch
struct Warp {
  int arrived = 0, kind = 0;
  unsigned generation = 0;
  u32 in[2][32][4];
  float out[2][32][8];
};
struct Barrier {
  int arrived = 0, total = 0;
  unsigned generation = 0;
  int who[1024];
};
struct Races;
struct Fiber {
  void* sp = nullptr;
  char* stack = nullptr;
  bool done = true;
};
static dim3 tid, bid, bdim, gdim;
struct Block {
  dim3 id;
  int first;  // of its fibers
  u8* smem;
  int live;  // threads that have not ended
  std::vector<Warp> warps;
  Barrier barriers[16];
  Races* races = nullptr;
};
static std::vector<Fiber> fibers;
static Block* block;  // the one that runs
static std::vector<Block*> blocks_there;
static void* main_sp;
static int current;
static u64 progress;
static bool waits;  // some thread waits for another block
static std::vector<u8*> shared_ends;  // the shared memory of each block that is there at a time; it ends at a guard page
static u8* smem;
static int shared_bytes;
static void (*body)(void*);
static void* body_args;
static sigjmp_buf escape;
static volatile sig_atomic_t running;
static char message[512];

[[noreturn]] static void fail(const char* what) {
  snprintf(message, sizeof message, "%s (block %u,%u,%u thread %u)", what, bid.x, bid.y, bid.z, tid.x);
  siglongjmp(escape, 1);
}
#ifdef RACES
#include "races.hpp"
#else
static inline void begin_races(Block&, int) {}
static inline void ordered(const int*, int) {}
static inline void settle() {}
#endif
static void on_signal(int number, siginfo_t* info, void*) {
  if (!running) {  // not ours: die as if we had never been here
    signal(number, SIG_DFL);
    raise(number);
    return;
  }
  char what[160];
  if (number == SIGILL) snprintf(what, sizeof what, "undefined behaviour: misaligned access, bad index or shift");
  else snprintf(what, sizeof what, "access outside every buffer at %p", info->si_addr);
  fail(what);
}
static inline void yield() { sm70_emulator_switch(&fibers[current].sp, main_sp); }
// All 32 lanes meet; the last one to come runs `complete` on what they brought.
template <class F>
static inline Warp& meet(int kind, const u32* value, int words, F complete, unsigned& parity) {
  Warp& w = block->warps[tid.x >> 5];
  const unsigned g = w.generation;
  parity = g & 1;
  if (w.arrived == 0) w.kind = kind;
  else if (w.kind != kind) fail("lanes of a warp reached different warp operations");
  memcpy(w.in[parity][current & 31], value, 4 * words);
  progress++;
  if (++w.arrived == 32) {
    complete(w, parity);
    w.arrived = 0;
    w.generation++;
  }
  while (w.generation == g) yield();
  return w;
}
static inline void block_barrier(int id, int total) {
  Barrier& b = block->barriers[id];
  const unsigned g = b.generation;
  if (b.arrived == 0) b.total = total;
  else if (b.total != total) fail("threads reached one barrier with different counts");
  progress++;
  b.who[b.arrived] = (int)tid.x;
  if (++b.arrived == total) {
    ordered(b.who, total);
    b.arrived = 0;
    b.generation++;
  }
  while (b.generation == g) yield();
}
static void trampoline() {
  body(body_args);
  fibers[current].done = true;
  progress++;
  sm70_emulator_switch(&fibers[current].sp, main_sp);
  abort();
}
static void prepare(Fiber& f) {
  if (!f.stack) {
    f.stack = (char*)mmap(nullptr, kStack + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (f.stack == MAP_FAILED) abort();
    mprotect(f.stack, kPage, PROT_NONE);  // an overflow of the stack is an access outside every buffer, too
  }
  void** top = (void**)(f.stack + kPage + kStack);
  top[-2] = (void*)trampoline;
  for (int i = 3; i <= 8; i++) top[-i] = nullptr;
  f.sp = top - 8;
  f.done = false;
}
// Blocks run one after another, each to its end. Where none of those that have started can go on, one more starts, up to `limit` at a time, as on a
// GPU with so many places; `eager`: all that find a place at once.
static void run_blocks(const std::vector<dim3>& ids, const std::vector<int>& order, int limit, bool eager) {
  const int n = (int)order.size();
  std::vector<int> free_places;
  for (int i = limit; i--;) free_places.push_back(i);
  std::vector<Block*>& active = blocks_there;  // outlives a fiber that fails
  int idle = 0;
  for (size_t next = 0; next < ids.size() || !active.empty();) {
    const u64 before = progress;
    waits = false;
    for (auto it = active.begin(); it != active.end();) {
      block = *it;
      bid = block->id;
      smem = block->smem;
      for (int i : order)
        if (!fibers[block->first + i].done) {
          current = block->first + i;
          tid = {(unsigned)i, 0, 0};
          sm70_emulator_switch(&main_sp, fibers[current].sp);
          if (fibers[current].done) block->live--;
        }
      if (block->live) ++it;
      else {
        settle();
        free_places.push_back(block->first / n);
        delete block;
        it = active.erase(it);
        idle = 0;
      }
    }
    if (progress != before && !waits && !active.empty()) continue;
    if (next == ids.size() || free_places.empty()) {
      if (active.empty()) break;
      if (waits && ++idle < 1000) continue;
      fail("deadlock: some threads wait at a barrier or warp operation that others never reach");
    }
    do {
      const int place = free_places.back();
      free_places.pop_back();
      Block* b = new Block{ids[next++], place * n, shared_ends[place] - shared_bytes, n};
      active.push_back(b);
      b->warps.assign((n + 31) / 32, Warp());
      memset(b->smem, 0xff, shared_bytes);
      begin_races(*b, n);
      for (int i = 0; i < n; i++) prepare(fibers[b->first + i]);
    } while (eager && next < ids.size() && !free_places.empty());
  }
}
template <class... P>
struct Call {
  void (*kernel)(P...);
  std::tuple<P...> args;
};
template <class... P>
static void apply(void* p) {
  auto* c = (Call<P...>*)p;
  std::apply(c->kernel, c->args);
}
template <class... P, size_t... I>
static std::tuple<P...> unpack(void** a, std::index_sequence<I...>) {
  return std::tuple<P...>(*(P*)a[I]...);
}
static std::vector<int> arrange(int n, int order) {
  std::vector<int> v(n);
  for (int i = 0; i < n; i++) v[i] = order == 1 ? n - 1 - i : i;
  if (order > 1) std::shuffle(v.begin(), v.end(), std::mt19937(order));
  return v;
}
template <class... P>
static int launch(void (*k)(P...), const int* shape, int order, void** a) {
  Call<P...> call{k, unpack<P...>(a, std::index_sequence_for<P...>{})};
  body = apply<P...>;
  body_args = &call;
  gdim = {(unsigned)shape[0], (unsigned)shape[1], (unsigned)shape[2]};
  bdim = {(unsigned)shape[3], 1, 1};
  shared_bytes = (shape[4] + 15) / 16 * 16;
  message[0] = 0;
  if (shape[3] % 32 || shape[3] < 32 || shape[3] > 1024 || shared_bytes > (int)kShared) {
    snprintf(message, sizeof message, "block of %d threads and %d bytes of shared memory: sm_70 has 1024 and %zu", shape[3], shape[4], kShared);
    return 1;
  }
  const int count = shape[0] * shape[1] * shape[2], together = shape[5] ? count : std::min(count, shape[6] + 1);
  while ((int)shared_ends.size() < together) {
    u8* p = (u8*)mmap(nullptr, kShared + 2 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) abort();
    mprotect(p, kPage, PROT_NONE);
    shared_ends.push_back(p + kPage + kShared);
    mprotect(shared_ends.back(), kPage, PROT_NONE);
  }
  if ((int)fibers.size() < shape[3] * together) fibers.resize(shape[3] * together);
  static char signal_stack[1 << 16];
  stack_t mine{}, before{};
  mine.ss_sp = signal_stack;
  mine.ss_size = sizeof signal_stack;
  sigaltstack(&mine, &before);
  struct sigaction act {}, segv{}, bus{}, ill{};
  act.sa_sigaction = on_signal;
  act.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &act, &segv);
  sigaction(SIGBUS, &act, &bus);
  sigaction(SIGILL, &act, &ill);
  const std::vector<int> threads = arrange(shape[3], order), numbers = arrange(count, order);
  std::vector<dim3> ids;
  for (int b : numbers) ids.push_back({(unsigned)(b % shape[0]), (unsigned)(b / shape[0] % shape[1]), (unsigned)(b / shape[0] / shape[1])});
  int result = 1;
  if (!sigsetjmp(escape, 1)) {
    running = 1;
    run_blocks(ids, threads, together, shape[5]);
    result = 0;
  }
  for (Block* b : blocks_there) delete b;
  blocks_there.clear();
  for (size_t i = kKept; i < fibers.size(); i++)  // Linux gives a process 65,530 mappings, and a stack takes two
    if (fibers[i].stack) {
      munmap(fibers[i].stack, kStack + kPage);
      fibers[i].stack = nullptr;
    }
  running = 0;
  sigaction(SIGSEGV, &segv, nullptr);
  sigaction(SIGBUS, &bus, nullptr);
  sigaction(SIGILL, &ill, nullptr);
  sigaltstack(&before, nullptr);
  return result;
}
using Entry = int (*)(const int*, int, void**);
static std::map<std::string, Entry>& registry() {
  static std::map<std::string, Entry> r;
  return r;
}
struct Register {
  Register(const char* name, Entry e) { registry()[name] = e; }
};
}  // namespace emu
// shape = grid x, y, z, threads, bytes of shared memory, cooperative; order 0 forwards, 1 backwards, more: the seed of a shuffle. 0 when all went well.
extern "C" int sm70_emulator_launch(const char* name, const int* shape, int order, void** args) {
  auto e = emu::registry().find(name);
  if (e == emu::registry().end()) {
    snprintf(emu::message, sizeof emu::message, "no kernel %s", name);
    return 1;
  }
  return e->second(shape, order, args);
}
extern "C" const char* sm70_emulator_message() { return emu::message; }
extern "C" const char* sm70_emulator_kernels() {
  static std::string names;
  names.clear();
  for (auto& e : emu::registry()) names += e.first + "\n";
  return names.c_str();
}

#define DEVICE static inline
#define MEMBER inline
#define KERNEL(name, threads, ctas) static void name
#define EXPORT(name)                                                                                                 \
  static emu::Register register_##name(#name, [](const int* shape, int order, void** args) { return emu::launch(name, shape, order, args); });
#define SHARED_BYTES(p) u8* p = emu::smem
#define MMA_BEGIN
#define MMA_END(o)
#define __restrict__
#define threadIdx emu::tid
#define blockIdx emu::bid
#define blockDim emu::bdim
#define gridDim emu::gdim
#ifdef __F16C__
DEVICE float h2f(u16 h) { return _cvtsh_ss(h); }
DEVICE u16 f2h(float x) { return _cvtss_sh(x, 0); }
#else
DEVICE float h2f(u16 h) {
  _Float16 f;
  memcpy(&f, &h, 2);
  return (float)f;
}
DEVICE u16 f2h(float x) {
  _Float16 f = (_Float16)x;
  u16 h;
  memcpy(&h, &f, 2);
  return h;
}
#endif
DEVICE float reciprocal(float x) { return 1.f / x; }
DEVICE int leading_zeros(u32 x) { return x ? __builtin_clz(x) : 32; }
DEVICE u32 multiply_high(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
DEVICE u32 float_bits(float x) {
  u32 u;
  memcpy(&u, &x, 4);
  return u;
}
DEVICE float float_of(u32 u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}
DEVICE float magnitude(float x) { return fabsf(x); }
DEVICE u32 pack2(float a, float b) { return f2h(a) | (u32)f2h(b) << 16; }
DEVICE float lof(u32 a) { return h2f(a & 0xffff); }
DEVICE float hif(u32 a) { return h2f(a >> 16); }
DEVICE u32 hmul2(u32 a, u32 b) { return pack2(lof(a) * lof(b), hif(a) * hif(b)); }
DEVICE u32 lo2(u32 a) { return (a & 0xffff) * 0x10001u; }
DEVICE u32 hi2(u32 a) { return (a >> 16) * 0x10001u; }
DEVICE u32 prmt(u32 a, u32 b, u32 s) {
  const u64 v = a | (u64)b << 32;
  u32 r = 0;
  for (int i = 0; i < 4; i++) {
    const u32 k = s >> (4 * i) & 15;
    u32 y = (u32)(v >> (8 * (k & 7))) & 255;
    if (k & 8) y = (y & 128) ? 255 : 0;
    r |= y << (8 * i);
  }
  return r;
}
DEVICE float ex2(float x) {
  const float y = exp2f(x);
  return y < 1.17549435e-38f ? 0.f : y;  // .ftz
}
DEVICE u32 smem_base(const void* p) { return (u32)((const u8*)p - emu::smem); }
DEVICE uint4 sld128(u32 a) { return *(const uint4*)(emu::smem + a); }
DEVICE void sst128(u32 a, uint4 v) { *(uint4*)(emu::smem + a) = v; }
DEVICE int min(int a, int b) { return a < b ? a : b; }
DEVICE int max(int a, int b) { return a > b ? a : b; }
DEVICE uint4 lds128(const void* p) { return *(const uint4*)p; }
DEVICE uint4 stream128(const void* p) { return *(const uint4*)p; }
DEVICE uint4 ldg128(const void* p) { return *(const uint4*)p; }
DEVICE int ldg32(const int* p) { return *p; }
DEVICE uint2 stream64(const void* p) { return *(const uint2*)p; }
DEVICE void stream128_if(bool on, const void* p, uint4& r) {
  if (on) r = *(const uint4*)p;
}
DEVICE void stream64_if(bool on, const void* p, uint4& r) {
  if (!on) return;
  r.x = ((const uint2*)p)->x;
  r.y = ((const uint2*)p)->y;
}
DEVICE u32 stream32(const void* p) { return *(const u32*)p; }
DEVICE float4 shared_by_ctas(const float4* p) { return *p; }
DEVICE void give_to_ctas(float4* p, float4 x) { *p = x; }
DEVICE void let_others_run() {
  emu::waits = true;
  emu::yield();
}
DEVICE u32 take_ticket(u32* p) { return (*p)++; }
DEVICE float shfl(float v, int lane) {
  const u32 x = float_bits(v);
  unsigned p;
  emu::Warp& w = emu::meet(1, &x, 1, [](emu::Warp&, unsigned) {}, p);
  return float_of(w.in[p][lane][0]);
}
DEVICE int shfl(int v, int lane) { return (int)float_bits(shfl(float_of((u32)v), lane)); }
DEVICE float shfl_xor(float v, int m) { return shfl(v, (emu::current & 31) ^ m); }
DEVICE int vote_any(int value) {
  const u32 x = value != 0;
  unsigned p;
  emu::Warp& w = emu::meet(2, &x, 1, [](emu::Warp&, unsigned) {}, p);
  u32 r = 0;
  for (int i = 0; i < 32; i++) r |= w.in[p][i][0];
  return (int)r;
}
DEVICE void syncwarp() {
  const u32 x = 0;
  unsigned p;
  emu::meet(3, &x, 1, [](emu::Warp&, unsigned) {
    int lanes[32];
    for (int i = 0; i < 32; i++) lanes[i] = (int)(emu::tid.x & ~31u) + i;
    emu::ordered(lanes, 32);
  }, p);
}
DEVICE void syncblock() { emu::block_barrier(0, (int)blockDim.x); }
DEVICE void named_bar(int id, int n) { emu::block_barrier(id, n); }
template <bool kRowMajorB>
static void mma_all_lanes(emu::Warp& w, unsigned p) {
  float a[32][4], b[32][4];
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < 2; i++) {
      a[l][2 * i] = lof(w.in[p][l][i]);
      a[l][2 * i + 1] = hif(w.in[p][l][i]);
      b[l][2 * i] = lof(w.in[p][l][2 + i]);
      b[l][2 * i + 1] = hif(w.in[p][l][2 + i]);
    }
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < 8; i++) {
      const int q = (l >> 2) & 3, r = (l & 1) + (i & 2) + ((l >> 4) << 2), n = (i & 1) + (l & 2) + (i & 4);
      const float* x = a[4 * q + (r & 3) + 16 * (r >> 2)];
      float s = 0;
      for (int k = 0; k < 4; k++) s += x[k] * (kRowMajorB ? b[4 * q + k + 16 * (n >> 2)][n & 3] : b[4 * q + (n & 3) + 16 * (n >> 2)][k]);
      w.out[p][l][i] = s;
    }
}
template <bool kRowMajorB>
DEVICE void mma_emulated(float (&c)[8], u32 a0, u32 a1, u32 b0, u32 b1) {
  const u32 v[4] = {a0, a1, b0, b1};
  unsigned p;
  emu::Warp& w = emu::meet(kRowMajorB ? 5 : 4, v, 4, mma_all_lanes<kRowMajorB>, p);
  for (int i = 0; i < 8; i++) c[i] += w.out[p][emu::current & 31][i];
}
DEVICE void mma884(float (&c)[8], u32 a0, u32 a1, u32 b0, u32 b1) { mma_emulated<false>(c, a0, a1, b0, b1); }
DEVICE void mma884_rr(float (&c)[8], u32 a0, u32 a1, u32 b0, u32 b1) { mma_emulated<true>(c, a0, a1, b0, b1); }
