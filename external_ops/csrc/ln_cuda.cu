// CUDA LayerNorm. Two forms of each kernel:
//
//   in registers   widths up to 8192 whose rows are 16-byte aligned: a row is read once, by 16-byte accesses, and stays in
//                  registers; backward sums the parameter gradients of its rows on the way
//   streamed       every other width and alignment: a row is read again for each pass over it
//
// Parameter gradients are summed in two stages, a partial sum of each block and then the sum of those, in a fixed order.
// tests/external_ops/test_cuda.py runs this file on a CPU, thread by thread; external_ops/check_cuda.py on a GPU.
#include "ln_cuda.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace ln_cuda {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 512;        // of a block
constexpr int kUsualThreads = 128;      // of a block, where rows are short: it takes several
constexpr int kColumnsOfThread = 16;    // that a thread keeps in registers, at most: 512 threads x 16 = width 8192
constexpr int kPartialsPerSm = 4;       // blocks of the backward on one multiprocessor, each with a partial sum
constexpr int kColumnTile = 32;         // columns of a block, in the kernels that go down columns
constexpr int kRowTile = 16;            // threads that share one such column

// ------------------------------------------------------------------------------------------------ values and packs

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }

__device__ __forceinline__ void from_float(float value, float& out) { out = value; }
__device__ __forceinline__ void from_float(float value, __nv_bfloat16& out) { out = __float2bfloat16_rn(value); }
__device__ __forceinline__ void from_float(float value, __half& out) { out = __float2half_rn(value); }

// W neighbours, read and written by one access (two where they take 32 bytes).
template <class T, int W>
struct alignas(sizeof(T) * W < 16 ? sizeof(T) * W : 16) Pack {
  T values[W];
};

template <class T, int W>
__device__ __forceinline__ Pack<T, W> load(const void* base, int64_t pack) {
  return static_cast<const Pack<T, W>*>(base)[pack];
}

template <class T, int W>
__device__ __forceinline__ void store(void* base, int64_t pack, const float (&values)[W]) {
  Pack<T, W> out;
#pragma unroll
  for (int k = 0; k < W; ++k) from_float(values[k], out.values[k]);
  static_cast<Pack<T, W>*>(base)[pack] = out;
}

// What is normalised: x, or x + residual rounded to T, which is stored as `sum`.
template <class T, int W>
__device__ __forceinline__ void load_input(const LnForward& args, int64_t pack, float (&values)[W]) {
  const Pack<T, W> x = load<T, W>(args.x, pack);
  if (args.residual == nullptr) {
#pragma unroll
    for (int k = 0; k < W; ++k) values[k] = to_float(x.values[k]);
    return;
  }
  const Pack<T, W> residual = load<T, W>(args.residual, pack);
  Pack<T, W> sum;
#pragma unroll
  for (int k = 0; k < W; ++k) {
    from_float(to_float(x.values[k]) + to_float(residual.values[k]), sum.values[k]);
    values[k] = to_float(sum.values[k]);
  }
  static_cast<Pack<T, W>*>(args.sum)[pack] = sum;
}

// --------------------------------------------------------------------------------------------------------- sums

// The sum over the threads that share a row (threadIdx.y is the row), each of which gets it. All threads of the block
// have to call it. The order of the additions is fixed.
__device__ __forceinline__ float2 row_sum(float2 value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value.x += __shfl_xor_sync(0xffffffffu, value.x, offset);
    value.y += __shfl_xor_sync(0xffffffffu, value.y, offset);
  }
  const int warps = blockDim.x / kWarp;  // of a row
  if (warps == 1) return value;
  __shared__ float2 of_warp[kMaxThreads / kWarp];
  __syncthreads();  // what an earlier call left there has been read by all
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.y * warps + threadIdx.x / kWarp] = value;
  __syncthreads();
  float2 sum = make_float2(0.0f, 0.0f);
  for (int k = 0; k < warps; ++k) {
    sum.x += of_warp[threadIdx.y * warps + k].x;
    sum.y += of_warp[threadIdx.y * warps + k].y;
  }
  return sum;
}

