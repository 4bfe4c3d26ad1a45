// One step of AdamW (Loshchilov & Hutter 2019) over many tensors in one pass, and their squared norm. Tensors of float32
// without gaps; the threads share the elements of all tensors, so small ones cost no start of threads each.
#pragma once
#include <vector>

#include "common.h"

namespace cpu_ops {

struct AdamWTensor {
  float *param, *moment1, *moment2;
  const float* grad;
  int64_t size;
  float rate, keep, epsilon;  // step size and epsilon with the bias corrections in them; the decay's factor of the weight
  float scale;                // what clipping multiplies the gradient with
};

// g = scale grad;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;  p = keep p - rate m / (sqrt(v) + epsilon)
void adamw(const std::vector<AdamWTensor>& tensors, float beta1, float beta2);

struct Span {
  const float* data;
  int64_t size;
};

// The sum of all squares, the same for any number of threads.
double squared_norm(const std::vector<Span>& tensors);

}  // namespace cpu_ops
