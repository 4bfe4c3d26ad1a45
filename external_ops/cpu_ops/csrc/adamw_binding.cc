// cpu_squared_norm(tensors) -> (1,) float64: the sum of all their squares
//
// cpu_adamw_(params, moments1, moments2, beta1_powers, beta2_powers, grads, beta1, beta2, epsilon, rates, decays, scales)
// One step of AdamW as Paddle's adamw computes it, in place on the first five lists (adamw.h). All tensors are float32; the
// powers, one (1,) tensor a parameter, hold beta^t of this step and leave with that of the next. Per parameter: the learning
// rate, the weight decay (0: none), and the factor of its gradient. No views: of a list's tensor with gaps Paddle hands the op a
// copy, and what is written there is lost.
#include "adamw.h"
#include "binding.h"

namespace {

using namespace cpu_ops;
using Tensors = std::vector<Tensor>;

Tensors SquaredNorm(const Tensors& tensors) {
  Tensors dense;  // keeps copies of views alive
  std::vector<Span> spans;
  for (const Tensor& tensor : tensors) {
    check_float("cpu_squared_norm", "tensors", tensor);
    dense.push_back(contiguous(tensor));
    spans.push_back({dense.back().data<float>(), dense.back().numel()});
  }
  Tensor sum = empty({1}, DataType::FLOAT64);
  *sum.data<double>() = squared_norm(spans);
  return {sum};
}

std::vector<Shape> NormShape(const std::vector<Shape>&) { return {{1}}; }
std::vector<DataType> NormDtype(const std::vector<DataType>&) { return {DataType::FLOAT64}; }

float* in_place(const char* name, Tensor& tensor, const Shape& shape) {
  check_float("cpu_adamw_", name, tensor);
  check_shape("cpu_adamw_", name, tensor, shape);
  return tensor.data<float>();
}

void Update(Tensors& params, Tensors& moments1, Tensors& moments2, Tensors& beta1_powers, Tensors& beta2_powers,
            const Tensors& grads, float beta1, float beta2, float epsilon, const std::vector<float>& rates,
            const std::vector<float>& decays, const std::vector<float>& scales) {
  const size_t count = params.size();
  for (size_t given : {moments1.size(), moments2.size(), beta1_powers.size(), beta2_powers.size(), grads.size(),
                       rates.size(), decays.size(), scales.size()}) {
    CPU_OPS_CHECK(given == count, "cpu_adamw_: a list has ", given, " members for ", count, " params.");
  }
  Tensors dense;
  std::vector<AdamWTensor> tensors;
  std::vector<float*> powers;
  for (size_t i = 0; i < count; ++i) {
    const Shape shape = params[i].shape();
    check_float("cpu_adamw_", "grads", grads[i]);
    check_shape("cpu_adamw_", "grads", grads[i], shape);
    dense.push_back(contiguous(grads[i]));
    float* power1 = in_place("beta1_powers", beta1_powers[i], {1});
    float* power2 = in_place("beta2_powers", beta2_powers[i], {1});
    const float correction = std::sqrt(1.0f - *power2);
    tensors.push_back({in_place("params", params[i], shape), in_place("moments1", moments1[i], shape),
                       in_place("moments2", moments2[i], shape), dense.back().data<float>(), params[i].numel(),
                       rates[i] * (correction / (1.0f - *power1)), 1.0f - rates[i] * decays[i], epsilon * correction,
                       scales[i]});
    powers.insert(powers.end(), {power1, power2});
  }
  adamw(tensors, beta1, beta2);
  for (size_t i = 0; i < powers.size(); ++i) *powers[i] *= i % 2 ? beta2 : beta1;
}

}  // namespace

PD_BUILD_OP(cpu_squared_norm)
    .Inputs({paddle::Vec("tensors")})
    .Outputs({"sum"})
    .SetKernelFn(PD_KERNEL(SquaredNorm))
    .SetInferShapeFn(PD_INFER_SHAPE(NormShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(NormDtype));

PD_BUILD_OP(cpu_adamw_)
    .Inputs({paddle::Vec("params"), paddle::Vec("moments1"), paddle::Vec("moments2"), paddle::Vec("beta1_powers"),
             paddle::Vec("beta2_powers"), paddle::Vec("grads")})
    .Outputs({paddle::Vec("new_params"), paddle::Vec("new_moments1"), paddle::Vec("new_moments2"),
              paddle::Vec("new_beta1_powers"), paddle::Vec("new_beta2_powers")})
    .Attrs({"beta1: float", "beta2: float", "epsilon: float", "rates: std::vector<float>", "decays: std::vector<float>",
            "scales: std::vector<float>"})
    .SetInplaceMap({{paddle::Vec("params"), paddle::Vec("new_params")},
                    {paddle::Vec("moments1"), paddle::Vec("new_moments1")},
                    {paddle::Vec("moments2"), paddle::Vec("new_moments2")},
                    {paddle::Vec("beta1_powers"), paddle::Vec("new_beta1_powers")},
                    {paddle::Vec("beta2_powers"), paddle::Vec("new_beta2_powers")}})
    .SetKernelFn(PD_KERNEL(Update));
