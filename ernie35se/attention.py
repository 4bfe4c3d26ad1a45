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
from paddle.autograd import PyLayer
from paddlenlp.utils.log import logger

from . import cpu_ops
from .configuration import Ernie35Config

HIDDEN = -1e9  # additive mask: lost beside any score, yet a row of nothing else stays finite in float32's range
BLOCK = 256  # queries that the block form takes at a time


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
    """Attention on a CPU that takes some queries at a time, each block with the keys up to its end: the upper triangle is
    skipped, no (T, S) matrix is kept, and the backward pass computes the probabilities again (Dao et al. 2022). The causal
    form runs in the CPU op; under a mask, or without the op, Paddle's operators run block by block. Training keeps the
    plain form where that is one block and no op, or another dtype."""
    if need_weights:
        return eager_attention(query, key, value, mask, need_weights)
    ops = cpu_ops.usable(query, key, value)
    if mask is None and ops is not None:
        return ops.cpu_causal_attention(query, key, value)[0], None
    trains = paddle.is_grad_enabled() and not (query.stop_gradient and key.stop_gradient and value.stop_gradient)
    if trains and (query.shape[1] <= BLOCK or query.dtype != paddle.float32):
        return eager_attention(query, key, value, mask)
    return _AttentionInBlocks.apply(query, key, value, mask), None


class _AttentionInBlocks(PyLayer):
    """Heads come first, (H, B, T, D), and lie in memory so: Paddle adds a mask (B, T, S) along trailing axes, and slices
    along the third, many times quicker than along others or through views."""

    @staticmethod
    def forward(ctx, query, key, value, mask):
        q, k, v = map(_heads_first, (query * query.shape[-1] ** -0.5, key, value))
        parts = [paddle.matmul(weights.astype(v.dtype), v[:, :, :seen]) for _, seen, weights in _blocks(q, k, mask)]
        context = _joined(parts).transpose([1, 2, 0, 3])  # (B, T, H, D)
        ctx.save_for_backward(query, key, value, mask, context)
        return context

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, mask, context = ctx.saved_tensor()
        scale = query.shape[-1] ** -0.5
        q, k, v, context, gradient = map(_heads_first, (query * scale, key, value, context, gradient))
        through_softmax = (context * gradient).sum(-1, keepdim=True)  # (H, B, T, 1): sum of weights times their gradients
        dq, dk, dv = [], paddle.zeros(k.shape, k.dtype), paddle.zeros(v.shape, v.dtype)
        for rows, seen, weights in _blocks(q, k, mask):
            above = gradient[:, :, rows]
            unseen = paddle.zeros([*k.shape[:2], k.shape[2] - seen, k.shape[3]], k.dtype)
            dv.add_(paddle.concat([paddle.matmul(weights, above, transpose_x=True), unseen], axis=2))
            scores = paddle.matmul(above, v[:, :, :seen], transpose_y=True)  # the gradient of weights, then of scores
            scores.subtract_(through_softmax[:, :, rows]).multiply_(weights)
            dq.append(paddle.matmul(scores, k[:, :, :seen]))
            dk.add_(paddle.concat([paddle.matmul(scores, q[:, :, rows], transpose_x=True), unseen], axis=2))
            del weights, scores  # before the next block's exist
        found = (x.transpose([1, 2, 0, 3]) for x in (_joined(dq) * scale, dk, dv))
        wanted = [None if x.stop_gradient else d for x, d in zip((query, key, value), found)]  # Paddle insists on None
        return (*wanted, *([] if mask is None else [None]))


def _blocks(query, key, mask):
    """Each block of query (H, B, T, D): its slice of T, how many keys of (H, B, S, D) it may see, its probabilities
    (H, B, rows, seen) in float32."""
    length, ahead = query.shape[2], key.shape[2] - query.shape[2]
    for start in range(0, length, BLOCK):
        rows, seen = slice(start, min(start + BLOCK, length)), ahead + min(start + BLOCK, length)
        if mask is None:
            hidden = paddle.full([rows.stop - start, seen], HIDDEN).triu(ahead + start + 1)
        else:
            hidden = mask[:, 0, rows, :seen]
        scores = paddle.matmul(query[:, :, rows], key[:, :, :seen], transpose_y=True).astype("float32").add_(hidden)
        yield rows, seen, F.softmax_(scores)
        del scores  # before the next block's exist


def _heads_first(x: paddle.Tensor) -> paddle.Tensor:
    """(B, T, H, D) -> (H, B, T, D)"""
    return x.transpose([2, 0, 1, 3]).contiguous()


def _joined(parts: list) -> paddle.Tensor:
    return parts[0] if len(parts) == 1 else paddle.concat(parts, axis=2)


def choose_core(config: Ernie35Config, need_weights: bool = False):
    """The core that a model runs: flash where it is asked for and there is a GPU, block by block on a CPU, else eager."""
    device = paddle.get_device()
    if config.use_flash_attention and not need_weights:
        if device.startswith("gpu"):
            return flash_attention
        _say_once("use_flash_attention is on, but there is no GPU: attention runs in its CPU form.")
    return blockwise_attention if device == "cpu" and not need_weights else eager_attention


def score_rows(config: Ernie35Config, length: int, precision: str = "float32") -> int | None:
    """Of how many queries the scores exist at a time in training, in the causal form: None for all `length`, which are
    kept for the backward pass; else they pass, and where a kernel holds them, 0."""
    core = choose_core(config)
    if core is flash_attention or (core is blockwise_attention and precision == "float32" and cpu_ops.usable() is not None):
        return 0
    return BLOCK if core is blockwise_attention and precision == "float32" and length > BLOCK else None


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
