// The two ops for Paddle: checks, outputs, and a call of the kernels of ln_cpu.h or ln_cuda.h.
//
//   fused_ln(x, scale, bias, epsilon)               -> y, mean, invvar
//   fused_add_ln(x, residual, scale, bias, epsilon) -> y, sum, mean, invvar
//
// x has any leading shape; its last axis is normalised. mean and invvar are float32, one a row, in one axis, as in
// Paddle's own layer_norm. Gradients reach x, residual, scale and bias from every output.
#include <cmath>
#include <string>
#include <vector>

#include "paddle/extension.h"

#include "ln_cpu.h"
#ifdef PADDLE_WITH_CUDA
#include "ln_cuda.h"
#endif

// A user's mistake: ValueError in Python, where PD_CHECK would give an OSError.
#define LN_CHECK(condition, ...)                                                                             \
  do {                                                                                                       \
    if (!(condition)) {                                                                                      \
      PADDLE_THROW(common::errors::InvalidArgument("%s", common::ErrorMessage(__VA_ARGS__).to_string()));    \
    }                                                                                                        \
  } while (0)

namespace {

using paddle::DataType;
using paddle::Tensor;
using Shape = std::vector<int64_t>;

std::string text(const Shape& shape) {
  std::string joined;
  for (int64_t size : shape) joined += (joined.empty() ? "" : ", ") + std::to_string(size);
  return "[" + joined + "]";
}

// -1 where an axis is not known yet (while a static graph is made).
int64_t row_count(const Shape& shape) {
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) {
    if (shape[i] < 0) return -1;
    rows *= shape[i];
  }
  return rows;
}

int32_t ln_dtype(DataType dtype) {
  return dtype == DataType::FLOAT32 ? LN_FLOAT32 : dtype == DataType::BFLOAT16 ? LN_BFLOAT16 : LN_FLOAT16;
}

void check_input(const Tensor& x) {
  LN_CHECK(x.is_cpu() || x.is_gpu(), "fused_ln: x is on ", x.place(), ", but only CPU and CUDA devices have kernels.");
#ifndef PADDLE_WITH_CUDA
  LN_CHECK(x.is_cpu(), "fused_ln: x is on ", x.place(), ", but this build has CPU kernels only. Build external_ops with ",
           "the GPU build of Paddle.");
#endif
  const bool known = x.dtype() == DataType::FLOAT32 || x.dtype() == DataType::BFLOAT16 ||
                     (x.dtype() == DataType::FLOAT16 && x.is_gpu());
  LN_CHECK(known, "fused_ln: x is ", x.dtype(), " on ", x.place(), ", expected float32 or bfloat16",
           x.is_gpu() ? " or float16." : " (float16 on CUDA only).");
  LN_CHECK(x.dims().size() >= 1 && x.shape().back() >= 1, "fused_ln: x has shape ", text(x.shape()),
           ", expected at least one axis and a last axis that is not empty.");
}

void check_parameter(const char* name, const Tensor& parameter, const Tensor& x) {
  LN_CHECK(parameter.place() == x.place(), "fused_ln: ", name, " is on ", parameter.place(), ", but x is on ", x.place(), ".");
  LN_CHECK(parameter.shape() == Shape{x.shape().back()}, "fused_ln: ", name, " has shape ", text(parameter.shape()),
           ", expected [", x.shape().back(), "], the last axis of x, whose shape is ", text(x.shape()), ".");
  LN_CHECK(parameter.dtype() == DataType::FLOAT32 || parameter.dtype() == x.dtype(), "fused_ln: ", name, " is ",
           parameter.dtype(), ", expected float32 or x's ", x.dtype(), ".");
}

void check_arguments(const Tensor& x, const Tensor& scale, const Tensor& bias, float epsilon) {
  check_input(x);
  check_parameter("scale", scale, x);
  check_parameter("bias", bias, x);
  LN_CHECK(scale.dtype() == bias.dtype(), "fused_ln: scale is ", scale.dtype(), ", but bias is ", bias.dtype(), ".");
  LN_CHECK(std::isfinite(epsilon) && epsilon >= 0, "fused_ln: epsilon is ", epsilon, ", expected a number of at least 0.");
}

