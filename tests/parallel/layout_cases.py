"""Checkpoints of step 3 and what is resumed from them, on one process and on two ranks."""

from __future__ import annotations

from pathlib import Path

import paddle.distributed as dist
from cases import arguments, losses, make_trainer, small_config

from ernie35se.modeling import Ernie35ForCausalLM
from ernie35se.modeling_pipe import Ernie35ForCausalLMPipe

FORMS = ("classic", "unified")
LAYOUTS = {
    "one": {},
    "tensor": dict(tensor_parallel_degree=2),
    "pipeline": dict(pipeline_parallel_degree=2),
    "data": dict(per_device_train_batch_size=1),
    "stage1": dict(sharding="stage1", per_device_train_batch_size=1),
    "stage2": dict(sharding="stage2", per_device_train_batch_size=1),
    "stage3": dict(sharding="stage3", per_device_train_batch_size=1),
}
# Which makers' checkpoints a layout resumes. Those that come earlier in the test exist by then.
RESUMES = {
    "tensor": ("one",),
    "pipeline": ("one", "tensor"),
    "data": ("one", "tensor", "pipeline"),
    "stage1": ("one", "tensor", "stage1"),
    "stage2": ("one", "tensor", "stage1", "stage2"),
    "stage3": ("stage3",),
    "one": ("tensor", "pipeline", "data", "stage1", "stage2"),
}
# Stage3's optimizer is in slices: neither read by others nor made from theirs.
REFUSED = {"stage3": ("one", "stage2"), "one": ("stage3",)}


def trainer_of(folder: Path, form: str, layout: str, **changes):
    tensor = layout == "tensor"
    config = small_config(
        enable_random_position_ids=False,
        tie_word_embeddings=form == "unified",  # both kinds of head, without a run more
        tensor_parallel_degree=2 if tensor else 1,
        tensor_parallel_rank=dist.get_rank() if tensor else 0,
    )
    args = arguments(folder, unified_checkpoint=form == "unified", save_steps=3, **LAYOUTS[layout], **changes)
    kind = Ernie35ForCausalLMPipe if layout == "pipeline" else Ernie35ForCausalLM
    return make_trainer(config, args, kind)


def save_at_step_3(folder: Path, form: str, layout: str):
    """Train three steps of six; the checkpoint is `folder`/checkpoint-3."""
    trainer = trainer_of(folder, form, layout, decay_steps=6, max_steps=3)
    trainer.train()
    return trainer


def resume(folder: Path, maker: str, form: str, layout: str):
    """Losses of steps 4 to 6, from the maker's checkpoint."""
    place = folder / f"{layout}-from-{maker}-{form}"
    trainer = trainer_of(place, form, layout, decay_steps=6)
    trainer.train(resume_from_checkpoint=str(folder / f"{maker}-{form}" / "checkpoint-3"))
    return losses(trainer)[-3:]
