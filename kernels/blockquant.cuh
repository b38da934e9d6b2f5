// The codes for gradients: every function that makes a number, one source for NVRTC, nvcc and g++.
//
// A block of 512 elements has one scale, in bf16. A warp works on a block, or one CPU thread does. Rules that make
// every byte the same on both, whatever the compiler's and the processor's settings for denormals and contraction:
//  R1  No #include, typedefs of our own: NVRTC has no headers.
//  R2  fp32 arithmetic only through add, sub, mul, div: on a GPU intrinsics that are never fused; on a CPU compiled with
//      -ffp-contract=off, never with -ffast-math.
//  R3  Every fp32 that enters is flushed in integer arithmetic, and blocks whose largest element is under 2^-64 code to
//      zero, so no operation of which a byte depends sees a denormal.
//  R4  Magnitudes are compared as integers: in any order, and NaN is the largest.
//  R5  Rounding to integers adds 1.5 * 2^23 and reads the bits.
//  R6  A scale has 8 significant bits, so code * scale is exact, and v - code * scale and sum + code * scale round once.
//  R7  A block that holds NaN, inf or a magnitude from 2^127 on is poisoned: scale 0x7fc0, codes and residual 0.
//  R8  Floats are added in one fixed order: accumulator i mod 128, then a tree.
//  R9  Random bits are a pure function of the seed and the element's index.
// Loops are one phase each, of fixed length over private arrays with affine indices: so they vectorise.
#ifndef HIERCOMM_BLOCKQUANT_CUH
#define HIERCOMM_BLOCKQUANT_CUH

#if defined(__FAST_MATH__)
#error "-ffast-math would change the bytes"
#endif

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define FN __host__ __device__ __forceinline__
#else
#define FN inline __attribute__((always_inline))
#endif

#if defined(__CUDA_ARCH__)
#define LANES 32
#define UNROLL _Pragma("unroll")
// Element i of the block is element k of this lane's private array: lane l has 128 * c + 4 * l + (0, 1, 2, 3).
#define EACH(i, k)                                                                  \
  UNROLL for (int k = 0, i = 4 * (int)hiercomm::lane(); k < hiercomm::PER; \
              ++k, i = (k >> 2) * 128 + 4 * (int)hiercomm::lane() + (k & 3))
#else
#define LANES 1
#define UNROLL
#define EACH(i, k) for (int k = 0, i = 0; k < hiercomm::PER; ++k, ++i)
#endif

// The same in tiles t of 256 and their halves h, for what pairs element j of one half with that of the other.
#define EACH_HALF(t, h, j, k)                                      \
  UNROLL for (int t = 0; t < hiercomm::BLOCK / 256; ++t)           \
    UNROLL for (int h = 0; h < 2; ++h)                             \
      UNROLL for (int j = 0, k = (2 * t + h) * hiercomm::HALF; j < hiercomm::HALF; ++j, ++k)

