#include "simd_math.h"

// A head turned by its angles, times `scale`: (x1, x2) becomes (x1 cos - x2 sin, x2 cos + x1 sin).
inline void rotate_head(const float* x, const float* cos, const float* sin, float scale, float* out, int64_t width) {
  const int64_t half = width / 2;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float x1 = x[i], x2 = x[half + i];
    out[i] = scale * (x1 * cos[i] - x2 * sin[i]);
    out[half + i] = scale * (x2 * cos[i] + x1 * sin[i]);
  }
}

// Fetches the n floats that lie 1 KiB behind x: a little more than the processor foresees by itself.
inline void fetch_ahead(const float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(x + 256 + i);
}

// softmax(query keys^T) values of one head: keys and values (n, width). scores: room for n floats.
inline void attend_head(const float* query, const float* keys, const float* values, float* scores, float* out, int64_t n,
                        int64_t width) {
  for (int64_t t = 0; t < n; ++t) {
    const float* key = keys + t * width;
    float sum = 0;
    fetch_ahead(key, width);
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; ++i) sum += query[i] * key[i];
    scores[t] = sum;
  }
  const float inverse = 1.0f / row_exp(scores, n, row_max(scores, n));
  std::memset(out, 0, width * sizeof(float));
  for (int64_t t = 0; t < n; ++t) {
    const float* value = values + t * width;
    const float weight = scores[t] * inverse;
    fetch_ahead(value, width);
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) out[i] += weight * value[i];
  }
}
