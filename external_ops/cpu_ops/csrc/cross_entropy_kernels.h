#include "simd_math.h"

inline float cross_entropy_row(float* x, const float* bias, int64_t label, float share, int64_t n) {
  if (share == 0.0f) {
    std::memset(x, 0, n * sizeof(float));
    return 0.0f;
  }
  if (bias != nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) x[i] += bias[i];
  }
  const float largest = row_max(x, n), target = x[label], sum = row_exp(x, n, largest), scale = share / sum;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] *= scale;
  x[label] -= share;
  return largest + std::log(sum) - target;
}
