// The paged KV cache: writing new tokens into it, and the FP8 codecs on plain arrays (tests, the FP8 prefix of a prefill).
#include "fp8.cuh"
// Strides of the cache in bytes; `value_offset` is the way from a token's K to its V, so that both known layouts fit:
// [block, 2, page, head, D] and [block, head, page, 2 * D]. Every stride and the offset are multiples of 16 bytes, D of 8.
struct WriteArgs {
  const u16 *key, *value;  // [tokens, heads, D] halves; a token's heads are `*_stride` halves apart from the next token's
  const long long* slots;  // per token: page index * page + position, or negative: the token is not written
  u8* cache;
  int key_stride, value_stride, heads, dim, page;
  int block_stride, value_offset, token_stride, head_stride;
  float key_inverse, value_inverse;  // 1 / scale; 1 for FP16 storage
};
template <int FORMAT>
DEVICE void write_eight(u8* to, const u16* from, float inverse) {
  const uint4 x = ldg128(from);
  if (FORMAT == F16) {
    *reinterpret_cast<uint4*>(to) = x;
  } else {
    const u32 w[4] = {x.x, x.y, x.z, x.w};
    u32 r[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      r[i >> 1] |= encode<FORMAT>(lof(w[i]) * inverse) << (16 * (i & 1));
      r[i >> 1] |= encode<FORMAT>(hif(w[i]) * inverse) << (16 * (i & 1) + 8);
    }
    *reinterpret_cast<uint2*>(to) = make_uint2(r[0], r[1]);
  }
}
// grid (tokens), 128 threads: a thread writes eight elements of K or V at a time.
template <int FORMAT>
DEVICE void write_cache(WriteArgs a) {
  const long long slot = a.slots[blockIdx.x];
  if (slot < 0) return;
  const int block = (int)(slot / a.page), position = (int)(slot - (long long)block * a.page), per_head = a.dim >> 3, n = a.heads * per_head;
  u8* to = a.cache + (size_t)block * a.block_stride + (size_t)position * a.token_stride;
  constexpr int BYTES = FORMAT == F16 ? 16 : 8;
  for (int i = threadIdx.x; i < 2 * n; i += blockDim.x) {
    const bool is_value = i >= n;
    const int j = is_value ? i - n : i, head = j / per_head, piece = j - head * per_head;
    const u16* from = is_value ? a.value + (size_t)blockIdx.x * a.value_stride : a.key + (size_t)blockIdx.x * a.key_stride;
    write_eight<FORMAT>(to + (size_t)head * a.head_stride + (is_value ? a.value_offset : 0) + piece * BYTES, from + head * a.dim + piece * 8,
                        is_value ? a.value_inverse : a.key_inverse);
  }
}
#define WRITE(NAME, FORMAT)                                              \
  KERNEL(kv_write_##NAME, 128, 1)(WriteArgs a) { write_cache<FORMAT>(a); } \
  EXPORT(kv_write_##NAME)
WRITE(e4m3, E4M3)
WRITE(e5m2, E5M2)
WRITE(f16, F16)

// One thread, one element: these two are the definition that the fast paths are checked against on the device.
#define CODEC(NAME, FORMAT)                                                                               \
  KERNEL(decode_##NAME, 256, 1)(const u8* from, u16* to, int n) {                                         \
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);                                           \
    if (i < n) to[i] = decode<FORMAT>(from[i]);                                                           \
  }                                                                                                       \
  EXPORT(decode_##NAME)                                                                                   \
  KERNEL(encode_##NAME, 256, 1)(const u16* from, u8* to, int n, float inverse) {                          \
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);                                           \
    if (i < n) to[i] = (u8)encode<FORMAT>(h2f(from[i]) * inverse);                                        \
  }                                                                                                       \
  EXPORT(encode_##NAME)
CODEC(e4m3, E4M3)
CODEC(e5m2, E5M2)
