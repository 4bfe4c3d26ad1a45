// cpu_skinny_matmul(x (..., K), weight (K, N), bias (N), transposed) -> (..., N), for a few rows of x; no gradient.
// With `transposed` the weight is (N, K). A bias of no elements: none.
#include "binding.h"
#include "skinny_matmul.h"

namespace {

using namespace cpu_ops;

Shape out_shape(Shape x, const Shape& weight, bool transposed) {
  x.back() = weight[transposed ? 0 : 1];
  return x;
}

std::vector<Tensor> Forward(const Tensor& x_, const Tensor& weight_, const Tensor& bias_, bool transposed) {
  const char* op = "cpu_skinny_matmul";
  check_float(op, "x", x_);
  check_float(op, "weight", weight_);
  check_float(op, "bias", bias_);
  const Shape x_shape = x_.shape(), weight_shape = weight_.shape();
  CPU_OPS_CHECK(!x_shape.empty() && weight_shape.size() == 2 && x_shape.back() == weight_shape[transposed ? 1 : 0], op,
                ": x has shape ", text(x_shape), ", weight ", text(weight_shape), "; expected (..., K) and ",
                transposed ? "(N, K)." : "(K, N).");
  const int64_t columns = weight_shape[transposed ? 0 : 1];
  const bool has_bias = bias_.numel() > 0;
  if (has_bias) check_shape(op, "bias", bias_, {columns});
  Tensor out = empty(out_shape(x_shape, weight_shape, transposed));
  if (out.numel() == 0) return {out};
  const Rows x(x_);
  const Tensor weight = contiguous(weight_), bias = contiguous(bias_);
  const auto matmul = transposed ? skinny_matmul_transposed : skinny_matmul;
  matmul({x.count, x.width, columns}, x.data, x.distance, weight.data<float>(), has_bias ? bias.data<float>() : nullptr,
         out.data<float>());
  return {out};
}

std::vector<Shape> OutShape(Shape x, Shape weight, Shape, bool transposed) { return {out_shape(x, weight, transposed)}; }
std::vector<DataType> OutDtype(DataType x, DataType, DataType) { return {x}; }

}  // namespace

PD_BUILD_OP(cpu_skinny_matmul)
    .Inputs({"x", "weight", "bias"})
    .Outputs({"out"})
    .Attrs({"transposed: bool"})
    .SetKernelFn(PD_KERNEL(Forward))
    .SetInferShapeFn(PD_INFER_SHAPE(OutShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(OutDtype));
