"""The linear layer, quicker on CPU in eval mode: few rows, as a step of decoding has them, take the CPU op that is as quick as
reading the weight; of many the bias is added in place."""

from __future__ import annotations

import functools
import math

import paddle
import paddle.nn.functional as F
from paddle import nn

from . import cpu_ops

FEW_ROWS = 32  # up to which the CPU op beats Paddle's matrix product


def linear(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None = None, transposed: bool = False):
    """x W + b: x (..., K), weight (K, N), or (N, K) where `transposed`, bias (N); returns (..., N)."""
    ops = _ops_for(x, weight)
    if ops is None:
        return F.linear(x, weight.t() if transposed else weight, bias)
    if math.prod(x.shape[:-1]) <= FEW_ROWS:
        return ops.cpu_skinny_matmul(x, weight, _no_bias() if bias is None else bias, transposed)
    product = paddle.matmul(x, weight, transpose_y=transposed)
    return product if bias is None else product.add_(bias)  # F.linear writes a second tensor


class Linear(nn.Linear):
    """nn.Linear by way of `linear`, in train mode as ever: what recomputation does without gradients and then with them has
    to come out the same to the last bit."""

    def forward(self, x):
        return super().forward(x) if self.training else linear(x, self.weight, self.bias)


def _ops_for(x: paddle.Tensor, weight: paddle.Tensor):
    """The module of CPU ops where these are on CPU and no gradients are wanted; else None."""
    if not paddle.in_dynamic_mode() or paddle.is_grad_enabled():
        return None
    return cpu_ops.usable(x, weight)


@functools.cache
def _no_bias() -> paddle.Tensor:
    return paddle.to_tensor([], dtype="float32", place=paddle.CPUPlace())
