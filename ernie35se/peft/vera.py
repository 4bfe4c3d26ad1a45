"""VeRA: frozen random matrices, the same for all layers, and two learnt vectors (Kopiczko et al. 2023).

    s x A diag(d) B diag(b)    A (in, r) and B (r, out) frozen, d starts at 0.1, b at 0; s = vera_alpha / r

A and B are slices of two matrices drawn from the saved seed, so they need not be saved. With `pissa_init`,
PaddleNLP's own variant, A and B are W's top singular triplets, d and b start at 1, and B is learnt as well.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar, Optional

import numpy as np
import paddle

from .base import AdapterConfig, AdapterLinear, generator, top_singular


@dataclass
class VeRAConfig(AdapterConfig):
    """Attributes beyond AdapterConfig's: rank `r`, `vera_alpha` (None: r), `vera_dropout`, `pissa_init`."""

    method: ClassVar[str] = "vera"

    r: int = 8
    vera_alpha: Optional[float] = None
    vera_dropout: float = 0.0
    pissa_init: bool = False

    def __post_init__(self):
        self.require_positive("r")
        self.vera_alpha = self.r if self.vera_alpha is None else self.vera_alpha
        self.require_number("vera_alpha", positive=True)
        self.require_number("vera_dropout", below=1)
        if self.pissa_init and self.vera_alpha != self.r:
            raise ValueError(
                f"vera: pissa_init needs the scale 1, vera_alpha = r = {self.r}; leave vera_alpha out."
            )

    def name(self) -> str:
        return "VeRA"


@functools.lru_cache(maxsize=64)  # layers of one size share their tensor
def _shared_random(seed: int, side: str, length: int, rank: int, dtype) -> paddle.Tensor:
    """(length, rank): the first rows of one endless matrix, so that layers of all sizes slice the same
    one."""
    raw = generator(seed, f"vera.{side}").uniform(-1, 1, (length, rank))
    fan_in = length if side == "A" else rank
    return paddle.to_tensor(
        raw * math.sqrt(3 / fan_in), dtype=dtype
    )  # keeps the variance of what passes through


class VeRALinear(AdapterLinear):
    """Two learnt vectors around frozen matrices."""

    def __init__(self, name, base, config: VeRAConfig, start: bool = True):
        super().__init__(base, config.vera_dropout)
        self.scaling, self.pissa_init = config.vera_alpha / config.r, config.pissa_init
        rank, inside, outside = config.r, self.in_features, self.out_features
        if config.pissa_init:
            a, b = np.zeros([inside, rank]), np.zeros([rank, outside])
            if start:
                u, s, v = top_singular(base.weight, rank, name)
                root = np.sqrt(s[:rank])
                a, b = u[:, :rank] * root, root[:, None] * v[:rank]
            self.make("vera_A", a, trainable=False)
            self.make("vera_B", b)
            self.make("vera_B_start", b, trainable=False)
        else:
            shared = _shared_random(config.seed, "A", inside, rank, self._dtype)
            self.register_buffer("vera_A", shared, persistable=False)
            self.register_buffer(
                "vera_B", _shared_random(config.seed, "B", outside, rank, self._dtype).t(), persistable=False
            )
        self.make("vera_d", np.full([rank], 1.0 if config.pissa_init else 0.1))
        self.make("vera_b", np.full([outside], 1.0 if config.pissa_init else 0.0))

    def update(self, x):
        return (x @ self.vera_A * self.vera_d) @ self.vera_B * self.vera_b * self.scaling

    def kept_by_update(self):
        return 2 * len(self.vera_d) + self.out_features

    def taken_from_base(self):
        return self.vera_A @ self.vera_B_start if self.pissa_init else None
