// cpu_decode_attention_(query, key, value (B, 1, H, D), cos, sin (B or 1, 1, H or 1, D/2), keys, values (B, H, S, D),
// first (B), column) -> context (B, 1, H, D); in place on keys and values. decode_attention.h says what it computes.
// `first`, int64, may have no elements: every row starts at column 0. keys and values may not be views with gaps, of which
// Paddle hands the op a copy. No gradient.
#include "binding.h"
#include "decode_attention.h"

namespace {

using namespace cpu_ops;

constexpr const char* kOp = "cpu_decode_attention_";

// A tensor (B or 1, 1, H or 1, ...) with its strides; `kept` owns the copy of one whose heads have gaps.
Heads heads_of(const char* name, const Tensor& given, const Shape& expected, bool may_serve_all, std::vector<Tensor>* kept) {
  check_float(kOp, name, given);
  Shape shape = given.shape();
  if (may_serve_all && shape.size() == 4) {
    for (int axis : {0, 2}) shape[axis] = shape[axis] == 1 ? expected[axis] : shape[axis];
  }
  CPU_OPS_CHECK(shape == expected, kOp, ": ", name, " has shape ", text(given.shape()), ", expected ", text(expected),
                may_serve_all ? " or 1 for its rows or heads." : ".");
  kept->push_back(given.strides()[3] == 1 || expected[3] == 1 ? given : given.contiguous());
  const Tensor& tensor = kept->back();
  const auto strides = tensor.strides();
  return {tensor.data<float>(), tensor.shape()[0] == 1 ? 0 : strides[0], tensor.shape()[2] == 1 ? 0 : strides[2]};
}

float* in_place(const char* name, Tensor& cache, const Shape& expected) {
  check_float(kOp, name, cache);
  check_shape(kOp, name, cache, expected);
  return cache.data<float>();
}

void check_first(const Tensor& first, int64_t batch, int64_t column) {
  CPU_OPS_CHECK(first.is_cpu() && first.dtype() == DataType::INT64, kOp, ": first has to be an int64 tensor on CPU.");
  if (first.numel() == 0) return;
  check_shape(kOp, "first", first, {batch});
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t start = first.data<int64_t>()[b];
    CPU_OPS_CHECK(start >= 0 && start <= column, kOp, ": first of row ", b, " is ", start, "; expected 0 to the column, ",
                  column, ".");
  }
}

std::vector<Tensor> Forward(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cos, const Tensor& sin,
                            Tensor& keys, Tensor& values, const Tensor& first_, int64_t column) {
  const Shape q = query.shape(), cache = keys.shape();
  CPU_OPS_CHECK(q.size() == 4 && q[1] == 1 && q[3] % 2 == 0, kOp, ": query has shape ", text(q),
                "; expected (B, 1, H, D) with an even D.");
  CPU_OPS_CHECK(cache.size() == 4 && column >= 0 && column < cache[2], kOp, ": column ", column, " is not one of keys ",
                text(cache), ".");
  const Shape expected = {q[0], q[2], cache[2], q[3]}, angles = {q[0], 1, q[2], q[3] / 2};
  std::vector<Tensor> kept;
  const Heads turned[] = {heads_of("query", query, q, false, &kept), heads_of("key", key, q, false, &kept),
                          heads_of("value", value, q, false, &kept)};
  const Heads table[] = {heads_of("cos", cos, angles, true, &kept), heads_of("sin", sin, angles, true, &kept)};
  float *key_cache = in_place("keys", keys, expected), *value_cache = in_place("values", values, expected);
  const Tensor first = contiguous(first_);
  check_first(first, q[0], column);
  Tensor out = empty(q);
  if (out.numel() == 0) return {out};
  decode_attention({q[0], q[2], q[3], cache[2], column}, turned[0], turned[1], turned[2], table[0], table[1], key_cache,
                   value_cache, first.numel() == 0 ? nullptr : first.data<int64_t>(), out.data<float>());
  return {out};
}

std::vector<Shape> OutShape(Shape query, Shape, Shape, Shape, Shape, Shape keys, Shape values, Shape, int64_t) {
  return {query, keys, values};
}
std::vector<DataType> OutDtype(DataType query, DataType, DataType, DataType, DataType, DataType keys, DataType values,
                               DataType) {
  return {query, keys, values};
}

}  // namespace

PD_BUILD_OP(cpu_decode_attention_)
    .Inputs({"query", "key", "value", "cos", "sin", "keys", "values", "first"})
    .Outputs({"context", "new_keys", "new_values"})
    .Attrs({"column: int64_t"})
    .SetInplaceMap({{"keys", "new_keys"}, {"values", "new_values"}})
    .SetKernelFn(PD_KERNEL(Forward))
    .SetInferShapeFn(PD_INFER_SHAPE(OutShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(OutDtype));
