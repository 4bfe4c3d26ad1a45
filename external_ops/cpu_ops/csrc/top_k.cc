#include "top_k.h"

#define CPU_OPS_KERNELS "top_k_kernels.h"
#include "each_isa.h"

namespace cpu_ops {

void top_k(const float* scores, int64_t rows, int64_t width, int64_t k, float temperature, float* values, int64_t* ids,
           float* log_sums) {
  const auto largest = CPU_OPS_CHOOSE(top_k_row);
  const auto sum = CPU_OPS_CHOOSE(sum_exp);
#pragma omp parallel for schedule(static) num_threads(useful_threads(rows * width))
  for (int64_t i = 0; i < rows; ++i) {
    const float* row = scores + i * width;
    largest(row, width, k, values + i * k, ids + i * k);
    const float peak = values[i * k], cold = 1.0f / temperature;
    log_sums[2 * i] = peak + std::log(sum(row, width, peak, 1.0f));
    log_sums[2 * i + 1] = temperature == 1.0f ? log_sums[2 * i] : peak * cold + std::log(sum(row, width, peak, cold));
  }
}

}  // namespace cpu_ops
