constexpr int64_t kLanes = CPU_OPS_LANES;
typedef float Lanes __attribute__((vector_size(4 * kLanes), aligned(4)));  // one register

inline Lanes load(const float* x) { return *reinterpret_cast<const Lanes*>(x); }
inline void store(float* x, Lanes value) { *reinterpret_cast<Lanes*>(x) = value; }

inline float total(Lanes value) {
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += value[i];
  return sum;
}

// sums[b][j] += x[b][k] W[k][j] for kRows rows of x, kInner rows of W and n columns. On the way it fetches what lies `ahead`
// floats behind each entry of W.
template <int kRows, int kInner>
void add_products(const float* x, int64_t x_distance, const float* weight, int64_t weight_distance, int64_t ahead, float* sums,
                  int64_t sums_distance, int64_t n) {
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    Lanes sum[kRows];
    for (int k = 0; k < kInner; ++k) __builtin_prefetch(weight + k * weight_distance + j + ahead);
    for (int b = 0; b < kRows; ++b) sum[b] = load(sums + b * sums_distance + j);
    for (int k = 0; k < kInner; ++k) {
      const Lanes w = load(weight + k * weight_distance + j);
      for (int b = 0; b < kRows; ++b) sum[b] += x[b * x_distance + k] * w;
    }
    for (int b = 0; b < kRows; ++b) store(sums + b * sums_distance + j, sum[b]);
  }
  for (; j < n; ++j) {
    for (int b = 0; b < kRows; ++b) {
      for (int k = 0; k < kInner; ++k) sums[b * sums_distance + j] += x[b * x_distance + k] * weight[k * weight_distance + j];
    }
  }
}

constexpr int kInner = 8;  // rows of W that are taken together

template <int kRows>
void add_block(const float* x, int64_t x_distance, const float* weight, int64_t weight_distance, int64_t ahead, float* sums,
               int64_t sums_distance, int64_t inner, int64_t n) {
  int64_t k = 0;
  for (; k + kInner <= inner; k += kInner) {
    add_products<kRows, kInner>(x + k, x_distance, weight + k * weight_distance, weight_distance, ahead, sums, sums_distance,
                                n);
  }
  for (; k < inner; ++k) {
    add_products<kRows, 1>(x + k, x_distance, weight + k * weight_distance, weight_distance, ahead, sums, sums_distance, n);
  }
}

// sums[b][0] += x[b] . w for kRows rows of x.
template <int kRows>
void add_dots(const float* x, int64_t x_distance, const float* w, float* sums, int64_t sums_distance, int64_t inner) {
  Lanes sum[kRows] = {};
  int64_t k = 0;
  for (; k + kLanes <= inner; k += kLanes) {
    const Lanes part = load(w + k);
    for (int b = 0; b < kRows; ++b) sum[b] += load(x + b * x_distance + k) * part;
  }
  for (int b = 0; b < kRows; ++b) {
    float& entry = sums[b * sums_distance];
    entry += total(sum[b]);
    for (int64_t i = k; i < inner; ++i) entry += x[b * x_distance + i] * w[i];
  }
}

using AddBlock = void (*)(const float*, int64_t, const float*, int64_t, int64_t, float*, int64_t, int64_t, int64_t);
using AddDots = void (*)(const float*, int64_t, const float*, float*, int64_t, int64_t);

// The functions for 1 to 8 rows of x.
inline AddBlock add_block_of(int64_t rows) {
  constexpr AddBlock made[] = {add_block<1>, add_block<2>, add_block<3>, add_block<4>,
                               add_block<5>, add_block<6>, add_block<7>, add_block<8>};
  return made[rows - 1];
}

inline AddDots add_dots_of(int64_t rows) {
  constexpr AddDots made[] = {add_dots<1>, add_dots<2>, add_dots<3>, add_dots<4>,
                              add_dots<5>, add_dots<6>, add_dots<7>, add_dots<8>};
  return made[rows - 1];
}
