// LayerNorm on CUDA: float32, bfloat16 and float16, computed in float32. No framework: see ln.h for the arguments, whose
// pointers are device pointers here. The same input on the same kind of card always gives the same bits: no atomics.
#pragma once
#include "ln.h"

extern "C" {

// Enqueue on `stream` (a cudaStream_t) of the current device. Return 0, a cudaError_t, or -1 for dtypes that the kernels
// do not have.
int ln_cuda_forward(const LnForward* args, void* stream);
int ln_cuda_backward(const LnBackward* args, void* workspace, void* stream);

// Bytes of device memory, 16-byte aligned, that ln_cuda_backward needs as its workspace; negative: minus a cudaError_t.
int64_t ln_cuda_workspace(int64_t rows, int64_t cols);
}
