#include "simd_math.h"

inline void silu_mul_row(const float* gate, const float* up, float* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = gate[i] * sigmoid_float(gate[i]) * up[i];
}

// silu'(g) = s (1 + g (1 - s)) with s = sigmoid(g)
inline void silu_mul_row_backward(const float* gate, const float* up, const float* dout, float* dgate, float* dup, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float g = gate[i], s = sigmoid_float(g), d = dout[i], u = up[i];
    dup[i] = d * (g * s);
    dgate[i] = d * u * (s * (1.0f + g * (1.0f - s)));
  }
}