__device__ __forceinline__ float row_sum(float value) { return row_sum(make_float2(value, 0.0f)).x; }

// The means that dx is made of (see RowSums in ln_cpu_rows.h); what reached mean and invvar shifts them.
__device__ __forceinline__ float2 row_means(const LnBackward& args, float2 sums, int64_t row, float invvar) {
  if (args.dmean != nullptr) sums.x -= args.dmean[row] / invvar;
  if (args.dinvvar != nullptr) sums.y += args.dinvvar[row] * invvar;
  return make_float2(sums.x / args.cols, sums.y / args.cols);
}

// dx of one pack, and its copy for the residual.
template <class T, class P, int W>
__device__ __forceinline__ void store_dx(const LnBackward& args, int64_t pack, const Pack<T, W>& x, const Pack<T, W>& dy,
                                         const Pack<P, W>& scale, float mean, float invvar, float2 means) {
  float dx[W];
#pragma unroll
  for (int k = 0; k < W; ++k) {
    const float xhat = (to_float(x.values[k]) - mean) * invvar;
    dx[k] = (to_float(dy.values[k]) * to_float(scale.values[k]) - means.x - xhat * means.y) * invvar;
  }
  if (args.dsum != nullptr) {
    const Pack<T, W> dsum = load<T, W>(args.dsum, pack);
#pragma unroll
    for (int k = 0; k < W; ++k) dx[k] += to_float(dsum.values[k]);
  }
  store<T, W>(args.dx, pack, dx);
  if (args.dresidual != nullptr) store<T, W>(args.dresidual, pack, dx);
}

// ------------------------------------------------------------------------------------------- a row in registers

// blockDim = (threads of a row, a multiple of 32; rows of a block). A thread keeps V packs of W columns of its row:
// packs threadIdx.x, threadIdx.x + blockDim.x, ... The parameters are loaded once for all rows of the block.
template <class T, class P, int W, int V>
__global__ void __launch_bounds__(kMaxThreads) forward_in_registers(LnForward args) {
  const int packs = static_cast<int>(args.cols / W);
  Pack<P, W> scale[V], bias[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int pack = threadIdx.x + v * blockDim.x;
    if (pack < packs) {
      scale[v] = load<P, W>(args.scale, pack);
      bias[v] = load<P, W>(args.bias, pack);
    }
  }
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < args.rows; first += step) {
    const int64_t row = first + threadIdx.y;
    const bool is_row = row < args.rows;  // the others only take part in the sums
    float x[V][W];
    float sum = 0.0f;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int pack = threadIdx.x + v * blockDim.x;
      if (!is_row || pack >= packs) continue;
      load_input<T, W>(args, row * packs + pack, x[v]);
#pragma unroll
      for (int k = 0; k < W; ++k) sum += x[v][k];
    }
    const float mean = row_sum(sum) / args.cols;
    float squares = 0.0f;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (!is_row || threadIdx.x + v * blockDim.x >= packs) continue;
#pragma unroll
      for (int k = 0; k < W; ++k) squares += (x[v][k] - mean) * (x[v][k] - mean);
    }
    const float invvar = 1.0f / sqrtf(row_sum(squares) / args.cols + args.epsilon);
    if (!is_row) continue;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int pack = threadIdx.x + v * blockDim.x;
      if (pack >= packs) continue;
#pragma unroll
      for (int k = 0; k < W; ++k) {
        x[v][k] = (x[v][k] - mean) * invvar * to_float(scale[v].values[k]) + to_float(bias[v].values[k]);
      }
      store<T, W>(args.y, row * packs + pack, x[v]);
    }
    if (threadIdx.x == 0) {
      args.mean[row] = mean;
      args.invvar[row] = invvar;
    }
  }
}

