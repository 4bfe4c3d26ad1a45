// exp and what rows need of it, in plain C++ that the compiler turns into vector code. Read once for each instruction set
// (each_isa.h): no include guard. `omp simd` lets it change the order of additions; nothing else is relaxed.

// e^x to about 1 unit in the last place, for x from -87.3 (below: that of -87.3, about 1e-38) to 88. Cody and Waite's
// reduction, e^x = 2^n e^r with |r| <= ln(2) / 2, and Cephes' polynomial for e^r.
inline float exp_float(float x) {
  x = x < -87.3f ? -87.3f : x;
  x = x > 88.0f ? 88.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer, kept in the low bits
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  int32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = static_cast<int32_t>((static_cast<uint32_t>(bits) + 127u) << 23);
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

inline float sigmoid_float(float x) { return 1.0f / (1.0f + exp_float(-x)); }

inline float row_max(const float* x, int64_t n) {
  float largest = x[0];
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < n; ++i) largest = largest > x[i] ? largest : x[i];
  return largest;
}

// x becomes e^(x - shift); returns the sum.
inline float row_exp(float* x, int64_t n, float shift) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    const float e = exp_float(x[i] - shift);
    x[i] = e;
    sum += e;
  }
  return sum;
}
