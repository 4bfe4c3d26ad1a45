// CPU LayerNorm: the entry points, the choice of instruction set, and the threads. ln_cpu_rows.h has the arithmetic.
#include "ln_cpu.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <omp.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#define LN_HAS_AVX2 1
#else
#define LN_HAS_AVX2 0
#endif

namespace {

struct BFloat16 {
  uint16_t bits;
};

namespace baseline {
#include "ln_cpu_rows.h"
}  // namespace baseline

// The file is built for any x86-64 processor, and what this one has is found out when it runs: so AMD and Intel get the
// same path, and a build moves between machines.
#if LN_HAS_AVX2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
#include "ln_cpu_rows.h"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

struct Kernels {
  const char* isa;
  decltype(&baseline::forward_rows<float>) forward_float32, forward_bfloat16;
  decltype(&baseline::backward_rows<float>) backward_float32, backward_bfloat16;
};

const Kernels& kernels() {
  static const Kernels chosen = [] {
#if LN_HAS_AVX2
    const char* wish = std::getenv("FUSED_LN_ISA");
    const bool allowed = wish == nullptr || std::strcmp(wish, "baseline") != 0;
    if (allowed && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      return Kernels{"avx2", avx2::forward_rows<float>, avx2::forward_rows<BFloat16>, avx2::backward_rows<float>,
                     avx2::backward_rows<BFloat16>};
    }
#endif
    return Kernels{"baseline", baseline::forward_rows<float>, baseline::forward_rows<BFloat16>,
                   baseline::backward_rows<float>, baseline::backward_rows<BFloat16>};
  }();
  return chosen;
}

bool supported(int32_t dtype, int32_t param_dtype) {
  return (dtype == LN_FLOAT32 || dtype == LN_BFLOAT16) && (param_dtype == LN_FLOAT32 || param_dtype == dtype);
}

// A parameter in float32: itself, or a copy in `buffer`.
const float* as_float32(int32_t dtype, const void* values, int64_t n, std::vector<float>& buffer) {
  if (dtype == LN_FLOAT32) return static_cast<const float*>(values);
  buffer.resize(n);
  for (int64_t i = 0; i < n; ++i) buffer[i] = baseline::load(static_cast<const BFloat16*>(values), i);
  return buffer.data();
}

// How many threads are worth starting: below some thousand elements each, starting them costs more than they save.
int useful_threads(int64_t rows, int64_t cols, int threads) {
  const int64_t wanted = threads > 0 ? threads : omp_get_max_threads();
  return static_cast<int>(std::max<int64_t>(1, std::min({wanted, rows, rows * cols / 16384})));
}

// body(thread, begin, end), once a thread, over contiguous shares of the rows: the same shares for the same arguments.
template <class Body>
void share_rows(int64_t rows, int threads, const Body& body) {
  if (threads == 1) return body(0, 0, rows);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int t = 0; t < threads; ++t) body(t, rows * t / threads, rows * (t + 1) / threads);
}

// An output is usually fresh memory, whose first touch costs one page fault for every 4 KiB: more time than the kernels
// take. Where the tensor spans whole huge pages (2 MiB), the kernel is asked for those: 512 times fewer faults. It takes
// no more memory than the tensor has, and where the memory was touched before it changes nothing.
void prefer_huge_pages(void* tensor, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = 2 << 20;
  const uintptr_t address = reinterpret_cast<uintptr_t>(tensor);
  const uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (address + bytes) / kHugePage * kHugePage;
  if (tensor != nullptr && begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

int64_t tensor_bytes(int32_t dtype, int64_t rows, int64_t cols) { return rows * cols * (dtype == LN_FLOAT32 ? 4 : 2); }

}  // namespace

extern "C" const char* ln_cpu_isa() { return kernels().isa; }

extern "C" int ln_cpu_forward(const LnForward* args, int threads) {
  if (!supported(args->dtype, args->param_dtype)) return -1;
  std::vector<float> scale_buffer, bias_buffer;
  const float* scale = as_float32(args->param_dtype, args->scale, args->cols, scale_buffer);
  const float* bias = as_float32(args->param_dtype, args->bias, args->cols, bias_buffer);
  for (void* out : {args->sum, args->y}) prefer_huge_pages(out, tensor_bytes(args->dtype, args->rows, args->cols));
  const auto run = args->dtype == LN_FLOAT32 ? kernels().forward_float32 : kernels().forward_bfloat16;
  share_rows(args->rows, useful_threads(args->rows, args->cols, threads),
             [&](int, int64_t begin, int64_t end) { run(*args, scale, bias, begin, end); });
  return 0;
}

extern "C" int ln_cpu_backward(const LnBackward* args, int threads) {
  if (!supported(args->dtype, args->param_dtype)) return -1;
  const int64_t n = args->cols;
  std::vector<float> scale_buffer;
  const float* scale = as_float32(args->param_dtype, args->scale, n, scale_buffer);
  threads = useful_threads(args->rows, n, threads);
  // Each thread sums the parameter gradients of its rows apart (16 floats keep two threads off one cache line).
  const int64_t stride = 2 * n + 16;
  std::vector<float> partial(threads * stride, 0.0f);
  for (void* out : {args->dx, args->dresidual}) prefer_huge_pages(out, tensor_bytes(args->dtype, args->rows, n));
  const auto run = args->dtype == LN_FLOAT32 ? kernels().backward_float32 : kernels().backward_bfloat16;
  share_rows(args->rows, threads, [&](int thread, int64_t begin, int64_t end) {
    float* mine = partial.data() + thread * stride;
    run(*args, scale, mine, mine + n, begin, end);
  });
  for (int64_t i = 0; i < n; ++i) {
    float dscale = 0, dbias = 0;
    for (int t = 0; t < threads; ++t) {
      dscale += partial[t * stride + i];
      dbias += partial[t * stride + n + i];
    }
    if (args->param_dtype == LN_FLOAT32) {
      static_cast<float*>(args->dscale)[i] = dscale;
      static_cast<float*>(args->dbias)[i] = dbias;
    } else {
      baseline::store(static_cast<BFloat16*>(args->dscale), i, dscale);
      baseline::store(static_cast<BFloat16*>(args->dbias), i, dbias);
    }
  }
  return 0;
}
