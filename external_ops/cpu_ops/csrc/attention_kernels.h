#include "simd_math.h"

// A row of scores becomes e^(score - largest), 0 from `seen` to `width`. Returns the sum; `largest` is set.
inline float softmax_row(float* scores, int64_t seen, int64_t width, float* largest) {
  *largest = row_max(scores, seen);
  const float sum = row_exp(scores, seen, *largest);
  std::memset(scores + seen, 0, (width - seen) * sizeof(float));
  return sum;
}

// scores become probabilities p = e^(score - log_sum), dp becomes p (dp - share), the gradient of the scores; both 0 from
// `seen` to `width`.
inline void softmax_row_backward(float* scores, float* dp, int64_t seen, int64_t width, float log_sum, float share) {
  row_exp(scores, seen, log_sum);
#pragma omp simd
  for (int64_t i = 0; i < seen; ++i) dp[i] = scores[i] * (dp[i] - share);
  std::memset(scores + seen, 0, (width - seen) * sizeof(float));
  std::memset(dp + seen, 0, (width - seen) * sizeof(float));
}

inline void scale_row(float* x, int64_t n, float factor) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

inline float dot_rows(const float* x, const float* y, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += x[i] * y[i];
  return sum;
}
