#include "cross_entropy.h"

#define CPU_OPS_KERNELS "cross_entropy_kernels.h"
#include "each_isa.h"

namespace cpu_ops {

void cross_entropy(float* scores, const float* bias, const int64_t* labels, const float* share, float* loss, int64_t rows,
                   int64_t width) {
  const auto row = CPU_OPS_CHOOSE(cross_entropy_row);
#pragma omp parallel for schedule(static) num_threads(useful_threads(rows * width))
  for (int64_t i = 0; i < rows; ++i) loss[i] = row(scores + i * width, bias, labels[i], share[i], width);
}

}  // namespace cpu_ops
