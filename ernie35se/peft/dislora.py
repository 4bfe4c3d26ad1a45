"""DisLoRA: train W's weakest directions, then add the ones that the task hardly moved (EMNLP 2025, main 695).

W^T = U diag(S) V is the singular value decomposition of the (out, in) matrix. The r directions with the
smallest singular values form the trainable part s U_r diag(S_r) V_r, s = dislora_alpha / r, and the base
loses what that starts as. After `dash_flag` optimizer steps each original direction i has changed by

    |u_i^T D v_i| / (|S_i| + eps),  D what training has added to the matrix

and the `s_tsd` directions of the lowest rate join as s U_tsd diag(S_tsd) V_tsd with only S_tsd learnt. S_tsd
starts at 0 (as in LoRA-Dash, Si et al. 2024), so that the output does not jump when they join.

The loss gains ortho_lambda (|U_r^T U_r - I|^2 + |V_r V_r^T - I|^2), Frobenius norms, summed over the layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import paddle

from .base import AdapterConfig, AdapterLinear, top_singular

EPSILON = 1e-6


@dataclass
class DisLoRAConfig(AdapterConfig):
    """Attributes beyond AdapterConfig's: rank `r`, `dislora_alpha`, `dislora_dropout`; `dash_flag`, the
    optimizer step after which `s_tsd` more directions join; `prefer_small_sigma`, or the opposite choices;
    `ortho_lambda`."""

    method: ClassVar[str] = "dislora"

    r: int = 8
    dislora_alpha: float = 12
    dislora_dropout: float = 0.0
    dash_flag: int = 50
    s_tsd: int = 8
    prefer_small_sigma: bool = True
    ortho_lambda: float = 1.0

    def __post_init__(self):
        self.require_positive("r", "dash_flag", "s_tsd")
        if self.s_tsd > self.r:
            raise ValueError(f"dislora: s_tsd = {self.s_tsd}: expected at most the rank, {self.r}.")
        self.require_number("dislora_alpha", positive=True)
        self.require_number("dislora_dropout", below=1)
        self.require_number("ortho_lambda")

    @property
    def scaling(self) -> float:
        return self.dislora_alpha / self.r

    def name(self) -> str:
        return "DisLoRA"


class DisLoRALinear(AdapterLinear):
    """U (out, r), S (r,), V (r, in) and the same for the directions that join, 0 until then."""

    def __init__(self, name, base, config: DisLoRAConfig, start: bool = True):
        super().__init__(base, config.dislora_dropout)
        self.name, self.config = name, config
        rank, inside, outside = config.r, self.in_features, self.out_features
        u, s, v = np.zeros([outside, rank]), np.zeros([rank]), np.zeros([rank, inside])
        if start:
            left, values, right = self._decomposed(base.weight)
            chosen = np.arange(len(values))[-rank:] if config.prefer_small_sigma else np.arange(rank)
            u, s, v = left[:, chosen], values[chosen], right[chosen]
        for part, value in (("U", u), ("S", s), ("V", v)):
            self.make(f"dislora_{part}", value)
            self.make(f"dislora_{part}_start", value, trainable=False)
        self.make("dislora_U_tsd", np.zeros([outside, config.s_tsd]), trainable=False)
        self.make("dislora_S_tsd", np.zeros([config.s_tsd]))
        self.make("dislora_V_tsd", np.zeros([config.s_tsd, inside]), trainable=False)

    def _decomposed(self, weight):
        """U (out, n), S (n,), V (n, in) of the (out, in) matrix."""
        v, s, u = top_singular(weight, self.config.r, self.name)
        return u.T, s, v.T

    def update(self, x):
        main = (x @ self.dislora_V.t() * self.dislora_S) @ self.dislora_U.t()
        joined = (x @ self.dislora_V_tsd.t() * self.dislora_S_tsd) @ self.dislora_U_tsd.t()
        return (main + joined) * self.config.scaling

    def kept_by_update(self):
        return 2 * (self.config.r + self.config.s_tsd)

    def _main_part(self, suffix=""):
        u, s, v = (getattr(self, f"dislora_{part}{suffix}") for part in "USV")
        return ((u * s) @ v).t() * self.config.scaling  # (in, out)

    def taken_from_base(self):
        return self._main_part("_start")

    def extra_loss(self):
        u, v = self.dislora_U, self.dislora_V
        eye = paddle.eye(self.config.r, dtype=u.dtype)
        return self.config.ortho_lambda * (((u.t() @ u - eye) ** 2).sum() + ((v @ v.t() - eye) ** 2).sum())

    @paddle.no_grad()
    def after_step(self, step: int) -> None:
        if step != self.config.dash_flag:
            return
        left, values, right = self._decomposed(self.base.weight + self.taken_from_base())
        change = (
            (self._main_part() - self.taken_from_base()).astype("float32").numpy().astype("float64").T
        )  # (out, in)
        rate = np.abs(np.einsum("oi,on,ni->n", change, left, right)) / (np.abs(values) + EPSILON)
        order = np.argsort(rate, kind="stable")
        if not self.config.prefer_small_sigma:
            order = order[::-1]
        chosen = order[: self.config.s_tsd]
        self.dislora_U_tsd.set_value(
            paddle.to_tensor(left[:, chosen], dtype="float32").astype(self.dislora_U_tsd.dtype)
        )
        self.dislora_V_tsd.set_value(
            paddle.to_tensor(right[chosen], dtype="float32").astype(self.dislora_V_tsd.dtype)
        )
