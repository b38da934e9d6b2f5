// kernels.cu as a CPU's library: launches a kernel by its name.
#include <tuple>

#include "cuda_shim.hpp"
#include "kernels.cu"

#define KERNELS(DO)                                                                                              \
  DO(quantize_int8) DO(quantize_int4) DO(quantize_fp8) DO(quantize_sign) DO(quantize_int8_stochastic)            \
  DO(quantize_int4_stochastic) DO(quantize_fp8_stochastic) DO(dequantize_int8) DO(dequantize_int4)               \
  DO(dequantize_fp8) DO(dequantize_sign) DO(top_k_histogram) DO(top_k_pick) DO(top_k_count) DO(top_k_write)      \
  DO(scatter)

extern "C" __attribute__((visibility("default"))) int shim_launch(const char *name, int order, unsigned blocks,
                                                                  const uint64_t *arguments) {
  shim::order = order;
#define LAUNCH(KERNEL_NAME) \
  if (!strcmp(name, #KERNEL_NAME)) { shim::launch(KERNEL_NAME, blocks, arguments); return 0; }
  KERNELS(LAUNCH)
  return 1;
}
