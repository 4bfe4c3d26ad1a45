// The likeliest tokens of each row of scores, and what turns their scores into probabilities.
#pragma once
#include "common.h"

namespace cpu_ops {

// scores (rows, width). values and ids (rows, k): the k largest, the largest first, of equal ones the first. log_sums (rows, 2):
// log sum exp of the row, and of the row / temperature. 1 <= k <= width.
void top_k(const float* scores, int64_t rows, int64_t width, int64_t k, float temperature, float* values, int64_t* ids,
           float* log_sums);

}  // namespace cpu_ops
