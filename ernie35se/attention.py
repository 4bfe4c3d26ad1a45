"""Attention cores behind one signature.

A core takes query (B, T, H, D), key and value (B, S, H, D), and an additive mask broadcastable to (B, H, T, S), and returns
the context (B, T, H, D) and, where `need_weights`, the probabilities (B, H, T, S). Mask None means causal: the T queries
are the last of the S tokens, and each sees the tokens up to itself. Softmax runs in float32.

Query rows that may look nowhere (padding) hold something finite that nothing depends on.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import paddle
import paddle.nn.functional as F
from paddlenlp.utils.log import logger

from . import cpu_ops
from .configuration import Ernie35Config

HIDDEN = -1e9  # additive mask: lost beside any score, yet a row of nothing else stays finite in float32's range


class AttentionInputs(NamedTuple):
    """What all layers of one forward share."""

    batch: int  # B
    core: callable  # one of the functions below
    cos: paddle.Tensor  # (B or 1, T, 1, D/2)
    sin: paddle.Tensor
    mask: paddle.Tensor | None  # additive (B or 1, 1, T, S)
    use_cache: bool = False
    need_weights: bool = False
    recompute_core: bool = False
    last_only: bool = False  # the core answers the last query alone, and only that token goes on


def eager_attention(query, key, value, mask=None, need_weights=False):
    """The plain form, softmax(Q K^T / sqrt(D)) V (Vaswani et al. 2017, section 3.2.1)."""
    head_dim = query.shape[-1]
    if mask is None:
        mask = _additive(_causal(query.shape[1], key.shape[1]))
    query, key, value = (x.transpose([0, 2, 1, 3]) for x in (query, key, value))  # (B, H, T or S, D)
    scores = paddle.matmul(query / math.sqrt(head_dim), key, transpose_y=True)  # (B, H, T, S)
    weights = F.softmax(scores.astype("float32") + mask, axis=-1).astype(value.dtype)
    context = paddle.matmul(weights, value).transpose([0, 2, 1, 3])  # (B, T, H, D)
    return context, (weights if need_weights else None)


def flash_attention(query, key, value, mask=None, need_weights=False):
    """Paddle's fused attention (Dao et al. 2022), which keeps no (T, S) matrix."""
    if need_weights:
        raise ValueError("flash attention has no probabilities to return; use eager attention for output_attentions.")
    query_length, key_length = query.shape[1], key.shape[1]
    if mask is None and query_length != key_length:  # its own causal form counts from the first column
        mask = _additive(_causal(query_length, key_length))
    if mask is not None:
        mask = mask.clip(min=-6e4).astype(query.dtype)  # float16 ends at 65504
    context = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
    return context, None


def blockwise_attention(query, key, value, mask=None, need_weights=False):
    """The CPU op's causal attention, which goes through the keys block by block and keeps no (T, S) matrix; the plain form
    where there is a mask, another dtype, or no op."""
    ops = cpu_ops.usable(query, key, value)
    if mask is not None or need_weights or ops is None:
        return eager_attention(query, key, value, mask, need_weights)
    return ops.cpu_causal_attention(query, key, value)[0], None


def choose_core(config: Ernie35Config, need_weights: bool = False):
    """The core that a model runs: flash where it is asked for and there is a GPU, block by block on a CPU that has the
    CPU ops, else eager."""
    if config.use_flash_attention and not need_weights:
        if paddle.get_device().startswith("gpu"):
            return flash_attention
        _say_once("use_flash_attention is on, but there is no GPU: attention runs in its CPU form.")
    if not need_weights and paddle.get_device() == "cpu" and cpu_ops.usable() is not None:
        return blockwise_attention
    return eager_attention


def prepare_mask(core, attention_mask: paddle.Tensor | None, query_length: int, key_length: int):
    """What each query may see, the causal mask and the caller's together, made once for all layers.

    Args:
        attention_mask: None, (B, S) with 1 for real tokens, or (B, T, S) or (B, 1, T, S) with 1 where a query may
            look (packed samples). Booleans or integers.

    Returns:
        Additive float32 (B or 1, 1, T, S), or None where `core` is faster in its own causal form.

    Raises:
        ValueError: a mask of another shape, or an additive one.
    """
    if attention_mask is None:
        return None if core in (flash_attention, blockwise_attention) else _additive(_causal(query_length, key_length))
    if attention_mask.dtype not in (paddle.bool, paddle.int32, paddle.int64, paddle.uint8):
        raise ValueError(
            f"attention_mask has dtype {attention_mask.dtype}; expected booleans or integers, 1 where a token counts. "
            "Additive masks are not taken."
        )
    shape = attention_mask.shape
    expected = {2: [key_length], 3: [query_length, key_length], 4: [1, query_length, key_length]}
    if len(shape) not in expected or shape[1:] != expected[len(shape)]:
        raise ValueError(
            f"attention_mask has shape {shape}; expected (batch, {key_length}), (batch, {query_length}, {key_length}) "
            f"or (batch, 1, {query_length}, {key_length}) for {query_length} new of {key_length} tokens."
        )
    allowed = attention_mask.astype("bool").reshape([shape[0], 1, -1, key_length])  # (B, 1, 1 or T, S)
    return _additive(allowed & _causal(query_length, key_length))


def _causal(query_length: int, key_length: int) -> paddle.Tensor:
    """Boolean (1, 1, T, S): query t is the token in column S - T + t and may see the columns up to that one."""
    ones = paddle.ones([1, 1, query_length, key_length], dtype="bool")
    return ones.tril(key_length - query_length)


def _additive(allowed: paddle.Tensor) -> paddle.Tensor:
    """0 where allowed, elsewhere HIDDEN."""
    return (~allowed).astype("float32") * HIDDEN


_said = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        logger.info(text)
