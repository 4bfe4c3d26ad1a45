// What the kernels share: the instruction set, threads and memory. No framework.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace cpu_ops {

// ------------------------------------------------------------------------------------------------ instruction set

enum class Isa { kBaseline, kAvx2, kAvx512 };

// The best that this processor has; CPU_OPS_ISA=baseline or avx2 in the environment asks for less.
Isa best_isa();

// -------------------------------------------------------------------------------------------------------- threads

// How many threads are worth starting for so many elements: starting them costs as much as some thousand elements do.
int useful_threads(int64_t elements);

// --------------------------------------------------------------------------------------------------------- memory

// Asks for 2 MiB pages where fresh memory spans whole ones. Its first touch costs a page fault for every page, and with
// 4 KiB pages that is more time than most kernels take. Memory that was touched before stays as it is.
void prefer_huge_pages(void* memory, int64_t bytes);

}  // namespace cpu_ops