namespace hiercomm {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int BLOCK = 512, SPAN = 65536, PER = BLOCK / LANES, HALF = 128 / LANES;

// ---- scalars ----------------------------------------------------------------------------------------------

#if defined(__CUDA_ARCH__)
FN u32 bits(float f) { return __float_as_uint(f); }
FN float flt(u32 u) { return __uint_as_float(u); }
FN float add(float a, float b) { return __fadd_rn(a, b); }
FN float sub(float a, float b) { return __fsub_rn(a, b); }
FN float mul(float a, float b) { return __fmul_rn(a, b); }
FN float div(float a, float b) { return __fdiv_rn(a, b); }
FN u32 mulhi(u32 a, u32 b) { return __umulhi(a, b); }
FN u32 lane() { return threadIdx.x & 31u; }
#else
FN u32 bits(float f) { u32 u; __builtin_memcpy(&u, &f, 4); return u; }
FN float flt(u32 u) { float f; __builtin_memcpy(&f, &u, 4); return f; }
FN float add(float a, float b) { return a + b; }
FN float sub(float a, float b) { return a - b; }
FN float mul(float a, float b) { return a * b; }
FN float div(float a, float b) { return a / b; }
FN u32 mulhi(u32 a, u32 b) { return (u32)(((u64)a * b) >> 32); }
FN u32 lane() { return 0; }
#endif
FN u32 umax(u32 a, u32 b) { return a > b ? a : b; }
FN u32 umin(u32 a, u32 b) { return a < b ? a : b; }
FN u32 magnitude(float f) { return bits(f) & 0x7fffffffu; }
FN float flush(float f) {
  const u32 u = bits(f);
  return flt((u & 0x7f800000u) ? u : (u & 0x80000000u));
}
FN i32 nearest(float y) { return (i32)(bits(add(y, 12582912.0f)) - 0x4B400000u); }  // |y| < 2^22
FN i32 clamp(i32 c, i32 most) { return c < -most ? -most : c > most ? most : c; }

FN float from_bf16(u16 h) { return flt((u32)h << 16); }
FN u16 bf16_up(float f) { return (u16)((bits(f) + 0xffffu) >> 16); }                         // f >= 0
FN u16 bf16_nearest(u32 u) { return (u16)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16); }         // bits of no NaN

// ---- memory -----------------------------------------------------------------------------------------------

// What goes over the wire is little-endian and may start at any byte.
#if defined(__CUDA_ARCH__)
FN u16 load16(const u8 *p) { return (u16)(p[0] | (p[1] << 8)); }
FN void store16(u8 *p, u16 w) { p[0] = (u8)w; p[1] = (u8)(w >> 8); }
FN u32 load32(const u8 *p) {
  if (((u64)p & 3) == 0) return *reinterpret_cast<const u32 *>(p);
  return (u32)load16(p) | ((u32)load16(p + 2) << 16);
}
FN void store32(u8 *p, u32 w) {
  if (((u64)p & 3) == 0) { *reinterpret_cast<u32 *>(p) = w; return; }
  store16(p, (u16)w);
  store16(p + 2, (u16)(w >> 16));
}
#else
FN u16 load16(const u8 *p) { u16 w; __builtin_memcpy(&w, p, 2); return w; }
FN void store16(u8 *p, u16 w) { __builtin_memcpy(p, &w, 2); }
FN u32 load32(const u8 *p) { u32 w; __builtin_memcpy(&w, p, 4); return w; }
FN void store32(u8 *p, u32 w) { __builtin_memcpy(p, &w, 4); }
#endif

// Elements first to first + BLOCK of p, flushed; zeros from n on.
FN void load(const float *p, i64 first, i64 n, float *v) {
  if (first + BLOCK <= n) {
#if defined(__CUDA_ARCH__)
    if (((u64)p & 15) == 0) {
      UNROLL for (int c = 0; c < BLOCK / 128; ++c) {
        const float4 f = *reinterpret_cast<const float4 *>(p + first + 128 * c + 4 * lane());
        v[4 * c] = flush(f.x); v[4 * c + 1] = flush(f.y); v[4 * c + 2] = flush(f.z); v[4 * c + 3] = flush(f.w);
      }
      return;
    }
#endif
    EACH(i, k) v[k] = flush(p[first + i]);
    return;
  }
  EACH(i, k) v[k] = first + i < n ? flush(p[first + i]) : 0.0f;
}
FN void store(float *p, i64 first, i64 n, const float *v) {
  if (first + BLOCK <= n) {
#if defined(__CUDA_ARCH__)
    if (((u64)p & 15) == 0) {
      UNROLL for (int c = 0; c < BLOCK / 128; ++c)
        *reinterpret_cast<float4 *>(p + first + 128 * c + 4 * lane()) =
            make_float4(v[4 * c], v[4 * c + 1], v[4 * c + 2], v[4 * c + 3]);
      return;
    }
#endif
    EACH(i, k) p[first + i] = v[k];
    return;
  }
  EACH(i, k) if (first + i < n) p[first + i] = v[k];
}
// x + e; just x where there is no e.
FN void load_sum(const float *x, const float *e, i64 first, i64 n, float *v) {
  load(x, first, n, v);
  if (e) {
    float w[PER];
    load(e, first, n, w);
    EACH(i, k) v[k] = flush(add(v[k], w[k]));
  }
}

