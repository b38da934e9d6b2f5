// Decodes random bytes of the right sizes, in buffers of exactly those sizes, under AddressSanitizer.
#include <stdio.h>
#include <stdlib.h>

#include <random>
#include <vector>

#include "cpu_twin.cpp"

static std::mt19937_64 rng(1);
static i64 below(i64 n) { return (i64)(rng() % (u64)n); }
static std::vector<u8> noise(i64 n) {
  std::vector<u8> bytes((size_t)n);
  const int style = (int)below(3);  // anything, small numbers, all ones
  for (u8 &b : bytes) b = style == 2 ? 255 : (u8)(style == 1 ? below(3) : (i64)rng());
  bytes.shrink_to_fit();
  return bytes;
}

int main(int, char **argv) {
  const i64 rounds = atoll(argv[1]);
  for (i64 round = 0; round < rounds; ++round) {
    const i64 n = round % 100 ? 1 + below(1200) : SPAN - 3 + below(SPAN), blocks = (n + BLOCK - 1) / BLOCK;
    std::vector<float> out((size_t)n, 1.0f);
    const int code = (int)below(4), accumulate = (int)below(2);
    const i64 bytes[] = {n, 256 * blocks, n, 64 * blocks};
    const auto codes = noise(bytes[code]), scales = noise(2 * blocks);
    hiercomm_dequantize(code, accumulate, codes.data(), scales.data(), out.data(), n);
    const i64 k = below((n < 300 ? n : 300) + 1);
    const auto counts = noise(4 * ((n + SPAN - 1) / SPAN)), indices = noise(2 * k), values = noise(2 * k);
    hiercomm_scatter(counts.data(), indices.data(), values.data(), k, out.data(), n, accumulate);
  }
  printf("%lld\n", rounds);
}
