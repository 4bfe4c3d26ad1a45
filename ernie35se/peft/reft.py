"""ReFT: edit the hidden state of a few prompt tokens behind chosen blocks (Wu et al. 2024, arXiv:2404.03592).

    LoreftIntervention   h + R^T (act(W h + b) - R h)      R (r, C) with orthonormal rows
    TinyIntervention     h + diag(b) B^T diag(a) A^T h     without R's own projection; B starts at 0

R is kept orthonormal by construction: the parameter that is learnt goes through Gram-Schmidt first. Tokens
are the first and last of the prompt, `f7+l7` for seven each (a token counts once where the two meet). In
generation the prompt is edited while it is read, new tokens are not. The edit depends on the token's place,
so it cannot be merged, and packed rows have no one prompt.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

from .base import Adapter, AdapterConfig, blocks_of, generator, kaiming_uniform
from .tokens import BatchNotes

INTERVENTIONS = ("LoreftIntervention", "TinyIntervention")
ACTIVATIONS = {"linear": lambda x: x, "relu": F.relu, "gelu": F.gelu, "silu": F.silu, "tanh": paddle.tanh}


@dataclass
class ReFTConfig(AdapterConfig):
    """Attributes beyond AdapterConfig's: `layers`, "all" or numbers of blocks separated by `;`; `position`,
    such as f7+l7; `intervention_type`; `rank`; `act_fn`; `add_bias`, whether W has b; `dropout` on what is
    added."""

    method: ClassVar[str] = "reft"

    layers: str = "all"
    position: str = "f7+l7"
    intervention_type: str = "LoreftIntervention"
    rank: int = 8
    act_fn: str = "linear"
    add_bias: bool = True
    dropout: float = 0.0

    def __post_init__(self):
        self.require_positive("rank")
        if self.intervention_type not in INTERVENTIONS:
            raise ValueError(
                f"reft: intervention_type = {self.intervention_type!r}: expected "
                f"{' or '.join(INTERVENTIONS)}."
            )
        if self.act_fn not in ACTIVATIONS:
            raise ValueError(f"reft: act_fn = {self.act_fn!r}: expected one of {', '.join(ACTIVATIONS)}.")
        self.require_number("dropout", below=1)
        self.first_and_last()

    def first_and_last(self) -> tuple[int, int]:
        """Numbers of tokens at the prompt's start and end."""
        counts = re.fullmatch(r"(?:f(\d+))?\+?(?:l(\d+))?", self.position)
        if not counts or not any(map(int, filter(None, counts.groups()))):
            raise ValueError(f"reft: position = {self.position!r}: expected such as f7+l7, f3 or l1.")
        return tuple(int(count or 0) for count in counts.groups())

    def layer_numbers(self, count: int) -> list[int]:
        """Which of `count` blocks are edited."""
        if self.layers == "all":
            return list(range(count))
        numbers = [int(part) if part.strip().isdigit() else -1 for part in re.split("[;,]", self.layers)]
        if not all(0 <= number < count for number in numbers) or len(set(numbers)) < len(numbers):
            raise ValueError(
                f"reft: layers = {self.layers!r}: expected all, or numbers from 0 to {count - 1} such as 0;2."
            )
        return numbers

    def name(self) -> str:
        return "ReFT"


class Intervention(Adapter):
    """An edit of hidden states (B, T, C)."""

    def __init__(self, width: int, config: ReFTConfig, dtype):
        super().__init__(dtype=dtype)
        self.width, self.rank = width, config.rank
        self.dropout = nn.Dropout(config.dropout)

    def kept_floats(self, rows, length):
        return rows * length * (2 * self.width + 3 * self.rank)


class LoreftIntervention(Intervention):
    """h + R^T (act(W h + b) - R h)."""

    def __init__(self, name, width: int, config: ReFTConfig, dtype):
        super().__init__(width, config, dtype)
        start = generator(config.seed, f"{name}.rotate").normal(size=(width, config.rank))
        self.make("rotate", np.linalg.qr(start)[0])
        self.make(
            "source", kaiming_uniform(config.seed, f"{name}.source", (width, config.rank), fan_in=width)
        )
        self.bias = self.make("source_bias", np.zeros([config.rank])) if config.add_bias else None
        self.act = ACTIVATIONS[config.act_fn]

    def rotation(self) -> paddle.Tensor:
        """R^T (C, r), orthonormal columns."""
        return orthonormal(self.rotate.astype("float32")).astype(self.rotate.dtype)

    def forward(self, h):
        rotation = self.rotation()
        return h + self.dropout((self.act(F.linear(h, self.source, self.bias)) - h @ rotation) @ rotation.t())


class TinyIntervention(Intervention):
    """h + diag(b) B^T diag(a) A^T h."""

    def __init__(self, name, width: int, config: ReFTConfig, dtype):
        super().__init__(width, config, dtype)
        self.make(
            "param_A", kaiming_uniform(config.seed, f"{name}.param_A", (width, config.rank), fan_in=width)
        )
        self.make("param_B", np.zeros([config.rank, width]))
        self.make("param_a", np.ones([config.rank]))
        self.make("param_b", np.ones([width]))

    def forward(self, h):
        return h + self.dropout((h @ self.param_A * self.param_a) @ self.param_B * self.param_b)


def orthonormal(columns: paddle.Tensor) -> paddle.Tensor:
    """(C, r) by Gram-Schmidt: each column loses its parts along those before it and gets length 1. (Paddle's
    own QR ends the process on some CPUs.)"""
    done = []
    for column in columns.unbind(axis=1):
        for _ in range(2 if done else 0):  # a second time takes away what rounding left
            before = paddle.stack(done, axis=1)
            column = column - before @ (before.t() @ column)
        done.append(column / column.norm())
    return paddle.stack(done, axis=1)


def edited_tokens(prompt: paddle.Tensor, first: int, last: int) -> paddle.Tensor:
    """(B, T) booleans, prompt tokens -> those among the `first` first and the `last` last of each row."""
    order = prompt.astype("int64").cumsum(axis=-1)  # 1, 2, ... within the prompt
    return prompt & ((order <= first) | (order > order[:, -1:] - last))


def wrap(model, config: ReFTConfig, start: bool = True) -> None:
    """Add the interventions, as `model.reft`, and hook them behind the blocks; see the package's `wrap`."""
    blocks = blocks_of(model)
    numbers = config.layer_numbers(len(blocks))
    kind = {"LoreftIntervention": LoreftIntervention, "TinyIntervention": TinyIntervention}[
        config.intervention_type
    ]
    width = getattr(model.config, "hidden_size", None) or model.get_input_embeddings().weight.shape[-1]
    dtype = next(iter(model.parameters())).dtype
    if config.rank > width and kind is LoreftIntervention:
        raise ValueError(
            f"reft: rank = {config.rank}: hidden states have {width} dimensions, so at most {width} directions are orthonormal."
        )
    model.reft = nn.LayerDict({str(n): kind(f"reft.{n}", width, config, dtype) for n in numbers})
    notes, (first, last) = BatchNotes(model), config.first_and_last()

    def hook(intervention):
        def after(block, inputs, outputs):
            h = outputs[0] if isinstance(outputs, tuple) else outputs  # (B, T, C)
            if notes.decodes:
                return outputs
            chosen = edited_tokens(notes.prompt_tokens(*h.shape[:2]), first, last)
            h = paddle.where(chosen.unsqueeze(-1), intervention(h), h)
            return (h, *outputs[1:]) if isinstance(outputs, tuple) else h

        return after

    for number in numbers:
        blocks[number].register_forward_post_hook(hook(model.reft[str(number)]))
