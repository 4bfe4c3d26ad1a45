#!/usr/bin/env python3
"""Measure the held-out perplexity of checkpoints at 1, 2, 4 and 8 times the length they were trained at.

Each checkpoint reads the same tokens twice at every length: with evenly spaced positions, the interval that
    generation
would use, and with plain ones, 0, 1, 2, ... Windows of every length cover the same tokens, so a longer one
differs by its context alone: a model that can use or at least bear it does not get worse. Two files appear in
    the output folder:
long_context.json and the picture long_context.png. (Ruoss et al. 2023, Randomized Positional Encodings.)
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Sequence

import numpy as np
from _common import make_parser, positive, run_tool, write_json

EXAMPLE = (
    "  python tools/eval_long_context.py output/demo/model --input_prefix output/demo/corpus --split 90,10,0 \\\n"
    "      --train_length 256 --output_dir output/long_context"
)
SCHEMES = ("interval", "plain")


def main(argv: Sequence[str] | None) -> int:
    parser = make_parser(__doc__, EXAMPLE)
    parser.add_argument("checkpoint", nargs="+", help="folders of trained models")
    parser.add_argument("--input_prefix", required=True, help="token file, as for pretraining")
    parser.add_argument(
        "--split", default="949,50,1", help="its split; the second part is read (default %(default)s)"
    )
    parser.add_argument(
        "--train_length", type=positive, required=True, help="sequence length of the training"
    )
    parser.add_argument(
        "--multiples", type=positive, nargs="+", default=[1, 2, 4, 8], help="of it (default 1 2 4 8)"
    )
    parser.add_argument(
        "--windows",
        type=positive,
        default=8,
        help="windows of the longest length to read (default %(default)s)",
    )
    parser.add_argument(
        "--output_dir", type=Path, required=True, help="folder for the numbers and the picture"
    )
    arguments = parser.parse_args(argv)

    from ernie35se.predictor import check_model_folder, load_model, set_device
    from ernie35se.runtime import tune_cpu

    for folder in arguments.checkpoint:
        check_model_folder(folder)
    tune_cpu()
    set_device(None)
    lengths = sorted({arguments.train_length * multiple for multiple in arguments.multiples})
    tokens = held_out_tokens(arguments.input_prefix, arguments.split, lengths, arguments.windows)
    print(
        f"{tokens.size - len(tokens):,} tokens of {arguments.input_prefix}, held out by split {arguments.split}"
    )
    curves = []
    for folder in arguments.checkpoint:
        model = load_model(folder, "float32")
        model.eval()
        curves += curves_of(model, Path(folder).name, tokens, lengths)
    print("\n".join(table(curves, lengths)))
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    write_json(
        arguments.output_dir / "long_context.json", {"train_length": arguments.train_length, "curves": curves}
    )
    draw(curves, arguments.train_length, arguments.output_dir / "long_context.png")
    print(f"{arguments.output_dir / 'long_context.png'}")
    return 0


def held_out_tokens(prefix: str, split: str, lengths: Sequence[int], windows: int) -> np.ndarray:
    """(windows, longest + 1) ids of the validation split.

    Raises:
        ValueError: lengths of which the longest is no multiple of the others, or too few tokens.
    """
    from ernie35se.data.pretrain import build_train_valid_test_datasets

    longest = lengths[-1]
    odd = [length for length in lengths if longest % length]
    if odd:
        raise ValueError(
            f"multiples: {longest} tokens do not divide into windows of {odd[0]}; take 1 2 4 8, for example"
        )
    with tempfile.TemporaryDirectory() as cache:
        datasets = build_train_valid_test_datasets([prefix], split, [0, windows, 0], longest, 1234, cache)
        valid = datasets[1]
        if valid is None:
            raise ValueError(f"{prefix}: its validation split ({split}) holds no documents")
        return np.stack([valid[i]["text"] for i in range(windows)])


def curves_of(model, name: str, tokens: np.ndarray, lengths: Sequence[int]) -> list[dict]:
    """One curve a scheme: {"name", "scheme", "trained", "perplexity": {length: value}}; lengths that the
    table of positions does not hold are left out, and said."""
    table_size = model.config.max_position_embeddings
    trained = "random" if model.config.enable_random_position_ids else "plain"
    fitting = [length for length in lengths if length <= table_size]
    if len(fitting) < len(lengths):
        print(f"{name}: has {table_size} positions; longer windows are left out")
    return [
        {
            "name": name,
            "trained": trained,
            "scheme": scheme,
            "perplexity": {str(length): perplexity(model, tokens, length, scheme) for length in fitting},
        }
        for scheme in SCHEMES
    ]


def perplexity(model, tokens: np.ndarray, length: int, scheme: str) -> float:
    """exp of the mean loss over all windows of that length; every token is predicted once."""
    import paddle

    from ernie35se.positions import interval_position_ids, position_interval

    interval = position_interval(length, model.config.max_position_embeddings) if scheme == "interval" else 1
    positions = paddle.to_tensor(interval_position_ids(length, interval))
    losses = []
    with paddle.no_grad():
        for row in tokens:
            for start in range(0, len(row) - 1, length):
                window = paddle.to_tensor(row[None, start : start + length + 1].astype("int64"))
                loss, _ = model(window[:, :-1], position_ids=positions, labels=window[:, 1:])
                losses.append(float(loss))
    return math.exp(float(np.mean(losses)))


def table(curves: list[dict], lengths: Sequence[int]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [
        f"| model | positions | {' | '.join(f'{length} tokens' for length in lengths)} |",
        f"|---|---|{'---|' * len(lengths)}",
    ]
    for curve in curves:
        values = [curve["perplexity"].get(str(length)) for length in lengths]
        shown = " | ".join("" if value is None else f"{value:.1f}" for value in values)
        lines.append(f"| {curve['name']} | {curve['scheme']} | {shown} |")
    return lines


def draw(curves: list[dict], train_length: int, path: Path) -> None:
    """Perplexity over length, a line a curve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), constrained_layout=True)
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(curve["name"] for curve in curves))}
    for curve in curves:
        axes.plot(
            [int(length) for length in curve["perplexity"]],
            list(curve["perplexity"].values()),
            "o-" if curve["scheme"] == "interval" else "s--",
            color=colours[curve["name"]],
            label=f"{curve['name']} (trained on {curve['trained']} positions), read at {curve['scheme']} ones",
        )
    axes.axvline(train_length, color="grey", linewidth=1, linestyle=":")
    axes.annotate("trained at", (train_length, 1), xycoords=("data", "axes fraction"), xytext=(4, -12),
                  textcoords="offset points", color="grey")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({int(length) for curve in curves for length in curve["perplexity"]})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("tokens in a window")
    axes.set_ylabel("held-out perplexity")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    temporary = path.with_name(f".tmp-{path.name}")
    figure.savefig(temporary, dpi=130)
    pyplot.close(figure)
    temporary.replace(path)


if __name__ == "__main__":
    run_tool(main)
