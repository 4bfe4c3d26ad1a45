"""Which parallel degrees fit together, told before any model is built. Plain numbers in, the first fault out."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional


class Degrees(NamedTuple):
    """The degrees of a run; 1 where something is off."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    sharding: int = 1
    stage: str = ""  # stage1, stage2, stage3, or nothing
    sequence_parallel: bool = False

    @property
    def product(self) -> int:
        return self.tensor * self.pipeline * self.sharding


class Fault(NamedTuple):
    """A setting, its value, and what was expected instead."""

    name: str
    value: Any
    expected: str


def first_fault(
    degrees: Degrees, devices: int, seq_length: int = 0, micro_batch: int = 1, accumulation: int = 1
) -> Optional[Fault]:
    """What does not fit, or None.

    Args:
        devices: processes of the run. seq_length: tokens of a sample; 0: not known yet.
        micro_batch, accumulation: samples of a micro-batch, and micro-batches of a step.
    """
    tensor, pipeline, virtual, sharding, stage, sequence_parallel = degrees
    if devices == 1 and tensor * pipeline > 1:
        name, value = ("tensor_parallel_degree", tensor) if tensor > 1 else ("pipeline_parallel_degree", pipeline)
        return Fault(
            name,
            value,
            f"this is a single process, the degrees need {tensor * pipeline}; start them with python -m "
            "paddle.distributed.launch, as scripts/launch does",
        )
    if sharding > 1 and not stage:
        return Fault("sharding_parallel_degree", sharding, "no sharding is on; set --sharding stage1, stage2 or stage3")
    if devices > 1 and devices % degrees.product:
        return Fault(
            "tensor_parallel_degree",
            tensor,
            f"tensor {tensor} x pipeline {pipeline} x sharding {sharding} = {degrees.product} devices do not divide "
            f"the {devices} of this run",
        )
    if sequence_parallel and tensor == 1:
        return Fault(
            "sequence_parallel",
            True,
            "tensor_parallel_degree is 1; the sequence is shared by the ranks of a tensor-parallel group. Set it to 2 "
            "or more, or turn sequence_parallel off",
        )
    if sequence_parallel and seq_length % tensor:
        return Fault("max_seq_length", seq_length, f"with sequence_parallel a multiple of tensor_parallel_degree {tensor}")
    if pipeline > 1 and stage in ("stage2", "stage3"):
        return Fault("sharding", stage, f"with pipeline_parallel_degree {pipeline} only stage1 is possible")
    if tensor > 1 and stage == "stage3":
        return Fault("sharding", stage, f"with tensor_parallel_degree {tensor} only stage1 and stage2 are possible")
    if virtual > 1 and pipeline == 1:
        return Fault("virtual_pp_degree", virtual, "pipeline_parallel_degree is 1; there are no stages to interleave")
    if virtual > 1 and pipeline == 2:
        return Fault("virtual_pp_degree", virtual, "Paddle interleaves three stages or more; pipeline_parallel_degree is 2")
    if virtual > 1 and accumulation % pipeline:
        return Fault(
            "gradient_accumulation_steps",
            accumulation,
            f"with virtual_pp_degree {virtual} a multiple of pipeline_parallel_degree {pipeline}",
        )
    return None