// partial: (2, gridDim.x, cols), the parameter gradients of each block's rows, dscale's first.
template <class T, class P, int W, int V>
__global__ void __launch_bounds__(kMaxThreads) backward_in_registers(LnBackward args, float* partial) {
  const int packs = static_cast<int>(args.cols / W);
  Pack<P, W> scale[V];
  float dscale[V][W], dbias[V][W];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int pack = threadIdx.x + v * blockDim.x;
    if (pack < packs) scale[v] = load<P, W>(args.scale, pack);
#pragma unroll
    for (int k = 0; k < W; ++k) dscale[v][k] = dbias[v][k] = 0.0f;
  }
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < args.rows; first += step) {
    const int64_t row = first + threadIdx.y;
    const bool is_row = row < args.rows;
    const float mean = is_row ? args.mean[row] : 0.0f, invvar = is_row ? args.invvar[row] : 0.0f;
    Pack<T, W> x[V], dy[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int pack = threadIdx.x + v * blockDim.x;
      if (!is_row || pack >= packs) continue;
      x[v] = load<T, W>(args.input, row * packs + pack);
      dy[v] = load<T, W>(args.dy, row * packs + pack);
    }
    float2 sums = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (!is_row || threadIdx.x + v * blockDim.x >= packs) continue;
#pragma unroll
      for (int k = 0; k < W; ++k) {
        const float d = to_float(dy[v].values[k]), xhat = (to_float(x[v].values[k]) - mean) * invvar;
        const float g = d * to_float(scale[v].values[k]);
        sums.x += g;
        sums.y += g * xhat;
        dscale[v][k] += d * xhat;
        dbias[v][k] += d;
      }
    }
    sums = row_sum(sums);
    if (!is_row) continue;
    const float2 means = row_means(args, sums, row, invvar);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int pack = threadIdx.x + v * blockDim.x;
      if (pack < packs) store_dx<T, P, W>(args, row * packs + pack, x[v], dy[v], scale[v], mean, invvar, means);
    }
  }

  // The block's rows, one after another, through shared memory: (2, cols), used where a block takes several rows at once.
  extern __shared__ float block_sums[];
  float* out = partial + blockIdx.x * args.cols;
  const int64_t to_dbias = gridDim.x * args.cols;
  for (int y = 0; y < blockDim.y; ++y) {
    if (threadIdx.y == y) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int pack = threadIdx.x + v * blockDim.x;
        if (pack >= packs) continue;
#pragma unroll
        for (int k = 0; k < W; ++k) {
          const int64_t column = pack * W + k;
          const float s = dscale[v][k] + (y > 0 ? block_sums[column] : 0.0f);
          const float b = dbias[v][k] + (y > 0 ? block_sums[args.cols + column] : 0.0f);
          if (y + 1 < blockDim.y) {
            block_sums[column] = s;
            block_sums[args.cols + column] = b;
          } else {
            out[column] = s;
            out[to_dbias + column] = b;
          }
        }
      }
    }
    if (blockDim.y > 1) __syncthreads();
  }
}

// ----------------------------------------------------------------------------------------------------- streamed

// One row a block. A thread reads back only the `sum` that it wrote itself.
template <class T, class P, int W>
__global__ void __launch_bounds__(kMaxThreads) forward_streamed(LnForward args) {
  const int64_t packs = args.cols / W;
  const void* input = args.residual == nullptr ? args.x : args.sum;
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    float sum = 0.0f;
    for (int64_t pack = threadIdx.x; pack < packs; pack += blockDim.x) {
      float x[W];
      load_input<T, W>(args, row * packs + pack, x);
#pragma unroll
      for (int k = 0; k < W; ++k) sum += x[k];
    }
    const float mean = row_sum(sum) / args.cols;
    float squares = 0.0f;
    for (int64_t pack = threadIdx.x; pack < packs; pack += blockDim.x) {
      const Pack<T, W> x = load<T, W>(input, row * packs + pack);
#pragma unroll
      for (int k = 0; k < W; ++k) squares += (to_float(x.values[k]) - mean) * (to_float(x.values[k]) - mean);
    }
    const float invvar = 1.0f / sqrtf(row_sum(squares) / args.cols + args.epsilon);
    for (int64_t pack = threadIdx.x; pack < packs; pack += blockDim.x) {
      const Pack<T, W> x = load<T, W>(input, row * packs + pack);
      const Pack<P, W> scale = load<P, W>(args.scale, pack), bias = load<P, W>(args.bias, pack);
      float y[W];
#pragma unroll
      for (int k = 0; k < W; ++k) {
        y[k] = (to_float(x.values[k]) - mean) * invvar * to_float(scale.values[k]) + to_float(bias.values[k]);
      }
      store<T, W>(args.y, row * packs + pack, y);
    }
    if (threadIdx.x == 0) {
      args.mean[row] = mean;
      args.invvar[row] = invvar;
    }
  }
}

