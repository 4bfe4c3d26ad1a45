"""What every tool shares: finding the package, turning users' mistakes into exit status 2, opening the
tokenizer."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterator, Sequence

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the package beside us, where it is not installed

TOKENIZER_FILE = "sentencepiece.bpe.model"


def make_parser(doc: str, example: str) -> argparse.ArgumentParser:
    """A parser whose --help shows a tool's docstring and an example."""
    return argparse.ArgumentParser(
        description=doc,
        epilog=f"example:\n{example}",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def positive(text: str, least: int = 1) -> int:
    """argparse type: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def natural(text: str) -> int:
    """argparse type: a whole number of at least 0."""
    return positive(text, least=0)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_tool(main: Callable[[Sequence[str] | None], int | None]) -> None:
    """Run `main`; exit with its status, 2 for a user's mistake (ValueError or OSError, told in one message),
    130 for Ctrl-C. Termination unwinds like Ctrl-C, so that unfinished outputs are removed."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        status = main(None)
    except BrokenPipeError:  # the reader of our output left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except (ValueError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    sys.exit(status)


def progress_bar(total_bytes: int, what: str):
    """A bar over bytes with rate and time left, from the third second on; every 30 s without a terminal."""
    from tqdm import tqdm

    return tqdm(
        total=total_bytes,
        desc=what,
        unit="B",
        unit_scale=True,
        delay=2,
        dynamic_ncols=True,
        mininterval=0.5 if sys.stderr.isatty() else 30,
    )


@contextmanager
def written_whole(path: str | os.PathLike, mode: str = "w") -> Iterator:
    """An open file beside `path` that takes its name at a successful exit and vanishes otherwise."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise ValueError(f"{path}: is a folder, expected the name of a file to write")
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}; choose another place") from None
    try:
        encoding = None if "b" in mode else "utf-8"
        with open(descriptor, mode, encoding=encoding, newline=None if encoding is None else "\n") as stream:
            yield stream
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp's files are private
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def tokenizer_file(name_or_path: str) -> Path:
    """The SentencePiece model that a folder holds, or that is named itself. Raises ValueError without one."""
    path = Path(name_or_path)
    if path.is_dir():
        path = path / TOKENIZER_FILE
    if not path.is_file():
        held = (
            f"; the folder holds: {', '.join(sorted(os.listdir(path.parent))[:8]) or 'nothing'}"
            if path.parent.is_dir() and path.name == TOKENIZER_FILE
            else ""
        )
        raise ValueError(
            f"{path}: no such file{held}. The tokenizer is a folder with {TOKENIZER_FILE}, or that file "
            "itself; tools/train_tokenizer.py makes one"
        )
    return path


def load_tokenizer(name_or_path: str):
    """(sentencepiece.SentencePieceProcessor, the model's path). Raises ValueError for a file that is none."""
    import sentencepiece

    path = tokenizer_file(name_or_path)
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(path.read_bytes())
    except RuntimeError:
        raise ValueError(
            f"{path}: not a SentencePiece model; copy it again, or make one with tools/train_tokenizer.py"
        ) from None
    return processor, path


def verify_tokens(written, checksum: int) -> None:
    """Read back what a closed TokenFileWriter has written, in pieces, and compare it with what was meant: its
    counts, and the CRC-32 of the ids as stored. Raises ValueError."""
    from ernie35se.data.indexed import open_tokens, read_npy_header

    tokens = open_tokens(written.prefix)  # checks the sizes, the lengths and the boundaries
    found = 0
    with open(tokens.files[0], "rb") as stream:
        read_npy_header(stream, tokens.files[0])
        while piece := stream.read(2**20):
            found = zlib.crc32(piece, found)
    counts = (tokens.num_documents, tokens.num_tokens)
    if (found, *counts) != (checksum, written.num_documents, written.num_tokens):
        raise ValueError(
            f"{tokens.files[0]}: holds {counts[0]} documents and {counts[1]} tokens, checksum {found:08x}, "
            f"after writing {written.num_documents} and {written.num_tokens}, {checksum:08x}; the disk or "
            "another process changed it: run it again"
        )


def written_summary(written, replaced: bool) -> str:
    """One line about a verified token file."""
    return (
        f"{written.prefix}_ids.npy, {written.prefix}_idx.npz: {written.num_documents:,} documents, "
        f"{written.num_tokens:,} tokens, {written.dtype}; verified"
        + ("; the older files were replaced" if replaced else "")
    )


def write_json(path: Path, value: object) -> None:
    """`value` as indented JSON, written whole."""
    with written_whole(path) as stream:
        json.dump(value, stream, indent=2)
        stream.write("\n")