bool is_given(const Tensor& tensor) { return tensor.defined() && tensor.has_allocation(); }

Tensor contiguous(const Tensor& tensor) { return tensor.is_contiguous() ? tensor : tensor.contiguous(); }

// The kernels' view of an optional gradient. An output that nothing used comes with an undefined tensor.
const void* pointer_or_null(const Tensor& tensor) { return is_given(tensor) ? tensor.data() : nullptr; }

void forward(const Tensor& x, const Tensor* residual, const Tensor& scale, const Tensor& bias, float epsilon, Tensor* sum,
             Tensor& y, Tensor& mean, Tensor& invvar) {
  LnForward args{};
  args.dtype = ln_dtype(x.dtype());
  args.param_dtype = ln_dtype(scale.dtype());
  args.rows = row_count(x.shape());
  args.cols = x.shape().back();
  args.epsilon = epsilon;
  if (args.rows == 0) return;
  args.x = x.data();
  args.residual = residual != nullptr ? residual->data() : nullptr;
  args.scale = scale.data();
  args.bias = bias.data();
  args.sum = sum != nullptr ? sum->data() : nullptr;
  args.y = y.data();
  args.mean = mean.data<float>();
  args.invvar = invvar.data<float>();
#ifdef PADDLE_WITH_CUDA
  if (x.is_gpu()) {
    const int status = ln_cuda_forward(&args, reinterpret_cast<void*>(x.stream()));
    LN_CHECK(status == 0, "fused_ln: the CUDA forward kernel failed, cudaError ", status, ".");
    return;
  }
#endif
  LN_CHECK(ln_cpu_forward(&args, 0) == 0, "fused_ln: no CPU kernel for ", x.dtype(), " with ", scale.dtype(), ".");
}

// Returns the gradients of input, (residual,) scale and bias; each is a tensor of its own, even where the values agree:
// Paddle adds later gradients into them in place.
std::vector<Tensor> backward(const Tensor& input_, const Tensor& scale_, const Tensor& mean, const Tensor& invvar,
                             const Tensor& dy_, const Tensor* dsum_, const Tensor& dmean_, const Tensor& dinvvar_) {
  // Where an earlier backward freed the saved tensors, Paddle 3.3 calls with the first gradient in the place of each.
  LN_CHECK(is_given(input_) && input_.impl() != mean.impl(),
           "fused_ln: backward ran before and freed what it needs; the first one has to have retain_graph=True.");
  const Tensor input = contiguous(input_), scale = contiguous(scale_);
  const Tensor dy = is_given(dy_) ? contiguous(dy_) : paddle::full(input.shape(), 0.0, input.dtype(), input.place());
  const auto made_contiguous = [](const Tensor& t) { return is_given(t) ? contiguous(t) : Tensor(); };
  const Tensor dsum = dsum_ != nullptr ? made_contiguous(*dsum_) : Tensor();
  const Tensor dmean = made_contiguous(dmean_), dinvvar = made_contiguous(dinvvar_);

  Tensor dx = paddle::empty(input.shape(), input.dtype(), input.place());
  Tensor dscale = paddle::empty(scale.shape(), scale.dtype(), input.place());
  Tensor dbias = paddle::empty(scale.shape(), scale.dtype(), input.place());
  std::vector<Tensor> gradients{dx};
  if (dsum_ != nullptr) gradients.push_back(paddle::empty(input.shape(), input.dtype(), input.place()));

  LnBackward args{};
  args.dtype = ln_dtype(input.dtype());
  args.param_dtype = ln_dtype(scale.dtype());
  args.rows = row_count(input.shape());
  args.cols = input.shape().back();
  if (args.rows == 0) {
    gradients.push_back(paddle::full(scale.shape(), 0.0, scale.dtype(), input.place()));
    gradients.push_back(paddle::full(scale.shape(), 0.0, scale.dtype(), input.place()));
    return gradients;
  }
  args.input = input.data();
  args.scale = scale.data();
  args.mean = mean.data<float>();
  args.invvar = invvar.data<float>();
  args.dy = dy.data();
  args.dsum = pointer_or_null(dsum);
  args.dmean = static_cast<const float*>(pointer_or_null(dmean));
  args.dinvvar = static_cast<const float*>(pointer_or_null(dinvvar));
  args.dx = dx.data();
  args.dresidual = dsum_ != nullptr ? gradients[1].data() : nullptr;
  args.dscale = dscale.data();
  args.dbias = dbias.data();
  gradients.push_back(dscale);
  gradients.push_back(dbias);
#ifdef PADDLE_WITH_CUDA
  if (input.is_gpu()) {
    const int64_t bytes = ln_cuda_workspace(args.rows, args.cols);
    LN_CHECK(bytes >= 0, "fused_ln: the CUDA device cannot be asked for its size, cudaError ", -bytes, ".");
    Tensor workspace = paddle::empty({bytes / 4 + 1}, DataType::FLOAT32, input.place());
    const int status = ln_cuda_backward(&args, workspace.data(), reinterpret_cast<void*>(input.stream()));
    LN_CHECK(status == 0, "fused_ln: the CUDA backward kernel failed, cudaError ", status, ".");
    return gradients;
  }
#endif
  LN_CHECK(ln_cpu_backward(&args, 0) == 0, "fused_ln: no CPU kernel for ", input.dtype(), " with ", scale.dtype(), ".");
  return gradients;
}

