// cpu_silu_mul(gate, up) -> silu(gate) * up
#include "binding.h"
#include "silu_mul.h"

namespace {

using namespace cpu_ops;

std::vector<Tensor> Forward(const Tensor& gate_, const Tensor& up_) {
  check_float("cpu_silu_mul", "gate", gate_);
  check_float("cpu_silu_mul", "up", up_);
  check_shape("cpu_silu_mul", "up", up_, gate_.shape());
  Tensor out = empty(gate_.shape());
  if (out.numel() == 0) return {out};
  const Rows gate(gate_), up(up_);
  silu_mul_forward(gate.data, gate.distance, up.data, up.distance, out.data<float>(), gate.count, gate.width);
  return {out};
}

std::vector<Tensor> Backward(const Tensor& gate_, const Tensor& up_, const Tensor& dout_) {
  Tensor dgate = empty(gate_.shape()), dup = empty(gate_.shape());
  if (dgate.numel() == 0) return {dgate, dup};
  const Rows gate(gate_), up(up_), dout(dout_);
  silu_mul_backward(gate.data, gate.distance, up.data, up.distance, dout.data, dout.distance, dgate.data<float>(),
                    dup.data<float>(), gate.count, gate.width);
  return {dgate, dup};
}

std::vector<Shape> OutShape(Shape gate, Shape) { return {gate}; }
std::vector<DataType> OutDtype(DataType gate, DataType) { return {gate}; }
std::vector<Shape> GradShape(Shape gate, Shape up, Shape) { return {gate, up}; }
std::vector<DataType> GradDtype(DataType gate, DataType up, DataType) { return {gate, up}; }

}  // namespace

PD_BUILD_OP(cpu_silu_mul)
    .Inputs({"gate", "up"})
    .Outputs({"out"})
    .SetKernelFn(PD_KERNEL(Forward))
    .SetInferShapeFn(PD_INFER_SHAPE(OutShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(OutDtype));

PD_BUILD_GRAD_OP(cpu_silu_mul)
    .Inputs({"gate", "up", paddle::Grad("out")})
    .Outputs({paddle::Grad("gate"), paddle::Grad("up")})
    .SetKernelFn(PD_KERNEL(Backward))
    .SetInferShapeFn(PD_INFER_SHAPE(GradShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(GradDtype));