template <class T, class P, int W>
__global__ void __launch_bounds__(kMaxThreads) backward_streamed(LnBackward args) {
  const int64_t packs = args.cols / W;
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const float mean = args.mean[row], invvar = args.invvar[row];
    float2 sums = make_float2(0.0f, 0.0f);
    for (int64_t pack = threadIdx.x; pack < packs; pack += blockDim.x) {
      const Pack<T, W> x = load<T, W>(args.input, row * packs + pack), dy = load<T, W>(args.dy, row * packs + pack);
      const Pack<P, W> scale = load<P, W>(args.scale, pack);
#pragma unroll
      for (int k = 0; k < W; ++k) {
        const float g = to_float(dy.values[k]) * to_float(scale.values[k]);
        sums.x += g;
        sums.y += g * (to_float(x.values[k]) - mean) * invvar;
      }
    }
    const float2 means = row_means(args, row_sum(sums), row, invvar);
    for (int64_t pack = threadIdx.x; pack < packs; pack += blockDim.x) {
      store_dx<T, P, W>(args, row * packs + pack, load<T, W>(args.input, row * packs + pack),
                        load<T, W>(args.dy, row * packs + pack), load<P, W>(args.scale, pack), mean, invvar, means);
    }
  }
}

// Each of the blocks (gridDim.x over columns, gridDim.y over rows) sums kColumnTile columns of its share of the rows.
// partial: (2, gridDim.y, cols).
template <class T>
__global__ void __launch_bounds__(kColumnTile* kRowTile) parameter_partials(LnBackward args, float* partial) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumnTile + threadIdx.x;
  const int64_t begin = args.rows * blockIdx.y / gridDim.y, end = args.rows * (blockIdx.y + 1) / gridDim.y;
  float2 sum = make_float2(0.0f, 0.0f);
  if (column < args.cols) {
    for (int64_t row = begin + threadIdx.y; row < end; row += kRowTile) {
      const float d = to_float(load<T, 1>(args.dy, row * args.cols + column).values[0]);
      const float x = to_float(load<T, 1>(args.input, row * args.cols + column).values[0]);
      sum.x += d * (x - args.mean[row]) * args.invvar[row];
      sum.y += d;
    }
  }
  __shared__ float2 of_thread[kRowTile][kColumnTile];
  of_thread[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= args.cols) return;
  for (int y = 1; y < kRowTile; ++y) {
    sum.x += of_thread[y][threadIdx.x].x;
    sum.y += of_thread[y][threadIdx.x].y;
  }
  partial[blockIdx.y * args.cols + column] = sum.x;
  partial[(gridDim.y + blockIdx.y) * args.cols + column] = sum.y;
}

// The second stage: partial (2, parts, cols) -> dscale (blockIdx.y = 0) and dbias (1).
template <class P>
__global__ void __launch_bounds__(kColumnTile* kRowTile)
    sum_partials(const float* partial, int parts, int64_t cols, P* dscale, P* dbias) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumnTile + threadIdx.x;
  float sum = 0.0f;
  if (column < cols) {
    const float* mine = partial + static_cast<int64_t>(blockIdx.y) * parts * cols + column;
    for (int part = threadIdx.y; part < parts; part += kRowTile) sum += mine[part * cols];
  }
  __shared__ float of_thread[kRowTile][kColumnTile];
  of_thread[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= cols) return;
  for (int y = 1; y < kRowTile; ++y) sum += of_thread[y][threadIdx.x];
  from_float(sum, (blockIdx.y == 0 ? dscale : dbias)[column]);
}

// ----------------------------------------------------------------------------------------------------- launches

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                   Arguments... arguments) {
  kernel<<<grid, block, shared, stream>>>(arguments...);
  return cudaGetLastError();
}

