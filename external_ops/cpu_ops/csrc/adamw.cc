#include "adamw.h"

#define CPU_OPS_KERNELS "adamw_kernels.h"
#include "each_isa.h"

namespace cpu_ops {

namespace {

struct Piece {
  size_t tensor;
  int64_t begin, end;
};

// The tensors cut into pieces that fit a core's cache.
template <typename T>
std::vector<Piece> pieces_of(const std::vector<T>& tensors) {
  constexpr int64_t kPiece = 16384;
  std::vector<Piece> pieces;
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (int64_t begin = 0; begin < tensors[i].size; begin += kPiece) {
      pieces.push_back({i, begin, std::min(tensors[i].size, begin + kPiece)});
    }
  }
  return pieces;
}

template <typename T>
int threads_for(const std::vector<T>& tensors) {
  int64_t elements = 0;
  for (const T& tensor : tensors) elements += tensor.size;
  return useful_threads(elements);
}

}  // namespace

void adamw(const std::vector<AdamWTensor>& tensors, float beta1, float beta2) {
  const auto update = CPU_OPS_CHOOSE(adamw_span);
  const std::vector<Piece> pieces = pieces_of(tensors);
  const int64_t count = static_cast<int64_t>(pieces.size());
#pragma omp parallel for schedule(static) num_threads(threads_for(tensors))
  for (int64_t i = 0; i < count; ++i) {
    update(tensors[pieces[i].tensor], pieces[i].begin, pieces[i].end, beta1, beta2);
  }
}

double squared_norm(const std::vector<Span>& tensors) {
  const auto squares = CPU_OPS_CHOOSE(squares_of_span);
  const std::vector<Piece> pieces = pieces_of(tensors);
  const int64_t count = static_cast<int64_t>(pieces.size());
  std::vector<double> parts(pieces.size());
#pragma omp parallel for schedule(static) num_threads(threads_for(tensors))
  for (int64_t i = 0; i < count; ++i) parts[i] = squares(tensors[pieces[i].tensor].data, pieces[i].begin, pieces[i].end);
  double sum = 0;
  for (double part : parts) sum += part;
  return sum;
}

}  // namespace cpu_ops
