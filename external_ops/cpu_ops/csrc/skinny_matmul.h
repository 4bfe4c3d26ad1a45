// out = x W + bias for a few rows of x, as a step of decoding has them. Such a product takes as long as reading W does, so W
// is read once, by all threads, whatever the number of rows.
#pragma once
#include "common.h"

namespace cpu_ops {

struct SkinnySizes {
  int64_t rows, inner, columns;
};

// x (rows, inner) with x_distance floats from row to row; bias (columns), or null; out (rows, columns).
// weight (inner, columns).
void skinny_matmul(const SkinnySizes& sizes, const float* x, int64_t x_distance, const float* weight, const float* bias,
                   float* out);

// weight (columns, inner).
void skinny_matmul_transposed(const SkinnySizes& sizes, const float* x, int64_t x_distance, const float* weight,
                              const float* bias, float* out);

}  // namespace cpu_ops
