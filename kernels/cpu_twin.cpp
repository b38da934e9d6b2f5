// The kernels on a CPU: one thread works on a block where a GPU has a warp. A plain C ABI, called through ctypes.
#if defined(__has_include)
#if __has_include(<features.h>)
#include <features.h>  // __GLIBC__
#endif
#endif
#include "blockquant.cuh"

// One library for all processors: the loader picks the widest that this one has. Sanitizers start too late for that.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && !defined(HIERCOMM_ONE_LEVEL)
#define LEVELS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define LEVELS
#endif
#define INLINE __attribute__((always_inline))
#define API extern "C" __attribute__((visibility("default")))

using namespace hiercomm;

namespace {

template <class Code, class Rounding>
FN void quantize_all(const float *x, float *e, u8 *codes, u8 *scales, i64 n, u64 seed) {
  for (i64 block = 0; block * BLOCK < n; ++block) quantize<Code, Rounding>(x, e, codes, scales, block, n, seed);
}
template <class Code>
FN void dequantize_all(const u8 *codes, const u8 *scales, float *out, i64 n, int accumulate) {
  if (accumulate)
    for (i64 block = 0; block * BLOCK < n; ++block) dequantize<Code>(codes, scales, out, true, block, n);
  else
    for (i64 block = 0; block * BLOCK < n; ++block) dequantize<Code>(codes, scales, out, false, block, n);
}

// A histogram of ranks: the upper 16 bits first, then the lower 15 of those whose upper bits are known.
constexpr int LOW_BITS = 15, BINS = 65536, GROUP = 32;

struct Histogram {
  u32 bin[BINS];
  FN void clear() { for (int b = 0; b < BINS; ++b) bin[b] = 0; }
  // The bin of the need-th largest; need becomes its number within the bin.
  FN u32 find(i64 &need) const {
    u32 b = BINS - 1;
    for (; b > 0 && bin[b] < need; --b) need -= bin[b];
    return b;
  }
};

// Calls `found` for each index below n whose rank holds, in order. Of 32 elements at once it is one comparison each, and
// nearly all come out empty.
template <class Holds, class Found>
FN void each(const float *v, i64 n, Holds holds, Found found) {
  i64 first = 0;
  for (; first + GROUP <= n; first += GROUP) {
    u32 mask = 0;
    for (int j = 0; j < GROUP; ++j) mask |= (u32)holds(rank_of(v[first + j])) << j;
    for (; mask; mask &= mask - 1) found(first + __builtin_ctz(mask));
  }
  for (; first < n; ++first)
    if (holds(rank_of(v[first]))) found(first);
}

// e += x, and a lower bound on the k-th largest rank: the k-th largest of the maxima of groups of 16. Few elements that
// are not among the k largest are above it, so whatever follows can skip nearly all.
FN u32 add_and_bound(const float *x, float *e, i64 n, i64 k, Histogram &histogram) {
  i64 first = 0, need = k;
  histogram.clear();
  for (; first + BLOCK <= n; first += BLOCK) {
    float v[BLOCK];
    u32 most[GROUP];
    load_sum(x, e, first, n, v);
    if (e) store(e, first, n, v);
    for (int j = 0; j < GROUP; ++j) most[j] = 0;
    for (int c = 0; c < BLOCK / GROUP; ++c)
      for (int j = 0; j < GROUP; ++j) most[j] = umax(most[j], rank_of(v[c * GROUP + j]));
    for (int j = 0; j < GROUP; ++j) ++histogram.bin[most[j] >> LOW_BITS];
  }
  for (; first < n; ++first) {
    const float v = e ? flush(add(flush(x[first]), flush(e[first]))) : x[first];
    if (e) e[first] = v;
    ++histogram.bin[rank_of(v) >> LOW_BITS];
  }
  return histogram.find(need) << LOW_BITS;  // 0 where there are fewer groups than k
}

// The k-th largest rank; k becomes how many of that rank are among the k largest.
FN u32 select(const float *v, i64 n, i64 &k, u32 bound, Histogram &histogram) {
  histogram.clear();
  each(v, n, [=](u32 r) INLINE { return r >= bound; }, [&](i64 i) INLINE { ++histogram.bin[rank_of(v[i]) >> LOW_BITS]; });
  const u32 high = histogram.find(k), low_mask = (1u << LOW_BITS) - 1u;
  histogram.clear();
  each(v, n, [=](u32 r) INLINE { return r >> LOW_BITS == high; },
       [&](i64 i) INLINE { ++histogram.bin[rank_of(v[i]) & low_mask]; });
  return (high << LOW_BITS) | histogram.find(k);
}

// Of a span, the elements whose rank is above `least` and the first `ties` of that rank. Returns how many.
FN u32 pack(const float *v, float *e, i64 n, u32 least, i64 &ties, u8 *indices, u8 *values) {
  u32 taken = 0;
  each(v, n, [=](u32 r) INLINE { return r >= least; }, [&](i64 i) INLINE {
    const float f = flush(v[i]);
    if (rank_of(f) == least && ties-- <= 0) return;
    const u16 wire = to_bf16(f);
    store16(indices + 2 * taken, (u16)i);
    store16(values + 2 * taken, wire);
    ++taken;
    if (e) e[i] = left_out(f, wire);
  });
  return taken;
}

}  // namespace

