// Enough of CUDA to run ln_cuda.cu on a CPU: every thread of a block is a coroutine, and they run one after another from
// one barrier to the next. Slow and exact: it finds wrong indices, wrong sums, accesses outside of a tensor, and barriers
// that not all threads of a block reach. It says nothing about races between barriers, nor about speed.
//
// test_cuda.py puts this file in the place of cuda_runtime.h, cuda_bf16.h and cuda_fp16.h.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ __thread  // one block runs at a time, in one thread of the CPU

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {  // of finite numbers
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

struct __half {
  _Float16 value;
};
inline float __half2float(__half value) { return static_cast<float>(value.value); }
inline __half __float2half_rn(float value) { return {static_cast<_Float16>(value)}; }

// ---------------------------------------------------------------------------------------------------------- threads

inline dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace emulation {

constexpr size_t kStack = 1 << 16;

struct Thread {
  ucontext_t start;
  jmp_buf resume;  // where it waits; swapcontext would do, but makes two system calls each time
  std::vector<char> stack = std::vector<char>(kStack);
  dim3 index;
  bool started = false;
  const char* waits_at = nullptr;  // the barrier; null: it ran to its end
};

inline jmp_buf scheduler;
inline std::vector<Thread> threads;
inline Thread* current = nullptr;
inline const std::function<void()>* body = nullptr;
inline float exchanged[1024];  // by lanes of warps

inline void fail(const char* what) {
  std::fprintf(stderr, "CUDA emulation: %s\n", what);
  std::abort();
}

inline void wait(const char* barrier) {
  current->waits_at = barrier;
  if (_setjmp(current->resume) == 0) _longjmp(scheduler, 1);
}

inline void thread_main() {
  (*body)();
  current->waits_at = nullptr;
  _longjmp(scheduler, 1);
}

// Lets a thread run until it waits or ends.
__attribute__((noinline)) inline void run(Thread& thread) {
  current = &thread;
  threadIdx = thread.index;
  if (_setjmp(scheduler) != 0) return;
  if (thread.started) _longjmp(thread.resume, 1);
  thread.started = true;
  setcontext(&thread.start);
}

inline void run_block() {
  const size_t count = static_cast<size_t>(blockDim.x) * blockDim.y;
  if (threads.size() < count) threads.resize(count);
  for (size_t i = 0; i < count; ++i) {
    Thread& thread = threads[i];
    thread.index = dim3(i % blockDim.x, i / blockDim.x);
    thread.started = false;
    getcontext(&thread.start);
    thread.start.uc_stack.ss_sp = thread.stack.data();
    thread.start.uc_stack.ss_size = kStack;
    thread.start.uc_link = nullptr;
    makecontext(&thread.start, thread_main, 0);
  }
  const char* barrier = "the start";
  while (barrier != nullptr) {
    for (size_t i = 0; i < count; ++i) {
      run(threads[i]);
      if (threads[i].waits_at != threads[0].waits_at) fail("threads of a block wait at different barriers");
    }
    barrier = threads[0].waits_at;
  }
}

inline int launch(dim3 grid, dim3 block, std::function<void()> kernel) {
  if (block.x * block.y > 1024 || grid.x == 0 || grid.y == 0 || grid.y > 65535) return 9;  // invalid configuration
  body = &kernel;
  gridDim = grid;
  blockDim = block;
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      blockIdx = dim3(x, y);
      run_block();
    }
  }
  return 0;
}

}  // namespace emulation

inline void __syncthreads() { emulation::wait("__syncthreads"); }

inline float __shfl_xor_sync(unsigned, float value, int lanes) {
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
  emulation::exchanged[thread] = value;
  emulation::wait("the shuffle's write");
  const float other = emulation::exchanged[thread ^ lanes];
  emulation::wait("the shuffle's read");
  return other;
}

// -------------------------------------------------------------------------------------------------------------- host

using cudaError_t = int;
using cudaStream_t = void*;
constexpr cudaError_t cudaSuccess = 0;
constexpr int cudaDevAttrMultiProcessorCount = 16;
inline int launch_status = 0;

inline cudaError_t cudaGetLastError() { return launch_status; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }

// A small card: some tens of blocks at once, so that small tensors already take several rounds, but more than the 16 threads
// that share a column of partial sums.
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) {
  *value = 5;
  return 0;
}

template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int threads, size_t) {
  *blocks = 512 / threads;
  return 0;
}
