"""Documents out of text files: the one reader that the tools share.

    reader = DocumentReader(["corpus/", "more.jsonl.gz"], json_key="text")
    for text in reader:          # one str a document, in a fixed order
        ...
    print(reader.skipped)        # what was left out, why, and the first places

Formats, told by the file's name, each also with `.gz` or `.zst` behind it:

    .jsonl   one JSON object a line; the document is the string under `json_key`
    .json    a list of such objects, or objects one after another; read piece by piece, never whole
    .txt     documents separated by blank lines (or one a line, or one a file: `txt_documents`)

A folder is searched recursively; its files come in sorted order. Memory does not grow with the input, only
with its longest document. Bytes are decoded as UTF-8, lines end at "\\n" or "\\r\\n" (never at U+2028 and its
kin), and a byte order mark at the start of a file is dropped.

Needs the standard library alone; `zstandard` only where a `.zst` file is read.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import BinaryIO, Iterable, Iterator, NamedTuple, Sequence, TextIO

FORMATS = (".jsonl", ".json", ".txt")
COMPRESSIONS = (".gz", ".zst")
TXT_DOCUMENTS = ("blank_line", "line", "file")
EXPECTED_FILES = ".jsonl, .json or .txt files, plain or with .gz or .zst behind the name"
# A longer document is taken for a file without line ends or with an unclosed string: it would be read whole.
MAX_DOCUMENT_CHARS = 2**26
CHUNK_CHARS = 2**20
_SPACE = re.compile(r"[ \t\n\r]*")


class Bad(NamedTuple):
    """A record that holds no document: the reason that it is counted under, and what exactly was seen."""

    reason: str
    detail: str


class Skipped:
    """Counts of what was skipped, by reason, with the first places of each reason."""

    def __init__(self, places_kept: int = 3):
        self.counts: Counter[str] = Counter()
        self.places: dict[str, list[str]] = {}
        self.places_kept = places_kept

    def add(self, bad: Bad, place: str) -> None:
        self.counts[bad.reason] += 1
        places = self.places.setdefault(bad.reason, [])
        if len(places) < self.places_kept:
            places.append(f"{place}: {bad.detail}" if bad.detail else place)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        """One line a reason and one line a place; "nothing" where nothing was skipped."""
        lines = []
        for reason, count in self.counts.most_common():
            lines.append(f"{count:,} x {reason}")
            lines += [f"    {place}" for place in self.places[reason]]
            if count > len(self.places[reason]):
                lines.append(f"    and {count - len(self.places[reason]):,} more")
        return "\n".join(lines) or "nothing"


class DocumentReader:
    """Iterates over the documents of files and folders. May be iterated once.

    paths: files and folders, read in the order given. json_key: the field that holds the text.
    txt_documents: what one document of a .txt file is, "blank_line", "line" or "file".
    strict: a malformed record is an error (an empty document and a blank line never are).
    skip_broken_files: a file that cannot be read to its end keeps what was read of it, and is counted.

    Attributes: files (what will be read), ignored (what folders hold besides), total_bytes and bytes_done
    (on disk, for progress), documents (yielded so far), skipped.

    Raises ValueError naming the file, the line and the fix: here for paths that cannot be read, while
    iterating for broken files and, under `strict`, for malformed records.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike],
        json_key: str = "text",
        txt_documents: str = "blank_line",
        strict: bool = False,
        skip_broken_files: bool = False,
    ):
        if txt_documents not in TXT_DOCUMENTS:
            raise ValueError(
                f"txt_documents is {txt_documents!r}; it must be one of {', '.join(TXT_DOCUMENTS)}"
            )
        self.json_key = json_key
        self.txt_documents = txt_documents
        self.strict = strict
        self.skip_broken_files = skip_broken_files
        self.files, self.ignored = find_files(paths)
        self.total_bytes = sum(path.stat().st_size for path in self.files)
        self.documents = 0
        self.skipped = Skipped()
        self._finished_bytes = 0
        self._raw: BinaryIO | None = None

    @property
    def bytes_done(self) -> int:
        """Bytes of the files on disk (compressed ones where compressed) that have been consumed."""
        current = self._raw.tell() if self._raw is not None and not self._raw.closed else 0
        return self._finished_bytes + current

    def __iter__(self) -> Iterator[str]:
        for path in self.files:
            yield from self._read_file(path)
            self._finished_bytes += path.stat().st_size

    def found_nothing(self) -> ValueError:
        """The error for an input without one document: the files, and why each record was left out."""
        names = ", ".join(map(str, self.files[:5])) + (" ..." if len(self.files) > 5 else "")
        return ValueError(f"no document found in {names}; skipped:\n{self.skipped}")

    def _read_file(self, path: Path) -> Iterator[str]:
        place = "1"
        try:
            with open(path, "rb") as self._raw, decompressed(self._raw, path) as binary:
                _refuse_utf16(binary)
                stream = io.TextIOWrapper(
                    binary, encoding="utf-8-sig", errors="surrogateescape", newline="\n"
                )
                empty = True
                for place, record in self._records(stream, path):
                    empty = False
                    found = record if isinstance(record, Bad) else check_text(record)
                    if isinstance(found, Bad):
                        self._skip(found, f"{path}:{place}")
                    else:
                        self.documents += 1
                        yield found
                if empty:
                    self._skip(Bad("empty file", ""), str(path))
        except BrokenFile as error:
            self._broken(f"{path}: {error}")
        except PermissionError:
            self._broken(f"{path}: no permission to read it: chmod +r, or leave it out")
        except (OSError, EOFError, zlib.error) as error:
            self._broken(
                f"{path}: cannot be read past line {place}: {error or type(error).__name__}; the file is "
                "truncated or damaged: make it again"
            )
        finally:
            self._raw = None

    def _records(self, stream: TextIO, path: Path) -> Iterator[tuple[str, str | Bad]]:
        """(place, text or Bad) for each record of a file."""
        file_format = split_suffix(path)[0]
        if file_format == ".txt":
            return read_txt(stream, self.txt_documents)
        read = read_jsonl if file_format == ".jsonl" else read_json
        return (
            (place, value if isinstance(value, Bad) else field_of(value, self.json_key))
            for place, value in read(stream)
        )

    def _skip(self, bad: Bad, place: str) -> None:
        if self.strict and bad.reason not in HARMLESS:
            raise ValueError(
                f"{place}: {bad.reason}: {bad.detail}; mend the record, or leave strict mode off to skip "
                "and count such records"
            )
        self.skipped.add(bad, place)

    def _broken(self, message: str) -> None:
        if not self.skip_broken_files:
            raise ValueError(f"{message} (or let broken files be skipped: --skip_broken_files)") from None
        self.skipped.add(Bad("rest of a broken file", ""), message)


