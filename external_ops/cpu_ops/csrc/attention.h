// Causal attention, softmax(Q K^T / sqrt(D)) V (Vaswani et al. 2017, section 3.2.1), block by block: the upper triangle is
// skipped, no T x S matrix is kept, and the backward forms the probabilities again from each row's log of the sum of
// exponentials (Dao et al. 2022, section 3.1 and appendix B.4).
#pragma once
#include "common.h"

namespace cpu_ops {

struct AttentionSizes {
  int64_t batch, queries, keys, heads, width;  // B, T, S >= T, H, D

  int64_t token() const { return heads * width; }  // floats from one token to the next
  int64_t before() const { return keys - queries; }  // keys that every query sees: the queries are the last tokens
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(width)); }
};

// query and out (B, T, H, D), key and value (B, S, H, D), log_sum (B, H, T); all without gaps.
void causal_attention_forward(const AttentionSizes& sizes, const float* query, const float* key, const float* value, float* out,
                              float* log_sum);

// dquery, dkey and dvalue are written whole.
void causal_attention_backward(const AttentionSizes& sizes, const float* query, const float* key, const float* value,
                               const float* out, const float* log_sum, const float* dout, float* dquery, float* dkey,
                               float* dvalue);

}  // namespace cpu_ops
