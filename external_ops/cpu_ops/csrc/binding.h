// What the bindings share: every file *_binding.cc checks Paddle's tensors, makes the outputs, and calls kernels.
#pragma once
#include <string>
#include <vector>

#include "paddle/extension.h"

#include "common.h"

// A user's mistake: ValueError in Python, where PD_CHECK would give an OSError.
#define CPU_OPS_CHECK(condition, ...)                                                                        \
  do {                                                                                                       \
    if (!(condition)) {                                                                                      \
      PADDLE_THROW(common::errors::InvalidArgument("%s", common::ErrorMessage(__VA_ARGS__).to_string()));    \
    }                                                                                                        \
  } while (0)

namespace cpu_ops {

using paddle::DataType;
using paddle::Tensor;
using Shape = std::vector<int64_t>;

inline std::string text(const Shape& shape) {
  std::string joined;
  for (int64_t size : shape) joined += (joined.empty() ? "" : ", ") + std::to_string(size);
  return "[" + joined + "]";
}

inline bool is_given(const Tensor& tensor) { return tensor.defined() && tensor.has_allocation(); }

inline void check_float(const char* op, const char* name, const Tensor& tensor) {
  CPU_OPS_CHECK(is_given(tensor) && tensor.is_cpu() && tensor.dtype() == DataType::FLOAT32, op, ": ", name,
                " has to be a float32 tensor on CPU.");
}

inline void check_shape(const char* op, const char* name, const Tensor& tensor, const Shape& expected) {
  CPU_OPS_CHECK(tensor.shape() == expected, op, ": ", name, " has shape ", text(tensor.shape()), ", expected ",
                text(expected), ".");
}

inline Tensor contiguous(const Tensor& tensor) { return tensor.is_contiguous() ? tensor : tensor.contiguous(); }

// A tensor as rows of its last axis, equally far apart: a view such as a part of split() needs no copy.
struct Rows {
  Tensor tensor;
  int64_t count, width, distance;
  const float* data;

  explicit Rows(const Tensor& given) : tensor(given), count(1) {
    const Shape shape = given.shape();
    width = shape.back();
    for (size_t axis = 0; axis + 1 < shape.size(); ++axis) count *= shape[axis];
    distance = row_distance(given);
    if (distance < 0) {
      tensor = given.contiguous();
      distance = width;
    }
    data = tensor.data<float>();
  }

 private:
  static int64_t row_distance(const Tensor& tensor) {  // -1: not equally far apart, or with gaps inside a row
    const Shape shape = tensor.shape();
    const auto strides = tensor.strides();
    const int last = static_cast<int>(shape.size()) - 1;
    if (shape[last] != 1 && strides[last] != 1) return -1;
    int64_t distance = -1, next = 0;  // next: what the axis before has to have
    for (int axis = last - 1; axis >= 0; --axis) {
      if (shape[axis] == 1) continue;
      if (distance < 0) distance = strides[axis];
      else if (strides[axis] != next) return -1;
      next = strides[axis] * shape[axis];
    }
    return distance < 0 ? shape[last] : distance;
  }
};

// An output, on huge pages where it is large.
inline Tensor empty(const Shape& shape, DataType dtype = DataType::FLOAT32) {
  Tensor made = paddle::empty(shape, dtype, paddle::CPUPlace());
  prefer_huge_pages(made.data(), made.numel() * static_cast<int64_t>(phi::SizeOf(dtype)));
  return made;
}

}  // namespace cpu_ops
