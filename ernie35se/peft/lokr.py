"""LoKr: the update is a Kronecker product (Yeh et al. 2023, arXiv:2309.14859; LyCORIS).

    W^T (out, in) gains s kron(W1, W2);  W1 (o1, i1), W2 (o2, i2) = W2a W2b of rank `lokr_dim`
    o1 o2 = out,  i1 i2 = in

W1 starts at 0. s = lokr_alpha / lokr_dim, and alpha is lokr_dim unless given. o1 and i1 are the largest
divisors that do not exceed the square root (or `factor`), so a prime size gives 1.

With X (i1, i2), the input reshaped, kron(W1, W2) x is W1 X W2^T: the large matrix need never exist.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .base import AdapterConfig, AdapterLinear, kaiming_uniform


@dataclass
class LoKrConfig(AdapterConfig):
    """Attributes beyond AdapterConfig's: `lokr_dim`, the rank of W2; `lokr_alpha` (0: lokr_dim); `factor`,
    the largest size of W1 (-1: as near square as possible); `decompose_both`: W1 of low rank too."""

    method: ClassVar[str] = "lokr"

    lokr_dim: int = 8
    lokr_alpha: float = 0.0
    factor: int = -1
    decompose_both: bool = False

    def __post_init__(self):
        self.require_positive("lokr_dim")
        self.lokr_alpha = self.lokr_alpha or self.lokr_dim
        self.require_number("lokr_alpha", positive=True)
        if self.factor != -1:
            self.require_positive("factor")

    @property
    def scaling(self) -> float:
        return self.lokr_alpha / self.lokr_dim

    def name(self) -> str:
        return "LoKr"


def factorise(size: int, factor: int = -1) -> tuple[int, int]:
    """(m, n) with m n = size and m <= n: `factor` and the rest where it divides, else m the largest divisor
    within it."""
    most = math.isqrt(size)
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    most = most if factor < 0 else min(most, factor)
    m = next(m for m in range(most, 0, -1) if size % m == 0)
    return m, size // m


class LoKrLinear(AdapterLinear):
    """W1 whole (or of low rank), W2 of low rank (whole where that is smaller)."""

    def __init__(self, name, base, config: LoKrConfig, start: bool = True):
        super().__init__(base)
        self.scaling, rank = config.scaling, config.lokr_dim
        (self.i1, self.i2), (self.o1, self.o2) = (
            factorise(size, config.factor) for size in (self.in_features, self.out_features)
        )

        def random(parameter, shape, fan_in):
            return kaiming_uniform(config.seed, f"{name}.{parameter}", shape, fan_in)

        self.whole_w1 = not (config.decompose_both and rank < max(self.o1, self.i1) / 2)
        self.whole_w2 = not rank < max(self.o2, self.i2) / 2
        if self.whole_w1:
            self.make("lokr_w1", np.zeros([self.o1, self.i1]))
        else:
            self.make("lokr_w1_a", np.zeros([self.o1, rank]))
            self.make("lokr_w1_b", random("lokr_w1_b", (rank, self.i1), self.i1))
        if self.whole_w2:
            self.make("lokr_w2", random("lokr_w2", (self.o2, self.i2), self.i2))
        else:
            self.make("lokr_w2_a", random("lokr_w2_a", (self.o2, rank), rank))
            self.make("lokr_w2_b", random("lokr_w2_b", (rank, self.i2), self.i2))

    def update(self, x):
        x = x.reshape([*x.shape[:-1], self.i1, self.i2])  # X
        if self.whole_w2:
            x = x @ self.lokr_w2.t()
        else:
            x = x @ self.lokr_w2_b.t() @ self.lokr_w2_a.t()  # (..., i1, o2)
        w1 = self.lokr_w1 if self.whole_w1 else self.lokr_w1_a @ self.lokr_w1_b
        return (w1 @ x).flatten(-2) * self.scaling

    def kept_by_update(self):
        return self.i1 * (self.o2 + (0 if self.whole_w2 else self.lokr_w2_a.shape[1]))
