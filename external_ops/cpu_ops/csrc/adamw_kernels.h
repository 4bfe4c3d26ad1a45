inline void adamw_span(const cpu_ops::AdamWTensor& tensor, int64_t begin, int64_t end, float beta1, float beta2) {
  float *param = tensor.param, *moment1 = tensor.moment1, *moment2 = tensor.moment2;
  const float* grad = tensor.grad;
  const float rate = tensor.rate, keep = tensor.keep, epsilon = tensor.epsilon, scale = tensor.scale;
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    const float g = grad[i] * scale;
    const float m = beta1 * moment1[i] + (1.0f - beta1) * g;
    const float v = beta2 * moment2[i] + (1.0f - beta2) * g * g;
    moment1[i] = m;
    moment2[i] = v;
    param[i] = keep * param[i] - rate * (m / (std::sqrt(v) + epsilon));
  }
}

inline double squares_of_span(const float* data, int64_t begin, int64_t end) {
  constexpr int64_t kRun = 1024;  // so many in float, which is twice as fast; the rest of the sum in double
  double sum = 0;
  for (int64_t start = begin; start < end; start += kRun) {
    const int64_t stop = std::min(end, start + kRun);
    float part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t i = start; i < stop; ++i) part += data[i] * data[i];
    sum += part;
  }
  return sum;
}