// ---- rounding (R9) ----------------------------------------------------------------------------------------

struct Key { u32 add, xor_; };
FN Key philox(u64 counter, u64 key) {  // Philox4x32-10, half of its output
  u32 x = (u32)counter, y = (u32)(counter >> 32), z = 0, w = 0, k0 = (u32)key, k1 = (u32)(key >> 32);
  UNROLL for (int r = 0; r < 10; ++r) {
    const u32 h0 = mulhi(0xD2511F53u, x), l0 = 0xD2511F53u * x, h1 = mulhi(0xCD9E8D57u, z), l1 = 0xCD9E8D57u * z;
    x = h1 ^ y ^ k0; y = l1; z = h0 ^ w ^ k1; w = l0;
    k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
  }
  Key out; out.add = x; out.xor_ = y;
  return out;
}

struct Nearest {
  FN void fill(u64, i64) {}
  FN float at(int, int, int) const { return 0.0f; }
};
// Philox makes a key for each block, a 32-bit finaliser two times 16 bits of it for elements g and g + 128 of a tile.
struct Stochastic {
  u32 word[PER / 2];
  FN void fill(u64 seed, i64 block) {
    const Key key = philox((u64)block, seed);
    UNROLL for (int t = 0; t < BLOCK / 256; ++t)
      UNROLL for (int j = 0; j < HALF; ++j) {
        u32 h = (128u * (u32)t + 4u * lane() + (u32)j) * 0x9E3779B9u + key.add;
        h ^= h >> 16; h *= 0x7feb352du; h ^= h >> 15; h += key.xor_; h *= 0x846ca68bu; h ^= h >> 16;
        word[t * HALF + j] = h;
      }
  }
  // (r + 1/2) / 2^16 - 1/2 of 16 bits r, exact: never +-1/2, so what needs no rounding is left alone.
  FN float at(int t, int h, int j) const {
    const u32 w = word[t * HALF + j], r = h ? w >> 16 : w & 0xffffu;
    return sub(flt(0x3f800000u | (r << 7) | 0x40u), 1.5f);
  }
};

// ---- scales (R6, R7) --------------------------------------------------------------------------------------

struct Scale { u16 wire; float step, inverse; bool poisoned; };
FN Scale make_scale(u32 largest, u16 wire) {
  Scale s;
  s.poisoned = largest >= 0x7f000000u;
  const bool dead = s.poisoned || largest < 0x1f800000u;
  s.wire = s.poisoned ? (u16)0x7fc0u : dead ? (u16)0 : wire;
  s.step = dead ? 0.0f : from_bf16(wire);
  s.inverse = dead ? 0.0f : div(1.0f, from_bf16(wire));
  return s;
}
// No scale that was written here is between 0 and 2^-80; in bad bytes one may be, and would make denormals.
FN float read_scale(const u8 *p) {
  const float s = from_bf16(load16(p));
  return magnitude(s) < 0x17800000u ? 0.0f : s;
}

