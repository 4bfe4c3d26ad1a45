#!/usr/bin/env python3
"""Suggest parallel layouts of a pretraining run that fit into the memory of a device, the fastest first.

Every combination of tensor, pipeline, virtual, sharding and data parallel degrees is described as `--dry_run` describes
one, with the formulas and sources of ernie35se/training/estimate.py. What needs too much memory is left out, the rest is
ordered by this estimate of a step's seconds:

    FLOPs / (devices x tflops x efficiency) / (1 - idle share of the pipeline) + sent bytes / bandwidth

with the bandwidth within a machine where the group of ranks fits into one, else that between machines. The order is a
guide, not a measurement: try the first two or three.
"""

from __future__ import annotations

import argparse
import json
import math
from itertools import product
from pathlib import Path
from typing import Iterator, List, NamedTuple, Sequence

from _common import make_parser, positive, run_tool

EXAMPLE = "  python tools/plan_parallel.py --devices 64 --memory 80 --global_batch 512 --max_seq_length 4096"
RESERVE = 0.9  # share of the memory that the estimate may fill; fragments, buffers and the CUDA context take the rest


class Choice(NamedTuple):
    """A plan, its memory in bytes, and its estimated seconds a step."""

    plan: object
    memory: int
    seconds: float
    idle: float
    sent: int


