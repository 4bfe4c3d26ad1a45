// silu(gate) * up, the gated part of a SwiGLU FFN (Shazeer 2020), and its gradients. Rows of `width` floats.
#pragma once
#include "common.h"

namespace cpu_ops {

void silu_mul_forward(const float* gate, int64_t gate_distance, const float* up, int64_t up_distance, float* out, int64_t rows,
                      int64_t width);
void silu_mul_backward(const float* gate, int64_t gate_distance, const float* up, int64_t up_distance, const float* dout,
                       int64_t dout_distance, float* dgate, float* dup, int64_t rows, int64_t width);

}  // namespace cpu_ops
