"""QLoRA's frozen weights in 4 or 8 bits (Dettmers et al. 2023, arXiv:2305.14314), on any device.

A weight is cut into blocks of `weight_blocksize` values. Each block keeps its largest magnitude, the scale,
and for every value the nearest code, two codes to a byte where they have 4 bits:

    nf4               the 16 quantiles of a normal distribution, with 0 among them
    fp4               a 4-bit float: 0, 1/192, 1/6, 1/4, 1/3, 1/2, 2/3, 1 and their negatives
    weight_only_int8  -127 ... 127 in equal steps
    weight_only_int4  -7 ... 7 in equal steps

Double quantisation stores the scales themselves in 8 bits: less their mean, in blocks of 256.

The forward dequantises, and so does the backward: no full-precision weight stays in memory between the two.

A GPU runs the same Paddle operations. The CUDA kernels that PaddleNLP 3.0.0b4 calls are not used there: those of nf4 and
fp4 (`paddleslim_ops`) are in no released package, and `paddle.nn.quant.weight_only_linear` takes half precision alone, with
one scale a column or fixed groups, so it would not be the numbers that are trained, saved and merged here.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

SCALE_BLOCK = 256
FLOAT32 = 4  # bytes
ALGORITHMS = ("nf4", "fp4", "weight_only_int8", "weight_only_int4")


def _normal_float_codes() -> list[float]:
    """Quantiles at equal steps of probability, 8 above zero and 7 below, scaled into -1 ... 1 (QLoRA,
    appendix E)."""
    offset, quantile = 0.9677083, NormalDist().inv_cdf
    above = [quantile(p) for p in np.linspace(offset, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
    return sorted(value / max(above) for value in [*below, 0.0, *above])


_FP4 = [0.0, 1 / 192, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1.0]
CODES: dict[str, np.ndarray] = {
    "nf4": np.array(_normal_float_codes(), dtype="float32"),
    "fp4": np.array([-value for value in _FP4[:0:-1]] + _FP4, dtype="float32"),
    "weight_only_int8": np.arange(-127, 128, dtype="float32") / 127,
    "weight_only_int4": np.arange(-7, 8, dtype="float32") / 7,
}


def nearest_codes(values: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Number of the code nearest to each value, uint8."""
    middles = ((codes[1:].astype("float64") + codes[:-1]) / 2).astype("float32")
    return np.searchsorted(middles, values).astype(np.uint8)


def quantise_blocks(values: np.ndarray, codes: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Flat values (n,), float32, to code numbers (blocks, block), the last block filled with zeros, and
    scales (blocks,)."""
    blocks = np.pad(values, (0, -len(values) % block)).reshape(-1, block)
    scales = np.abs(blocks).max(axis=1)
    return nearest_codes(blocks / np.where(scales == 0, 1, scales)[:, None], codes), scales


class _Linear(paddle.autograd.PyLayer):
    """x W + b that keeps nothing but the layer for its backward."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return F.linear(x, layer.weight.astype(x.dtype), layer.bias)

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.layer.weight.astype(gradient.dtype).t()


class QuantisedLinear(nn.Layer):
    """A frozen linear layer whose weight is stored in 4 or 8 bits.

    Args:
        base: the layer it replaces. algorithm: one of ALGORITHMS. block: values that share a scale.
        double: whether the scales are quantised too.

    Attributes:
        weight: (in, out), computed anew at each access.
    """

    is_quantised_linear = True

    def __init__(self, base: nn.Linear, algorithm: str, block: int = 64, double: bool = False):
        super().__init__(dtype=base._dtype)
        self.shape, self.codes, self.double = base.weight.shape, CODES[algorithm], double
        self.bias = base.bias
        numbers, scales = quantise_blocks(base.weight.astype("float32").numpy().ravel(), self.codes, block)
        self.block, self.two_a_byte = block, len(self.codes) <= 16
        if self.two_a_byte:
            numbers = numbers.ravel()
            numbers = numbers[0::2] | numbers[1::2] << 4
        self._keep("quantised", numbers.ravel())
        self._keep("table", _byte_table(self.codes) if self.two_a_byte else self.codes[:, None])
        if double:
            self.scale_mean = float(scales.mean())
            numbers, coarse = quantise_blocks(
                scales - self.scale_mean, CODES["weight_only_int8"], SCALE_BLOCK
            )
            self._keep("scale_numbers", numbers.ravel()[: len(scales)])
            self._keep("scale_scales", coarse)
        else:
            self._keep("scales", scales)

    def _keep(self, name: str, value: np.ndarray) -> None:
        self.register_buffer(name, paddle.to_tensor(value))

    @property
    def weight(self) -> paddle.Tensor:
        with paddle.no_grad():
            values = F.embedding(self.quantised.astype("int32"), self.table).reshape([-1, self.block])
            values = values * self._scales().unsqueeze(-1)
            rows, columns = self.shape
            return values.flatten()[: rows * columns].reshape(self.shape).astype(self._dtype)

    def _scales(self) -> paddle.Tensor:
        if not self.double:
            return self.scales
        values = (self.scale_numbers.astype("float32") - 127) / 127
        coarse = self.scale_scales.repeat_interleave(SCALE_BLOCK)[: values.shape[0]]
        return values * coarse + self.scale_mean

    def forward(self, x):
        if x.stop_gradient:
            return F.linear(x, self.weight.astype(x.dtype), self.bias)
        return _Linear.apply(x, self)

    def stored_bytes(self) -> int:
        """Bytes of the weight as it is stored, scales included, the code table not."""
        return sum(b.size * b.element_size() for name, b in self.named_buffers() if name != "table")

    def to_linear(self) -> nn.Linear:
        """An ordinary linear layer with the dequantised weight."""
        layer = nn.Linear(*self.shape, bias_attr=None if self.bias is not None else False)
        layer = layer.astype(self._dtype)
        layer.weight.set_value(self.weight)
        if self.bias is not None:
            layer.bias.set_value(self.bias)
        return layer


def _byte_table(codes: np.ndarray) -> np.ndarray:
    """(256, 2): the two values that a byte stands for."""
    padded = np.zeros(16, dtype="float32")
    padded[: len(codes)] = codes
    byte = np.arange(256)
    return np.stack([padded[byte & 15], padded[byte >> 4]], axis=1)


def stored_bytes(size: int, algorithm: str, block: int, double: bool) -> int:
    """Bytes in which QuantisedLinear stores a weight of `size` values, scales included."""
    blocks = -(-size // block)
    scales = blocks + FLOAT32 * -(-blocks // SCALE_BLOCK) if double else FLOAT32 * blocks
    return blocks * block // (2 if len(CODES[algorithm]) <= 16 else 1) + scales


def check_settings(algorithm: str, block: int) -> None:
    """Raise a ValueError for an unknown algorithm, or a block size that is not even and at least 2."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"weight_quantize_algo = {algorithm!r}: expected one of {', '.join(ALGORITHMS)}.")
    if isinstance(block, bool) or not isinstance(block, int) or block < 2 or block % 2:
        raise ValueError(f"weight_blocksize = {block!r}: expected an even number, such as 64.")
