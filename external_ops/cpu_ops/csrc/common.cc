#include "common.h"

#include <dlfcn.h>
#include <omp.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace cpu_ops {

namespace {

Isa find_isa() {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  const char* wish = std::getenv("CPU_OPS_ISA");
  const bool baseline = wish != nullptr && std::strcmp(wish, "baseline") == 0;
  const bool at_most_avx2 = wish != nullptr && std::strcmp(wish, "avx2") == 0;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (avx512 && !baseline && !at_most_avx2) return Isa::kAvx512;
  if (avx2 && !baseline) return Isa::kAvx2;
#endif
  return Isa::kBaseline;
}

// The C interface of BLAS; row-major is 101, transposed or not 112 and 111.
using Sgemm = void (*)(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);

Sgemm find_sgemm() {
  for (const char* library : {"libmklml_intel.so", "libmkl_rt.so", "libopenblas.so.0", "libopenblas.so"}) {
    void* handle = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
    void* found = handle != nullptr ? dlsym(handle, "cblas_sgemm") : nullptr;
    if (found != nullptr) return reinterpret_cast<Sgemm>(found);
  }
  return reinterpret_cast<Sgemm>(dlsym(RTLD_DEFAULT, "cblas_sgemm"));
}

Sgemm loaded_sgemm() {
  static const Sgemm found = find_sgemm();
  return found;
}

}  // namespace

Isa best_isa() {
  static const Isa found = find_isa();
  return found;
}

const char* isa_name() {
  return best_isa() == Isa::kAvx512 ? "avx512" : best_isa() == Isa::kAvx2 ? "avx2" : "baseline";
}

int useful_threads(int64_t elements) {
  const int64_t wanted = omp_get_max_threads();
  return static_cast<int>(std::max<int64_t>(1, std::min(wanted, elements / 16384)));
}

void prefer_huge_pages(void* memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = 2 << 20;
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (address + bytes) / kHugePage * kHugePage;
  if (memory != nullptr && begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

bool has_sgemm() { return loaded_sgemm() != nullptr; }

void sgemm(Transpose a_transposed, Transpose b_transposed, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
           int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
  if (m == 0 || n == 0) return;
  const auto code = [](Transpose transposed) { return transposed == Transpose::kYes ? 112 : 111; };
  const auto size = [](int64_t value) { return static_cast<int>(value); };
  loaded_sgemm()(101, code(a_transposed), code(b_transposed), size(m), size(n), size(k), alpha, a, size(lda), b, size(ldb),
                 beta, c, size(ldc));
}

}  // namespace cpu_ops
