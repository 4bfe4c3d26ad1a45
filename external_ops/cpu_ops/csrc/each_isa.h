// Compiles the file CPU_OPS_KERNELS once for each instruction set, in the namespaces baseline, avx2 and avx512. One build
// then runs on any x86-64 processor, Intel's or AMD's, and `best_isa()` finds out when it runs what that one has.
//
//   #define CPU_OPS_KERNELS "silu_mul_kernels.h"     no include guard and no #include in there: it is read three times
//   #include "each_isa.h"
//   ...
//   const auto forward = CPU_OPS_CHOOSE(silu_mul_forward);
//
// CPU_OPS_LANES is how many floats a register of the instruction set holds.
//
// No guard here either: a source may have several files of kernels. Include what the kernels need before this.
#define CPU_OPS_LANES 4
namespace baseline {
#include CPU_OPS_KERNELS
}  // namespace baseline

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CPU_OPS_CHOOSE(function) \
  (cpu_ops::best_isa() == cpu_ops::Isa::kAvx512 ? avx512::function \
                                                : cpu_ops::best_isa() == cpu_ops::Isa::kAvx2 ? avx2::function : baseline::function)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#undef CPU_OPS_LANES
#define CPU_OPS_LANES 8
namespace avx2 {
#include CPU_OPS_KERNELS
}  // namespace avx2
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,prefer-vector-width=512")
#undef CPU_OPS_LANES
#define CPU_OPS_LANES 16
namespace avx512 {
#include CPU_OPS_KERNELS
}  // namespace avx512
#pragma GCC pop_options
#else
#define CPU_OPS_CHOOSE(function) baseline::function
#endif
#undef CPU_OPS_LANES
#undef CPU_OPS_KERNELS
