#include "common.h"

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

}  // namespace

Isa best_isa() {
  static const Isa found = find_isa();
  return found;
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

}  // namespace cpu_ops
