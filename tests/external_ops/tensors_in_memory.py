"""Calls of the kernels on tensors that betray an access outside of them, checked against float64.

`kernels` is an object whose forward(LnForward) and backward(LnBackward) return the C functions' status.
"""

import numpy as np
from kernels import (
    FLOAT32,
    NUMPY_TYPES,
    ROUNDING,
    LnBackward,
    LnForward,
    decode,
    encode,
    reference_backward,
    reference_forward,
)

EPSILON = 1e-5
GUARD = 64  # bytes on each side of a tensor, whose change betrays a write outside of it


class Memory:
    """A tensor between two guards: NaN to whoever reads them, and checked for writes."""

    def __init__(self, shape, dtype, values=None, misaligned=False):
        self.dtype, self.shape = dtype, shape
        itemsize = np.dtype(NUMPY_TYPES[dtype]).itemsize
        self.size = int(np.prod(shape)) * itemsize
        raw = np.full(self.size + 2 * GUARD + 32, 0xFF, dtype=np.uint8)
        self.start = GUARD + -(raw.ctypes.data + GUARD) % 16 + (itemsize if misaligned else 0)
        self.raw = raw
        if values is not None:
            self.body[:] = encode(values, dtype).reshape(shape)

    @property
    def body(self):
        return self.raw[self.start : self.start + self.size].view(NUMPY_TYPES[self.dtype]).reshape(self.shape)

    @property
    def values(self):
        self.check_guards()
        return decode(self.body, self.dtype)

    def check_guards(self):
        assert (self.raw[: self.start] == 0xFF).all() and (self.raw[self.start + self.size :] == 0xFF).all(), "written outside"

    @property
    def address(self):
        return self.raw.ctypes.data + self.start


def assert_near(memory, expected, what, size=1.0):
    actual = memory.values
    allowed = ROUNDING[memory.dtype] * np.abs(expected) + 3e-6 * max(size, np.abs(expected).max(initial=0.0))
    assert (np.abs(actual - expected) <= allowed).all(), f"{what}: off by {np.abs(actual - expected).max():.1e}"


def run_forward(kernels, dtype, param_dtype, rows, cols, with_residual, misaligned=False):
    """The tensors of one forward, checked against float64."""
    rng = np.random.default_rng(rows * cols)

    def given(shape, dtype):
        return Memory(shape, dtype, rng.standard_normal(shape), misaligned)

    t = {name: given((rows, cols), dtype) for name in ("x", "residual")}
    t |= {name: given((cols,), param_dtype) for name in ("scale", "bias")}
    t |= {name: Memory((rows, cols), dtype, None, misaligned) for name in ("sum", "y")}
    t |= {name: Memory((rows,), FLOAT32) for name in ("mean", "invvar")}
    if not with_residual:
        del t["residual"], t["sum"]
    addresses = {name: memory.address for name, memory in t.items()}
    args = LnForward(dtype=dtype, param_dtype=param_dtype, rows=rows, cols=cols, epsilon=EPSILON, **addresses)
    assert kernels.forward(args) == 0

    if with_residual:
        assert_near(t["sum"], t["x"].values + t["residual"].values, "sum")
    source = (t["sum"] if with_residual else t["x"]).values
    y, mean, invvar = reference_forward(source, t["scale"].values, t["bias"].values, EPSILON)
    for name, expected in (("y", y), ("mean", mean), ("invvar", invvar)):
        assert_near(t[name], expected, name)
    return t, rng


def run_backward(kernels, dtype, param_dtype, rows, cols, with_residual, with_statistics, misaligned=False):
    """The gradients' bits, checked against float64."""
    t, rng = run_forward(kernels, dtype, param_dtype, rows, cols, with_residual, misaligned)
    tensors = {"input": t["sum"] if with_residual else t["x"], **{name: t[name] for name in ("scale", "mean", "invvar")}}
    tensors["dy"] = Memory((rows, cols), dtype, rng.standard_normal((rows, cols)), misaligned)
    if with_residual:
        tensors["dsum"] = Memory((rows, cols), dtype, rng.standard_normal((rows, cols)), misaligned)
        tensors["dresidual"] = Memory((rows, cols), dtype, None, misaligned)
    if with_statistics:
        tensors |= {name: Memory((rows,), FLOAT32, rng.standard_normal(rows)) for name in ("dmean", "dinvvar")}
    tensors["dx"] = Memory((rows, cols), dtype, None, misaligned)
    tensors |= {name: Memory((cols,), param_dtype) for name in ("dscale", "dbias")}
    addresses = {name: memory.address for name, memory in tensors.items()}
    args = LnBackward(dtype=dtype, param_dtype=param_dtype, rows=rows, cols=cols, **addresses)
    assert kernels.backward(args) == 0

    statistics = [tensors[name].values if with_statistics else 0.0 for name in ("dmean", "dinvvar")]
    dx, dscale, dbias = reference_backward(
        tensors["input"].values, tensors["scale"].values, EPSILON, tensors["dy"].values, *statistics
    )
    dx = dx + (tensors["dsum"].values if with_residual else 0.0)
    assert_near(tensors["dx"], dx, "dx", size=tensors["invvar"].values.max(initial=1.0))
    assert_near(tensors["dscale"], dscale, "dscale")
    assert_near(tensors["dbias"], dbias, "dbias")
    if with_residual:
        np.testing.assert_array_equal(tensors["dresidual"].values, tensors["dx"].values)
    return [tensors[name].body.copy() for name in ("dx", "dscale", "dbias")]