// Of the sources that this was compiled from, so that a library of other sources is not used.
API u64 hiercomm_digest() { return HIERCOMM_DIGEST; }

// code: 0 int8, 1 int4, 2 fp8, 3 sign (never stochastic).
API LEVELS void hiercomm_quantize(int code, int stochastic, const float *x, float *e, u8 *codes, u8 *scales, i64 n,
                                  u64 seed) {
  switch (2 * code + stochastic) {
    case 0: quantize_all<Int8, Nearest>(x, e, codes, scales, n, seed); break;
    case 1: quantize_all<Int8, Stochastic>(x, e, codes, scales, n, seed); break;
    case 2: quantize_all<Int4, Nearest>(x, e, codes, scales, n, seed); break;
    case 3: quantize_all<Int4, Stochastic>(x, e, codes, scales, n, seed); break;
    case 4: quantize_all<Fp8, Nearest>(x, e, codes, scales, n, seed); break;
    case 5: quantize_all<Fp8, Stochastic>(x, e, codes, scales, n, seed); break;
    case 6: quantize_all<Sign, Nearest>(x, e, codes, scales, n, seed); break;
  }
}

API LEVELS void hiercomm_dequantize(int code, int accumulate, const u8 *codes, const u8 *scales, float *out, i64 n) {
  switch (code) {
    case 0: dequantize_all<Int8>(codes, scales, out, n, accumulate); break;
    case 1: dequantize_all<Int4>(codes, scales, out, n, accumulate); break;
    case 2: dequantize_all<Fp8>(codes, scales, out, n, accumulate); break;
    case 3: dequantize_all<Sign>(codes, scales, out, n, accumulate); break;
  }
}

API LEVELS void hiercomm_top_k(const float *x, float *e, u8 *counts, u8 *indices, u8 *values, i64 n, i64 k) {
  Histogram histogram;
  const u32 bound = add_and_bound(x, e, n, k, histogram);
  const float *const v = e ? e : x;
  i64 ties = k;
  const u32 least = select(v, n, ties, bound, histogram);
  for (i64 start = 0, taken = 0; start < n; start += SPAN) {
    const i64 rest = n - start < SPAN ? n - start : SPAN;
    const u32 count = pack(v + start, e ? e + start : nullptr, rest, least, ties, indices + 2 * taken, values + 2 * taken);
    store32(counts + 4 * (start / SPAN), count);
    taken += count;
  }
}

// Counts that exceed k and indices from n on, which only bad bytes have, are cut short and left out.
API LEVELS void hiercomm_scatter(const u8 *counts, const u8 *indices, const u8 *values, i64 k, float *out, i64 n,
                                 int accumulate) {
  if (!accumulate)
    for (i64 i = 0; i < n; ++i) out[i] = 0.0f;
  for (i64 start = 0, taken = 0; start < n; start += SPAN) {
    const i64 count = load32(counts + 4 * (start / SPAN)), end = count < k - taken ? taken + count : k;
    for (; taken < end; ++taken) {
      const i64 i = start + load16(indices + 2 * taken);
      const u16 wire = load16(values + 2 * taken);
      if (i < n) out[i] = accumulate ? decoded_sum(out[i], wire) : from_bf16(wire);
    }
  }
}
