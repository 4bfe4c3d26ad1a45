"""The CPU ops of external_ops/cpu_ops behind one seam: `usable()` gives the module, or None where the plain form runs.

The only importer of `cpu_ops`. Where the module is missing that is logged once, with the command that builds it; where it
is broken or another module of that name stands in its way, it is warned of once. ERNIE35SE_CPU_OPS=0 does without it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys

import paddle
from paddlenlp.utils.log import logger

from . import runtime

# What the module has to offer.
FUNCTIONS = (
    "cpu_adamw_", "cpu_causal_attention", "cpu_cross_entropy_", "cpu_decode_attention_", "cpu_silu_mul", "cpu_skinny_matmul",
    "cpu_squared_norm", "cpu_top_k",
)  # fmt: skip


def usable(*tensors: paddle.Tensor):
    """The module `cpu_ops` where it is there, works, and the tensors are all float32 on CPU; else None."""
    if not all(t.dtype == paddle.float32 and t.place.is_cpu_place() for t in tensors):
        return None
    return _healthy_module() if runtime.wants_cpu_ops() else None


@functools.cache
def _healthy_module():
    build = f"{sys.executable} -m pip install ./external_ops/cpu_ops --no-build-isolation"
    try:
        module = importlib.import_module("cpu_ops")
        absent = [name for name in FUNCTIONS if not callable(getattr(module, name, None))]
        if absent:
            raise ImportError(f"it has no {' and no '.join(absent)}")
        ones = paddle.ones([1, 2])
        if module.cpu_silu_mul(ones, 0 * ones).abs().sum().item() != 0:
            raise ImportError("silu(1) * 0 is not 0")
        return module
    except ModuleNotFoundError as error:
        if error.name == "cpu_ops":
            logger.info(f"The CPU ops are not built, so plain Paddle operators run. To build them: {build}")
            return None
        reason = error
    except Exception as error:  # whatever a library of another Paddle, or a file of that name, ends in
        reason = error
    found = sys.modules.get("cpu_ops")
    path = runtime.module_path(importlib.util.find_spec("cpu_ops") if found is None else found.__spec__)
    logger.warning(
        f"The module cpu_ops that Python finds, {path}, does not work ({runtime.last_words(reason)}), so plain "
        f"Paddle operators run. Remove or rename it, or build it again: {build}"
    )
    return None
