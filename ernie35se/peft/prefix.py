"""Prefix tuning: learnt keys and values before every attention layer (Li & Liang 2021, arXiv:2101.00190).

Each layer with attention sees P more keys and values, which every query may look at. They are added where the
layer is called, and taken off the cache that it returns: outside of it nothing knows of them. So positions,
padding, masks and caches are those of the model without a prefix, and recomputation computes the prefix again
along with its block.

The keys are used as they are, without rotation. A layer without attention (the tail block) has no prefix.
With `prefix_projection` a small table is mapped through tanh to all keys and values; after training only the
result matters.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import ClassVar, Optional

import numpy as np
import paddle
from paddle import nn

from ..modeling import FusedBlock, HeadBlock, TailBlock
from .base import Adapter, AdapterConfig, blocks_of, normal

DEVIATION = 0.02  # of the learnt values at the start
HEADS_FIRST = ("MistralAttention", "YuanAttention")  # in paddlenlp 3.0.0b4: keys of (B, H, T, D), not (B, T, H, D)


@dataclass
class PrefixConfig(AdapterConfig):
    """Attributes beyond AdapterConfig's: `num_prefix_tokens`; `prefix_projection` with
    `prefix_projection_hidden_size` (None: the model's hidden size); `prefix_dropout` on the learnt keys and
    values."""

    method: ClassVar[str] = "prefix"

    num_prefix_tokens: int = 128
    prefix_projection: bool = False
    prefix_projection_hidden_size: Optional[int] = None
    prefix_dropout: float = 0.0

    def __post_init__(self):
        self.require_positive("num_prefix_tokens")
        if self.prefix_projection_hidden_size is not None:
            self.require_positive("prefix_projection_hidden_size")
        self.require_number("prefix_dropout", below=1)

    def name(self) -> str:
        return "Prefix"


class PrefixEncoder(Adapter):
    """P tokens to the keys and values of `layers` layers with `heads` heads of size `head_dim`."""

    def __init__(
        self, config: PrefixConfig, layers: int, heads: int, head_dim: int, hidden_size: int, dtype, start
    ):
        super().__init__(dtype=dtype)
        self.layers, self.heads, self.head_dim, self.length = layers, heads, head_dim, config.num_prefix_tokens
        self.projected = config.prefix_projection
        self.dropout = nn.Dropout(config.prefix_dropout) if config.prefix_dropout else None

        def random(name, *shape, deviation=DEVIATION):
            full = f"prefix.{name}"
            self.make(
                name, normal(config.seed, full, shape, deviation) if start else np.zeros(shape, "float32")
            )

        width = 2 * heads * head_dim
        if self.projected:
            inner = config.prefix_projection_hidden_size or hidden_size
            random("embedding", self.length, heads * head_dim, deviation=1.0)
            random("projection_in", heads * head_dim, inner, deviation=(heads * head_dim) ** -0.5)
            self.make("projection_in_bias", np.zeros([inner]))
            random("projection_out", layers, inner, width)
            self.make("projection_out_bias", np.zeros([layers, width]))
        else:
            random("embedding", layers, self.length, width)

    def forward(self, layer: int, batch: int):
        """Keys and values of one layer, each (batch, P, H, D)."""
        if self.projected:
            inner = paddle.tanh(self.embedding @ self.projection_in + self.projection_in_bias)
            values = inner @ self.projection_out[layer] + self.projection_out_bias[layer]
        else:
            values = self.embedding[layer]  # (P, 2 H D)
        values = values if self.dropout is None else self.dropout(values)
        values = values.reshape([1, self.length, 2 * self.heads, self.head_dim]).expand([batch, -1, -1, -1])
        return values.chunk(2, axis=2)

    def kept_floats(self, rows, length):
        """Keys and values with the prefix in front, beside those without."""
        return self.layers * rows * 2 * (length + self.length) * self.heads * self.head_dim


def wrap(model, config: PrefixConfig, start: bool = True) -> None:
    """Add the encoder, as `model.prefix_encoder`, and hook it to the attention layers; see the package's
    `wrap`."""
    settings = model.config
    attentions = [_attention_of(block) for block in blocks_of(model) if not isinstance(block, TailBlock)]
    heads = getattr(settings, "num_key_value_heads", None) or settings.num_attention_heads
    head_dim = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    dtype = next(iter(model.parameters())).dtype
    encoder = PrefixEncoder(config, len(attentions), heads, head_dim, settings.hidden_size, dtype, start)
    model.prefix_encoder = encoder
    for number, layer in enumerate(attentions):
        ours = isinstance(layer, (HeadBlock, FusedBlock))
        before, after = _hooks_of_ours(encoder, number) if ours else _hooks_of_paddlenlp(encoder, number)
        layer.register_forward_pre_hook(before, with_kwargs=not ours)
        layer.register_forward_post_hook(after)


def _attention_of(block):
    """The layer that takes the cache: our blocks themselves, the attention of PaddleNLP's."""
    if isinstance(block, (HeadBlock, FusedBlock)):
        return block
    attention = getattr(block, "self_attn", None)
    named = ("hidden_states", "past_key_value", "attention_mask")
    if attention is None or not set(named) <= set(inspect.signature(attention.forward).parameters):
        raise ValueError(
            f"prefix: {type(block).__name__} has no `self_attn` that takes {', '.join(named)}, as those of Ernie35, Qwen2, "
            "Llama and Gemma do; choose another method."
        )
    if type(attention).__name__ in HEADS_FIRST:
        raise ValueError(
            f"prefix: {type(attention).__name__} keeps its cache with the heads before the tokens, where a prefix has no "
            "place; choose another method."
        )
    return attention


def _joined(prefix, past):
    return tuple(prefix) if not past else tuple(paddle.concat(pair, axis=1) for pair in zip(prefix, past))


def _widened(mask, length):
    """An additive (B, 1, T, S) mask with `length` more columns in front that every query sees."""
    return paddle.concat([paddle.zeros([*mask.shape[:-1], length], dtype=mask.dtype), mask], axis=-1)


def _hooks_of_ours(encoder, number):
    def before(block, inputs):
        x, past, shared = inputs
        if shared.mask is not None:
            shared = shared._replace(mask=_widened(shared.mask, encoder.length))
        return x, _joined(encoder(number, x.shape[0]), past), shared

    def after(block, inputs, outputs):
        x, present, weights = outputs
        return x, tuple(cached[:, encoder.length :] for cached in present), weights

    return before, after


def _hooks_of_paddlenlp(encoder, number):
    def before(attention, inputs, named):
        call = inspect.signature(attention.forward).bind(*inputs, **named)
        call.apply_defaults()
        arguments = call.arguments
        if arguments.get("attn_mask_startend_row_indices") is not None:
            raise ValueError(
                "prefix: packing with flash_mask leaves no place for a prefix; use zero_padding without it."
            )
        x, past, mask = arguments["hidden_states"], arguments["past_key_value"], arguments["attention_mask"]
        if mask is None:  # the attention's own causal form; with a prefix it needs a mask
            seen = x.shape[1] + (past[0].shape[1] if past else 0)
            allowed = paddle.ones([x.shape[1], seen], dtype="bool").tril(seen - x.shape[1])
            mask = ((~allowed).astype(x.dtype) * -1e4).expand([x.shape[0], 1, -1, -1])
        arguments["past_key_value"] = _joined(encoder(number, x.shape[0]), past)
        arguments["attention_mask"] = _widened(mask, encoder.length)
        arguments.update(arguments.pop("kwargs", {}))
        return (), dict(arguments)

    def after(attention, inputs, outputs):
        if not isinstance(outputs, tuple):
            return outputs
        return tuple(
            tuple(cached[:, encoder.length :] for cached in part) if isinstance(part, tuple) else part
            for part in outputs
        )

    return before, after
