// Finds races in shared memory: two accesses to the same bytes by different threads of a block, one of them a write, with no barrier
// between that orders them. It does not matter in which order the emulator ran them, nor whether the result came out right.
//
// The compiler calls a function before every access (-fsanitize=thread; its runtime is not linked, the functions are below). Each thread has a
// vector clock; a barrier, plain or named, and a __syncwarp join the clocks of those that meet in it. Shuffles, votes and matrix instructions
// order nothing: the CUDA model promises no more. Every 2 bytes remember who wrote last, and who has read since.
// Threads may write the same value to the same place (a flag that any of them raises): whether it was the same shows at the next call.
// Included by emulator.hpp inside its namespace. Global memory is not watched.
#define UNWATCHED __attribute__((no_sanitize("thread"), noinline))
struct Cell {
  u32 written = 0, read = 0;  // clocks of the writer and of the reader; 0: none
  u16 writer = 0, reader = 0;
  bool several = false;  // unordered threads have read: their clocks are in Races::readers
};
struct Races {
  int threads = 0;
  u32* clocks = nullptr;  // [thread][thread]
  Cell cells[kShared / 2];
  u32* readers[kShared / 2] = {};  // of a cell, by thread
};
static std::vector<Races*> all_races;
UNWATCHED static void begin_races(Block& b, int threads) {
  const size_t place = b.first / threads;
  while (all_races.size() <= place) all_races.push_back(new Races());
  Races& r = *all_races[place];
  if (r.threads != threads) {
    for (int i = 0; i < (int)kShared / 2; i++) free(r.readers[i]), r.readers[i] = nullptr;
    free(r.clocks);
    r.clocks = (u32*)malloc(4ull * threads * threads);
    r.threads = threads;
  }
  memset(r.clocks, 0, 4ull * threads * threads);
  for (int i = 0; i < threads; i++) r.clocks[(size_t)i * threads + i] = 1;
  for (int i = 0; i < (shared_bytes + 1) / 2; i++) r.cells[i] = Cell();
  b.races = &r;
}
struct Suspect {
  u16* place;
  u8* smem;
  u16 value;
  int thread, other;
};
static Suspect suspects[8];
static int suspected;
[[noreturn]] UNWATCHED static void race(int at, const char* now, int thread, const char* before, int other) {
  static char what[200];
  snprintf(what, sizeof what, "race in shared memory at byte %d: no barrier orders the %s by thread %d with the %s by thread %d", at, now, thread, before, other);
  suspected = 0;
  fail(what);
}
UNWATCHED static void settle() {
  for (int i = 0; i < suspected; i++) {
    const Suspect& s = suspects[i];
    if (*s.place != s.value) race((int)((u8*)s.place - s.smem), "write", s.thread, "write", s.other);
  }
  suspected = 0;
}
// All of `who` have waited for each other.
UNWATCHED static void ordered(const int* who, int count) {
  settle();
  Races& r = *block->races;
  const int n = r.threads;
  static u32 joined[1024];
  memset(joined, 0, 4 * n);
  for (int i = 0; i < count; i++) {
    const u32* mine = r.clocks + (size_t)who[i] * n;
    for (int j = 0; j < n; j++) joined[j] = mine[j] > joined[j] ? mine[j] : joined[j];
  }
  for (int i = 0; i < count; i++) {
    u32* mine = r.clocks + (size_t)who[i] * n;
    memcpy(mine, joined, 4 * n);
    mine[who[i]]++;
  }
}
UNWATCHED static void touch(const void* address, size_t size, bool write) {
  const size_t begin = (const u8*)address - smem;
  if (suspected) settle();
  if (!running || begin >= (size_t)shared_bytes) return;
  Races& r = *block->races;
  const int n = r.threads, me = (int)tid.x;
  const u32* seen = r.clocks + (size_t)me * n;
  for (size_t i = begin / 2; i < (begin + size + 1) / 2; i++) {
    Cell& c = r.cells[i];
    if (c.written > seen[c.writer]) {
      if (!write) race((int)i * 2, "read", me, "write", c.writer);
      u16* place = (u16*)(smem + 2 * i);
      suspects[suspected++] = {place, smem, *place, me, c.writer};
    }
    if (!write) {
      if (c.several) r.readers[i][me] = seen[me];
      else if (!c.read || c.reader == me || c.read <= seen[c.reader]) c.reader = (u16)me, c.read = seen[me];
      else {
        if (!r.readers[i]) r.readers[i] = (u32*)malloc(4 * n);
        memset(r.readers[i], 0, 4 * n);
        c.several = true;
        r.readers[i][c.reader] = c.read;
        r.readers[i][me] = seen[me];
      }
      continue;
    }
    if (c.several) {
      for (int j = 0; j < n; j++)
        if (r.readers[i][j] > seen[j]) race((int)i * 2, "write", me, "read", j);
    } else if (c.read > seen[c.reader]) race((int)i * 2, "write", me, "read", c.reader);
    c.written = seen[me];
    c.writer = (u16)me;
    c.read = 0;
    c.several = false;
  }
}
#define HOOK extern "C" __attribute__((no_sanitize("thread"), visibility("hidden"))) void
#define HOOKS(n)                                                                              \
  HOOK __tsan_read##n(void* p) { touch(p, n, false); }                                        \
  HOOK __tsan_write##n(void* p) { touch(p, n, true); }                                        \
  HOOK __tsan_unaligned_read##n(void* p) { touch(p, n, false); }                              \
  HOOK __tsan_unaligned_write##n(void* p) { touch(p, n, true); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
HOOK __tsan_read_range(void* p, size_t n) { touch(p, n, false); }  // at most 16 bytes: no type here is larger
HOOK __tsan_write_range(void* p, size_t n) { touch(p, n, true); }
HOOK __tsan_init() {}
HOOK __tsan_func_entry(void*) {}
HOOK __tsan_func_exit() {}
HOOK __tsan_vptr_update(void**, void*) {}
HOOK __tsan_vptr_read(void**) {}
