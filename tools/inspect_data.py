"""Look at a token file before training on it: check it, count it, decode samples as training will see them.

Prints documents, tokens, type, document lengths and the share of documents that end in the tokenizer's eos
id; then, with a tokenizer, decoded samples with the document boundaries in them. The samples are those of
training with the same --split, --seed, --max_seq_length and --train_samples (max_steps x global batch size:
it decides the number of epochs, on which the order depends; default: one epoch). --histogram draws the
document lengths.

Exit status 0: valid; 1: a file is malformed or has ids outside the vocabulary; 2: wrong usage.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Iterator, NamedTuple, Sequence

import numpy as np
from _common import load_tokenizer, make_parser, natural, positive, run_tool, written_whole

from ernie35se.data.indexed import TokenFile, find_prefixes, open_tokens
from ernie35se.data.pretrain import SPLIT_NAMES, PretrainDataset, build_train_valid_test_datasets

EXAMPLE = """\
  python tools/inspect_data.py --input_path data/corpus --tokenizer_name_or_path tokenizer/ \\
      --max_seq_length 512 --samples 2 --histogram lengths.png"""
IDS_SHOWN = 32


def document_lengths(tokens: TokenFile) -> np.ndarray:
    """(documents,) int64: tokens of each document, all its sequences together."""
    return np.diff(tokens.starts[tokens.docs])


def ending_share(tokens: TokenFile, token: int) -> float:
    """Share of the documents whose last token is `token`."""
    ends = tokens.starts[tokens.docs[1:]]
    filled = document_lengths(tokens) > 0
    return float(np.count_nonzero(tokens.ids[ends[filled] - 1] == token) / tokens.num_documents)


def describe(tokens: TokenFile, eos: int | None) -> list[str]:
    """The statistics, a line each."""
    lengths = document_lengths(tokens)
    lines = [
        f"documents {tokens.num_documents:,} in {tokens.num_sequences:,} sequences; tokens "
        f"{tokens.num_tokens:,}; "
        f"{tokens.dtype}, {tokens.ids.nbytes / 1e6:,.1f} MB",
        f"tokens a document: min {lengths.min():,}, mean {lengths.mean():,.1f}, median "
        f"{np.median(lengths):,.0f}, "
        f"max {lengths.max():,}"
        + (f"; {np.count_nonzero(lengths == 0):,} empty" if lengths.min() == 0 else ""),
    ]
    if eos is not None:
        lines.append(f"documents that end in eos (id {eos}): {ending_share(tokens, eos):.1%}")
    return lines


class Part(NamedTuple):
    """A stretch of one sequence inside a sample."""

    sequence: int
    start: int  # first token, counted from the sequence's start
    length: int


def parts_of(dataset: PretrainDataset, index: int) -> list[Part]:
    """Which stretches of which sequences sample `index` is made of, in order."""
    maps, lens = dataset.maps, dataset.tokens.lens
    sample = int(maps.shuffle_idx[index])
    (first, start), (last, end) = maps.sample_idx[sample : sample + 2].tolist()
    parts = []
    for place, sequence in enumerate(maps.doc_idx[first : last + 1].tolist(), first):
        begin = start if place == first else 0
        stop = end + 1 if place == last else int(lens[sequence])
        parts.append(Part(sequence, begin, stop - begin))
    return parts


def decode_visibly(processor, ids: np.ndarray) -> str:
    """The text of ids, with control pieces such as "</s>" written out and ids outside the vocabulary as
    <?id>."""
    out, run = [], []
    for token in [*ids.tolist(), None]:
        if token is not None and token < processor.vocab_size() and not processor.is_control(token):
            run.append(token)
            continue
        out.append(processor.decode(run))
        run = []
        if token is not None:
            out.append(processor.id_to_piece(token) if token < processor.vocab_size() else f"<?{token}>")
    return "".join(out)


def show_sample(dataset: PretrainDataset, index: int, processor) -> Iterator[str]:
    """Lines that show a sample part by part: its place in the data, and its text (without tokenizer: its
    ids)."""
    text = dataset[index]["text"]  # (T + 1,)
    tokens, at = dataset.tokens, 0
    for part in parts_of(dataset, index):
        document = int(np.searchsorted(tokens.docs, part.sequence, side="right")) - 1
        ids = text[at : at + part.length]
        at += part.length
        yield (
            f"  -- document {document}, tokens {part.start}..{part.start + part.length - 1} of its "
            f"{int(tokens.lens[part.sequence])} --"
        )
        if processor is None:
            yield f"  {ids[:IDS_SHOWN].tolist()}" + (
                f" and {len(ids) - IDS_SHOWN} more" * (len(ids) > IDS_SHOWN)
            )
        else:
            yield "  " + decode_visibly(processor, ids).replace("\n", "\n  ")


def show_samples(prefix: str, processor, args) -> None:
    """Print the first samples of the chosen split."""
    wanted = SPLIT_NAMES.index(args.show)
    asked = [0, 0, 0]
    asked[wanted] = args.train_samples
    with tempfile.TemporaryDirectory() as folder:  # looking at data leaves nothing beside it
        datasets = build_train_valid_test_datasets(
            [prefix], args.split, asked, args.max_seq_length, args.seed, args.data_cache_path or folder
        )
        dataset = datasets[wanted]
        if dataset is None:
            print(f"the {args.show} split of --split {args.split} has no documents")
            return
        for index in range(min(args.samples, len(dataset))):
            print(f"{args.show} sample {index} of {len(dataset)}: {args.max_seq_length} + 1 tokens")
            print("\n".join(show_sample(dataset, index, processor)))


def draw_histogram(lengths: np.ndarray, title: str, path: str) -> None:
    """Document lengths as a PNG, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = lengths[lengths > 0]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    edges = np.unique(np.geomspace(max(1, lengths.min()), lengths.max() + 1, 50).astype(np.int64))
    edges = edges if len(edges) > 1 else np.array([edges[0], edges[0] + 1])
    axes.hist(lengths, bins=edges)
    axes.set(xscale="log", yscale="log", xlabel="tokens a document", ylabel="documents", title=title)
    axes.axvline(np.median(lengths), color="black", linestyle="--", label=f"median {np.median(lengths):,.0f}")
    axes.legend()
    with written_whole(path, "wb") as stream:
        figure.savefig(stream, format="png", dpi=120)
    pyplot.close(figure)


