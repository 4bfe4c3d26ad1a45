"""Runs on each of two pipeline stages.

    pipeline_worker.py FOLDER        writes FOLDER/<case>.<rank>.npz, FOLDER/stages.<rank>.json and a refusal
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cpu_gloo  # before fleet.init
import numpy as np
import paddle
import paddle.distributed as dist
from cases import arguments, losses, make_trainer, small_config, weights_of
from pipeline_cases import TRAINING, VIRTUAL

from ernie35se.modeling_pipe import Ernie35ForCausalLMPipe
from ernie35se.training import build


def main(folder: Path):
    degrees = dict(pipeline_parallel_degree=2)
    arguments(folder, **degrees)
    rank = dist.get_rank()
    for name, changes in TRAINING.items():
        config = small_config(use_progressive_seq_len=True, **changes)
        trainer = make_trainer(config, arguments(folder / name, **degrees), Ernie35ForCausalLMPipe)
        start = {f"start/{key}": value for key, value in weights_of(trainer.model).items()}
        before = cpu_gloo.moved["sent"]
        trainer.train()
        sent = cpu_gloo.moved["sent"] - before
        np.savez(folder / f"{name}.{rank}.npz", sent=sent, losses=losses(trainer), **start, **weights_of(trainer.model))
    loaded = Ernie35ForCausalLMPipe.from_pretrained(str(folder / "whole"), config=small_config())
    np.savez(folder / f"loaded.{rank}.npz", **weights_of(loaded))
    try:
        build.build_model(arguments(folder, **degrees), small_config(), str(folder / "lacking"))
    except ValueError as error:
        (folder / f"lacking.{rank}.txt").write_text(str(error))
    stages = {}
    for name, changes in VIRTUAL.items():
        paddle.seed(7)
        model = Ernie35ForCausalLMPipe(small_config(**changes))
        state = model.state_dict()
        stages[name] = {"cuts": model.segment_parts, "names": sorted(state)}
        np.savez(folder / f"virtual-{name}.{rank}.npz", **{key: value.numpy() for key, value in state.items()})
    (folder / f"stages.{rank}.json").write_text(json.dumps(stages))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
