"""Runs on each of two ranks: makes checkpoints under one layout, resumes those made under others.

    layout_worker.py FOLDER LAYOUT        LAYOUT is tensor, pipeline, data or sharding

FOLDER/<maker>-<form>/checkpoint-3 are the checkpoints (form: classic or unified); what makers exist when this starts is
resumed to step 6. Writes FOLDER/<layout>-from-<maker>-<form>.<rank>.npz with the losses of steps 4 to 6.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cpu_gloo  # noqa: F401  before fleet.init
import numpy as np
import paddle.distributed as dist
from layout_cases import FORMS, RESUMES, resume, save_at_step_3



def main(folder: Path, layout: str):
    for form in FORMS:
        trainer = save_at_step_3(folder / f"{layout}-{form}", form, layout)
        merged = folder / f"{layout}-{form}-merged"
        trainer.save_model(str(merged), merge_tensor_parallel=True)
    for maker in RESUMES[layout]:
        for form in FORMS:
            got = resume(folder, maker, form, layout)
            np.savez(folder / f"{layout}-from-{maker}-{form}.{dist.get_rank()}.npz", losses=got)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
