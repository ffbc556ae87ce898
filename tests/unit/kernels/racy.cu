// Kernels with and without races in shared memory, for test_races.py. Most results are right in the order that the emulator runs.
#include "sm70.cuh"
KERNEL(missing_barrier, 64, 1)(float* out) {
  SHARED_BYTES(sm);
  float* x = reinterpret_cast<float*>(sm);
  x[threadIdx.x] = 1.f;
  out[threadIdx.x] = x[threadIdx.x / 2];
}
EXPORT(missing_barrier)
KERNEL(with_barrier, 64, 1)(float* out) {
  SHARED_BYTES(sm);
  float* x = reinterpret_cast<float*>(sm);
  x[threadIdx.x] = 1.f;
  syncblock();
  out[threadIdx.x] = x[63 - threadIdx.x];
}
EXPORT(with_barrier)
KERNEL(groups_meet_unequally_often, 128, 1)(float* out) {  // compute-sanitizer's racecheck reports one with eight pairs of warps
  SHARED_BYTES(sm);
  float* x = reinterpret_cast<float*>(sm);
  const int pair = threadIdx.x >> 6;
  x[threadIdx.x] = 1.f;
  for (int i = 0; i < 2 - pair; i++) named_bar(1 + pair, 64);
  syncblock();
  x[127 - threadIdx.x] = threadIdx.x;
  syncblock();
  out[threadIdx.x] = x[threadIdx.x];
}
EXPORT(groups_meet_unequally_often)
KERNEL(reuse_too_early, 64, 1)(float* out) {  // the second round may write what a slow thread still reads
  SHARED_BYTES(sm);
  float* x = reinterpret_cast<float*>(sm);
  for (int i = 0; i < 2; i++) {
    x[threadIdx.x] = 1.f;
    syncblock();
    out[threadIdx.x] = x[63 - threadIdx.x];
  }
}
EXPORT(reuse_too_early)
KERNEL(shuffle_is_no_barrier, 32, 1)(float* out) {
  SHARED_BYTES(sm);
  float* x = reinterpret_cast<float*>(sm);
  x[threadIdx.x] = 1.f;
  if (out[0] != 0.f) syncwarp();
  else shfl(1.f, 0);
  out[threadIdx.x] = x[31 - threadIdx.x];
}
EXPORT(shuffle_is_no_barrier)
KERNEL(half_a_barrier, 128, 1)(float* out) {  // two warps meet, the other two read what they wrote
  SHARED_BYTES(sm);
  float* x = reinterpret_cast<float*>(sm);
  if (threadIdx.x < 64) x[threadIdx.x] = 1.f;
  named_bar(1 + (int)(threadIdx.x >> 6), 64);
  out[threadIdx.x] = x[63 - (threadIdx.x & 63)];
}
EXPORT(half_a_barrier)
KERNEL(flag_that_all_raise, 64, 1)(float* out) {
  SHARED_BYTES(sm);
  int* flag = reinterpret_cast<int*>(sm);
  *flag = 1;
  syncblock();
  out[threadIdx.x] = (float)*flag;
}
EXPORT(flag_that_all_raise)
KERNEL(flag_that_all_set, 64, 1)(float* out) {
  SHARED_BYTES(sm);
  int* flag = reinterpret_cast<int*>(sm);
  *flag = (int)threadIdx.x;
  syncblock();
  out[threadIdx.x] = *flag >= 0 ? 1.f : 0.f;
}
EXPORT(flag_that_all_set)
