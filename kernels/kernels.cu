// The kernels' entries for a GPU: compiled by NVRTC at run time, all arithmetic in blockquant.cuh.
// All are launched with 256 threads. Quantizing and decoding: one warp a block of elements.
#include "blockquant.cuh"

using namespace hiercomm;

#define KERNEL extern "C" __global__ void __launch_bounds__(256)
#define MY_BLOCK (((i64)blockIdx.x * blockDim.x + threadIdx.x) >> 5)

#define QUANTIZE(NAME, CODE, ROUNDING)                                                             \
  KERNEL NAME(const float *x, float *e, u8 *codes, u8 *scales, i64 n, u64 seed) {                  \
    const i64 block = MY_BLOCK;                                                                    \
    if (block * BLOCK < n) quantize<CODE, ROUNDING>(x, e, codes, scales, block, n, seed);          \
  }
#define DEQUANTIZE(NAME, CODE)                                                                     \
  KERNEL NAME(const u8 *codes, const u8 *scales, float *out, i64 n, int accumulate) {              \
    const i64 block = MY_BLOCK;                                                                    \
    if (block * BLOCK < n) dequantize<CODE>(codes, scales, out, accumulate != 0, block, n);        \
  }
QUANTIZE(quantize_int8, Int8, Nearest)
QUANTIZE(quantize_int4, Int4, Nearest)
QUANTIZE(quantize_fp8, Fp8, Nearest)
QUANTIZE(quantize_sign, Sign, Nearest)
QUANTIZE(quantize_int8_stochastic, Int8, Stochastic)
QUANTIZE(quantize_int4_stochastic, Int4, Stochastic)
QUANTIZE(quantize_fp8_stochastic, Fp8, Stochastic)
DEQUANTIZE(dequantize_int8, Int8)
DEQUANTIZE(dequantize_int4, Int4)
DEQUANTIZE(dequantize_fp8, Fp8)
DEQUANTIZE(dequantize_sign, Sign)

// Top-k: histogram and pick three times (11, 10 and 10 bits of the ranks), count, a running sum of the counts (torch's),
// write. Atomics add integers alone, so any order gives the same.

constexpr int BINS = 2048, TILE = 4096, WARPS = 8;

// The k-th largest rank as far as it is known, and its number among those with these bits.
struct Selection { i64 rank, need; };

// Ranks whose bits from shift + width on are those of the selection, by the next `width` bits. v = x, or v += x.
KERNEL top_k_histogram(const float *x, float *v, i64 n, const Selection *selection, u32 *histogram, int shift, int width) {
  __shared__ u32 bin[BINS];
  for (u32 b = threadIdx.x; b < BINS; b += blockDim.x) bin[b] = 0;
  __syncthreads();
  const u32 known = (u32)selection->rank;
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) {
    float f = flush(x[i]);
    if (v) v[i] = f = flush(add(f, flush(v[i])));
    const u32 r = rank_of(f);
    if (r >> (shift + width) == known) atomicAdd(&bin[(r >> shift) & ((1u << width) - 1u)], 1u);
  }
  __syncthreads();
  for (u32 b = threadIdx.x; b < BINS; b += blockDim.x)
    if (bin[b]) atomicAdd(&histogram[b], bin[b]);
}

// One block. k is 0 but for the first time. Leaves the histogram empty.
KERNEL top_k_pick(Selection *selection, u32 *histogram, i64 k, int width) {
  __shared__ u32 bin[BINS], sum[256];
  u32 s = 0;
  for (u32 b = 8 * threadIdx.x; b < 8 * threadIdx.x + 8; ++b) {
    s += bin[b] = histogram[b];
    histogram[b] = 0;
  }
  sum[threadIdx.x] = s;
  __syncthreads();
  if (threadIdx.x == 0) {
    i64 need = k ? k : selection->need;
    int g = 255;
    for (; g > 0 && sum[g] < need; --g) need -= sum[g];
    int b = 8 * g + 7;
    for (; b > 8 * g && bin[b] < need; --b) need -= bin[b];
    selection->rank = (selection->rank << width) | b;
    selection->need = need;
  }
}

