"""Runs on each rank of a tensor-parallel pair: every model case, with and without sequence parallel, and training runs.

    tensor_worker.py FOLDER        writes FOLDER/<case>.<rank>.npz
"""

from __future__ import annotations

import sys
from pathlib import Path

import cpu_gloo  # before fleet.init
import numpy as np
import paddle
import paddle.distributed as dist
from cases import (
    MODELS,
    arguments,
    forward_and_backward,
    losses,
    make_trainer,
    set_rebuilt_weights,
    small_config,
    train_once,
    weights_of,
)

from ernie35se.modeling import Ernie35ForCausalLM

TRAINING = {
    "plain": {},
    "tied_untrimmed": dict(tie_word_embeddings=True, parallel_attn_hatf=False),
    "no_bias_whole_logits": dict(use_bias=False, tensor_parallel_output=False),
}


def ranked(sequence_parallel: bool, **changes):
    return small_config(
        tensor_parallel_degree=2, tensor_parallel_rank=dist.get_rank(), sequence_parallel=sequence_parallel, **changes
    )


def main(folder: Path):
    arguments(folder, tensor_parallel_degree=2)  # joins the group, as in any run
    rank = dist.get_rank()

    def save(case, arrays):
        np.savez(folder / f"{case}.{rank}.npz", **arrays)

    loaded = Ernie35ForCausalLM.from_pretrained(str(folder / "whole"), config=ranked(False))
    save("loaded", weights_of(loaded))
    for sequence_parallel in (False, True):
        kind = "sequence" if sequence_parallel else "tensor"
        for name, changes in MODELS.items():
            paddle.seed(11)
            model = Ernie35ForCausalLM(ranked(sequence_parallel, **changes))
            start = {f"start/{key}": value for key, value in weights_of(model).items()}
            set_rebuilt_weights(model, 2, rank)
            partial = [p for p in model.parameters() if getattr(p, "sequence_parallel", False)]
            before = cpu_gloo.moved["collective"]
            train_once(model)
            moved = cpu_gloo.moved["collective"] - before
            model.clear_gradients()
            arrays = forward_and_backward(model)
            arrays["moved"] = np.array(moved)
            for parameter in partial:  # as the trainer's hooks do
                dist.all_reduce(parameter.grad)
            arrays.update({f"gradient/{key}": p.grad.numpy() for key, p in model.named_parameters()})
            save(f"{kind}-model-{name}", {**arrays, **start})
        for name, changes in TRAINING.items():
            config = ranked(sequence_parallel, use_progressive_seq_len=True, **changes)
            args = arguments(folder / f"{kind}-{name}", tensor_parallel_degree=2, sequence_parallel=sequence_parallel)
            trainer = make_trainer(config, args)
            trainer.train()
            save(f"{kind}-training-{name}", {"losses": losses(trainer), **weights_of(trainer.model)})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
