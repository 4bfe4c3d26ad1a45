"""Join token files into one: the documents of all inputs, in the order given (a folder's in sorted order).

Inputs are prefixes of `_ids.npy` + `_idx.npz` or of `.bin` + `.idx`, or folders of them; the output is the
former pair. Every id and length is checked first. The ids are stored as uint16 where all inputs are that or
narrower and below 65,500, else as int32. Sequences inside documents are kept. Memory stays constant: files
are mapped, documents pass one by one. All inputs must come from the same tokenizer: nothing in a token file
tells.
"""

from __future__ import annotations

import os
import zlib
from typing import Sequence

import numpy as np
from _common import make_parser, positive, progress_bar, run_tool, verify_tokens, written_summary

from ernie35se.data.indexed import NPY_ENDINGS, TokenFile, TokenFileWriter, find_prefixes, open_tokens

EXAMPLE = "  python tools/merge_data.py --inputs data/wiki data/books_folder --output_prefix data/all"
UINT16_VOCAB = 65499  # the largest vocabulary that is stored as uint16
INT32_VOCAB = 2**31


def refuse_overwriting(inputs: Sequence[TokenFile], output_prefix: str) -> None:
    """Raises ValueError if the output is one of the inputs, by whatever path."""
    targets = [output_prefix + ending for ending in NPY_ENDINGS]
    for tokens in inputs:
        for file in tokens.files:
            if any(os.path.exists(target) and os.path.samefile(file, target) for target in targets):
                raise ValueError(
                    f"--output_prefix {output_prefix}: {file} is an input; choose another name, "
                    "or leave that input out"
                )


def joint_vocab_size(inputs: Sequence[TokenFile], vocab_size: int | None) -> int:
    """A vocabulary size that all ids are below, and that keeps the widest type. Looks at every id; raises
    ValueError."""
    largest = 0
    for tokens in inputs:
        tokens.check(vocab_size)
        largest = max(largest, tokens.scan().max_id)
        if largest >= INT32_VOCAB:
            raise ValueError(f"{tokens.files[0]}: id {largest}, expected ids below {INT32_VOCAB} (int32)")
    wide = any(tokens.dtype.itemsize > 2 for tokens in inputs)
    return max(largest + 1, UINT16_VOCAB + 1 if wide else 1)


def copy_documents(tokens: TokenFile, writer: TokenFileWriter, checksum: int, bar) -> tuple[int, int]:
    """Append the documents of one file, telling the bar; (empty ones left out, CRC-32 from `checksum` on)."""
    empty = 0
    for first, last in zip(tokens.docs[:-1].tolist(), tokens.docs[1:].tolist()):
        ids = np.asarray(tokens.ids[tokens.starts[first] : tokens.starts[last]], writer.dtype)
        if len(ids):
            writer.add_document(ids, tokens.lens[first:last])
            checksum = zlib.crc32(ids, checksum)
            bar.update(len(ids) * tokens.dtype.itemsize)
        else:
            empty += 1
    return empty, checksum


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLE)
    parser.add_argument(
        "--inputs", required=True, nargs="+", help="prefixes of token files, and folders of them"
    )
    parser.add_argument(
        "--output_prefix", required=True, help="the token file to write, without _ids.npy (folder made)"
    )
    parser.add_argument("--vocab_size", type=positive, help="refuse ids that are not below it")
    args = parser.parse_args(argv)

    inputs = [open_tokens(prefix) for given in args.inputs for prefix in find_prefixes(given)]
    refuse_overwriting(inputs, args.output_prefix)
    print(f"checking every id of {len(inputs)} token files", flush=True)
    vocab_size = joint_vocab_size(inputs, args.vocab_size)
    replaced = os.path.exists(args.output_prefix + NPY_ENDINGS[0])
    checksum = skipped = 0
    with TokenFileWriter(args.output_prefix, vocab_size) as writer:
        with progress_bar(sum(tokens.ids.nbytes for tokens in inputs), "merging") as bar:
            for tokens in inputs:
                empty, checksum = copy_documents(tokens, writer, checksum, bar)
                skipped += empty
                print(
                    f"{tokens.prefix}: {tokens.num_documents:,} documents, {tokens.num_tokens:,} tokens, "
                    f"{tokens.dtype}" + (f"; {empty:,} empty documents left out" if empty else "")
                )
    expected = (
        sum(tokens.num_documents for tokens in inputs) - skipped,
        sum(tokens.num_tokens for tokens in inputs),
    )
    if (writer.num_documents, writer.num_tokens) != expected:
        raise ValueError(
            f"{args.output_prefix}: {writer.num_documents} documents and {writer.num_tokens} tokens; the "
            f"inputs hold {expected[0]} and {expected[1]}: another process changed them, run it again"
        )
    verify_tokens(writer, checksum)
    print(written_summary(writer, replaced))
    return 0


if __name__ == "__main__":
    run_tool(main)