FN u32 largest(const float *v) {
  u32 m = 0;
  EACH(i, k) m = umax(m, magnitude(v[k]));
#if defined(__CUDA_ARCH__)
  for (int d = 16; d; d >>= 1) m = umax(m, __shfl_xor_sync(0xffffffffu, m, d));
#endif
  return m;
}
// The sum of 128 accumulators, of which a GPU's lane l has 4 * l + (0, 1, 2, 3).
FN float sum_of_128(const float *a) {
#if defined(__CUDA_ARCH__)
  float s = add(add(a[0], a[1]), add(a[2], a[3]));
  for (int d = 16; d; d >>= 1) s = add(s, __shfl_xor_sync(0xffffffffu, s, d));
  return s;
#else
  float s[32];
  for (int l = 0; l < 32; ++l) s[l] = add(add(a[4 * l], a[4 * l + 1]), add(a[4 * l + 2], a[4 * l + 3]));
  for (int d = 16; d; d >>= 1)
    for (int l = 0; l < d; ++l) s[l] = add(s[l], s[l + d]);
  return s[0];
#endif
}
// The mean magnitude in bf16. Where the largest is from 2^64 on all is added 2^-16 times as large: 512 * 2^127 is inf.
FN u16 mean_magnitude(const float *v, u32 largest, i32 count) {
  const u32 down = largest >= 0x5f800000u ? 16u << 23 : 0u;
  float a[HALF];
  UNROLL for (int j = 0; j < HALF; ++j) a[j] = 0.0f;
  UNROLL for (int c = 0; c < BLOCK / 128; ++c)
    UNROLL for (int j = 0; j < HALF; ++j) {
      const u32 m = magnitude(v[c * HALF + j]);
      a[j] = add(a[j], flt(m >= down + 0x00800000u ? m - down : 0u));
    }
  return bf16_nearest(bits(div(sum_of_128(a), (float)count)) + down);
}

// ---- codes ------------------------------------------------------------------------------------------------

// One byte an element, none for those from n on.
FN void store_bytes(u8 *p, i64 first, i64 n, const i32 *c) {
  if (first + BLOCK <= n) {
#if defined(__CUDA_ARCH__)
    UNROLL for (int t = 0; t < BLOCK / 128; ++t)
      store32(p + first + 128 * t + 4 * lane(), ((u32)c[4 * t] & 255u) | (((u32)c[4 * t + 1] & 255u) << 8) |
                                                    (((u32)c[4 * t + 2] & 255u) << 16) | ((u32)c[4 * t + 3] << 24));
#else
    EACH(i, k) p[first + i] = (u8)c[k];
#endif
    return;
  }
  EACH(i, k) if (first + i < n) p[first + i] = (u8)c[k];
}
FN void load_bytes(const u8 *p, i64 first, i64 n, i32 *c) {
  if (first + BLOCK <= n) {
#if defined(__CUDA_ARCH__)
    UNROLL for (int t = 0; t < BLOCK / 128; ++t) {
      const u32 w = load32(p + first + 128 * t + 4 * lane());
      UNROLL for (int j = 0; j < 4; ++j) c[4 * t + j] = (i32)((w >> (8 * j)) & 255u);
    }
#else
    EACH(i, k) c[k] = p[first + i];
#endif
    return;
  }
  EACH(i, k) c[k] = first + i < n ? p[first + i] : 0;
}

template <int MOST>
FN Scale scale_of_largest(const float *v) {
  const u32 m = largest(v);
  return make_scale(m, bf16_up(div(flt(m), (float)MOST)));
}

// -127 to 127, in two's complement.
struct Int8 {
  static FN Scale scale(const float *v, i32) { return scale_of_largest<127>(v); }
  static FN i32 encode(float y, float u) { return clamp(nearest(add(y, u)), 127); }
  static FN float decode(i32 c) { return (float)c; }
  static FN void write(u8 *p, i64 block, i64 n, const i32 *c) { store_bytes(p, block * BLOCK, n, c); }
  static FN void read(const u8 *p, i64 block, i64 n, i32 *c) {
    load_bytes(p, block * BLOCK, n, c);
    EACH(i, k) c[k] = (c[k] ^ 128) - 128;
  }
};