// ---------------------------------------------------------------------------- what Paddle calls

std::vector<Tensor> FusedLnForward(const Tensor& x, const Tensor& scale, const Tensor& bias, float epsilon) {
  check_arguments(x, scale, bias, epsilon);
  const Shape rows{row_count(x.shape())};
  Tensor y = paddle::empty(x.shape(), x.dtype(), x.place());
  Tensor mean = paddle::empty(rows, DataType::FLOAT32, x.place());
  Tensor invvar = paddle::empty(rows, DataType::FLOAT32, x.place());
  forward(contiguous(x), nullptr, contiguous(scale), contiguous(bias), epsilon, nullptr, y, mean, invvar);
  return {y, mean, invvar};
}

std::vector<Tensor> FusedLnBackward(const Tensor& x, const Tensor& scale, const Tensor& mean, const Tensor& invvar,
                                    const Tensor& dy, const Tensor& dmean, const Tensor& dinvvar) {
  return backward(x, scale, mean, invvar, dy, nullptr, dmean, dinvvar);
}

std::vector<Tensor> FusedAddLnForward(const Tensor& x, const Tensor& residual, const Tensor& scale, const Tensor& bias,
                                      float epsilon) {
  check_arguments(x, scale, bias, epsilon);
  LN_CHECK(residual.shape() == x.shape() && residual.dtype() == x.dtype() && residual.place() == x.place(),
           "fused_add_ln: residual is ", residual.dtype(), text(residual.shape()), " on ", residual.place(), ", but x is ",
           x.dtype(), text(x.shape()), " on ", x.place(), "; they must agree.");
  const Shape rows{row_count(x.shape())};
  Tensor y = paddle::empty(x.shape(), x.dtype(), x.place());
  Tensor sum = paddle::empty(x.shape(), x.dtype(), x.place());
  Tensor mean = paddle::empty(rows, DataType::FLOAT32, x.place());
  Tensor invvar = paddle::empty(rows, DataType::FLOAT32, x.place());
  const Tensor dense_residual = contiguous(residual);
  forward(contiguous(x), &dense_residual, contiguous(scale), contiguous(bias), epsilon, &sum, y, mean, invvar);
  return {y, sum, mean, invvar};
}

std::vector<Tensor> FusedAddLnBackward(const Tensor& sum, const Tensor& scale, const Tensor& mean, const Tensor& invvar,
                                       const Tensor& dy, const Tensor& dsum, const Tensor& dmean, const Tensor& dinvvar) {
  return backward(sum, scale, mean, invvar, dy, &dsum, dmean, dinvvar);
}

// Without these a second derivative would silently lack the part that goes through this op's backward.
std::vector<Tensor> RefuseSecondDerivative(const Tensor&, const Tensor&, const Tensor&) {
  LN_CHECK(false, "fused_ln: no second derivative (create_graph=True); use paddle.nn.functional.layer_norm for it.");
  return {};
}