# Skipped and counted even in strict mode: nobody's mistake.
HARMLESS = ("empty document", "blank line", "empty file")


class BrokenFile(Exception):
    """A file whose further records cannot be found. The message holds the place, what was seen, the fix."""


def split_suffix(path: Path) -> tuple[str, str]:
    """("a/b.jsonl.gz") -> (".jsonl", ".gz"); ("", "") where the name is none that is read."""
    stem, last = os.path.splitext(path.name.lower())
    compression = last if last in COMPRESSIONS else ""
    file_format = os.path.splitext(stem)[1] if compression else last
    return (file_format, compression) if file_format in FORMATS else ("", "")


def find_files(paths: Sequence[str | os.PathLike]) -> tuple[list[Path], list[Path]]:
    """Files to read, in order, and what else the folders hold: other names, hidden files, links to folders.

    Raises ValueError for a path that is missing, has an unknown ending, comes twice or holds no such file.
    """
    files: list[Path] = []
    ignored: list[Path] = []
    if "" in paths:
        raise ValueError("a path is empty; expected files or folders to read (. is this folder)")
    for given in map(Path, paths):
        if given.is_dir():
            found, others = _walk(given)
            if not found:
                seen = ", ".join(sorted(path.name for path in others)[:5]) or "nothing"
                raise ValueError(f"{given}: the folder holds no {EXPECTED_FILES}; it holds: {seen}")
            files += found
            ignored += others
        elif given.exists():
            if not split_suffix(given)[0]:
                raise ValueError(f"{given}: unknown kind of file; expected {EXPECTED_FILES}")
            files.append(given)
        else:
            raise ValueError(
                f"{given}: no such file or folder; expected {EXPECTED_FILES}, or a folder of them"
            )
    times = Counter(path.resolve() for path in files)
    twice = [str(path) for path in files if times[path.resolve()] > 1]
    if twice:
        raise ValueError(f"{twice[0]}: given twice, its documents would be doubled; name it once")
    return files, ignored


