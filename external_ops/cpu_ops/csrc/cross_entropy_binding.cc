// cpu_cross_entropy_(scores, bias, labels, share) -> scores, in place now their gradient, and loss (cross_entropy.h).
// scores (N, V) float32 without gaps; bias (V,) or an empty tensor; labels (N,) int64 within 0 .. V-1; share (N,) float32.
#include "binding.h"
#include "cross_entropy.h"

namespace {

using namespace cpu_ops;

std::vector<Tensor> Forward(Tensor& scores, const Tensor& bias, const Tensor& labels, const Tensor& share) {
  const char* op = "cpu_cross_entropy_";
  check_float(op, "scores", scores);
  check_float(op, "share", share);
  CPU_OPS_CHECK(scores.shape().size() == 2 && scores.is_contiguous(), op, ": scores have shape ", text(scores.shape()),
                ", expected two axes without gaps.");
  const int64_t rows = scores.shape()[0], width = scores.shape()[1];
  check_shape(op, "labels", labels, {rows});
  check_shape(op, "share", share, {rows});
  CPU_OPS_CHECK(labels.dtype() == DataType::INT64, op, ": labels have to be int64.");
  const bool has_bias = is_given(bias) && bias.numel() > 0;
  if (has_bias) check_shape(op, "bias", bias, {width});
  const Tensor dense_labels = contiguous(labels), dense_share = contiguous(share), dense_bias = has_bias ? contiguous(bias) : bias;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t label = dense_labels.data<int64_t>()[i];
    CPU_OPS_CHECK(label >= 0 && label < width, op, ": label ", label, " of row ", i, " is not within 0 .. ", width - 1, ".");
  }
  Tensor loss = empty({rows});
  cross_entropy(scores.data<float>(), has_bias ? dense_bias.data<float>() : nullptr, dense_labels.data<int64_t>(),
                dense_share.data<float>(), loss.data<float>(), rows, width);
  return {scores, loss};
}

std::vector<Shape> OutShape(Shape scores, Shape, Shape, Shape share) { return {scores, share}; }
std::vector<DataType> OutDtype(DataType scores, DataType, DataType, DataType share) { return {scores, share}; }

}  // namespace

PD_BUILD_OP(cpu_cross_entropy_)
    .Inputs({"scores", "bias", "labels", "share"})
    .Outputs({"gradient", "loss"})
    .SetInplaceMap({{"scores", "gradient"}})
    .SetKernelFn(PD_KERNEL(Forward))
    .SetInferShapeFn(PD_INFER_SHAPE(OutShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(OutDtype));
