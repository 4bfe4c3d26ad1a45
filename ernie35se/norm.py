"""LayerNorm behind one seam: Paddle's own, or the fused op of external_ops where `fuse_ln` asks for it.

The only importer of `fused_ln`, and only when it is asked for.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from types import ModuleType

import paddle
from paddle import nn

from .configuration import Ernie35Config
from .runtime import last_words, module_path

FUNCTIONS = ("fused_ln", "fused_add_ln")  # what the module has to offer


def layer_norm(config: Ernie35Config) -> nn.Layer:
    """A LayerNorm with weight and bias over the hidden width (Ba et al. 2016).

    Raises:
        ValueError: `fuse_ln` is on and the op is not installed, is not the one of external_ops, or does not run on the
            current device.
    """
    cls = FusedLayerNorm if config.fuse_ln else nn.LayerNorm
    return cls(config.hidden_size, epsilon=config.layer_norm_eps)


class FusedLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` over the last axis, computed by the fused op: same parameters, same results up to rounding."""

    def __init__(self, hidden_size: int, epsilon: float):
        usable_op(paddle.get_device())
        super().__init__(hidden_size, epsilon=epsilon)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        op = usable_op(paddle.get_device())
        y, _mean, _invvar = op.fused_ln(x, self.weight, self.bias, self._epsilon)
        return y


@functools.cache
def usable_op(device: str) -> ModuleType:
    """The module `fused_ln`, after one row has gone through it on the device: a model learns here that it cannot have it,
    not at its first step.

    Raises:
        ValueError: says which of missing, broken, shadowed or failing it is, and how to mend it.
    """
    op = _import_op()
    path = module_path(op.__spec__)
    absent = [name for name in FUNCTIONS if not callable(getattr(op, name, None))]
    if absent:
        raise _refusal(
            f"the module fused_ln that Python finds, {path}, is not the op: it has no {' and no '.join(absent)}. "
            "Something else of that name stands in its way, or its build is unfinished",
            "rename or remove that",
        )
    try:
        row, parameter = paddle.zeros([1, 2], dtype="float32"), paddle.ones([2], dtype="float32")
        op.fused_ln(row, parameter, parameter, 1e-5)
    except Exception as error:  # whatever Paddle makes of an op it cannot run
        raise _refusal(f"the op {path} does not run on {device}: {last_words(error)}", "") from error
    return op


def _import_op() -> ModuleType:
    try:
        return importlib.import_module("fused_ln")
    except ModuleNotFoundError as error:
        if error.name != "fused_ln":  # the module is there, and what it needs is not
            raise _broken(error) from error
        raise _refusal(f"the fused LayerNorm op is not installed ({error})", "") from error
    except Exception as error:  # a shared library of another Paddle, a file missing beside it, any file of that name
        raise _broken(error) from error


def _broken(error: Exception) -> ValueError:
    path = module_path(importlib.util.find_spec("fused_ln"))
    return _refusal(f"the module fused_ln that Python finds, {path}, cannot be imported: {last_words(error)}", "remove that")


def _refusal(what: str, first: str) -> ValueError:
    build = f"{sys.executable} -m pip install ./external_ops --no-build-isolation"
    steps = f"{first} and build it" if first else "build it"
    return ValueError(
        f"fuse_ln is on (--use_fused_ln), but {what}. Mend it: {steps} in the repository with "
        f"`{build}` (docs/fused_ln.md), or set fuse_ln to false."
    )