def inspect_prefix(prefix: str, processor, vocab_size: int | None, args) -> np.ndarray | None:
    """Check, describe and sample one token file. Its document lengths, or None where it is invalid."""
    print(f"\n{prefix}", flush=True)
    try:
        tokens = open_tokens(prefix)
        print("\n".join(describe(tokens, None if processor is None else processor.eos_id())))
        tokens.check(vocab_size)
    except ValueError as error:
        print(f"invalid: {error}", file=sys.stderr)
        return None
    print(f"valid: lengths, documents and ids{'' if vocab_size is None else f' within 0..{vocab_size - 1}'}")
    if args.samples:
        show_samples(prefix, processor, args)
    return document_lengths(tokens)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLE)
    parser.add_argument("--input_path", required=True, help="prefix of a token file, or a folder of them")
    parser.add_argument(
        "--tokenizer_name_or_path", help="folder with sentencepiece.bpe.model, or the file: decodes samples"
    )
    parser.add_argument("--vocab_size", type=positive, help="ids must be below it (default: the tokenizer's)")
    parser.add_argument("--samples", type=natural, default=1, help="samples to show (default: %(default)s)")
    parser.add_argument("--show", choices=SPLIT_NAMES, default="train", help="split to show (default: train)")
    parser.add_argument(
        "--max_seq_length", type=positive, default=512, help="as in training (default: %(default)s)"
    )
    parser.add_argument("--split", default="949,50,1", help="as in training (default: %(default)s)")
    parser.add_argument("--seed", type=natural, default=42, help="as in training (default: %(default)s)")
    parser.add_argument(
        "--train_samples",
        type=positive,
        default=1,
        help="samples that training asks for, max_steps x global batch size (default: one epoch)",
    )
    parser.add_argument("--data_cache_path", help="use training's index cache (default: a temporary folder)")
    parser.add_argument("--histogram", help="draw the document lengths into this .png")
    args = parser.parse_args(argv)

    prefixes = find_prefixes(args.input_path)
    processor = load_tokenizer(args.tokenizer_name_or_path)[0] if args.tokenizer_name_or_path else None
    vocab_size = args.vocab_size or (processor.vocab_size() if processor else None)
    lengths = [inspect_prefix(prefix, processor, vocab_size, args) for prefix in prefixes]
    valid = [found for found in lengths if found is not None]
    if args.histogram and valid:
        draw_histogram(
            np.concatenate(valid), f"Document lengths of {os.path.normpath(args.input_path)}", args.histogram
        )
        print(f"\n{args.histogram}: written")
    return 0 if len(valid) == len(lengths) else 1


if __name__ == "__main__":
    run_tool(main)
