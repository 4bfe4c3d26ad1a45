#include "simd_math.h"

// The k largest of n floats, sorted; few of a row are looked at one by one: those of a piece with one that is large enough.
inline void top_k_row(const float* x, int64_t n, int64_t k, float* values, int64_t* ids) {
  constexpr int64_t kPiece = 64;
  int64_t found = 0;
  for (int64_t first = 0; first < n; first += kPiece) {
    const int64_t count = n - first < kPiece ? n - first : kPiece;
    if (found == k && row_max(x + first, count) <= values[k - 1]) continue;
    for (int64_t i = first; i < first + count; ++i) {
      if (found == k && x[i] <= values[k - 1]) continue;
      int64_t place = found < k ? found++ : k - 1;
      for (; place > 0 && values[place - 1] < x[i]; --place) {
        values[place] = values[place - 1];
        ids[place] = ids[place - 1];
      }
      values[place] = x[i];
      ids[place] = i;
    }
  }
}

// sum of e^((x - shift) factor)
inline float sum_exp(const float* x, int64_t n, float shift, float factor) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += exp_float((x[i] - shift) * factor);
  return sum;
}
