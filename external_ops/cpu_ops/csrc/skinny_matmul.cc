#include "skinny_matmul.h"

#include <vector>

#define CPU_OPS_KERNELS "skinny_matmul_kernels.h"
#include "each_isa.h"

namespace cpu_ops {

namespace {

constexpr int64_t kRowGroup = 8;     // sums of so many rows fit into the registers
constexpr int64_t kInnerBlock = 64;  // rows of W in the second-level cache, where a second group of rows finds them
constexpr int64_t kLine = 16;        // floats in a cache line, which two threads should not share

// How W is gone through. One or two rows of x wait for nothing but W: they take long pieces of its rows, which the processor
// foresees, and fetch 4 lines ahead. With more rows the sums of a piece have to stay in the first-level cache; pieces are then
// short, and what is fetched ahead are the next 8 rows of W.
struct Way {
  int64_t columns, ahead;

  explicit Way(const SkinnySizes& s)
      : columns(s.rows > 2 ? 512 : 8192 / s.rows), ahead(s.rows > 2 ? 8 * s.columns : 4 * kLine) {}
};

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Columns of one piece of work, at most `most`: as many pieces for each thread.
int64_t piece_columns(int64_t columns, int64_t threads, int64_t most) {
  const int64_t rounds = round_up(columns, threads * most) / (threads * most);
  return std::min(most, round_up(round_up(columns, threads * rounds) / (threads * rounds), kLine));
}

void start(const float* bias, float* sums, int64_t n) {
  if (bias != nullptr) std::memcpy(sums, bias, n * sizeof(float));
  else std::memset(sums, 0, n * sizeof(float));
}

}  // namespace

void skinny_matmul(const SkinnySizes& s, const float* x, int64_t x_distance, const float* weight, const float* bias,
                   float* out) {
  const auto add_block_of = CPU_OPS_CHOOSE(add_block_of);
  const int threads = useful_threads(s.inner * s.columns);
  const Way way(s);
  const int64_t piece = piece_columns(s.columns, threads, way.columns);
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> sums(s.rows * piece);
#pragma omp for schedule(monotonic : dynamic)
    for (int64_t first = 0; first < s.columns; first += piece) {
      const int64_t n = std::min(piece, s.columns - first);
      for (int64_t b = 0; b < s.rows; ++b) start(bias == nullptr ? nullptr : bias + first, sums.data() + b * piece, n);
      for (int64_t k = 0; k < s.inner; k += kInnerBlock) {
        for (int64_t b = 0; b < s.rows; b += kRowGroup) {
          add_block_of(std::min(kRowGroup, s.rows - b))(x + b * x_distance + k, x_distance, weight + k * s.columns + first,
                                                        s.columns, way.ahead, sums.data() + b * piece, piece,
                                                        std::min(kInnerBlock, s.inner - k), n);
        }
      }
      for (int64_t b = 0; b < s.rows; ++b) {
        std::memcpy(out + b * s.columns + first, sums.data() + b * piece, n * sizeof(float));
      }
    }
  }
}

void skinny_matmul_transposed(const SkinnySizes& s, const float* x, int64_t x_distance, const float* weight,
                              const float* bias, float* out) {
  const auto add_dots_of = CPU_OPS_CHOOSE(add_dots_of);
  const int threads = useful_threads(s.inner * s.columns);
  for (int64_t b = 0; b < s.rows; ++b) start(bias, out + b * s.columns, s.columns);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t j = 0; j < s.columns; ++j) {
    for (int64_t b = 0; b < s.rows; b += kRowGroup) {
      add_dots_of(std::min(kRowGroup, s.rows - b))(x + b * x_distance, x_distance, weight + j * s.inner,
                                                   out + b * s.columns + j, s.columns, s.inner);
    }
  }
}

}  // namespace cpu_ops
