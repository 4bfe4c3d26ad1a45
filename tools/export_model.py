#!/usr/bin/env python3
"""Export a checkpoint as a static-graph inference model for Paddle Inference, and compare its logits with the
model's.

OUTPUT gets model.json (or .pdmodel), model.pdiparams, the configuration and the tokenizer. The graph takes
input_ids and position_ids, int64 (batch, tokens) of any size, and returns the logits, (batch, tokens,
vocabulary): positions are an input because their spacing is the caller's (interval_position_ids of
ernie35se/positions.py). """

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Sequence

import numpy as np
from _common import make_parser, run_tool

EXAMPLE = "  python tools/export_model.py output/demo/model output/demo/exported"
LARGEST_DIFFERENCE = 1e-4  # of the logits, relative to the largest of them


def main(argv: Sequence[str] | None) -> int:
    parser = make_parser(__doc__, EXAMPLE)
    parser.add_argument("input", help="folder of the model")
    parser.add_argument("output", type=Path, help="folder to write; made where it is missing")
    parser.add_argument(
        "--lora_path", help="adapters to merge into the weights first, of any method that merges"
    )
    arguments = parser.parse_args(argv)

    from ernie35se import peft, weight_files
    from ernie35se.predictor import check_model_folder, load_model, set_device

    if arguments.output.resolve() == Path(arguments.input).resolve():
        raise ValueError(f"{arguments.output} is the input itself; name another folder")
    check_model_folder(arguments.input)
    set_device("cpu")
    model = load_model(arguments.input, "float32")
    if arguments.lora_path:
        peft.merge(peft.load(model, arguments.lora_path))
    model.eval()
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.output, prefix=".tmp-") as beside:
        save_static(model, Path(beside) / "model")
        difference = compare(model, Path(beside) / "model")
        if difference > LARGEST_DIFFERENCE:
            raise ValueError(f"the exported graph's logits differ by {difference:.1e}; nothing is written")
        for file in sorted(Path(beside).iterdir()):
            file.replace(arguments.output / file.name)
    weight_files.copy_beside(Path(arguments.input), arguments.output, weight_files.WHOLE_CONFIG)
    print(f"{arguments.output}: logits equal the model's to {difference:.1e}")
    return 0


def save_static(model, prefix: Path) -> None:
    """Trace the blocks and write them. (The model's own forward checks and chooses by sizes, which a graph
    for all sizes does not know.)"""
    import paddle

    from ernie35se import rope
    from ernie35se.attention import HIDDEN, AttentionInputs, eager_attention

    paddle.jit.ignore_module([rope])  # rewriting it for graphs fails, and there is nothing to rewrite

    class Logits(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids, position_ids):
            trunk = self.model.ernie
            column = paddle.arange(paddle.shape(input_ids)[1])
            mask = (column > column.unsqueeze(-1)).astype("float32") * HIDDEN  # (T, T)
            cos, sin = rope.rope_tables(position_ids, self.model.config.head_dim)
            shared = AttentionInputs(input_ids.shape[0], eager_attention, cos, sin, mask)
            x = trunk.embed_tokens(input_ids)
            for block in trunk.layers:
                x, _, _ = block(x, None, shared)
            return self.model.lm_logits(trunk.norm(x))

    spec = [paddle.static.InputSpec([None, None], "int64", name) for name in ("input_ids", "position_ids")]
    paddle.jit.save(Logits(), str(prefix), input_spec=spec)


def compare(model, prefix: Path) -> float:
    """Largest difference of logits over two batches of other sizes than the trace's, relative to the largest
    logit."""
    import paddle

    from ernie35se.positions import interval_position_ids

    exported = paddle.jit.load(str(prefix))
    exported.eval()
    rng, worst = np.random.default_rng(0), 0.0
    for batch, length in ((1, 1), (3, 17)):
        ids = paddle.to_tensor(rng.integers(0, model.config.vocab_size, (batch, length)))
        positions = paddle.to_tensor(np.tile(interval_position_ids(length, 8), (batch, 1)))
        with paddle.no_grad():
            (expected,), got = model(ids, position_ids=positions, return_dict=False), exported(ids, positions)
        worst = max(worst, float((expected - got).abs().max() / expected.abs().max()))
    return worst


if __name__ == "__main__":
    run_tool(main)
