"""The kernels without Paddle: their C arguments (csrc/ln.h) for ctypes, and what they should give, in float64 numpy.

For check_cuda.py and the tests.
"""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import numpy as np

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
NUMPY_TYPES = {FLOAT32: np.float32, BFLOAT16: np.uint16, FLOAT16: np.float16}  # numpy has no bfloat16: its bits
ROUNDING = {FLOAT32: 0.0, BFLOAT16: 2**-8, FLOAT16: 2**-11}  # half a unit in the last place, as a part of the value


def encode(values, dtype):
    """The values in the numpy type of that dtype, rounded to the nearest."""
    if dtype != BFLOAT16:
        return np.asarray(values, dtype=NUMPY_TYPES[dtype])
    bits = np.asarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def decode(array, dtype):
    """The values as float64."""
    if dtype != BFLOAT16:
        return array.astype(np.float64)
    return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


class LnForward(ctypes.Structure):
    _fields_ = [
        ("dtype", c_int32),
        ("param_dtype", c_int32),
        ("rows", c_int64),
        ("cols", c_int64),
        ("epsilon", c_float),
        *((name, c_void_p) for name in ("x", "residual", "scale", "bias", "sum", "y", "mean", "invvar")),
    ]


class LnBackward(ctypes.Structure):
    _fields_ = [
        ("dtype", c_int32),
        ("param_dtype", c_int32),
        ("rows", c_int64),
        ("cols", c_int64),
        *((name, c_void_p) for name in ("input", "scale", "mean", "invvar", "dy", "dsum", "dmean", "dinvvar")),
        *((name, c_void_p) for name in ("dx", "dresidual", "dscale", "dbias")),
    ]


def reference_forward(x, scale, bias, epsilon):
    """y, mean, invvar of the last axis, in float64; mean and invvar have x's leading shape."""
    x, scale, bias = (np.asarray(a, dtype=np.float64) for a in (x, scale, bias))
    mean = x.mean(-1)
    invvar = 1 / np.sqrt(((x - mean[..., None]) ** 2).mean(-1) + epsilon)
    return (x - mean[..., None]) * invvar[..., None] * scale + bias, mean, invvar


def reference_backward(x, scale, epsilon, dy, dmean=0.0, dinvvar=0.0):
    """dx, dscale, dbias in float64, from the gradients of y, mean and invvar; derived from the definition:

    xhat = c * v with c = x - mean, v = (mean(c^2) + epsilon)^(-1/2); so dv/dx = -v^3 c / n, dc/dx = 1 - 1/n.
    """
    x, scale, dy = (np.asarray(a, dtype=np.float64) for a in (x, scale, dy))
    n = x.shape[-1]
    _, mean, invvar = reference_forward(x, scale, np.zeros(n), epsilon)
    centred, v = x - mean[..., None], invvar[..., None]
    dxhat = dy * scale
    dv = (dxhat * centred).sum(-1, keepdims=True) + np.broadcast_to(dinvvar, mean.shape)[..., None]
    dcentred = dxhat * v - dv * v**3 * centred / n
    dx = dcentred - dcentred.mean(-1, keepdims=True) + np.broadcast_to(dmean, mean.shape)[..., None] / n
    leading = tuple(range(x.ndim - 1))
    return dx, (dy * centred * v).sum(leading), dy.sum(leading)
