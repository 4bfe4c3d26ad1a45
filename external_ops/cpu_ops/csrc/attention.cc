#include "attention.h"

#include <vector>

#include "matmul.h"

#define CPU_OPS_KERNELS "attention_kernels.h"
#include "each_isa.h"

namespace cpu_ops {

namespace {

// A block's scores stay in the second-level cache while they are used.
constexpr int64_t kQueryBlock = 64, kKeyBlock = 512;

int64_t blocks(int64_t length, int64_t size) { return (length + size - 1) / size; }

int threads_for(const AttentionSizes& s) { return useful_threads(s.batch * s.heads * s.queries * s.keys); }

}  // namespace

void causal_attention_forward(const AttentionSizes& s, const float* query, const float* key, const float* value, float* out,
                              float* log_sum) {
  const auto softmax = CPU_OPS_CHOOSE(softmax_row);
  const auto scale = CPU_OPS_CHOOSE(scale_row);
  const int64_t token = s.token(), query_blocks = blocks(s.queries, kQueryBlock);
#pragma omp parallel num_threads(threads_for(s))
  {
    std::vector<float> scores(std::min(kQueryBlock, s.queries) * s.keys);
    float inverse[kQueryBlock];
#pragma omp for schedule(monotonic : dynamic)
    for (int64_t item = 0; item < s.batch * s.heads * query_blocks; ++item) {
      const int64_t pair = item / query_blocks, b = pair / s.heads, h = pair % s.heads;
      const int64_t first = (query_blocks - 1 - item % query_blocks) * kQueryBlock;  // the longest blocks first
      const int64_t count = std::min(kQueryBlock, s.queries - first), width = s.before() + first + count;
      const float *q = query + (b * s.queries + first) * token + h * s.width, *k = key + b * s.keys * token + h * s.width,
                  *v = value + b * s.keys * token + h * s.width;
      float* o = out + (b * s.queries + first) * token + h * s.width;
      matmul(false, true, count, width, s.width, s.scale(), q, token, k, token, 0.0f, scores.data(), width);
      for (int64_t i = 0; i < count; ++i) {
        float largest;
        const float sum = softmax(scores.data() + i * width, s.before() + first + i + 1, width, &largest);
        inverse[i] = 1.0f / sum;
        log_sum[pair * s.queries + first + i] = largest + std::log(sum);
      }
      matmul(false, false, count, s.width, width, 1.0f, scores.data(), width, v, token, 0.0f, o, token);
      for (int64_t i = 0; i < count; ++i) scale(o + i * token, s.width, inverse[i]);
    }
  }
}

void causal_attention_backward(const AttentionSizes& s, const float* query, const float* key, const float* value,
                               const float* out, const float* log_sum, const float* dout, float* dquery, float* dkey,
                               float* dvalue) {
  const auto softmax = CPU_OPS_CHOOSE(softmax_row_backward);
  const auto dot = CPU_OPS_CHOOSE(dot_rows);
  const int64_t token = s.token(), bytes = s.batch * s.keys * token * sizeof(float);
  std::memset(dkey, 0, bytes);
  std::memset(dvalue, 0, bytes);
#pragma omp parallel num_threads(threads_for(s))
  {
    std::vector<float> scores(kQueryBlock * std::min(kKeyBlock, s.keys)), dscores(scores.size());
    float share[kQueryBlock];  // a row's sum of p dp, which is out . dout
#pragma omp for schedule(monotonic : dynamic)
    for (int64_t pair = 0; pair < s.batch * s.heads; ++pair) {
      const int64_t b = pair / s.heads, h = pair % s.heads;
      for (int64_t first = 0; first < s.queries; first += kQueryBlock) {
        const int64_t count = std::min(kQueryBlock, s.queries - first), width = s.before() + first + count;
        const int64_t here = (b * s.queries + first) * token + h * s.width;
        const float *q = query + here, *dO = dout + here;
        for (int64_t i = 0; i < count; ++i) share[i] = dot(out + here + i * token, dO + i * token, s.width);
        for (int64_t start = 0; start < width; start += kKeyBlock) {
          const int64_t keys = std::min(kKeyBlock, width - start), there = (b * s.keys + start) * token + h * s.width;
          const float *k = key + there, *v = value + there;
          matmul(false, true, count, keys, s.width, s.scale(), q, token, k, token, 0.0f, scores.data(), keys);
          matmul(false, true, count, keys, s.width, 1.0f, dO, token, v, token, 0.0f, dscores.data(), keys);
          for (int64_t i = 0; i < count; ++i) {
            const int64_t seen = std::max<int64_t>(0, std::min(keys, s.before() + first + i + 1 - start));
            softmax(scores.data() + i * keys, dscores.data() + i * keys, seen, keys, log_sum[pair * s.queries + first + i], share[i]);
          }
          matmul(true, false, keys, s.width, count, 1.0f, scores.data(), keys, dO, token, 1.0f, dvalue + there, token);
          matmul(true, false, keys, s.width, count, s.scale(), dscores.data(), keys, q, token, 1.0f, dkey + there, token);
          matmul(false, false, count, s.width, keys, s.scale(), dscores.data(), keys, k, token, start == 0 ? 0.0f : 1.0f,
                 dquery + here, token);
        }
      }
    }
  }
}

}  // namespace cpu_ops