// -7 to 7, in two's complement: byte j of a tile is element j of it in the low half, element j + 128 in the high half.
// A block has 256 bytes, also the last one.
FN i32 signed4(u32 c) { return (i32)((c & 15u) ^ 8u) - 8; }
struct Int4 {
  static FN Scale scale(const float *v, i32) { return scale_of_largest<7>(v); }
  static FN i32 encode(float y, float u) { return clamp(nearest(add(y, u)), 7); }
  static FN float decode(i32 c) { return (float)c; }
  static FN void write(u8 *p, i64 block, i64, const i32 *c) {
    UNROLL for (int t = 0; t < BLOCK / 256; ++t) {
      u8 *const tile = p + block * (BLOCK / 2) + 128 * t;
      const i32 *const low = c + 2 * t * HALF, *const high = low + HALF;
#if defined(__CUDA_ARCH__)
      u32 w = 0;
      UNROLL for (int j = 0; j < 4; ++j) w |= (((u32)low[j] & 15u) | (((u32)high[j] & 15u) << 4)) << (8 * j);
      store32(tile + 4 * lane(), w);
#else
      for (int j = 0; j < 128; ++j) tile[j] = (u8)((low[j] & 15) | ((high[j] & 15) << 4));
#endif
    }
  }
  static FN void read(const u8 *p, i64 block, i64, i32 *c) {
    UNROLL for (int t = 0; t < BLOCK / 256; ++t) {
      const u8 *const tile = p + block * (BLOCK / 2) + 128 * t;
      i32 *const low = c + 2 * t * HALF, *const high = low + HALF;
#if defined(__CUDA_ARCH__)
      const u32 w = load32(tile + 4 * lane());
      UNROLL for (int j = 0; j < 4; ++j) {
        low[j] = signed4(w >> (8 * j));
        high[j] = signed4(w >> (8 * j + 4));
      }
#else
      for (int j = 0; j < 128; ++j) {
        low[j] = signed4(tile[j]);
        high[j] = signed4((u32)tile[j] >> 4);
      }
#endif
    }
  }
};

// OCP's e4m3, up to 448. Integer arithmetic on the bits of y.
struct Fp8 {
  static FN Scale scale(const float *v, i32) { return scale_of_largest<448>(v); }
  static FN i32 encode(float y, float u) {
    const u32 sign = (bits(y) >> 24) & 0x80u;
    const u32 a = umin(magnitude(y), 0x43e00000u);
    // 20 bits of the mantissa go; u in units of 2^-20 is what 12 + u has below 12.
    const u32 dither = bits(add(u, 12.0f)) - 0x41400000u;
    const u32 rounded = (a + 0x7ffffu + ((a >> 20) & 1u) + dither) >> 20;
    const u32 normal = umin(rounded - (120u << 3), 0x7eu);
    const u32 subnormal = (u32)nearest(add(mul(flt(a), 512.0f), u));  // below 2^-6, in units of 2^-9
    return (i32)(sign | (a < 0x3c800000u ? subnormal : normal));
  }
  static FN float decode(i32 c) {
    const u32 m = (u32)c & 0x7fu, subnormal = m < 8u;
    const float f = sub(flt((m << 20) + ((120u + subnormal) << 23)), flt(subnormal ? 0x3c800000u : 0u));
    return flt(bits(f) | (((u32)c & 0x80u) << 24));
  }
  static FN void write(u8 *p, i64 block, i64 n, const i32 *c) { store_bytes(p, block * BLOCK, n, c); }
  static FN void read(const u8 *p, i64 block, i64 n, i32 *c) { load_bytes(p, block * BLOCK, n, c); }
};

