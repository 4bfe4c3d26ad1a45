#include "matmul.h"

#include <dlfcn.h>

namespace cpu_ops {

namespace {

// cblas_sgemm with 32-bit integers. Its first three arguments are enumerations with these values in every CBLAS.
using Sgemm = void (*)(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float* a, int lda,
                       const float* b, int ldb, float beta, float* c, int ldc);
constexpr int kRowMajor = 101, kPlain = 111, kTransposed = 112;

Sgemm find_sgemm() {
  // Paddle loads the same file of the same folder at its first product; this module's run path leads there.
  void* mkl = dlopen("libmklml_intel.so", RTLD_LAZY);
  return mkl == nullptr ? nullptr : reinterpret_cast<Sgemm>(dlsym(mkl, "cblas_sgemm"));
}

void plain_matmul(bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
                  int64_t a_distance, const float* b, int64_t b_distance, float beta, float* c, int64_t c_distance) {
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      float sum = 0;
      for (int64_t l = 0; l < k; ++l) {
        sum += a[a_transposed ? l * a_distance + i : i * a_distance + l] *
               b[b_transposed ? j * b_distance + l : l * b_distance + j];
      }
      float& entry = c[i * c_distance + j];
      entry = alpha * sum + (beta == 0 ? 0 : beta * entry);  // what was never written may be NaN
    }
  }
}

}  // namespace

void matmul(bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
            int64_t a_distance, const float* b, int64_t b_distance, float beta, float* c, int64_t c_distance) {
  static const Sgemm sgemm = std::getenv("CPU_OPS_NO_BLAS") == nullptr ? find_sgemm() : nullptr;
  if (sgemm == nullptr) {
    plain_matmul(a_transposed, b_transposed, m, n, k, alpha, a, a_distance, b, b_distance, beta, c, c_distance);
    return;
  }
  sgemm(kRowMajor, a_transposed ? kTransposed : kPlain, b_transposed ? kTransposed : kPlain, static_cast<int>(m),
        static_cast<int>(n), static_cast<int>(k), alpha, a, static_cast<int>(a_distance), b, static_cast<int>(b_distance), beta,
        c, static_cast<int>(c_distance));
}

}  // namespace cpu_ops
