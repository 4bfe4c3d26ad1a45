"""Trains under tensor parallel; on rank 1 the data cannot be read from sample 8 on."""

from __future__ import annotations

import sys
from pathlib import Path

import cpu_gloo  # noqa: F401  before fleet.init
import paddle.distributed as dist
from cases import Text, arguments, make_trainer, small_config


class Broken(Text):
    def __getitem__(self, index):
        if index >= 8 and dist.get_rank() == 1:
            raise ValueError(f"sample {index} is broken on this disk")
        return super().__getitem__(index)


if __name__ == "__main__":
    args = arguments(Path(sys.argv[1]), tensor_parallel_degree=2)
    config = small_config(tensor_parallel_degree=2, tensor_parallel_rank=dist.get_rank())
    make_trainer(config, args, data=Broken()).train()