std::vector<Shape> FusedLnShape(Shape x, Shape, Shape) { return {x, {row_count(x)}, {row_count(x)}}; }

std::vector<DataType> FusedLnDtype(DataType x, DataType, DataType) { return {x, DataType::FLOAT32, DataType::FLOAT32}; }

std::vector<Shape> FusedAddLnShape(Shape x, Shape, Shape, Shape) { return {x, x, {row_count(x)}, {row_count(x)}}; }

std::vector<DataType> FusedAddLnDtype(DataType x, DataType, DataType, DataType) {
  return {x, x, DataType::FLOAT32, DataType::FLOAT32};
}

// Of the gradients, for static graphs: as what they are gradients of.
std::vector<Shape> FusedLnGradShape(Shape x, Shape scale, Shape, Shape, Shape, Shape, Shape) { return {x, scale, scale}; }

std::vector<DataType> FusedLnGradDtype(DataType x, DataType scale, DataType, DataType, DataType, DataType, DataType) {
  return {x, scale, scale};
}

std::vector<Shape> FusedAddLnGradShape(Shape sum, Shape scale, Shape, Shape, Shape, Shape, Shape, Shape) {
  return {sum, sum, scale, scale};
}

std::vector<DataType> FusedAddLnGradDtype(DataType sum, DataType scale, DataType, DataType, DataType, DataType, DataType,
                                          DataType) {
  return {sum, sum, scale, scale};
}

}  // namespace

PD_BUILD_OP(fused_ln)
    .Inputs({"x", "scale", "bias"})
    .Outputs({"y", "mean", "invvar"})
    .Attrs({"epsilon: float"})
    .SetKernelFn(PD_KERNEL(FusedLnForward))
    .SetInferShapeFn(PD_INFER_SHAPE(FusedLnShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(FusedLnDtype));

PD_BUILD_GRAD_OP(fused_ln)
    .Inputs({"x", "scale", "mean", "invvar", paddle::Grad("y"), paddle::Grad("mean"), paddle::Grad("invvar")})
    .Outputs({paddle::Grad("x"), paddle::Grad("scale"), paddle::Grad("bias")})
    .SetKernelFn(PD_KERNEL(FusedLnBackward))
    .SetInferShapeFn(PD_INFER_SHAPE(FusedLnGradShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(FusedLnGradDtype));

PD_BUILD_DOUBLE_GRAD_OP(fused_ln)
    .Inputs({"x", paddle::Grad("y"), paddle::Grad(paddle::Grad("x"))})
    .Outputs({paddle::Grad(paddle::Grad("y"))})
    .SetKernelFn(PD_KERNEL(RefuseSecondDerivative));

PD_BUILD_OP(fused_add_ln)
    .Inputs({"x", "residual", "scale", "bias"})
    .Outputs({"y", "sum", "mean", "invvar"})
    .Attrs({"epsilon: float"})
    .SetKernelFn(PD_KERNEL(FusedAddLnForward))
    .SetInferShapeFn(PD_INFER_SHAPE(FusedAddLnShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(FusedAddLnDtype));

PD_BUILD_GRAD_OP(fused_add_ln)
    .Inputs({"sum", "scale", "mean", "invvar", paddle::Grad("y"), paddle::Grad("sum"), paddle::Grad("mean"),
             paddle::Grad("invvar")})
    .Outputs({paddle::Grad("x"), paddle::Grad("residual"), paddle::Grad("scale"), paddle::Grad("bias")})
    .SetKernelFn(PD_KERNEL(FusedAddLnBackward))
    .SetInferShapeFn(PD_INFER_SHAPE(FusedAddLnGradShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(FusedAddLnGradDtype));

PD_BUILD_DOUBLE_GRAD_OP(fused_add_ln)
    .Inputs({"sum", paddle::Grad("y"), paddle::Grad(paddle::Grad("x"))})
    .Outputs({paddle::Grad(paddle::Grad("y"))})
    .SetKernelFn(PD_KERNEL(RefuseSecondDerivative));