def number(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def share(text: str) -> float:
    if number(text) > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share, above 0 and at most 1")
    return float(text)


def plans(config, devices: int, per_machine: int, batch: int, length: int, half: bool) -> Iterator:
    """Every layout of the devices that this model and batch allow."""
    from ernie35se.conversion import check_divides
    from ernie35se.stages import balanced_stages
    from ernie35se.training.degrees import Degrees, first_fault
    from ernie35se.training.estimate import Plan

    def fits(check, *arguments) -> bool:
        try:
            check(config, *arguments)
        except ValueError:
            return False
        return True

    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for tensor, pipeline, virtual in product(divisors, divisors, (1, 2, 4)):
        if tensor > per_machine or devices % (tensor * pipeline) or not fits(check_divides, tensor):
            continue
        if not fits(balanced_stages, pipeline * virtual):
            continue
        replicas = devices // (tensor * pipeline)
        if batch % replicas:
            continue
        accumulation = batch // replicas
        for stage, sharding, recompute in product((0, 1, 2, 3), divisors, ("none", "full")):
            shares = sharding <= per_machine or sharding == replicas  # one machine, or all copies
            if replicas % sharding or (stage == 0) != (sharding == 1) or not shares:
                continue
            name = f"stage{stage}" if stage else ""
            degrees = Degrees(tensor, pipeline, virtual, sharding, name, tensor > 1)
            if first_fault(degrees, devices, length, 1, accumulation) is None:
                yield Plan(
                    seq_length=length, accumulation=accumulation, data_parallel=replicas // sharding, sharding_stage=stage,
                    sharding_degree=sharding, tensor_parallel=tensor, pipeline_parallel=pipeline, virtual=virtual,
                    sequence_parallel=tensor > 1, precision="bfloat16" if half else "float32", master_weights=half,
                    recompute=recompute, score_rows=0 if half else None,
                )  # fmt: skip


def describe(config, plan, arguments) -> Choice:
    from ernie35se.training import estimate

    idle = estimate.pipeline_idle(plan)
    flops = estimate.flops_per_step(config, plan)
    seconds = flops / (plan.devices * arguments.tflops * 1e12 * arguments.efficiency) / (1 - idle)
    rows = estimate.communication_per_step(config, plan)
    inner = {"tensor": plan.tensor_parallel, "sharding": plan.tensor_parallel * plan.pipeline_parallel * plan.sharding_degree,
             "pipeline": plan.tensor_parallel * plan.pipeline_parallel, "data": plan.devices}  # fmt: skip
    for row in rows:
        within = inner[row.part] <= arguments.devices_per_machine
        seconds += row.bytes / ((arguments.bandwidth if within else arguments.network) * 1e9)
    memory = estimate.total_bytes(estimate.memory_per_device(config, plan))
    return Choice(plan, memory, seconds, idle, estimate.total_bytes(rows))


def flags(plan) -> str:
    """The run's flags, where they differ from their defaults."""
    words = {
        "tensor_parallel_degree": plan.tensor_parallel,
        "pipeline_parallel_degree": plan.pipeline_parallel,
        "virtual_pp_degree": plan.virtual,
        "sharding_parallel_degree": plan.sharding_degree,
        "gradient_accumulation_steps": plan.accumulation,
    }
    text = [f"--{name} {value}" for name, value in words.items() if value > 1]
    text += ["--sequence_parallel"] * plan.sequence_parallel + [f"--sharding stage{plan.sharding_stage}"] * bool(plan.sharding_stage)
    return " ".join(text + ["--recompute"] * (plan.recompute == "full"))


def suggest(config, arguments) -> List[Choice]:
    """The layouts that fit, fastest first.

    Raises:
        ValueError: none does; says how much the smallest needs.
    """
    found = [
        describe(config, plan, arguments)
        for plan in plans(config, arguments.devices, arguments.devices_per_machine, arguments.global_batch,
                          arguments.max_seq_length, not arguments.float32)
    ]  # fmt: skip
    if not found:
        raise ValueError(
            f"no layout of {arguments.devices} devices shares global_batch {arguments.global_batch} evenly; choose a batch "
            "that is a multiple of the devices"
        )
    fitting = [choice for choice in found if choice.memory <= RESERVE * arguments.memory * 2**30]
    if not fitting:
        least = min(found, key=lambda choice: choice.memory)
        raise ValueError(
            f"memory = {arguments.memory:g} GiB: no layout of {arguments.devices} devices fits; the smallest needs "
            f"{least.memory / RESERVE / 2**30:.1f} GiB ({flags(least.plan)}). Take more devices or shorter sequences"
        )
    return sorted(fitting, key=lambda choice: (round(choice.seconds, 2), choice.memory))


def main(argv: Sequence[str] | None) -> int:
    parser = make_parser(__doc__, EXAMPLE)
    parser.add_argument("--model", default="baidu/ernie-3.5-se-3b", help="built-in name, config file or folder")
    parser.add_argument("--devices", type=positive, required=True, help="GPUs of the run")
    parser.add_argument("--memory", type=number, required=True, help="GiB of one device")
    parser.add_argument("--global_batch", type=positive, required=True, help="samples of one optimizer step")
    parser.add_argument("--max_seq_length", type=positive, default=4096, help="tokens of a sample")
    parser.add_argument("--devices_per_machine", type=positive, default=8, help="GPUs that share fast links")
    parser.add_argument("--tflops", type=number, default=312, help="peak of one device (default: A100, bfloat16)")
    parser.add_argument("--efficiency", type=share, default=0.5, help="share of the peak that matrix products reach")
    parser.add_argument("--bandwidth", type=number, default=250, help="GB/s that a device sends within a machine")
    parser.add_argument("--network", type=number, default=20, help="GB/s that a device sends between machines")
    parser.add_argument("--float32", action="store_true", help="no half precision, no flash attention")
    parser.add_argument("--show", type=positive, default=8, help="layouts to print")
    arguments = parser.parse_args(argv)

    from ernie35se.configuration import Ernie35Config

    if Path(arguments.model).is_file():
        try:
            config = Ernie35Config.from_json_file(arguments.model)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"--model {arguments.model}: not a config.json of a model: {error}") from None
    else:
        config = Ernie35Config.from_pretrained(arguments.model)
    choices = suggest(config, arguments)
    print(f"{len(choices)} layouts fit; memory and traffic are those of the busiest device.")
    print(f"{'s / step':>9} {'memory':>9} {'sent':>9} {'idle':>6}  flags")
    for choice in choices[: arguments.show]:
        print(f"{choice.seconds:9.2f} {choice.memory / 2**30:5.1f} GiB {choice.sent / 2**30:5.1f} GiB {100 * choice.idle:5.1f}%"
              f"  {flags(choice.plan)}")  # fmt: skip
    return 0


if __name__ == "__main__":
    run_tool(main)
