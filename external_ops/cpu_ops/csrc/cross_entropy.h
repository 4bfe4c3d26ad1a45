// Softmax cross entropy: scores become their own gradient in place.
#pragma once
#include "common.h"

namespace cpu_ops {

// For each row i of `scores` (rows, width), plus `bias` where not null: loss[i] = -log softmax(row)[labels[i]] where share[i]
// is not 0, else 0; and the row becomes share[i] * (softmax(row) - onehot(labels[i])).
void cross_entropy(float* scores, const float* bias, const int64_t* labels, const float* share, float* loss, int64_t rows,
                   int64_t width);

}  // namespace cpu_ops