cudaError_t multiprocessors(int* count) {
  int device = 0;
  const cudaError_t status = cudaGetDevice(&device);
  return status != cudaSuccess ? status : cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

// How many blocks to start: what the card holds at once, at most `per_sm` on each multiprocessor, and no more than `tiles`.
template <class Kernel>
cudaError_t resident_blocks(Kernel kernel, int threads, size_t shared, int per_sm, int64_t tiles, unsigned* blocks) {
  int sms = 0, resident = 0;
  cudaError_t status = multiprocessors(&sms);
  if (status != cudaSuccess) return status;
  status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, shared);
  const int64_t most = static_cast<int64_t>(sms) * std::max(1, std::min(resident, per_sm));
  *blocks = static_cast<unsigned>(std::min(tiles, most));
  return status;
}

// How a row is laid over threads: packs of W columns, V packs a thread. V = 0: it is streamed.
struct Layout {
  int V;
  dim3 block;
};

template <class T>
Layout layout_of(int64_t cols, bool aligned) {
  constexpr int W = 16 / sizeof(T);
  if (!aligned || cols > kMaxThreads * kColumnsOfThread) {
    return {0, dim3(static_cast<unsigned>(std::min<int64_t>(kMaxThreads, (cols + kWarp - 1) / kWarp * kWarp)))};
  }
  Layout best{0, dim3()};
  const int packs = static_cast<int>(cols / W);
  int least_idle = -1;
  for (int V = 1; V * W <= kColumnsOfThread; V *= 2) {  // the fewest idle threads; of equals, the most packs a thread
    const int threads = (packs + V * kWarp - 1) / (V * kWarp) * kWarp, idle = threads * V - packs;
    if (threads > kMaxThreads || (best.V > 0 && idle > least_idle)) continue;
    best = {V, dim3(threads, std::max(1, kUsualThreads / threads))};
    least_idle = idle;
  }
  return best;
}

bool is_aligned(std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(),
                     [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; });
}

template <class T, class P, int W, int V>
cudaError_t launch_forward(const LnForward& args, dim3 block, cudaStream_t stream) {
  const auto kernel = forward_in_registers<T, P, W, V>;
  unsigned blocks = 0;
  const cudaError_t status =
      resident_blocks(kernel, block.x * block.y, 0, 32, (args.rows + block.y - 1) / block.y, &blocks);
  return status != cudaSuccess ? status : launch(kernel, dim3(blocks), block, 0, stream, args);
}

template <class T, class P>
int forward(const LnForward& args, cudaStream_t stream) {
  constexpr int W = 16 / sizeof(T);
  const bool aligned = args.cols % W == 0 &&
                       is_aligned({args.x, args.residual, args.scale, args.bias, args.sum, args.y});
  const Layout layout = layout_of<T>(args.cols, aligned);
  if (layout.V == 1) return launch_forward<T, P, W, 1>(args, layout.block, stream);
  if (layout.V == 2) return launch_forward<T, P, W, 2>(args, layout.block, stream);
  if (layout.V == 4) return launch_forward<T, P, W, kColumnsOfThread / W>(args, layout.block, stream);
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(args.rows, 1 << 20)));
  if (aligned) return launch(forward_streamed<T, P, W>, grid, layout.block, 0, stream, args);
  return launch(forward_streamed<T, P, 1>, grid, layout.block, 0, stream, args);
}

template <class T, class P, int W, int V>
cudaError_t launch_backward(const LnBackward& args, dim3 block, float* partial, int* parts, cudaStream_t stream) {
  const auto kernel = backward_in_registers<T, P, W, V>;
  const size_t shared = block.y > 1 ? 2 * args.cols * sizeof(float) : 0;
  unsigned blocks = 0;
  const cudaError_t status = resident_blocks(kernel, block.x * block.y, shared, kPartialsPerSm,
                                             (args.rows + block.y - 1) / block.y, &blocks);
  *parts = static_cast<int>(blocks);
  return status != cudaSuccess ? status : launch(kernel, dim3(blocks), block, shared, stream, args, partial);
}