// One bit, set where negative; the scale is the mean magnitude. Bit i is element i; a block has 64 bytes.
struct Sign {
  static FN Scale scale(const float *v, i32 count) {
    const u32 m = largest(v);
    return make_scale(m, mean_magnitude(v, m, count));
  }
  static FN i32 encode(float y, float) { return (i32)(bits(y) >> 31); }
  static FN float decode(i32 c) { return flt(0x3f800000u | ((u32)c << 31)); }
  static FN void write(u8 *p, i64 block, i64, const i32 *c) {
    p += block * (BLOCK / 8);
#if defined(__CUDA_ARCH__)
    UNROLL for (int t = 0; t < BLOCK / 128; ++t) {  // 8 lanes make a word
      u32 w = 0;
      UNROLL for (int j = 0; j < 4; ++j) w |= (u32)c[4 * t + j] << (4 * (lane() & 7u) + j);
      for (int d = 4; d; d >>= 1) w |= __shfl_xor_sync(0xffffffffu, w, d);
      if ((lane() & 7u) == 0) store32(p + 16 * t + (lane() >> 1), w);
    }
#else
    for (int t = 0; t < BLOCK / 32; ++t) {
      u32 w = 0;
      for (int j = 0; j < 32; ++j) w |= (u32)c[32 * t + j] << j;
      store32(p + 4 * t, w);
    }
#endif
  }
  static FN void read(const u8 *p, i64 block, i64, i32 *c) {
    p += block * (BLOCK / 8);
#if defined(__CUDA_ARCH__)
    UNROLL for (int t = 0; t < BLOCK / 128; ++t) {
      const u32 nibble = (u32)p[16 * t + (lane() >> 1)] >> (4 * (lane() & 1u));
      UNROLL for (int j = 0; j < 4; ++j) c[4 * t + j] = (i32)((nibble >> j) & 1u);
    }
#else
    for (int t = 0; t < BLOCK / 32; ++t) {
      const u32 w = load32(p + 4 * t);
      for (int j = 0; j < 32; ++j) c[32 * t + j] = (i32)((w >> j) & 1u);
    }
#endif
  }
};

// ---- a block ----------------------------------------------------------------------------------------------

// The code of x + e; e becomes what the code leaves out.
template <class Code, class Rounding>
FN void quantize(const float *x, float *e, u8 *codes, u8 *scales, i64 block, i64 n, u64 seed) {
  const i64 first = block * BLOCK;
  float v[PER];
  i32 c[PER];
  load_sum(x, e, first, n, v);
  const Scale scale = Code::scale(v, (i32)(n - first < BLOCK ? n - first : BLOCK));
  Rounding rounding;
  rounding.fill(seed, block);
  EACH_HALF(t, h, j, k) c[k] = Code::encode(mul(v[k], scale.inverse), rounding.at(t, h, j));
  if (scale.inverse == 0.0f) { EACH(i, k) c[k] = 0; }
  Code::write(codes, block, n, c);
  if (lane() == 0) store16(scales + 2 * block, scale.wire);
  if (e) {
    if (scale.poisoned) { EACH(i, k) v[k] = 0.0f; }
    EACH(i, k) v[k] = sub(v[k], mul(Code::decode(c[k]), scale.step));
    store(e, first, n, v);
  }
}

// out = what was coded, or out += it.
template <class Code>
FN void dequantize(const u8 *codes, const u8 *scales, float *out, bool accumulate, i64 block, i64 n) {
  i32 c[PER];
  float v[PER];
  Code::read(codes, block, n, c);
  const float step = read_scale(scales + 2 * block);
  EACH(i, k) v[k] = mul(Code::decode(c[k]), step);
  if (accumulate) {
    float w[PER];
    load(out, block * BLOCK, n, w);
    EACH(i, k) v[k] = flush(add(w[k], v[k]));
  }
  store(out, block * BLOCK, n, v);
}

// ---- top-k ------------------------------------------------------------------------------------------------

// What is sorted by: the magnitude's bits. All NaNs are equal, and above inf.
FN u32 rank_of(float v) { return umin(magnitude(flush(v)), 0x7f800001u); }
// A finite number stays finite.
FN u16 to_bf16(float v) {
  const u32 u = bits(v), m = u & 0x7fffffffu;
  if (m > 0x7f800000u) return (u16)0x7fc0u;
  return m < 0x7f800000u && m > 0x7f7f0000u ? (u16)(0x7f7fu | (u >> 31 << 15)) : bf16_nearest(u);
}
FN float left_out(float v, u16 wire) {
  return magnitude(v) < 0x7f800000u ? flush(sub(v, from_bf16(wire))) : 0.0f;
}
FN float decoded_sum(float out, u16 wire) { return flush(add(flush(out), flush(from_bf16(wire)))); }

}  // namespace hiercomm
#endif
