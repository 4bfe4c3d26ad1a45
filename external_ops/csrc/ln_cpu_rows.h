// The loops over rows. ln_cpu.cc includes this file once for each instruction set, inside a namespace of its own: hence
// no include guard and no #include in here.
//
// `omp simd` lets the compiler vectorise a sum, which changes the order of the additions; nothing else is relaxed.

inline float load(const float* p, int64_t i) { return p[i]; }
inline void store(float* p, int64_t i, float value) { p[i] = value; }

inline float load(const BFloat16* p, int64_t i) {
  const uint32_t bits = static_cast<uint32_t>(p[i].bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void store(BFloat16* p, int64_t i, float value) {  // rounds to the nearest, ties to even; a NaN stays one
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  p[i].bits = static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40u : rounded);
}

// Sums run over the four quarters of a row side by side: one chain of additions would wait for itself.

template <class T>
float row_sum(const T* x, int64_t n) {
  const int64_t q = n / 4;
  float a = 0, b = 0, c = 0, d = 0;
#pragma omp simd reduction(+ : a, b, c, d)
  for (int64_t i = 0; i < q; ++i) {
    a += load(x, i);
    b += load(x, i + q);
    c += load(x, i + 2 * q);
    d += load(x, i + 3 * q);
  }
  for (int64_t i = 4 * q; i < n; ++i) a += load(x, i);
  return (a + b) + (c + d);
}

template <class T>
float row_squares(const T* x, float mean, int64_t n) {  // sum of (x - mean)^2
  const int64_t q = n / 4;
  float a = 0, b = 0, c = 0, d = 0;
#pragma omp simd reduction(+ : a, b, c, d)
  for (int64_t i = 0; i < q; ++i) {
    const float xa = load(x, i) - mean, xb = load(x, i + q) - mean;
    const float xc = load(x, i + 2 * q) - mean, xd = load(x, i + 3 * q) - mean;
    a += xa * xa;
    b += xb * xb;
    c += xc * xc;
    d += xd * xd;
  }
  for (int64_t i = 4 * q; i < n; ++i) {
    const float xa = load(x, i) - mean;
    a += xa * xa;
  }
  return (a + b) + (c + d);
}

// Rows begin .. end. The row stays in the first-level cache between the three passes over it.
template <class T>
void forward_rows(const LnForward& args, const float* scale, const float* bias, int64_t begin, int64_t end) {
  const int64_t n = args.cols;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.x) + row * n;
    T* y = static_cast<T*>(args.y) + row * n;
    if (args.residual != nullptr) {
      const T* residual = static_cast<const T*>(args.residual) + row * n;
      T* sum = static_cast<T*>(args.sum) + row * n;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) store(sum, i, load(x, i) + load(residual, i));
      x = sum;
    }
    const float mean = row_sum(x, n) / n;
    const float invvar = 1.0f / std::sqrt(row_squares(x, mean, n) / n + args.epsilon);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) store(y, i, (load(x, i) - mean) * invvar * scale[i] + bias[i]);
    args.mean[row] = mean;
    args.invvar[row] = invvar;
  }
}

// The gradient of a row, with xhat = (x - mean) * invvar and g = dy * scale:
//   dx = invvar * (g - sum(g) / n - xhat * sum(g * xhat) / n) + dmean / n - dinvvar * invvar^2 * xhat / n  (+ dsum)
// so what reached mean and invvar only shifts the two sums.
struct RowSums {
  float g, g_xhat;
};

// One pass over a row; adds dy * xhat and dy to the parameter gradients.
template <class T>
RowSums sums_of_1_row(const T* x, const T* dy, const float* scale, float mean, float invvar, float* dscale, float* dbias,
                      int64_t n) {
  float g = 0, g_xhat = 0;
#pragma omp simd reduction(+ : g, g_xhat)
  for (int64_t i = 0; i < n; ++i) {
    const float d = load(dy, i), dx = d * ((load(x, i) - mean) * invvar);
    g += d * scale[i];
    g_xhat += dx * scale[i];
    dscale[i] += dx;
    dbias[i] += d;
  }
  return {g, g_xhat};
}

