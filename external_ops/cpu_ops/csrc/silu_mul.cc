#include "silu_mul.h"

#define CPU_OPS_KERNELS "silu_mul_kernels.h"
#include "each_isa.h"

namespace cpu_ops {

void silu_mul_forward(const float* gate, int64_t gate_distance, const float* up, int64_t up_distance, float* out, int64_t rows,
                      int64_t width) {
  const auto row = CPU_OPS_CHOOSE(silu_mul_row);
#pragma omp parallel for schedule(static) num_threads(useful_threads(rows * width))
  for (int64_t i = 0; i < rows; ++i) row(gate + i * gate_distance, up + i * up_distance, out + i * width, width);
}

void silu_mul_backward(const float* gate, int64_t gate_distance, const float* up, int64_t up_distance, const float* dout,
                       int64_t dout_distance, float* dgate, float* dup, int64_t rows, int64_t width) {
  const auto row = CPU_OPS_CHOOSE(silu_mul_row_backward);
#pragma omp parallel for schedule(static) num_threads(useful_threads(rows * width))
  for (int64_t i = 0; i < rows; ++i) {
    row(gate + i * gate_distance, up + i * up_distance, dout + i * dout_distance, dgate + i * width, dup + i * width, width);
  }
}

}  // namespace cpu_ops
