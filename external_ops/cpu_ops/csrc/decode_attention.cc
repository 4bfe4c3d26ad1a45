#include "decode_attention.h"

#include <vector>

#define CPU_OPS_KERNELS "decode_attention_kernels.h"
#include "each_isa.h"

namespace cpu_ops {

void decode_attention(const DecodeSizes& s, Heads query, Heads key, Heads value, Heads cos, Heads sin, float* keys,
                      float* values, const int64_t* first, float* out) {
  const auto rotate = CPU_OPS_CHOOSE(rotate_head);
  const auto attend = CPU_OPS_CHOOSE(attend_head);
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.width));
  const int threads = useful_threads(2 * s.batch * s.heads * (s.column + 1) * s.width);
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> turned(s.width), scores(s.column + 1);
#pragma omp for schedule(monotonic : dynamic)
    for (int64_t pair = 0; pair < s.batch * s.heads; ++pair) {
      const int64_t b = pair / s.heads, h = pair % s.heads, start = first == nullptr ? 0 : first[b];
      float *k = keys + pair * s.room * s.width, *v = values + pair * s.room * s.width;
      rotate(query.at(b, h), cos.at(b, h), sin.at(b, h), scale, turned.data(), s.width);
      rotate(key.at(b, h), cos.at(b, h), sin.at(b, h), 1.0f, k + s.column * s.width, s.width);
      std::memcpy(v + s.column * s.width, value.at(b, h), s.width * sizeof(float));
      attend(turned.data(), k + start * s.width, v + start * s.width, scores.data(), out + pair * s.width,
             s.column + 1 - start, s.width);
    }
  }
}

}  // namespace cpu_ops
