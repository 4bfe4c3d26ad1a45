#!/usr/bin/env python3
"""Cut whole weights into one file for each tensor-parallel rank.

INPUT holds model_state.pdparams or model.safetensors, in one file or several with an index; the output has its format
(model_state.tp00.pdparams, ...), and INPUT's configuration and tokenizer. One array is in memory at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

from _common import make_parser, positive, run_tool

EXAMPLE = "  python tools/split_tensor_parallel.py output/model output/model_tp2 --degree 2"
WEIGHTS = ("model*.pdparams*", "model*.safetensors*")


def main(argv: Sequence[str] | None) -> int:
    parser = make_parser(__doc__, EXAMPLE)
    parser.add_argument("input", type=Path, help="folder with whole weights")
    parser.add_argument("output", type=Path, help="folder to write; made where it is missing")
    parser.add_argument("--degree", type=positive, required=True, help="number of tensor-parallel ranks")
    arguments = parser.parse_args(argv)

    from ernie35se import conversion, weight_files
    from ernie35se.configuration import Ernie35Config
    from ernie35se.training.checkpoint import filled_at_once

    if arguments.output.resolve() == arguments.input.resolve():
        raise ValueError(f"{arguments.output} is the input itself; name another folder")
    config = Ernie35Config.from_pretrained(str(arguments.input))
    folder = weight_files.Folder(arguments.input)
    if folder.in_pieces:
        raise ValueError(f"{arguments.input}: the weights are in pieces already ({folder.names[0]}); merge them first")
    conversion.check_divides(config, arguments.degree)
    changes = {"tensor_parallel_degree": arguments.degree, "tensor_parallel_rank": 0}
    with filled_at_once(arguments.output, last=("config.json",), unless=WEIGHTS) as staging:
        written = weight_files.split_folder(folder, staging, config, arguments.degree)
        weight_files.copy_beside(arguments.input, staging, changes)
    print(f"{', '.join(folder.names)} -> {arguments.output / written[0].name} to {written[-1].name}")
    return 0


if __name__ == "__main__":
    run_tool(main)