// The same for four rows at once: the parameter gradients are read and written once for the four.
template <class T>
void sums_of_4_rows(const T* x, const T* dy, const float* scale, const float* mean, const float* invvar, float* dscale,
                    float* dbias, int64_t n, RowSums* sums) {
  const T *x0 = x, *x1 = x + n, *x2 = x + 2 * n, *x3 = x + 3 * n;
  const T *dy0 = dy, *dy1 = dy + n, *dy2 = dy + 2 * n, *dy3 = dy + 3 * n;
  const float m0 = mean[0], m1 = mean[1], m2 = mean[2], m3 = mean[3];
  const float v0 = invvar[0], v1 = invvar[1], v2 = invvar[2], v3 = invvar[3];
  float g0 = 0, g1 = 0, g2 = 0, g3 = 0, h0 = 0, h1 = 0, h2 = 0, h3 = 0;
#pragma omp simd reduction(+ : g0, g1, g2, g3, h0, h1, h2, h3)
  for (int64_t i = 0; i < n; ++i) {
    const float d0 = load(dy0, i), d1 = load(dy1, i), d2 = load(dy2, i), d3 = load(dy3, i), s = scale[i];
    const float p0 = d0 * ((load(x0, i) - m0) * v0), p1 = d1 * ((load(x1, i) - m1) * v1);
    const float p2 = d2 * ((load(x2, i) - m2) * v2), p3 = d3 * ((load(x3, i) - m3) * v3);
    g0 += d0 * s;
    g1 += d1 * s;
    g2 += d2 * s;
    g3 += d3 * s;
    h0 += p0 * s;
    h1 += p1 * s;
    h2 += p2 * s;
    h3 += p3 * s;
    dscale[i] += (p0 + p1) + (p2 + p3);
    dbias[i] += (d0 + d1) + (d2 + d3);
  }
  sums[0] = {g0, h0};
  sums[1] = {g1, h1};
  sums[2] = {g2, h2};
  sums[3] = {g3, h3};
}

// The second pass over one row: it reads from cache what the first one read from memory.
template <class T>
void write_dx(const LnBackward& args, const float* scale, RowSums sums, int64_t row) {
  const int64_t n = args.cols, at = row * n;
  const float mean = args.mean[row], invvar = args.invvar[row];
  if (args.dmean != nullptr) sums.g -= args.dmean[row] / invvar;
  if (args.dinvvar != nullptr) sums.g_xhat += args.dinvvar[row] * invvar;
  const float mean_g = sums.g / n, mean_g_xhat = sums.g_xhat / n;
  const T* x = static_cast<const T*>(args.input) + at;
  const T* dy = static_cast<const T*>(args.dy) + at;
  T* dx = static_cast<T*>(args.dx) + at;
  if (args.dsum != nullptr) {
    const T* dsum = static_cast<const T*>(args.dsum) + at;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const float xhat = (load(x, i) - mean) * invvar;
      store(dx, i, (load(dy, i) * scale[i] - mean_g - xhat * mean_g_xhat) * invvar + load(dsum, i));
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const float xhat = (load(x, i) - mean) * invvar;
      store(dx, i, (load(dy, i) * scale[i] - mean_g - xhat * mean_g_xhat) * invvar);
    }
  }
  if (args.dresidual != nullptr) std::memcpy(static_cast<T*>(args.dresidual) + at, dx, n * sizeof(T));
}

template <class T>
void backward_rows(const LnBackward& args, const float* scale, float* dscale, float* dbias, int64_t begin, int64_t end) {
  const int64_t n = args.cols;
  const T* x = static_cast<const T*>(args.input);
  const T* dy = static_cast<const T*>(args.dy);
  int64_t row = begin;
  for (; row + 4 <= end; row += 4) {
    RowSums sums[4];
    sums_of_4_rows(x + row * n, dy + row * n, scale, args.mean + row, args.invvar + row, dscale, dbias, n, sums);
    for (int k = 0; k < 4; ++k) write_dx<T>(args, scale, sums[k], row + k);
  }
  for (; row < end; ++row) {
    const RowSums sums =
        sums_of_1_row(x + row * n, dy + row * n, scale, args.mean[row], args.invvar[row], dscale, dbias, n);
    write_dx<T>(args, scale, sums, row);
  }
}
