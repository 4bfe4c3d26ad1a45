"""Trains on each rank, with several modes at once; one case after the other.

    combined_worker.py FOLDER        writes FOLDER/<case>.<rank>.npz
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import cpu_gloo  # before fleet.init
import numpy as np
import paddle.distributed as dist
from cases import arguments, losses, make_trainer, small_config, weights_of
from combined_cases import COMBINED

from ernie35se.modeling import Ernie35ForCausalLM
from ernie35se.modeling_pipe import Ernie35ForCausalLMPipe


def main(folder: Path):
    for case, settings in COMBINED[dist.get_world_size()].items():
        cpu_gloo.forget_layout()
        args = arguments(folder / case, **settings)
        tensor, stage = max(args.tensor_parallel_rank, 0), max(args.pipeline_parallel_rank, 0)
        config = small_config(
            use_progressive_seq_len=True,
            enable_random_position_ids=args.dataset_world_size == 1,  # data ranks draw their own
            tensor_parallel_degree=max(args.tensor_parallel_degree, 1),
            tensor_parallel_rank=tensor,
            sequence_parallel=args.sequence_parallel,
        )
        trainer = make_trainer(config, args, Ernie35ForCausalLMPipe if "pipeline" in case else Ernie35ForCausalLM)
        trainer.train()
        weights = {f"weight/{name}": value for name, value in weights_of(trainer.model).items()}
        place = folder / f"{case}.{dist.get_rank()}.npz"
        np.savez(place, losses=losses(trainer), tensor=tensor, stage=stage, **weights)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    dist.barrier()
    os._exit(0)  # ranks serve each other's connections: one that ends in order while another has left may abort
