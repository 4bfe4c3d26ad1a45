"""Which weights an adapter was trained on: two values of each linear layer, saved with the adapter.

An adapter fits any model of the same shapes, but with other weights, such as a base that was trained on meanwhile or one
that has the adapter merged already, it makes a model that nobody trained. The samples tell.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Dict, List, Optional

import numpy as np
import paddle
from paddle import nn
from safetensors import safe_open

from .base import is_linear

KEY = "base"  # in the metadata of an adapter's safetensors file
HALF = 2.0**-7  # relative difference that storing in 16 bits explains
Samples = Dict[str, List[float]]  # name of a weight -> its values


def sample(weight: paddle.Tensor) -> List[float]:
    """Two values of a matrix."""
    rows, columns = weight.shape
    return [weight[rows * n // 3, columns * n // 3].astype("float32").item() for n in (1, 2)]


def sample_model(model: nn.Layer) -> Optional[Samples]:
    """Of every linear layer of a plain model; None where it is cut over devices, or has shapes but no weights yet."""
    if (getattr(model.config, "tensor_parallel_degree", 1) or 1) > 1:
        return None
    weights = {f"{name}.weight": layer.weight for name, layer in model.named_sublayers() if is_linear(layer)}
    if not all(weight._is_initialized() for weight in weights.values()):
        return None
    return {name: sample(weight) for name, weight in weights.items()}


def metadata_of(model: nn.Layer) -> Dict[str, str]:
    """What goes into the file of the adapters of this model."""
    samples = model.base_samples
    return {} if samples is None else {KEY: json.dumps(samples)}


def saved_samples(weights: Path) -> Optional[Samples]:
    """What an adapter's safetensors file holds of its base; None for files without."""
    if not weights.is_file():
        return None
    with safe_open(str(weights), framework="np") as file:
        text = (file.metadata() or {}).get(KEY)
    return None if text is None else json.loads(text)


def difference(saved: Optional[Samples], seen: Optional[Samples]) -> Optional[str]:
    """A sentence about weights that the adapter was not trained on, None where there are none (or nobody knows)."""
    names = [name for name in saved or {} if name in (seen or {})]
    other = [name for name in names if not _same(saved[name], seen[name])]
    if not other:
        return None
    return (
        f"the adapter was trained on other weights than these ({len(other)} of {len(names)} linear layers differ, such as "
        f"{other[0]}): a base that was trained on since, another one, or one that has an adapter merged already."
    )


def _same(saved: List[float], seen: List[float]) -> bool:
    """Whether the two are equal, as they are or where one of them was stored in bfloat16 or float16."""
    saved, seen = (np.array(values, dtype="float32") for values in (saved, seen))
    if np.array_equal(saved, seen):
        return True
    halved = _in_16_bits(saved) or _in_16_bits(seen)
    return halved and np.allclose(saved, seen, rtol=HALF, atol=1e-7)


def _in_16_bits(values: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        as_float16 = np.array_equal(values.astype("float16").astype("float32"), values)
    return as_float16 or not (values.view("uint32") & 0xFFFF).any()
