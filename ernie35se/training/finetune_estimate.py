"""What a fine-tuning run will need: what trains, memory, tokens and FLOPs of a step.

Counted from the shapes of the model with its adapters; no weight is read, drawn or allocated. What a model needs that
trains whole is estimate.py's. With adapters

- gradients and optimizer state are those of what trains; the weights are the frozen ones as they are stored, and the
  adapters;
- activations are the model's, and what each adapter says that it keeps besides (`Adapter.kept_floats`);
- a frozen matrix has no gradient, the LM head neither: less working space, and 4 FLOPs a weight and token instead of 6.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, List, NamedTuple, Optional, Tuple

import paddle
from paddlenlp.transformers import AutoModelForCausalLM
from paddlenlp.transformers.model_utils import no_init_weights

from .. import auto, cpu_ops, peft  # noqa: F401  auto: makes the Auto classes find this model
from ..attention import score_rows
from ..configuration import Ernie35Config
from ..peft.base import find_targets, get_layer
from ..peft.quant import stored_bytes
from . import estimate
from .estimate import FLOAT32, HALF, Plan, Row, gib


class Counts(NamedTuple):
    """A model with adapters, as numbers.

    Attributes:
        method: its name. trained: parameters that train. frozen: those that do not, and are stored as the run stores
            weights. quantised, quantised_bytes: those stored in 4 or 8 bits, and in how many bytes. largest: those of
            the widest such layer.
        kept: floats that the adapters add to the activations of a micro-batch. kept_later: those of blocks after the last
            one that attends, which are not there when attention needs its working space.
    """

    method: str
    trained: int
    frozen: int = 0
    quantised: int = 0
    quantised_bytes: int = 0
    largest: int = 0
    kept: int = 0
    kept_later: int = 0

    @property
    def total(self) -> int:
        return self.trained + self.frozen + self.quantised

    def sentence(self) -> str:
        """As peft.trainable_share says it of a model that exists."""
        share = self.trained / self.total
        return f"{self.method}: {self.trained:,} of {self.total:,} parameters train ({share:.2%})."


def count(config: Any, adapter: Optional[peft.AdapterConfig], rows: int = 1, length: int = 1) -> Counts:
    """Counts of the model that a config describes, with adapters in it; None: all of it trains.

    Args:
        rows, length: of a micro-batch.

    Raises:
        ValueError: as `peft.wrap`, for targets and models that do not fit the adapter.
    """
    with no_init_weights(_enable=True), paddle.LazyGuard():  # shapes without memory
        model = AutoModelForCausalLM.from_config(config)
    if adapter is None:
        return Counts("all weights", sum(weight.size for weight in model.parameters()))
    stored: List[Tuple[int, int]] = []  # (values, bytes) of the layers that QLoRA quantises
    shapes = adapter
    if algorithm := getattr(adapter, "weight_quantize_algo", None):
        sizes = [get_layer(model, name).weight.size for name in find_targets(model, None)]
        how = algorithm, adapter.weight_blocksize, adapter.weight_double_quant
        stored = [(size, stored_bytes(size, *how)) for size in sizes]
        shapes = dataclasses.replace(adapter, weight_quantize_algo=None, weight_double_quant=False)
    peft.wrap(model, shapes, start=False)
    trained = sum(weight.size for weight in model.parameters() if not weight.stop_gradient)
    frozen = sum(weight.size for weight in model.parameters() if weight.stop_gradient)
    quantised = sum(size for size, _ in stored)
    kept = {name: layer.kept_floats(rows, length) for name, layer in peft.adapters(model)}
    last = max(i for i, block in enumerate(estimate.describe(config).blocks) if block.attends)
    numbers = {name: re.search(r"\.(\d+)\.", name) for name in kept}
    kept_later = sum(kept[name] for name, number in numbers.items() if number and int(number[1]) > last)
    return Counts(
        adapter.name(), trained, frozen - quantised, quantised, sum(size for _, size in stored),
        max((size for size, _ in stored), default=0), sum(kept.values()), kept_later,
    )  # fmt: skip


def make_plan(training, config: Any, length: int) -> Plan:
    """How the run uses devices. Args: length: tokens of the longest row."""
    degrees = training.degrees()
    sharding = degrees.sharding
    if degrees.stage and training.sharding_parallel_degree == -1:
        sharding = max(training.devices() // degrees.tensor, 1)
    half = "bfloat16" if training.bf16 else "float16"
    precision = half if training.bf16 or training.fp16 else "float32"
    if isinstance(config, Ernie35Config):
        recompute = config.recompute_scope
        rows = score_rows(config, length, precision)
    else:
        recompute = getattr(config, "recompute_granularity", "full") if config.recompute else "none"
        rows = None
    return Plan(
        seq_length=length,
        micro_batch=training.per_device_train_batch_size,
        accumulation=training.gradient_accumulation_steps,
        data_parallel=max(training.devices() // (degrees.tensor * sharding), 1),
        sharding_stage=int(degrees.stage[-1]) if degrees.stage else 0,
        sharding_degree=sharding,
        tensor_parallel=degrees.tensor,
        precision=precision,
        master_weights=training.fp16_opt_level == "O2",
        master_gradients=training.amp_master_grad,
        recompute=recompute,
        score_rows=0 if config.use_flash_attention else rows,
        loss_in_place=precision == "float32" and cpu_ops.usable() is not None,
    )


def memory_per_device(config: Any, plan: Plan, counts: Counts) -> List[Row]:
    """Peak memory of the fullest device in bytes, by part."""
    whole = sum(estimate.parameters_by_part(config).values())
    stored, trained = (counts.trained + counts.frozen) / whole, counts.trained / whole
    blocks = len(estimate.describe(config).blocks)
    element = FLOAT32 if plan.precision == "float32" else HALF
    kept = counts.kept * element
    if plan.recompute == "full":
        kept //= blocks  # of one block at a time
    rows = []
    later = 0 if plan.recompute == "full" else counts.kept_later * element
    plan = dataclasses.replace(plan, frozen=bool(counts.frozen), kept_later=later)
    for part, size, source in estimate.memory_per_device(config, plan):
        if part == "weights":
            size, source = int(size * stored) + counts.quantised_bytes, f"{counts.total:,} parameters"
            source += f", {counts.quantised:,} of them in {counts.quantised_bytes:,} B" if counts.quantised else ""
        elif part in ("gradients", "optimizer"):
            size, source = int(size * trained), f"{source}, of {counts.trained:,} parameters"
        elif part == "activations":
            size += kept
            source += f"; {gib(kept)} of it for the adapters" if counts.kept else ""
        elif part == "working space":
            size = max(size, 2 * FLOAT32 * counts.largest)  # a layer's weight, looked up and scaled
        rows.append(Row(part, size, source))
    return rows


def flops_per_step(config: Any, plan: Plan, counts: Counts) -> int:
    """As estimate.flops_per_step, less the gradients of frozen matrices, and with the adapters' own products."""
    whole = estimate.flops_per_step(config, plan)
    if not counts.frozen:
        return whole
    decoder = estimate.describe(config)
    matrices = sum(block.matrices for block in decoder.blocks) + decoder.embedding  # the LM head has that shape
    return whole + plan.tokens_per_step * (6 * counts.trained - 2 * matrices)


def report(config: Any, plan: Plan, counts: Counts) -> str:
    """What trains, memory of the fullest device, tokens and FLOPs of a step, as text."""
    lines = [counts.sentence()]
    if is_known(config):
        rows = memory_per_device(config, plan, counts)
        lines += [
            f"Memory of the fullest of {plan.devices} device(s), {plan.precision}, rows of {plan.seq_length} tokens: "
            f"{gib(estimate.total_bytes(rows))}",
            *[f"  {row.part:<14} {gib(row.bytes):>12}  {row.source}" for row in rows if row.bytes],
            f"FLOPs per step: at most {flops_per_step(config, plan, counts):.3e}",
        ]
    else:
        lines.append(f"Memory is estimated for Ernie35, Llama and Qwen2, not for {type(config).__name__}.")
    lines.append(f"Tokens per step: at most {plan.tokens_per_step:,} ({plan.samples_per_step} rows of {plan.seq_length})")
    return "\n".join(lines)


def is_known(config: Any) -> bool:
    """Whether estimate.py's counts are those of this model."""
    return isinstance(config, Ernie35Config) or getattr(config, "model_type", None) in ("llama", "qwen2")
