// LayerNorm on CPU: float32 and bfloat16, computed in float32. No framework: see ln.h for the arguments.
#pragma once
#include "ln.h"

extern "C" {

// Return 0, or -1 for a dtype that the CPU kernels do not have. threads = 0: as many as OpenMP would use.
int ln_cpu_forward(const LnForward* args, int threads);
int ln_cpu_backward(const LnBackward* args, int threads);

// The instruction set in use: "avx2" or "baseline". FUSED_LN_ISA=baseline in the environment forces the latter.
const char* ln_cpu_isa();
}
