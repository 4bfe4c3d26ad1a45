"""Rotary position embedding (Su et al. 2021, RoFormer, section 3.2.2): pure functions.

Halves are rotated, not neighbours: with a head split into (x1, x2), position p turns it by p * base^(-2i/D) into
(x1 cos - x2 sin, x2 cos + x1 sin).
"""

from __future__ import annotations

import paddle

ROPE_BASE = 10000.0


def rope_tables(position_ids: paddle.Tensor, head_dim: int, base: float = ROPE_BASE):
    """Cosine and sine of every rotation angle of the given positions.

    Args:
        position_ids: (B, T) integers; B may be 1 where all rows agree.

    Returns:
        cos, sin: float32 (B, T, 1, D/2), whatever the model's precision: in bfloat16 an angle is exact only up to
        position 256.
    """
    with paddle.amp.auto_cast(enable=False):
        exponent = paddle.arange(0, head_dim, 2, dtype="float32") / head_dim
        frequency = 1.0 / base**exponent  # (D/2,)
        angle = position_ids.astype("float32").unsqueeze(-1) * frequency  # (B, T, D/2)
        return angle.cos().unsqueeze(2), angle.sin().unsqueeze(2)


def rotate(x: paddle.Tensor, cos: paddle.Tensor, sin: paddle.Tensor) -> paddle.Tensor:
    """Turn every head of x, (B, T, H, D), by the angles of `rope_tables`. The tables are cast last."""
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    x1, x2 = x.chunk(2, axis=-1)
    return paddle.concat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
