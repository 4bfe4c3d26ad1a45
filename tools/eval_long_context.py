#!/usr/bin/env python3
"""Measure the held-out perplexity of checkpoints at 1, 2, 4 and 8 times the length they were trained at.

Each checkpoint reads the same tokens twice at every length: with evenly spaced positions, at the interval that
generation would use, and with plain ones, 0, 1, 2, ... (Ruoss et al. 2023, Randomized Positional Encodings.)
Two perplexities tell what a longer context does:

    all tokens     windows of every length cover the same tokens; a longer one gives most of them more to read
    last tokens    the last quarter of a training length of each longest window, predicted from the 1, 2, 4 and
                   8 training lengths that end with it: no token stands near the start of what is read

A model that can use a longer context, or at least bear it, does not get worse. Two files appear in the output
folder: long_context.json and the picture long_context.png.
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
MEASURES = ("all", "last")
TOKENS_AT_A_TIME = 2048  # their logits are in memory at once


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
        help="windows of the longest length to read, or all that there are (default %(default)s)",
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
        curves += curves_of(model, Path(folder).name, tokens, lengths, arguments.train_length)
    for measure in MEASURES:
        print("\n".join([f"\nPerplexity, {measure} tokens", *table(curves, lengths, measure)]))
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    write_json(
        arguments.output_dir / "long_context.json", {"train_length": arguments.train_length, "curves": curves}
    )
    draw(curves, arguments.train_length, arguments.output_dir / "long_context.png")
    print(f"\n{arguments.output_dir / 'long_context.png'}")
    return 0


def held_out_tokens(prefix: str, split: str, lengths: Sequence[int], windows: int) -> np.ndarray:
    """(windows, longest + 1) ids of the validation split, no token predicted twice; fewer windows where it
    holds no more.

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
    with tempfile.TemporaryDirectory() as cache:  # one sample asked for: the dataset is then one epoch
        valid = build_train_valid_test_datasets([prefix], split, [0, 1, 0], longest, 1234, cache)[1]
        if valid is None:
            raise ValueError(f"{prefix}: its validation split ({split}) holds no documents")
        return np.stack([valid[i]["text"] for i in range(min(windows, len(valid)))])


def curves_of(model, name: str, tokens: np.ndarray, lengths: Sequence[int], train_length: int) -> list[dict]:
    """One curve a scheme: {"name", "scheme", "trained", and for each measure {length: perplexity}}; lengths
    that the table of positions does not hold are left out, and said."""
    table_size = model.config.max_position_embeddings
    trained = "random" if model.config.enable_random_position_ids else "plain"
    fitting = [length for length in lengths if length <= table_size]
    if len(fitting) < len(lengths):
        print(f"{name}: has {table_size} positions; longer windows are left out")
    curves = []
    for scheme in SCHEMES:
        curve = {"name": name, "trained": trained, "scheme": scheme, **{measure: {} for measure in MEASURES}}
        for length in fitting:
            losses = token_losses(model, tokens, length, scheme)
            curve["all"][str(length)] = math.exp(losses.mean())
            curve["last"][str(length)] = math.exp(losses[:, -max(1, train_length // 4) :].mean())
        curves.append(curve)
    return curves


def token_losses(model, tokens: np.ndarray, length: int, scheme: str) -> np.ndarray:
    """Loss of each token but the first of each row, (rows, longest) in float64, each row read in windows of
    `length` tokens that know nothing of each other."""
    import paddle

    from ernie35se.positions import interval_position_ids, position_interval

    interval = position_interval(length, model.config.max_position_embeddings) if scheme == "interval" else 1
    positions = paddle.to_tensor(interval_position_ids(length, interval))
    inputs, labels = (part.reshape(-1, length) for part in (tokens[:, :-1], tokens[:, 1:]))
    together, losses = max(1, TOKENS_AT_A_TIME // length), []
    with paddle.no_grad():
        for first in range(0, len(inputs), together):
            window, wanted = (paddle.to_tensor(a[first : first + together]) for a in (inputs, labels))
            (logits,) = model(window, position_ids=positions)
            loss = paddle.nn.functional.cross_entropy(logits, wanted, reduction="none")
            losses.append(loss.numpy().reshape(-1, length))
    return np.concatenate(losses).reshape(len(tokens), -1).astype(np.float64)


def table(curves: list[dict], lengths: Sequence[int], measure: str) -> list[str]:
    """Lines of a Markdown table."""
    lines = [
        f"| model | read at | {' | '.join(f'{length} tokens' for length in lengths)} |",
        f"|---|---|{'---|' * len(lengths)}",
    ]
    for curve in curves:
        values = [curve[measure].get(str(length)) for length in lengths]
        shown = " | ".join("" if value is None else f"{value:.1f}" for value in values)
        lines.append(f"| {curve['name']} | {curve['scheme']} | {shown} |")
    return lines


def draw(curves: list[dict], train_length: int, path: Path) -> None:
    """Perplexity over length, a panel a measure, a line a curve; bold where a model is read as it was trained."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.4), sharey=True, constrained_layout=True)
    for axes, measure in zip(panels, MEASURES):
        draw_panel(axes, curves, measure, train_length)
    panels[0].set_title("all tokens, cut into windows")
    panels[1].set_title("the same last tokens, more and more before them")
    panels[0].set_ylabel("held-out perplexity")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=9)
    temporary = path.with_name(f".tmp-{path.name}")
    figure.savefig(temporary, dpi=130)
    pyplot.close(figure)
    temporary.replace(path)


def draw_panel(axes, curves: list[dict], measure: str, train_length: int) -> None:
    """One measure of all curves."""
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(curve["name"] for curve in curves))}
    for curve in curves:
        as_trained = (curve["scheme"] == "interval") == (curve["trained"] == "random")
        axes.plot(
            [int(length) for length in curve[measure]],
            list(curve[measure].values()),
            "o-" if as_trained else "s:",
            linewidth=2.2 if as_trained else 1.2,
            color=colours[curve["name"]],
            label=f"{curve['name']} (trained on {curve['trained']} positions), read at {curve['scheme']} ones",
        )
    axes.axvline(train_length, color="grey", linewidth=1, linestyle="--")
    axes.annotate("trained at", (train_length, 1), xycoords=("data", "axes fraction"), xytext=(4, -12),
                  textcoords="offset points", color="grey")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({int(length) for curve in curves for length in curve[measure]})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("tokens read at a time")
    axes.grid(alpha=0.3, which="both")


if __name__ == "__main__":
    run_tool(main)
