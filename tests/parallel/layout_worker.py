"""Runs on each of two ranks: makes checkpoints under one layout, resumes those made under others.

    layout_worker.py FOLDER LAYOUT ...        LAYOUT is tensor, pipeline, data, stage1, stage2 or stage3

FOLDER/<maker>-<form>/checkpoint-3 are the checkpoints (form: classic or unified); what makers exist when this starts is
resumed to step 6. Writes FOLDER/<layout>-from-<maker>-<form>.<rank>.npz with the losses of steps 4 to 6, or where
that is refused .<rank>.txt with the reason.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cpu_gloo  # noqa: F401  before fleet.init
import numpy as np
import paddle.distributed as dist
from layout_cases import FORMS, REFUSED, RESUMES, resume, save_at_step_3

def main(folder: Path, layout: str):
    for form in FORMS:
        trainer = save_at_step_3(folder / f"{layout}-{form}", form, layout)
        merged = folder / f"{layout}-{form}-merged"
        trainer.save_model(str(merged), merge_tensor_parallel=True)
    for maker in RESUMES[layout]:
        for form in FORMS:
            got = resume(folder, maker, form, layout)
            np.savez(folder / f"{layout}-from-{maker}-{form}.{dist.get_rank()}.npz", losses=got)
    for maker in REFUSED.get(layout, ()):
        for form in FORMS:
            place = folder / f"{layout}-from-{maker}-{form}.{dist.get_rank()}.txt"
            try:
                resume(folder, maker, form, layout)
            except ValueError as error:
                place.write_text(str(error), encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[2:]:
        main(Path(sys.argv[1]), name)
