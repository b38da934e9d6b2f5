// Runs __global__ functions on a CPU: one fiber for each CUDA thread, blocks one after the other. Barriers and warp
// collectives are real rendezvous: one that not every thread reaches, or that names a lane which has left, aborts.
// __CUDA_ARCH__ is defined, so that the header's device branch is what runs.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <memory>
#include <tuple>
#include <vector>

#define __CUDA_ARCH__ 800
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__ static

struct dim3 { unsigned x; };
struct alignas(16) float4 { float x, y, z, w; };
inline float4 make_float4(float a, float b, float c, float d) { return float4{a, b, c, d}; }
inline unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
inline float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((uint64_t)a * b) >> 32); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
template <class T>
T atomicAdd(T *p, T v) { T old = *p; *p += v; return old; }

namespace shim {

constexpr unsigned THREADS = 256, WARPS = THREADS / 32, STACK = 128 << 10;

struct Thread {
  dim3 index;
  bool done = false;
  const char *waits_at = "";
  ucontext_t context;
};
struct Warp { unsigned char slot[32][8]; unsigned arrived = 0, alive = ~0u, generation = 0; };

inline ucontext_t scheduler;
inline std::vector<Thread> threads;
inline std::vector<Warp> warps;
inline std::vector<std::unique_ptr<char[]>> stacks;
inline unsigned current, arrived, alive, generation;
inline dim3 block_index, grid_size, block_size{THREADS};
inline std::function<void()> body;
inline int order;  // of threads: 0 forward, 1 backward, others: random warps run ahead while all else stands still

[[noreturn]] inline void die(const char *what) {
  for (auto &t : threads)
    if (!t.done) { fprintf(stderr, "cuda_shim: thread %u waits at %s\n", t.index.x, t.waits_at); break; }
  fprintf(stderr, "cuda_shim: %s (block %u)\n", what, block_index.x);
  abort();
}

inline Thread &me() { return threads[current]; }
inline Warp &my_warp() { return warps[current / 32]; }
inline void pause() { swapcontext(&me().context, &scheduler); }
inline void wait_while(const unsigned &number, unsigned old, const char *what) {
  me().waits_at = what;
  while (*const_cast<volatile const unsigned *>(&number) == old) pause();
}
inline void enter() {
  body();
  me().done = true;
  pause();
}

inline void step(unsigned i) {
  if (threads[i].done) return;
  current = i;
  swapcontext(&scheduler, &threads[i].context);
  if (threads[i].done) {
    --alive;
    warps[i / 32].alive &= ~(1u << (i & 31));
  }
}
inline void round(uint64_t &random) {
  if (order < 2) {
    for (unsigned i = 0; i < THREADS; ++i) step(order ? THREADS - 1 - i : i);
    return;
  }
  random ^= random << 13; random ^= random >> 7; random ^= random << 17;
  const unsigned warp = (unsigned)(random >> 8) % WARPS, rounds = 1 + ((unsigned)(random >> 40) & 7);
  for (unsigned r = 0; r < rounds; ++r)
    for (unsigned l = 0; l < 32; ++l) step(warp * 32 + ((l * 5 + (unsigned)(random >> 20)) & 31));
}
inline unsigned progress() {
  unsigned sum = generation + THREADS - alive;
  for (auto &w : warps) sum += w.generation;
  return sum;
}
inline void run_block() {
  threads = std::vector<Thread>(THREADS);
  warps = std::vector<Warp>(WARPS);
  arrived = generation = 0;
  alive = THREADS;
  while (stacks.size() < THREADS) stacks.emplace_back(new char[STACK]);
  for (unsigned i = 0; i < THREADS; ++i) {
    threads[i].index.x = i;
    getcontext(&threads[i].context);
    threads[i].context.uc_stack.ss_sp = stacks[i].get();
    threads[i].context.uc_stack.ss_size = STACK;
    makecontext(&threads[i].context, enter, 0);
  }
  uint64_t random = 88172645463325252ull + order;
  for (unsigned idle = 0; alive;) {
    const unsigned before = progress();
    round(random);
    idle = progress() == before ? idle + 1 : 0;
    if (idle > (order > 1 ? 200 * WARPS : 2)) die("deadlock: not every thread reaches a barrier or collective");
  }
}

inline void block_barrier() {
  const unsigned old = generation;
  if (++arrived == alive) { arrived = 0; ++generation; } else wait_while(generation, old, "__syncthreads");
}
inline void warp_barrier(unsigned mask) {
  Warp &w = my_warp();
  if (mask & ~w.alive) die("a warp collective names a lane that has left");
  const unsigned old = w.generation;
  w.arrived |= 1u << (current & 31);
  if ((w.arrived & mask) == mask) { w.arrived = 0; ++w.generation; } else wait_while(w.generation, old, "a collective");
}
template <class T>
T shuffle(unsigned mask, T v, int distance) {
  memcpy(my_warp().slot[current & 31], &v, sizeof v);
  warp_barrier(mask);
  memcpy(&v, my_warp().slot[(current & 31) ^ distance], sizeof v);
  warp_barrier(mask);
  return v;
}
inline unsigned ballot(unsigned mask, bool holds) {
  my_warp().slot[current & 31][0] = holds;
  warp_barrier(mask);
  unsigned all = 0;
  for (unsigned l = 0; l < 32; ++l) all |= (unsigned)my_warp().slot[l][0] << l;
  warp_barrier(mask);
  return all;
}

// Calls a kernel with arguments given as 64 bits each.
template <class... A>
void launch(void (*kernel)(A...), unsigned blocks, const uint64_t *raw) {
  auto as = [&raw](auto *unused) {
    auto v = *unused;
    memcpy(&v, raw++, sizeof v);
    return v;
  };
  std::tuple<A...> arguments{as(std::unique_ptr<A>(new A()).get())...};
  grid_size.x = blocks;
  body = [&] { std::apply(kernel, arguments); };
  for (block_index.x = 0; block_index.x < blocks; ++block_index.x) run_block();
}

}  // namespace shim

#define threadIdx (shim::me().index)
#define blockIdx (shim::block_index)
#define blockDim (shim::block_size)
#define gridDim (shim::grid_size)
#define __syncthreads() shim::block_barrier()
#define __shfl_xor_sync(mask, v, distance) shim::shuffle((mask), (v), (distance))
#define __ballot_sync(mask, holds) shim::ballot((mask), (holds))
