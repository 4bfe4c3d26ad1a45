// What the kernels share: the instruction set, threads, memory, and the matrix product. No framework.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace cpu_ops {

// ------------------------------------------------------------------------------------------------ instruction set

enum class Isa { kBaseline, kAvx2, kAvx512 };

// The best that this processor has; CPU_OPS_ISA=baseline or avx2 in the environment asks for less.
Isa best_isa();
const char* isa_name();

// -------------------------------------------------------------------------------------------------------- threads

// How many threads are worth starting for so many elements: starting them costs as much as some thousand elements do.
int useful_threads(int64_t elements);

// --------------------------------------------------------------------------------------------------------- memory

// Asks for 2 MiB pages where fresh memory spans whole ones. Its first touch costs a page fault for every page, and with
// 4 KiB pages that is more time than most kernels take. Memory that was touched before stays as it is.
void prefer_huge_pages(void* memory, int64_t bytes);

// Scratch memory, freed at the end of the scope; on whole cache lines.
template <class T>
class Scratch {
 public:
  explicit Scratch(int64_t count) : memory_(allocate(count * sizeof(T))) {}
  T* get() const { return memory_.get(); }
  T& operator[](int64_t i) const { return memory_.get()[i]; }

 private:
  static T* allocate(int64_t bytes) {
    const size_t whole = (static_cast<size_t>(bytes) + 127) / 64 * 64;
    void* memory = std::aligned_alloc(64, whole);
    if (memory == nullptr) throw std::bad_alloc();
    prefer_huge_pages(memory, whole);
    return static_cast<T*>(memory);
  }
  struct Free {
    void operator()(T* memory) const { std::free(memory); }
  };
  std::unique_ptr<T, Free> memory_;
};

// --------------------------------------------------------------------------------------------------- matrix product

enum class Transpose { kNo, kYes };

// C (m, n) = alpha * op(A) (m, k) * op(B) (k, n) + beta * C; rows lie lda, ldb, ldc floats apart. It is the routine of the
// math library that Paddle has loaded, which uses all threads, or one inside a parallel region.
void sgemm(Transpose a_transposed, Transpose b_transposed, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
           int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc);

// Whether there is such a routine: without it no op that multiplies matrices runs.
bool has_sgemm();

}  // namespace cpu_ops
