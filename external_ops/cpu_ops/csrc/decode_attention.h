// Attention of one new token a row on a cache that is written in place: the step of decoding.
#pragma once
#include "common.h"

namespace cpu_ops {

// Heads of a tensor (B, 1, H, D) that may be a view: floats from row to row and from head to head, 0 where one serves all.
struct Heads {
  const float* data;
  int64_t row, head;

  const float* at(int64_t b, int64_t h) const { return data + b * row + h * head; }
};

struct DecodeSizes {
  int64_t batch, heads, width;  // B, H, D
  int64_t room;                 // S, columns of the cache
  int64_t column;               // that of the new token; it sees the columns up to this one
};

// query, key and value of the new token, (B, 1, H, D), not rotated yet; cos and sin, (B or 1, 1, H or 1, D/2), of its position.
// Turns query and key by halves (Su et al. 2021), writes key and value into column `column` of keys and values (B, H, S, D),
// and attends from column first[b] (null: 0) on; out (B, H, D).
void decode_attention(const DecodeSizes& sizes, Heads query, Heads key, Heads value, Heads cos, Heads sin, float* keys,
                      float* values, const int64_t* first, float* out);

}  // namespace cpu_ops
