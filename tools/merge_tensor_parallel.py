#!/usr/bin/env python3
"""Join the weight files of tensor-parallel ranks and pipeline stages into whole weights that one process loads.

INPUT holds pieces such as model_state.tp00.pdparams, model_state.tp01_pp00.pdparams or model.tp00.safetensors; the
output has their format, and INPUT's configuration and tokenizer. One array is in memory at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

from _common import make_parser, run_tool

EXAMPLE = "  python tools/merge_tensor_parallel.py output/pretrain_3b_4d output/merged"
WEIGHTS = ("model*.pdparams*", "model*.safetensors*")


def main(argv: Sequence[str] | None) -> int:
    parser = make_parser(__doc__, EXAMPLE)
    parser.add_argument("input", type=Path, help="folder with one weight file for each rank")
    parser.add_argument("output", type=Path, help="folder to write; made where it is missing")
    arguments = parser.parse_args(argv)

    from ernie35se import weight_files
    from ernie35se.configuration import Ernie35Config
    from ernie35se.training.checkpoint import filled_at_once

    if arguments.output.resolve() == arguments.input.resolve():
        raise ValueError(f"{arguments.output} is the input itself; name another folder")
    config = Ernie35Config.from_pretrained(str(arguments.input))
    folder = weight_files.Folder(arguments.input)
    if not folder.in_pieces:
        raise ValueError(f"{arguments.input}: the weights are whole already ({folder.names[0]}); nothing to merge")
    with filled_at_once(arguments.output, last=("config.json",), unless=WEIGHTS) as staging:
        (written,) = weight_files.merge_folder(folder, staging, config)
        weight_files.copy_beside(arguments.input, staging, weight_files.WHOLE_CONFIG)
    ranks = f"{folder.tensor} tensor-parallel ranks x {folder.pipeline} stages"
    print(f"{len(folder.names)} files ({ranks}) -> {arguments.output / written.name}")
    return 0


if __name__ == "__main__":
    run_tool(main)