template <class T, class P>
cudaError_t launch_backward_streamed(const LnBackward& args, bool aligned, dim3 block, float* partial, int* parts,
                                     cudaStream_t stream) {
  constexpr int W = 16 / sizeof(T);
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(args.rows, 1 << 20)));
  cudaError_t status = aligned ? launch(backward_streamed<T, P, W>, grid, block, 0, stream, args)
                               : launch(backward_streamed<T, P, 1>, grid, block, 0, stream, args);
  if (status != cudaSuccess) return status;
  int sms = 0;
  status = multiprocessors(&sms);
  if (status != cudaSuccess) return status;
  *parts = static_cast<int>(std::min<int64_t>(sms, (args.rows + kRowTile - 1) / kRowTile));
  const dim3 tiles(static_cast<unsigned>((args.cols + kColumnTile - 1) / kColumnTile), *parts);
  return launch(parameter_partials<T>, tiles, dim3(kColumnTile, kRowTile), 0, stream, args, partial);
}

template <class T, class P>
int backward(const LnBackward& args, float* partial, cudaStream_t stream) {
  constexpr int W = 16 / sizeof(T);
  const bool aligned = args.cols % W == 0 &&
                       is_aligned({args.input, args.scale, args.dy, args.dsum, args.dx, args.dresidual});
  const Layout layout = layout_of<T>(args.cols, aligned);
  int parts = 0;
  cudaError_t status;
  if (layout.V == 1) {
    status = launch_backward<T, P, W, 1>(args, layout.block, partial, &parts, stream);
  } else if (layout.V == 2) {
    status = launch_backward<T, P, W, 2>(args, layout.block, partial, &parts, stream);
  } else if (layout.V == 4) {
    status = launch_backward<T, P, W, kColumnsOfThread / W>(args, layout.block, partial, &parts, stream);
  } else {
    status = launch_backward_streamed<T, P>(args, aligned, layout.block, partial, &parts, stream);
  }
  if (status != cudaSuccess) return status;
  const dim3 tiles(static_cast<unsigned>((args.cols + kColumnTile - 1) / kColumnTile), 2);
  return launch(sum_partials<P>, tiles, dim3(kColumnTile, kRowTile), 0, stream, partial, parts, args.cols,
                static_cast<P*>(args.dscale), static_cast<P*>(args.dbias));
}

// call(T(), P()) with the types of the tensors and of the parameters; -1 where there are no such kernels.
template <class Call>
int with_types(int32_t dtype, int32_t param_dtype, const Call& call) {
  if (param_dtype != LN_FLOAT32 && param_dtype != dtype) return -1;
  const bool same = param_dtype == dtype;
  if (dtype == LN_FLOAT32) return call(float(), float());
  if (dtype == LN_BFLOAT16) return same ? call(__nv_bfloat16(), __nv_bfloat16()) : call(__nv_bfloat16(), float());
  if (dtype == LN_FLOAT16) return same ? call(__half(), __half()) : call(__half(), float());
  return -1;
}

}  // namespace ln_cuda

extern "C" int64_t ln_cuda_workspace(int64_t, int64_t cols) {
  int sms = 0;
  const cudaError_t status = ln_cuda::multiprocessors(&sms);
  if (status != cudaSuccess) return -static_cast<int64_t>(status);
  return 2 * static_cast<int64_t>(sizeof(float)) * sms * ln_cuda::kPartialsPerSm * cols;
}

extern "C" int ln_cuda_forward(const LnForward* args, void* stream) {
  if (args->rows == 0) return 0;
  return ln_cuda::with_types(args->dtype, args->param_dtype, [&](auto value, auto parameter) {
    return ln_cuda::forward<decltype(value), decltype(parameter)>(*args, static_cast<cudaStream_t>(stream));
  });
}

extern "C" int ln_cuda_backward(const LnBackward* args, void* workspace, void* stream) {
  return ln_cuda::with_types(args->dtype, args->param_dtype, [&](auto value, auto parameter) {
    return ln_cuda::backward<decltype(value), decltype(parameter)>(*args, static_cast<float*>(workspace),
                                                                   static_cast<cudaStream_t>(stream));
  });
}
