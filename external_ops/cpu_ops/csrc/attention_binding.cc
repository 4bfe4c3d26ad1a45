// cpu_causal_attention(query (B, T, H, D), key (B, S, H, D), value (B, S, H, D)) -> context (B, T, H, D), log_sum (B, H, T).
// The T queries are the last of the S tokens, and each sees the tokens up to itself. log_sum takes no gradient.
#include "attention.h"
#include "binding.h"

namespace {

using namespace cpu_ops;

AttentionSizes sizes_of(const Tensor& query, const Tensor& key) {
  const Shape q = query.shape();
  return {q[0], q[1], key.shape()[1], q[2], q[3]};
}

std::vector<Tensor> Forward(const Tensor& query_, const Tensor& key_, const Tensor& value_) {
  const char* op = "cpu_causal_attention";
  check_float(op, "query", query_);
  check_float(op, "key", key_);
  check_float(op, "value", value_);
  const Shape q = query_.shape(), k = key_.shape();
  CPU_OPS_CHECK(q.size() == 4 && k.size() == 4 && q[1] <= k[1], op, ": query has shape ", text(q), ", key ", text(k),
                "; expected (B, T, H, D) and (B, S, H, D) with T up to S.");
  check_shape(op, "key", key_, {q[0], k[1], q[2], q[3]});
  check_shape(op, "value", value_, k);
  Tensor out = empty(q), log_sum = empty({q[0], q[2], q[1]});
  if (out.numel() == 0) return {out, log_sum};
  const Tensor query = contiguous(query_), key = contiguous(key_), value = contiguous(value_);
  causal_attention_forward(sizes_of(query, key), query.data<float>(), key.data<float>(), value.data<float>(), out.data<float>(),
                           log_sum.data<float>());
  return {out, log_sum};
}

std::vector<Tensor> Backward(const Tensor& query_, const Tensor& key_, const Tensor& value_, const Tensor& out,
                             const Tensor& log_sum, const Tensor& dout_) {
  Tensor dquery = empty(query_.shape()), dkey = empty(key_.shape()), dvalue = empty(value_.shape());
  if (dquery.numel() == 0) return {dquery, dkey, dvalue};
  const Tensor query = contiguous(query_), key = contiguous(key_), value = contiguous(value_), dout = contiguous(dout_);
  causal_attention_backward(sizes_of(query, key), query.data<float>(), key.data<float>(), value.data<float>(), out.data<float>(),
                            log_sum.data<float>(), dout.data<float>(), dquery.data<float>(), dkey.data<float>(),
                            dvalue.data<float>());
  return {dquery, dkey, dvalue};
}

std::vector<Shape> OutShape(Shape query, Shape, Shape) { return {query, {query[0], query[2], query[1]}}; }
std::vector<DataType> OutDtype(DataType query, DataType, DataType) { return {query, query}; }
std::vector<Shape> GradShape(Shape query, Shape key, Shape value, Shape, Shape, Shape) { return {query, key, value}; }
std::vector<DataType> GradDtype(DataType query, DataType key, DataType value, DataType, DataType, DataType) {
  return {query, key, value};
}

}  // namespace

PD_BUILD_OP(cpu_causal_attention)
    .Inputs({"query", "key", "value"})
    .Outputs({"out", "log_sum"})
    .SetKernelFn(PD_KERNEL(Forward))
    .SetInferShapeFn(PD_INFER_SHAPE(OutShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(OutDtype));

PD_BUILD_GRAD_OP(cpu_causal_attention)
    .Inputs({"query", "key", "value", "out", "log_sum", paddle::Grad("out")})
    .Outputs({paddle::Grad("query"), paddle::Grad("key"), paddle::Grad("value")})
    .SetKernelFn(PD_KERNEL(Backward))
    .SetInferShapeFn(PD_INFER_SHAPE(GradShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(GradDtype));
