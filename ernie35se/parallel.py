"""Every layer that tensor parallel will cut, and recomputation, behind one seam. The only importer of fleet.

The model asks for a column-parallel or row-parallel linear layer and never for the parallel degree.
"""

from __future__ import annotations

import paddle
from paddle import nn
from paddle.distributed.fleet.utils import recompute as _fleet_recompute

from .configuration import Ernie35Config


def check_supported(config: Ernie35Config) -> None:
    """Raise a ValueError where the configuration asks for parallelism that this version does not have."""
    for field in ("tensor_parallel_degree", "pipeline_parallel_degree", "virtual_pp_degree"):
        degree = getattr(config, field, 1)
        if degree > 1:
            raise ValueError(f"{field} is {degree}, but this version runs each model whole; set it to 1.")
    if config.sequence_parallel:
        raise ValueError("sequence_parallel needs tensor parallel, which this version does not have; set it to false.")


def column_linear(config: Ernie35Config, in_features: int, out_features: int) -> nn.Layer:
    """Linear layer whose output columns tensor parallel splits: weight (in_features, out_features)."""
    return _linear(config, in_features, out_features)


def row_linear(config: Ernie35Config, in_features: int, out_features: int) -> nn.Layer:
    """Linear layer whose input rows tensor parallel splits: weight (in_features, out_features)."""
    return _linear(config, in_features, out_features)


def vocab_embedding(config: Ernie35Config) -> nn.Layer:
    """Embedding whose rows tensor parallel splits by vocabulary: weight (V, C)."""
    return nn.Embedding(config.vocab_size, config.hidden_size)


def recompute(function, *args):
    """Call `function`, keep only its inputs, and compute it again in the backward pass (Chen et al. 2016).

    Paddle's form wants tensors in and one tensor out; whatever else the function needs, it closes over.
    """
    return _fleet_recompute(function, *args)


def _linear(config: Ernie35Config, in_features: int, out_features: int) -> nn.Layer:
    bias_attr = None if config.use_bias else False
    if config.fuse_linear and paddle.is_compiled_with_cuda():
        from paddle.incubate.nn import FusedLinear  # exists in GPU builds only

        return FusedLinear(in_features, out_features, bias_attr=bias_attr)
    return nn.Linear(in_features, out_features, bias_attr=bias_attr)