// Of each tile: how many ranks are above the selected one, how many equal it.
KERNEL top_k_count(const float *v, i64 n, const Selection *selection, int *counts) {
  __shared__ u32 above[WARPS], equal[WARPS];
  const u32 least = (u32)selection->rank;
  const i64 start = (i64)blockIdx.x * TILE;
  u32 a = 0, q = 0;
  for (int t = threadIdx.x; t < TILE; t += 256)
    if (start + t < n) {
      const u32 r = rank_of(v[start + t]);
      a += r > least;
      q += r == least;
    }
  for (int d = 16; d; d >>= 1) {
    a += __shfl_xor_sync(0xffffffffu, a, d);
    q += __shfl_xor_sync(0xffffffffu, q, d);
  }
  if (lane() == 0) { above[threadIdx.x >> 5] = a; equal[threadIdx.x >> 5] = q; }
  __syncthreads();
  if (threadIdx.x == 0) {
    a = q = 0;
    for (int w = 0; w < WARPS; ++w) { a += above[w]; q += equal[w]; }
    counts[2 * blockIdx.x] = (int)a;
    counts[2 * blockIdx.x + 1] = (int)q;
  }
}

// How many elements of the first `tiles` tiles are chosen; sums[2 * t] and the next are over tiles 0 to t.
static __device__ i64 chosen(const i64 *sums, i64 tiles, i64 ties) {
  if (tiles == 0) return 0;
  const i64 equal = sums[2 * tiles - 1];
  return sums[2 * tiles - 2] + (equal < ties ? equal : ties);
}

KERNEL top_k_write(const float *v, float *e, i64 n, const Selection *selection, const i64 *sums, u8 *counts, u8 *indices,
                   u8 *values) {
  __shared__ u32 above[WARPS], equal[WARPS];
  const u32 least = (u32)selection->rank, warp = threadIdx.x >> 5, before = (1u << lane()) - 1u;
  const i64 ties = selection->need, tile = blockIdx.x, per_span = SPAN / TILE, tiles = gridDim.x;
  if (threadIdx.x == 0 && tile % per_span == 0) {
    const i64 next = tile + per_span < tiles ? tile + per_span : tiles;
    store32(counts + 4 * (tile / per_span), (u32)(chosen(sums, next, ties) - chosen(sums, tile, ties)));
  }
  i64 seen_above = tile ? sums[2 * tile - 2] : 0, seen_equal = tile ? sums[2 * tile - 1] : 0;
  for (int t = 0; t < TILE; t += 256) {
    const i64 i = tile * TILE + t + threadIdx.x;
    const float f = i < n ? flush(v[i]) : 0.0f;
    const u32 r = rank_of(f);
    const bool is_above = i < n && r > least, is_equal = i < n && r == least;
    const u32 a = __ballot_sync(0xffffffffu, is_above), q = __ballot_sync(0xffffffffu, is_equal);
    if (lane() == 0) { above[warp] = __popc(a); equal[warp] = __popc(q); }
    __syncthreads();
    i64 my_above = seen_above + __popc(a & before), my_equal = seen_equal + __popc(q & before);
    for (u32 w = 0; w < WARPS; ++w) {
      if (w < warp) { my_above += above[w]; my_equal += equal[w]; }
      seen_above += above[w];
      seen_equal += equal[w];
    }
    if (is_above || (is_equal && my_equal < ties)) {
      const i64 place = my_above + (my_equal < ties ? my_equal : ties);
      const u16 wire = to_bf16(f);
      store16(indices + 2 * place, (u16)(i & (SPAN - 1)));
      store16(values + 2 * place, wire);
      if (e) e[i] = left_out(f, wire);
    }
    __syncthreads();
  }
}

// One block of threads a span. Counts that exceed k and indices from n on are cut short and left out.
KERNEL scatter(const u8 *counts, const u8 *indices, const u8 *values, i64 k, float *out, i64 n, int accumulate) {
  __shared__ i64 sums[WARPS];
  const i64 span = blockIdx.x, start = span * SPAN;
  i64 taken = 0;
  for (i64 s = threadIdx.x; s < span; s += 256) taken += load32(counts + 4 * s);
  for (int d = 16; d; d >>= 1) taken += __shfl_xor_sync(0xffffffffu, taken, d);
  if (lane() == 0) sums[threadIdx.x >> 5] = taken;
  if (!accumulate)
    for (i64 i = start + threadIdx.x; i < n && i < start + SPAN; i += 256) out[i] = 0.0f;
  __syncthreads();
  taken = 0;
  for (int w = 0; w < WARPS; ++w) taken += sums[w];
  i64 end = taken + load32(counts + 4 * span);
  end = end < k ? end : k;
  for (taken += threadIdx.x; taken < end; taken += 256) {
    const i64 i = start + load16(indices + 2 * taken);
    const u16 wire = load16(values + 2 * taken);
    if (i < n) out[i] = accumulate ? decoded_sum(out[i], wire) : from_bf16(wire);
  }
}