def _walk(folder: Path) -> tuple[list[Path], list[Path]]:
    """All files below a folder, sorted by path: (those to read, all others)."""
    found, others = [], []

    def refuse(error: OSError) -> None:
        raise ValueError(f"{error.filename}: the folder cannot be listed: {error.strerror}")

    for parent, folders, names in os.walk(folder, onerror=refuse):
        others += [Path(parent, name) for name in folders if os.path.islink(os.path.join(parent, name))]
        for name in names:
            path = Path(parent, name)
            (found if split_suffix(path)[0] and not name.startswith(".") else others).append(path)
    return sorted(found), sorted(others)


# --- bytes ----------------------------------------------------------------------------------------------


def decompressed(raw: BinaryIO, path: Path) -> io.BufferedReader:
    """The file's content as a buffered binary stream. Raises OSError, EOFError or zlib.error when read."""
    compression = split_suffix(path)[1]
    if compression == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw, mode="rb"))
    if compression == ".zst":
        return io.BufferedReader(_ZstdReader(raw), buffer_size=CHUNK_CHARS)
    return raw  # open(..., "rb") is buffered already


class _ZstdReader(io.RawIOBase):
    """Decompresses zstd frames one after another; unlike zstandard's stream_reader it notices a cut one."""

    def __init__(self, raw: BinaryIO):
        try:
            import zstandard
        except ImportError:
            raise BrokenFile("zstd files need the package zstandard: pip install zstandard") from None
        self._zstandard = zstandard
        self._raw = raw
        self._frame = None
        self._compressed = b""  # read, not yet given to a frame
        self._pending = b""  # decompressed, not yet returned

    def readable(self) -> bool:
        return True

    def readinto(self, target) -> int:
        while not self._pending:
            if not self._compressed:
                self._compressed = self._raw.read(2**17)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("the zstd frame ends too early")
                return 0
            self._pending = self._decompress()
        count = min(len(target), len(self._pending))
        target[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        return count

    def _decompress(self) -> bytes:
        if self._frame is None:
            self._frame = self._zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
        data, self._compressed = self._compressed, b""
        try:
            out = self._frame.decompress(data)
        except self._zstandard.ZstdError as error:
            raise OSError(f"not zstd data ({error})") from None
        if self._frame.eof:
            self._compressed, self._frame = self._frame.unused_data, None
        return out


def _refuse_utf16(binary: io.BufferedReader) -> None:
    if binary.peek(2)[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise BrokenFile("the file is UTF-16, UTF-8 is expected: iconv -f UTF-16 -t UTF-8 OLD > NEW")


# --- records --------------------------------------------------------------------------------------------


def read_lines(stream: TextIO) -> Iterator[tuple[int, str]]:
    """(line number from 1, line without its end). Raises BrokenFile for an endless line."""
    number = 0
    while line := stream.readline(MAX_DOCUMENT_CHARS):
        number += 1
        if len(line) == MAX_DOCUMENT_CHARS and not line.endswith("\n"):
            raise BrokenFile(
                f"line {number} is longer than {MAX_DOCUMENT_CHARS:,} characters; split the document"
            )
        yield number, line.rstrip("\n").removesuffix("\r")


def read_txt(stream: TextIO, documents: str) -> Iterator[tuple[str, str | Bad]]:
    """Documents of a plain text file, with the line that each starts at. `documents` as in DocumentReader."""
    block: list[str] = []
    first = size = 0
    for number, line in read_lines(stream):
        blank = not line.strip()
        if documents == "line":
            yield str(number), Bad("blank line", "") if blank else line
        elif blank and documents == "blank_line":
            if block:
                yield str(first), "\n".join(block)
            block, size = [], 0
        elif not (blank and not block):  # a blank line never starts a document
            first = first if block else number
            block.append(line)
            size += len(line) + 1
            if size > MAX_DOCUMENT_CHARS:
                raise BrokenFile(
                    f"the document from line {first} on is longer than {MAX_DOCUMENT_CHARS:,} characters; "
                    "separate documents with blank lines, or choose --txt_documents line"
                )
    if block:
        yield str(first), "\n".join(block).rstrip("\n")


def read_jsonl(stream: TextIO) -> Iterator[tuple[str, object]]:
    """(line number, decoded value or Bad) for each line that is not blank."""
    for number, line in read_lines(stream):
        if not line.strip():
            yield str(number), Bad("blank line", "")
            continue
        try:
            yield str(number), json.loads(line)
        except (ValueError, RecursionError) as error:
            yield str(number), Bad("bad JSON", f"{_json_message(error)}: {_shown(line)}")


def read_json(stream: TextIO, chunk: int = CHUNK_CHARS) -> Iterator[tuple[str, object]]:
    """(line number, value) for each item of a JSON list, or for each of the values one after another.

    Raises BrokenFile at the first malformed item: behind it, the next one cannot be found.
    """
    source = _JsonSource(stream, chunk)
    in_list = source.peek() == "["
    if in_list:
        source.take()
    items = 0
    while source.peek() != ("]" if in_list else ""):
        if in_list and items:
            if source.take() != ",":
                raise source.broken("expected ',' or ']' behind a list item")
        source.peek()  # to the line that the value starts at
        yield str(source.line), source.value()
        items += 1
    if in_list:
        source.take()
        if source.peek():
            raise source.broken("there is more behind the end of the list")
        if not items:
            yield str(source.line), Bad("empty file", "the list is empty")


class _JsonSource:
    """A window over a stream of JSON text that moves forward as values are taken from it."""

    def __init__(self, stream: TextIO, chunk: int):
        self._stream = stream
        self._chunk = chunk
        self._window = ""
        self._at = 0  # in the window
        self._ended = False
        self._decoder = json.JSONDecoder()
        self.line = 1

    def peek(self) -> str:
        """The next character that is not white space, "" at the end."""
        while True:
            self._move(_SPACE.match(self._window, self._at).end())
            if self._at < len(self._window) or self._ended:
                return self._window[self._at : self._at + 1]
            self._refill()

    def take(self) -> str:
        """peek(), stepping over it."""
        character = self.peek()
        self._move(self._at + len(character))
        return character

    def value(self) -> object:
        """The next value whole. Each refill doubles the window, so the work stays linear."""
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._window, self._at)
                if len(self._window) - end > 3 or self._ended:  # else a number may go on, as 1 does in 1e+5
                    self._move(end)
                    return value
            except json.JSONDecodeError as error:
                if self._ended or not self._may_be_cut(error):
                    raise self.broken(_json_message(error)) from None
            except (ValueError, RecursionError) as error:
                raise self.broken(_json_message(error)) from None
            if len(self._window) - self._at > MAX_DOCUMENT_CHARS:
                raise self.broken(
                    f"an item is longer than {MAX_DOCUMENT_CHARS:,} characters, or is never closed"
                )
            self._refill()

    def broken(self, problem: str) -> BrokenFile:
        line = self._window[self._at : self._at + 200].split("\n", 1)[0]
        return BrokenFile(
            f"line {self.line}: bad JSON: {problem}: {_shown(line)}; mend the file; one object a line in a "
            ".jsonl file lets bad lines be skipped"
        )

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        """Whether the error may come from the window's end: an unclosed string, or a place just before it."""
        return error.msg.startswith("Unterminated string") or error.pos >= len(self._window) - 16

    def _move(self, to: int) -> None:
        self.line += self._window.count("\n", self._at, to)
        self._at = to

    def _refill(self) -> None:
        rest = self._window[self._at :]
        more = self._stream.read(max(self._chunk, len(rest)))
        self._window, self._at, self._ended = rest + more, 0, not more


def field_of(record: object, key: str) -> str | Bad:
    """The text of a decoded record, or why there is none."""
    if not isinstance(record, dict):
        return Bad("not an object", f"expected an object with the key {key!r}, found {_kind(record)}")
    if key not in record:
        keys = ", ".join(map(str, list(record)[:12])) or "none"
        return Bad("missing key", f"no key {key!r}; keys seen: {_shown(keys)} (choose with --json_key)")
    value = record[key]
    return value if isinstance(value, str) else Bad("not a string", f"the value of {key!r} is {_kind(value)}")


def check_text(text: str) -> str | Bad:
    """The text itself, or why it is no document: white space alone, or not encodable as UTF-8."""
    if not text or text.isspace():
        return Bad("empty document", "")
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        # Bytes that are not UTF-8 were decoded to U+DC80..U+DCFF; other surrogates come from JSON escapes.
        code = ord(text[error.start])
        seen = f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"lone surrogate \\u{code:04x}"
        return Bad("invalid UTF-8", f"{seen} at character {error.start}")
    return text


def batches(texts: Iterable[str], max_chars: int = CHUNK_CHARS, max_texts: int = 4096) -> Iterator[list[str]]:
    """Lists of texts in order, each closed once it holds `max_chars` characters or `max_texts` texts."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= max_chars or len(batch) >= max_texts:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _json_message(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} (column {error.colno})"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _shown(text: str, limit: int = 80) -> str:
    """A text cut to `limit` characters and safe to print anywhere."""
    cut = text if len(text) <= limit else text[:limit] + "..."
    return cut.encode("ascii", "backslashreplace").decode("ascii")
