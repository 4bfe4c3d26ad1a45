"""How each weight is cut for tensor parallel: every fused layout declared once, split and merge derived from it.

A weight is cut along one axis. Along that axis it is a row of segments, each shared out evenly: rank r of N gets the r-th
N-th of every segment, one after the other. A plain weight is one segment; the fused ones are

    qkv_gate_up_proj, 3C + 2F columns:  [ q k v interleaved by head : 3C | gate : F | up : F ]
    self_attn_mlp.o_proj, F + C rows:   [ FFN : F | attention : C ]

so a rank holds whole heads and matching gate and up columns. An adapter x A B of a layer is cut with it: B's columns as
the weight's columns, or A's rows as its rows. Needs numpy and the configuration only.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .configuration import Ernie35Config

VOCABULARY_MULTIPLE = 128  # of a new model's vocabulary: matrix units of GPUs want such widths
LOW_RANK_IN = ("lora_A", "lora_A_start")  # an adapter's parameters; its mixers, lora_AB*, are whole everywhere
LOW_RANK_OUT = ("lora_B", "lora_B_start")


class Cut(NamedTuple):
    """axis: the axis that is cut; segments: lengths along it, each shared out evenly."""

    axis: int
    segments: tuple[int, ...]


def layout(name: str, config: Ernie35Config) -> Cut | None:
    """How the parameter of this state-dict name is cut; None where every rank holds it whole.

    Raises:
        ValueError: a name that is no parameter of this model.
    """
    hidden, ffn, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    module, kind = ("." + name).split(".")[-2:]
    columns = {  # cut by output column, bias and all
        "q_proj": (hidden,),
        "k_proj": (hidden,),
        "v_proj": (hidden,),
        "gate_proj": (ffn,),
        "up_proj": (ffn,),
        "qkv_gate_up_proj": (3 * hidden, ffn, ffn),
        "lm_head": (vocab,),
    }
    rows = {  # cut by input row; the bias is added once, after the sum over ranks
        "o_proj": (ffn, hidden) if ".self_attn_mlp." in name else (hidden,),
        "down_proj": (ffn,),
        "embed_tokens": (vocab,),
    }
    if module in columns:
        if kind.startswith("lora_") and kind not in LOW_RANK_OUT:
            return None
        return Cut(0 if kind == "bias" else 1, columns[module])
    if module in rows:
        return Cut(0, rows[module]) if kind in ("weight", *LOW_RANK_IN) else None
    if module.endswith("norm"):
        return None
    raise ValueError(f"{name!r} is not the name of a parameter of this model.")


def split(name: str, array, config: Ernie35Config, degree: int, rank: int):
    """The piece of a weight that one rank of a tensor-parallel group holds.

    Args:
        array: the whole weight, in (in, out) layout: numpy array, Paddle tensor, or a lazily read safetensors slice.
        degree: size N of the group. rank: 0 .. N-1.

    Raises:
        ValueError: a segment that N does not divide, or an array of another length than the configuration says.
    """
    cut = layout(name, config)
    shape = _shape(array)
    if cut is None:
        return array[(slice(None),) * len(shape)]
    _check(name, cut, shape, degree, config)
    pieces, start = [], 0
    for length in cut.segments:
        share = length // degree
        index = [slice(None)] * len(shape)
        index[cut.axis] = slice(start + rank * share, start + (rank + 1) * share)
        pieces.append(array[tuple(index)])
        start += length
    return _concat(pieces, cut.axis)


def merge(name: str, shards: list, config: Ernie35Config):
    """The whole weight from every rank's piece, in rank order: the inverse of `split`.

    Raises:
        ValueError: a piece of another length than this many ranks have: one is missing, or cut for another degree.
    """
    cut = layout(name, config)
    if cut is None:
        return shards[0]
    degree, whole = len(shards), sum(cut.segments)
    seen = [_shape(shard)[cut.axis] for shard in shards]
    if any(length * degree != whole for length in seen):
        raise ValueError(
            f"{name}: {degree} piece{'s' * (degree > 1)} of {', '.join(map(str, seen))} along axis {cut.axis}; the "
            f"configuration expects {whole} in equal parts. A rank's piece is missing, or cut for another degree."
        )
    pieces, start = [], 0
    for length in cut.segments:
        share = length // degree
        for shard in shards:
            index = [slice(None)] * len(_shape(shard))
            index[cut.axis] = slice(start, start + share)
            pieces.append(shard[tuple(index)])
        start += share
    merged = _concat(pieces, cut.axis)
    _check(name, cut, _shape(merged), degree, config)
    return merged


def check_divides(config: Ernie35Config, degree: int) -> None:
    """Raise a ValueError, with the numbers, where `degree` ranks cannot share this model evenly."""
    for field in ("num_attention_heads", "intermediate_size", "vocab_size"):
        size = getattr(config, field)
        if size % degree:
            multiple = math.lcm(degree, VOCABULARY_MULTIPLE) if field == "vocab_size" else degree
            above = -(-size // multiple) * multiple
            raise ValueError(
                f"tensor_parallel_degree {degree} does not divide {field} {size} (remainder {size % degree}). Choose a "
                f"degree that does, or a model with {field} {above}."
            )


def parameter_names(config: Ernie35Config) -> list[str]:
    """State-dict name of every parameter that tensor parallel cuts, in the model's order."""
    names = ["ernie.embed_tokens.weight"]
    last = config.num_hidden_layers - 1
    for layer in range(config.num_hidden_layers):
        if config.parallel_attn_hatf and layer == 0:
            modules = [f"self_attn.{m}" for m in ("q_proj", "k_proj", "v_proj", "o_proj")]
        elif config.parallel_attn_hatf and layer == last:
            modules = [f"mlp.{m}" for m in ("gate_proj", "up_proj", "down_proj")]
        else:
            modules = ["self_attn_mlp.qkv_gate_up_proj", "self_attn_mlp.o_proj"]
        kinds = ("weight", "bias") if config.use_bias else ("weight",)
        names += [f"ernie.layers.{layer}.{module}.{kind}" for module in modules for kind in kinds]
    if not config.tie_word_embeddings:
        names.append("lm_head.weight")
    if config.use_bias and config.weight_share_add_bias:
        names.append("lm_head.bias")
    return [name for name in names if layout(name, config) is not None]


def _check(name: str, cut: Cut, shape: list[int], degree: int, config: Ernie35Config) -> None:
    if shape[cut.axis] != sum(cut.segments):
        raise ValueError(
            f"{name} has shape {shape}; the configuration expects {sum(cut.segments)} along axis {cut.axis} "
            f"({' + '.join(map(str, cut.segments))})."
        )
    if config.num_attention_heads % degree or any(length % degree for length in cut.segments):
        raise ValueError(
            f"{name}: tensor_parallel_degree {degree} must divide {config.num_attention_heads} heads and the "
            f"{' + '.join(map(str, cut.segments))} along axis {cut.axis}."
        )


def _shape(array) -> list[int]:
    return list(array.get_shape() if hasattr(array, "get_shape") else array.shape)


def _concat(pieces: list, axis: int):
    if isinstance(pieces[0], np.ndarray):
        return np.concatenate(pieces, axis)
    import paddle  # only where the pieces are its tensors already

    return paddle.concat(pieces, axis)
