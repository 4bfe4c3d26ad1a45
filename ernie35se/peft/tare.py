"""TARE: token-aware editing of the FFN's output (PaddleNLP's peft/tare).

Behind the output projection, a linear gate gives every token n scores from its hidden state h (C,). The
softmax over the k best weighs k editors, h * a_i + b_i. a starts at 1 and b at 0, so all of it starts as the
identity. What it does depends on the token, so it cannot be merged into a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import paddle
import paddle.nn.functional as F

from .base import AdapterConfig, AdapterLinear, kaiming_uniform

# Ernie35's, and what the models of PaddleNLP call theirs.
FFN_OUTPUTS = r".*\.(mlp\.down_proj|self_attn_mlp\.o_proj|dense_4h_to_h|linear2|mlp\.(fc_out|c_proj))"


@dataclass
class TareConfig(AdapterConfig):
    """Attributes beyond AdapterConfig's: `tare_n` editors, `tare_k` of them a token."""

    method: ClassVar[str] = "tare"

    tare_n: int = 8
    tare_k: int = 7

    def __post_init__(self):
        self.require_positive("tare_n", "tare_k")
        if self.tare_k > self.tare_n:
            raise ValueError(f"tare: tare_k = {self.tare_k}: expected at most tare_n, {self.tare_n}.")
        self.target_modules = self.target_modules or [FFN_OUTPUTS]

    def name(self) -> str:
        return "TARE"


class TareLinear(AdapterLinear):
    """A linear layer and the editors behind it."""

    mergeable = False

    def __init__(self, name, base, config: TareConfig, start: bool = True):
        super().__init__(base)
        self.k, width = config.tare_k, self.out_features
        self.make(
            "tare_gate",
            kaiming_uniform(config.seed, f"{name}.tare_gate", (width, config.tare_n), fan_in=width),
        )
        self.make("tare_a", np.ones([config.tare_n, width]))
        self.make("tare_b", np.zeros([config.tare_n, width]))

    def forward(self, x):
        h = self.base(x)  # (..., C)
        scores = h @ self.tare_gate  # (..., n)
        best, chosen = paddle.topk(scores, self.k, axis=-1)
        weights = F.softmax(best, axis=-1)  # (..., k)
        weights = (F.one_hot(chosen, scores.shape[-1]).astype(weights.dtype) * weights.unsqueeze(-1)).sum(
            -2
        )  # (..., n)
        return h * (weights @ self.tare_a) + weights @ self.tare_b

    def kept_by_update(self):
        editors = self.tare_a.shape[0]
        return 2 * self.out_features + editors * (self.k + 2) + 3 * self.k
