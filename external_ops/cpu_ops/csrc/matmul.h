// C = alpha A B + beta C for row-major float matrices, one thread: by the BLAS that Paddle brings, or else plain loops.
#pragma once
#include "common.h"

namespace cpu_ops {

// A (m, k), or its transpose (k, m) where `a_transposed`; B (k, n) likewise; C (m, n). *_distance: floats between rows.
// Called inside a parallel region, where MKL computes with the calling thread alone.
void matmul(bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
            int64_t a_distance, const float* b, int64_t b_distance, float beta, float* c, int64_t c_distance);

}  // namespace cpu_ops
