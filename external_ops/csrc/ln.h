// What one LayerNorm call is given: shared by the CPU and the CUDA kernels. Raw pointers only, no framework.
//
// A tensor is `rows` x `cols`, row after row without gaps. With a residual, "input" below is their sum.
#pragma once
#include <cstdint>

extern "C" {

enum LnDtype { LN_FLOAT32 = 0, LN_BFLOAT16 = 1, LN_FLOAT16 = 2 };

// y = (input - mean) * invvar * scale + bias, with invvar = 1 / sqrt(variance + epsilon).
struct LnForward {
  int32_t dtype;         // of x, residual, sum, y
  int32_t param_dtype;   // of scale, bias: float32, or the same as dtype
  int64_t rows, cols;
  float epsilon;
  const void* x;
  const void* residual;  // null: the input is x, and `sum` is not written
  const void* scale;
  const void* bias;
  void* sum;             // x + residual, rounded to dtype; this is what is normalised
  void* y;
  float* mean;           // (rows)
  float* invvar;         // (rows)
};

struct LnBackward {
  int32_t dtype;          // of input and its gradients
  int32_t param_dtype;    // of scale and the parameter gradients
  int64_t rows, cols;
  const void* input;      // x, or the sum where there was a residual
  const void* scale;
  const float* mean;
  const float* invvar;
  const void* dy;
  const void* dsum;       // gradient that reached the sum itself; null: none
  const float* dmean;     // gradient that reached mean or invvar, (rows); null: none
  const float* dinvvar;
  void* dx;
  void* dresidual;        // receives a second copy of dx; null: there was no residual
  void* dscale;
  void* dbias;
};

}  // extern "C"
