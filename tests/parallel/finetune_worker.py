"""Runs scripts/run_finetune.py on each rank, once for each list of words in a JSON file; what each rank holds in the end
is <output_dir>/rank.<rank>.npz.

    finetune_worker.py FOLDER FILE                FOLDER receives the logs
    finetune_worker.py FOLDER FILE broken         on rank 1 the fourth batch cannot be made
    finetune_worker.py FOLDER FILE missing        on rank 1 there are no data
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cpu_gloo  # before fleet.init
import numpy as np
import paddle.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import run_finetune  # noqa: E402

from ernie35se.data import sft  # noqa: E402
from ernie35se.training import callbacks  # noqa: E402


def break_batch(last: int) -> None:
    """Let batches after so many fail."""
    plain, made = sft.collate, []

    def collate(samples, **settings):
        made.append(samples)
        if len(made) > last:
            raise ValueError(f"batch {len(made)} is broken on this disk")
        return plain(samples, **settings)

    sft.collate = collate


def keep_what_trained(run):
    """`run`, after which this rank's parameters are written."""

    def keeping(trainer):
        run(trainer)
        if hasattr(trainer.model_wrapped, "get_all_parameters"):  # stage 3 holds slices
            trainer.model_wrapped.get_all_parameters(convert2cpu=True)
        arrays = {name: p.numpy() for name, p in trainer.model.named_parameters() if not p.stop_gradient}
        np.savez(Path(trainer.args.output_dir) / f"rank.{dist.get_rank()}.npz", **arrays)

    return keeping


if __name__ == "__main__":
    run_finetune.run = keep_what_trained(run_finetune.run)
    callbacks.draw_curves = lambda *args: None  # takes longer than these runs
    cpu_gloo.slice_weights_of(2000)  # more than an adapter's, which are never as large as what stage 3 slices
    fault = sys.argv[3] if len(sys.argv) > 3 and dist.get_rank() == 1 else None
    if fault == "broken":
        break_batch(3)
    for words in json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")):
        if fault == "missing":
            words += ["--dataset_name_or_path", "not-on-this-disk"]
        assert run_finetune.main(words) == 0, words
