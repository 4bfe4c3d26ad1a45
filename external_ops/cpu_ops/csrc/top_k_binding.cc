// cpu_top_k(scores (B, V), k, temperature) -> values (B, k), ids (B, k), log_sums (B, 2): top_k.h. No gradient.
#include "binding.h"
#include "top_k.h"

namespace {

using namespace cpu_ops;

std::vector<Tensor> Forward(const Tensor& scores_, int64_t k, float temperature) {
  const char* op = "cpu_top_k";
  check_float(op, "scores", scores_);
  const Shape shape = scores_.shape();
  CPU_OPS_CHECK(shape.size() == 2 && k >= 1 && k <= shape[1], op, ": scores has shape ", text(shape), ", k is ", k,
                "; expected (B, V) and 1 to V.");
  CPU_OPS_CHECK(temperature > 0, op, ": temperature is ", temperature, "; expected more than 0.");
  Tensor values = empty({shape[0], k}), ids = empty({shape[0], k}, DataType::INT64), log_sums = empty({shape[0], 2});
  if (values.numel() == 0) return {values, ids, log_sums};
  const Tensor scores = contiguous(scores_);
  top_k(scores.data<float>(), shape[0], shape[1], k, temperature, values.data<float>(), ids.data<int64_t>(),
        log_sums.data<float>());
  return {values, ids, log_sums};
}

std::vector<Shape> OutShape(Shape scores, int64_t k, float) { return {{scores[0], k}, {scores[0], k}, {scores[0], 2}}; }
std::vector<DataType> OutDtype(DataType scores) { return {scores, DataType::INT64, scores}; }

}  // namespace

PD_BUILD_OP(cpu_top_k)
    .Inputs({"scores"})
    .Outputs({"values", "ids", "log_sums"})
    .Attrs({"k: int64_t", "temperature: float"})
    .SetKernelFn(PD_KERNEL(Forward))
    .SetInferShapeFn(PD_INFER_SHAPE(OutShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(OutDtype));
