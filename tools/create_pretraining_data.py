"""Turn text into a token file: <output_prefix>_ids.npy (the ids) and <output_prefix>_idx.npz (lens, docs).

Input: files or folders (searched recursively, files sorted), plain or with .gz or .zst behind the name:
  .jsonl  one JSON object a line, the text under --json_key
  .json   a list of such objects (or objects one after another), streamed
  .txt    documents separated by blank lines; --txt_documents line: one a line, file: one a file

Each document is encoded as it stands and, by default, ends in the tokenizer's end-of-sequence id
(--append_eos) and does not begin with the begin-of-sequence id (--prepend_bos). A "</s>" in the text is text,
never that id. Ids are stored as uint16 below 65,500 pieces, else as int32. The order of the documents does
not depend on --workers.

Malformed records are skipped, counted and shown with file and line (--strict: they are errors). Memory stays
constant however large the input: it grows with the longest document only (and, for the final check, by some
20 bytes a document). Both files appear whole at the end, replacing older ones; an interrupted run leaves
nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable, Iterable, Iterator, NamedTuple, Sequence

from _common import (
    cores,
    load_tokenizer,
    make_parser,
    positive,
    progress_bar,
    run_tool,
    verify_tokens,
    written_summary,
)

from ernie35se.data.documents import TXT_DOCUMENTS, Bad, DocumentReader, batches
from ernie35se.data.indexed import TokenFileWriter

EXAMPLE = """\
  python tools/create_pretraining_data.py --input_path corpus/ more.jsonl.gz \\
      --tokenizer_name_or_path tokenizer/ --output_prefix data/corpus --json_key text --workers 8"""


class Encoded(NamedTuple):
    """A batch of documents as ids."""

    documents: list  # of int32 arrays (tokens,)
    text_bytes: int  # their size as UTF-8


def make_encoder(processor, append_eos: bool, prepend_bos: bool) -> Callable[[list[str]], Encoded]:
    """The function from a batch of texts to their ids; safe in several threads, in which it runs without the
    GIL."""
    for wanted, name, token in (
        (append_eos, "append_eos", processor.eos_id()),
        (prepend_bos, "prepend_bos", processor.bos_id()),
    ):
        if wanted and token < 0:
            raise ValueError(
                f"--{name} true: the tokenizer has no such piece; give --{name} false, or another tokenizer"
            )

    def encode(texts: list[str]) -> Encoded:
        ids = processor.encode(
            texts, add_bos=prepend_bos, add_eos=append_eos, num_threads=1, return_type="numpy"
        )
        return Encoded(ids, sum(len(text.encode("utf-8")) for text in texts))

    return encode


def encode_in_order(
    encode: Callable[[list[str]], Encoded], texts: Iterable[list[str]], workers: int
) -> Iterator[Encoded]:
    """encode() of each batch, in order, `workers` at a time; two batches a worker may wait, no more."""
    pool = ThreadPoolExecutor(workers)
    waiting = deque()
    try:
        for batch in texts:
            waiting.append(pool.submit(encode, batch))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def write_tokens(
    reader: DocumentReader,
    encode: Callable[[list[str]], Encoded],
    writer: TokenFileWriter,
    special_tokens: int,
    workers: int,
) -> tuple[int, int]:
    """Encode the reader's documents into the writer; returns (bytes of text, CRC-32 of the ids as stored).

    A document that encodes to nothing but its `special_tokens` is skipped and counted with the reader's.
    """
    text_bytes = checksum = 0
    started = time.perf_counter()
    with progress_bar(reader.total_bytes, "encoding") as bar:
        for encoded in encode_in_order(encode, batches(reader), workers):
            for ids in encoded.documents:
                if len(ids) > special_tokens:
                    writer.add_document(ids)
                    checksum = zlib.crc32(ids.astype(writer.dtype), checksum)
                else:
                    reader.skipped.add(Bad("no tokens", "the tokenizer drops all of the text"), "a document")
            text_bytes += encoded.text_bytes
            rate = writer.num_documents / (time.perf_counter() - started)
            bar.set_postfix_str(f"{rate:,.0f} docs/s, {writer.num_tokens:,} tokens", refresh=False)
            bar.update(reader.bytes_done - bar.n)
    return text_bytes, checksum


def switch(text: str) -> bool:
    """argparse type: true, false, 1 or 0."""
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in ("true", "1")


def build_parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__, EXAMPLE)
    parser.add_argument("--input_path", required=True, nargs="+", help="files and folders of text")
    parser.add_argument(
        "--output_prefix", required=True, help="the token file to write, without _ids.npy (folder made)"
    )
    parser.add_argument(
        "--tokenizer_name_or_path",
        required=True,
        help="folder with sentencepiece.bpe.model, or a SentencePiece model file",
    )
    parser.add_argument(
        "--json_key", default="text", help="field of a JSON record that holds the text (default: text)"
    )
    parser.add_argument(
        "--txt_documents",
        choices=TXT_DOCUMENTS,
        default="blank_line",
        help="what separates the documents of a .txt file (default: %(default)s)",
    )
    parser.add_argument(
        "--append_eos",
        type=switch,
        default=True,
        nargs="?",
        const=True,
        metavar="true|false",
        help="end each document with the eos id (default: true)",
    )
    parser.add_argument(
        "--prepend_bos",
        type=switch,
        default=False,
        nargs="?",
        const=True,
        metavar="true|false",
        help="begin each document with the bos id (default: false)",
    )
    parser.add_argument("--workers", type=positive, default=cores(), help="threads (default: one a core)")
    parser.add_argument("--strict", action="store_true", help="stop at the first malformed record")
    parser.add_argument(
        "--skip_broken_files",
        action="store_true",
        help="keep what can be read of truncated and damaged files, instead of stopping there",
    )
    return parser


def announce(args, reader: DocumentReader, writer: TokenFileWriter, model_path: Path) -> None:
    """Print what will be done, and which choices were taken."""
    print(
        f"{len(reader.files)} files, {reader.total_bytes / 1e6:,.1f} MB; tokenizer {model_path}, "
        f"{writer.vocab_size} pieces -> {writer.dtype} ids; append_eos {args.append_eos}, "
        f"prepend_bos {args.prepend_bos}; {args.workers} workers"
    )
    if reader.ignored:
        names = ", ".join(path.name for path in reader.ignored[:5]) + ", ..." * (len(reader.ignored) > 5)
        print(f"files of other kinds, ignored: {len(reader.ignored)} ({names})")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    processor, model_path = load_tokenizer(args.tokenizer_name_or_path)
    encode = make_encoder(processor, args.append_eos, args.prepend_bos)
    reader = DocumentReader(
        args.input_path, args.json_key, args.txt_documents, args.strict, args.skip_broken_files
    )
    replaced = os.path.exists(f"{args.output_prefix}_ids.npy")
    special_tokens = args.append_eos + args.prepend_bos
    started = time.perf_counter()
    with TokenFileWriter(args.output_prefix, processor.vocab_size()) as writer:
        announce(args, reader, writer, model_path)
        text_bytes, checksum = write_tokens(reader, encode, writer, special_tokens, args.workers)
        if not writer.num_documents:
            raise reader.found_nothing()
    seconds = time.perf_counter() - started
    verify_tokens(writer, checksum)
    print(f"skipped: {reader.skipped.total:,}" + (f"\n{reader.skipped}" if reader.skipped.total else ""))
    print(
        f"{text_bytes / 1e6:,.1f} MB of text in {seconds:.1f} s: {text_bytes / 1e6 / seconds:.1f} MB/s, "
        f"{writer.num_documents / seconds:,.0f} documents/s"
    )
    print(written_summary(writer, replaced))
    return 0


if __name__ == "__main__":
    run_tool(main)
