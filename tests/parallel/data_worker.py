"""Runs on each of two data ranks: plain data parallel, or the three stages of sharding.

    data_worker.py FOLDER data|sharding        writes FOLDER/<case>.<rank>.npz
"""

from __future__ import annotations

import sys
from pathlib import Path

import cpu_gloo  # before fleet.init
import numpy as np
import paddle.distributed as dist
from cases import Text, arguments, losses, make_trainer, small_config, weights_of

from ernie35se.training.trainer import PretrainTrainer

MODES = {
    "data": {"data": {}},
    "sharding": {stage: dict(sharding=stage) for stage in ("stage1", "stage2", "stage3")},
}
MODES["sharding"]["stage3_recompute"] = dict(sharding="stage3")


class Watching(PretrainTrainer):
    """Remembers the positions of every micro-batch, and what the rank had moved and sent after every step."""

    def _training_inputs(self, inputs):
        inputs = super()._training_inputs(inputs)
        if "position_ids" in inputs:
            self.__dict__.setdefault("drawn", []).append(inputs["position_ids"].numpy()[0])
        return inputs

    def _maybe_log_save_evaluate(self, *args, **kwargs):  # the end of a step
        moved = (cpu_gloo.moved["whole"] + cpu_gloo.moved["collective"], cpu_gloo.tcp_bytes_sent())
        self.__dict__.setdefault("traffic", []).append(moved)
        return super()._maybe_log_save_evaluate(*args, **kwargs)


def main(folder: Path, kind: str):
    for case, settings in MODES[kind].items():
        for random_positions in (False, True):
            name = f"{case}-random" if random_positions else case
            config = small_config(
                use_progressive_seq_len=True,
                enable_random_position_ids=random_positions,
                use_recompute="recompute" in case,
            )
            args = arguments(folder / name, per_device_train_batch_size=1, **settings)
            data = Text()
            trainer = make_trainer(config, args, data=data, kind=Watching)
            data.read.clear()
            trainer.train()
            drawn = {f"drawn/{i}": positions for i, positions in enumerate(getattr(trainer, "drawn", []))}
            if "stage3" in case:
                trainer.model_wrapped.get_all_parameters(convert2cpu=True)
            np.savez(
                folder / f"{name}.{dist.get_rank()}.npz",
                losses=losses(trainer),
                read=data.read,
                traffic=np.diff(trainer.traffic, axis=0)[:-1],  # a step each; the last is the end of training
                **drawn,
                **{f"weight/{key}": value for key, value in weights_of(trainer.model).items()},
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
