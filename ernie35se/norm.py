"""LayerNorm behind one seam: the plain form now, the fused op where it is built."""

from __future__ import annotations

from paddle import nn

from .configuration import Ernie35Config


def layer_norm(config: Ernie35Config) -> nn.Layer:
    """A LayerNorm with weight and bias over the hidden width (Ba et al. 2016).

    Raises:
        ValueError: `fuse_ln` is on, but this version has no fused op.
    """
    if config.fuse_ln:
        raise ValueError("fuse_ln is on (--use_fused_ln), but the fused LayerNorm op does not exist yet; set it to false.")
    return nn.LayerNorm(config.hidden_size, epsilon=config.layer_norm_eps)
