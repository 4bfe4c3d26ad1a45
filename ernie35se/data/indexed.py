"""Token files: the memory-mapped reader and the streaming writer.

A corpus is a flat array of token ids plus the length of each sequence in it, and the documents as ranges of
sequences. On disk it is one of

- `<prefix>_ids.npy` (1-D integer ids) and `<prefix>_idx.npz` (`lens`: tokens of each sequence; `docs`:
  document boundaries in sequences, 0 first, the number of sequences last): what this project writes and
  PaddleNLP publishes;
- `<prefix>.bin` and `<prefix>.idx`: Megatron-LM's and PaddleNLP's pair, in its memory-mapped form (magic
  `MMIDIDX`, with or without Megatron's trailing sequence modes) and in its older lazy form (`TNTIDX`,
  fairseq's).

For example, two documents, the second of two sequences:

    ids  = [5 6 7 | 8 9 | 4]      lens = [3 2 1]      docs = [0 1 3]

Files are checked as they are opened (types, sizes, the sum of lengths, the boundaries), so that reading stays
in bounds; `TokenFile.check` also looks at every id. Whatever is wrong with a file is a ValueError that names
it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import shutil
import struct
import tempfile
import zipfile
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

logger = logging.getLogger("ernie35se")

NPY_ENDINGS = ("_ids.npy", "_idx.npz")
BIN_ENDINGS = (".bin", ".idx")
INT32_MAX = np.iinfo(np.int32).max

# Megatron-LM's codes; 6 and 7 are floats, which no token file holds.
_DTYPE_OF_CODE = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32,
    8: np.uint16, 9: np.uint32, 10: np.uint64,
}  # fmt: skip
_SCAN_CHUNK = 1 << 22  # ids looked at together
_NPY_HEADER_BYTES = 128  # fixed, so that the writer can fill in the count at the end


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 below 65,500 pieces, else int32: the rule of Megatron-LM and PaddleNLP."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class ContentScan(NamedTuple):
    """What one pass over a token file finds."""

    fingerprint: str  # hash of ids, lens and docs
    min_id: int
    max_id: int


# ----------------------------------------------------------------------------------------------------
# Reading


class TokenFile:
    """Memory-mapped token file; made by `open_tokens`.

    Attributes: `prefix`; `files` (the pair of paths); `ids` (num_tokens,) memory map; `lens` (sequences,)
    int32 (int64 where a length needs it); `docs` (num_documents + 1,) int64; `starts` (sequences + 1,) int64,
    where each sequence starts in `ids`.
    """

    def __init__(
        self, prefix: str, files: tuple[str, str], ids: np.ndarray, lens: np.ndarray, docs: np.ndarray
    ):
        self.prefix = prefix
        self.files = files
        self.ids = ids.view(np.ndarray)  # still mapped; slices of the subclass are slow
        self.starts = _sequence_starts(lens, len(ids), files)
        self.lens = np.ascontiguousarray(lens, np.int32 if lens.max() <= INT32_MAX else np.int64)
        self.docs = _checked_docs(docs, len(lens), files[1])

    def __reduce__(self):
        return open_tokens, (self.prefix,)  # a copy in another process maps the file again

    def __repr__(self) -> str:
        counts = f"{self.num_documents} documents, {self.num_tokens} tokens"
        return f"TokenFile({self.prefix!r}, {counts}, {self.dtype})"

    @property
    def dtype(self) -> np.dtype:
        """Type of the ids on disk."""
        return self.ids.dtype

    @property
    def num_tokens(self) -> int:
        """Ids in the file."""
        return len(self.ids)

    @property
    def num_sequences(self) -> int:
        """Entries of `lens`."""
        return len(self.lens)

    @property
    def num_documents(self) -> int:
        """Documents; one sequence each, unless the file was split into sentences."""
        return len(self.docs) - 1

    def document(self, index: int) -> np.ndarray:
        """Ids of document `index`, all its sequences joined. Raises IndexError outside 0..num_documents-1."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents} in {self.prefix}")
        return self.ids[self.starts[self.docs[index]] : self.starts[self.docs[index + 1]]]

    def read(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` ids (default: the rest) of a sequence from `offset`. Raises IndexError outside it."""
        if not 0 <= sequence < self.num_sequences:
            raise IndexError(f"sequence {sequence} of {self.num_sequences} in {self.prefix}")
        size = int(self.lens[sequence])
        end = size if length is None else offset + length
        if not 0 <= offset <= end <= size:
            raise IndexError(
                f"ids {offset}..{end} of sequence {sequence}, which has {size}, in {self.prefix}"
            )
        start = int(self.starts[sequence])
        return self.ids[start + offset : start + end]

    def signature(self) -> list[list[int]]:
        """Size, times and inode of both files: changes whenever their content may have."""
        stats = [os.stat(file) for file in self.files]
        return [[s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for s in stats]

    def scan(self) -> ContentScan:
        """One pass over everything; remembered in this process for as long as the files stay the same."""
        key = (os.path.abspath(self.prefix), str(self.signature()))
        if key not in _SCANS:
            _SCANS[key] = _scan(self.ids, self.lens, self.docs)
        return _SCANS[key]

    def fingerprint(self) -> str:
        """Hash of the content: equal for equal ids, lens and docs, wherever and in whichever form they
        lie."""
        return self.scan().fingerprint

    def check(self, vocab_size: int | None = None) -> None:
        """Raises ValueError unless every id is at least 0 and, where given, below `vocab_size`."""
        self.check_scan(self.scan(), vocab_size)

    def check_scan(self, scan: ContentScan, vocab_size: int | None = None) -> None:
        """`check` with the scan's result at hand."""
        limit = math.inf if vocab_size is None else vocab_size
        if scan.min_id >= 0 and scan.max_id < limit:
            return
        place = self._first_outside(limit)
        expected = "0 or more" if vocab_size is None else f"ids within 0..{vocab_size - 1} (the vocabulary)"
        raise ValueError(
            f"{self.files[0]}: id {int(self.ids[place])} at token {place}, in sequence "
            f"{int(np.searchsorted(self.starts, place, side='right')) - 1}; expected {expected}. "
            "Prepare the data with the tokenizer that the model is trained with."
        )

    def _first_outside(self, limit: float) -> int:
        for start in range(0, len(self.ids), _SCAN_CHUNK):
            chunk = self.ids[start : start + _SCAN_CHUNK]
            outside = np.flatnonzero((chunk < 0) | (chunk >= limit))
            if len(outside):
                return start + int(outside[0])
        raise AssertionError("the scan found an id outside, the search did not")


_SCANS: dict[tuple[str, str], ContentScan] = {}


def _scan(ids: np.ndarray, lens: np.ndarray, docs: np.ndarray) -> ContentScan:
    digest = hashlib.sha256(f"{ids.dtype.str} {len(ids)} {len(lens)} {len(docs)}".encode())
    lows, highs = [], []
    for start in range(0, len(ids), _SCAN_CHUNK):
        chunk = ids[start : start + _SCAN_CHUNK]
        digest.update(np.ascontiguousarray(chunk))
        lows.append(int(chunk.min()))
        highs.append(int(chunk.max()))
    for index in (lens, docs):
        for start in range(0, len(index), _SCAN_CHUNK):
            digest.update(index[start : start + _SCAN_CHUNK].astype("<i8"))
    return ContentScan(digest.hexdigest(), min(lows), max(highs))


def open_tokens(prefix: str | os.PathLike) -> TokenFile:
    """Map the token file at `prefix`: `<prefix>_ids.npy` + `<prefix>_idx.npz`, or `<prefix>.bin` +
    `<prefix>.idx`.

    Raises ValueError, naming the file, what was seen, what was expected and the fix, for a missing,
    truncated, mismatched or otherwise malformed pair.
    """
    prefix = os.fspath(prefix)
    forms = [endings for endings in (NPY_ENDINGS, BIN_ENDINGS) if _pair_exists(prefix, endings)]
    if not forms:
        raise ValueError(
            f"{prefix}: no token file there; expected {_both_forms(prefix)}. "
            f"{_listing(os.path.dirname(prefix) or '.')} {_HOW_TO_MAKE}"
        )
    files = tuple(prefix + ending for ending in forms[0])
    if len(forms) == 2:
        logger.warning("%s is there in two forms; reading %s and not %s.bin", prefix, files[0], prefix)
    if os.path.exists(prefix + ".lsm"):
        logger.warning("%s.lsm (a loss mask) is not used: pretraining learns from every token", prefix)
    ids, lens, docs = _open_npy_pair(*files) if forms[0] is NPY_ENDINGS else _open_bin_pair(*files)
    return TokenFile(prefix, files, ids, lens, docs)


_HOW_TO_MAKE = "tools/create_pretraining_data.py makes token files."


def _both_forms(prefix: str) -> str:
    return f"{prefix}_ids.npy and {prefix}_idx.npz, or {prefix}.bin and {prefix}.idx"


def _pair_exists(prefix: str, endings: tuple[str, str]) -> bool:
    """Whether both files are there; one without the other is an error."""
    present = [os.path.exists(prefix + ending) for ending in endings]
    if any(present) and not all(present):
        lone, missing = sorted(endings, key=lambda ending: not os.path.exists(prefix + ending))
        raise ValueError(
            f"{prefix}{lone} is there but {prefix}{missing} is not; expected both files of a token file. "
            f"Copy the missing one beside it, or make both again. {_HOW_TO_MAKE}"
        )
    return all(present)


def _listing(folder: str, limit: int = 10) -> str:
    """Sentence that tells what a folder holds, for messages."""
    if not os.path.isdir(folder):
        return f"The folder {folder} does not exist."
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return f"The folder {folder} cannot be listed ({error.strerror})."
    if not names:
        return f"The folder {folder} is empty."
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"The folder {folder} holds {', '.join(names[:limit])}{more}."


def find_prefixes(folder_or_prefix: str | os.PathLike) -> list[str]:
    """Prefixes of the token files in a folder (sorted, not recursive), or the prefix itself.

    A path to one of a token file's own files stands for its prefix. Raises ValueError, listing what was found
    and what was expected, when there is none, or when one file of a pair is missing.
    """
    path = os.fspath(folder_or_prefix)
    if os.path.isdir(path):
        names = [name for name in os.listdir(path) if not name.startswith(".")]
        stems = {name[: -len(e)] for name in names for e in NPY_ENDINGS + BIN_ENDINGS if name.endswith(e)}
        prefixes = sorted(os.path.join(path, stem) for stem in stems)
        for prefix in prefixes:
            _ = [_pair_exists(prefix, endings) for endings in (NPY_ENDINGS, BIN_ENDINGS)]
        if not prefixes:
            raise ValueError(
                f"{path}: no token files in this folder; expected {_both_forms('<name>')}. "
                f"{_listing(path)} {_HOW_TO_MAKE}"
            )
        return prefixes
    for ending in NPY_ENDINGS + BIN_ENDINGS:
        if path.endswith(ending) and os.path.isfile(path):
            return find_prefixes(path[: -len(ending)])
    if not any([_pair_exists(path, endings) for endings in (NPY_ENDINGS, BIN_ENDINGS)]):
        raise ValueError(
            f"{path}: neither a folder of token files nor the prefix of one; expected {_both_forms(path)}. "
            f"{_listing(os.path.dirname(path) or '.')} {_HOW_TO_MAKE}"
        )
    return [path]


class _BadFile(ValueError):
    """Told apart from the ValueErrors of the libraries that parse a file, whose messages do not name it."""


def _bad(file: str, seen: str, expected: str, fix: str = "Make or copy the file again.") -> ValueError:
    return _BadFile(f"{file}: {seen}; expected {expected}. {fix}")


def _sequence_starts(lens: np.ndarray, num_ids: int, files: tuple[str, str]) -> np.ndarray:
    """(sequences + 1,) int64, after checking that the lengths are those of these ids."""
    if len(lens) == 0:
        raise _bad(files[1], "no sequences", "at least one")
    if lens.min() < 0:
        place = int(np.argmin(lens))
        raise _bad(files[1], f"length {int(lens[place])} of sequence {place}", "lengths of 0 or more")
    total = int(lens.sum(dtype=np.float64))  # near enough to tell whether int64 could wrap
    starts = np.zeros(len(lens) + 1, np.int64)
    if total < 2**62:
        np.cumsum(lens, dtype=np.int64, out=starts[1:])
        total = int(starts[-1])
    if total != num_ids:
        raise _bad(
            files[1], f"its lengths add up to {total} tokens but {files[0]} holds {num_ids}", "equal counts",
            "The two files belong to different data, or one is cut short: copy or make both again.",
        )  # fmt: skip
    return starts


def _checked_docs(docs: np.ndarray, sequences: int, file: str) -> np.ndarray:
    expected = f"document boundaries that rise from 0 to the number of sequences, {sequences}"
    if len(docs) < 2:
        raise _bad(file, f"{len(docs)} document boundaries", expected)
    if int(docs[0]) != 0 or int(docs[-1]) != sequences:
        raise _bad(file, f"boundaries from {int(docs[0])} to {int(docs[-1])}", expected)
    falls = np.flatnonzero(docs[1:] < docs[:-1])
    if len(falls):
        place = int(falls[0])
        raise _bad(file, f"boundary {int(docs[place])} followed by {int(docs[place + 1])}", expected)
    return np.ascontiguousarray(docs, np.int64)


# ----------------------------------------------------------------------------------------------------
# <prefix>_ids.npy + <prefix>_idx.npz


class _NpyHeader(NamedTuple):
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # of the data, from the start of the stream

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_npy_header(stream: BinaryIO, name: str) -> _NpyHeader:
    """Type, shape and data offset of the .npy array at the stream's position. Objects (pickles) are
    refused."""
    try:
        version = np.lib.format.read_magic(stream)
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(stream)
    except Exception as error:  # numpy's parser raises whatever the bytes lead it to
        raise _bad(name, f"not a readable .npy header ({error})", "a .npy array of integers") from error
    if dtype.hasobject:
        raise _bad(name, "an array of Python objects", "integers; objects are never unpickled")
    if any(side < 0 for side in shape):
        raise _bad(name, f"shape {shape}", "sides of 0 or more")
    return _NpyHeader(dtype, tuple(int(side) for side in shape), stream.tell())


def _check_integers(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    if dtype.kind not in "iu":
        raise _bad(name, f"{dtype} values", "integers, such as uint16 or int32")
    if len(shape) != 1:
        raise _bad(name, f"{len(shape)} dimensions {shape}", "one dimension")
    if shape[0] == 0:
        raise _bad(name, "no values", "at least one")


def _open_npy_pair(ids_file: str, idx_file: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    try:
        size = os.path.getsize(ids_file)
        with open(ids_file, "rb") as stream:
            header = read_npy_header(stream, ids_file)
    except OSError as error:
        raise _bad(ids_file, f"cannot be read ({error.strerror})", "a readable file") from error
    _check_integers(ids_file, header.dtype, header.shape)
    _check_size(ids_file, size, header.offset + header.nbytes)
    ids = np.memmap(ids_file, header.dtype, mode="r", offset=header.offset, shape=header.shape)
    lens, docs = _read_npz(idx_file, ("lens", "docs"))
    return ids, lens, docs


def _check_size(file: str, size: int, expected: int) -> None:
    if size != expected:
        word = "cut short" if size < expected else "too long"
        raise _bad(file, f"{size} bytes, {word}", f"{expected} bytes by its header")


def _read_npz(file: str, members: tuple[str, ...]) -> list[np.ndarray]:
    """1-D integer arrays of a .npz by name; checks each header before it trusts a size in it."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            for member in members:
                if f"{member}.npy" not in names:
                    held = ", ".join(names) or "nothing"
                    raise _bad(file, f"holds {held}", f"the arrays {' and '.join(members)}")
            return [_read_npz_member(archive, member, file) for member in members]
    except _BadFile:
        raise
    except Exception as error:  # zipfile and zlib raise whatever the bytes lead them to
        raise _bad(file, f"not a readable .npz ({error})", "an archive written by numpy.savez") from error


def _read_npz_member(archive: zipfile.ZipFile, member: str, file: str) -> np.ndarray:
    name = f"{member} in {file}"
    size = archive.getinfo(f"{member}.npy").file_size
    with archive.open(f"{member}.npy") as stream:
        header = read_npy_header(stream, name)
        _check_integers(name, header.dtype, header.shape)
        _check_size(name, size, header.offset + header.nbytes)
        data = stream.read()
    _check_size(name, header.offset + len(data), header.offset + header.nbytes)
    return np.frombuffer(data, header.dtype)


# ----------------------------------------------------------------------------------------------------
# <prefix>.bin + <prefix>.idx


def _open_bin_pair(bin_file: str, idx_file: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    try:
        size = os.path.getsize(bin_file)
        if os.path.getsize(idx_file) == 0:
            raise _bad(idx_file, "an empty file", "an index that starts with MMIDIDX or TNTIDX")
        index = np.memmap(idx_file, np.uint8, mode="r")
    except OSError as error:
        raise _bad(
            error.filename or idx_file, f"cannot be read ({error.strerror})", "a readable file"
        ) from error
    head = index[:9].tobytes()
    if head == b"MMIDIDX\0\0":
        dtype, lens, docs = _read_mmap_index(index, idx_file)
    elif head[:8] == b"TNTIDX\0\0":
        dtype, lens, docs = _read_lazy_index(index, idx_file)
    else:
        raise _bad(idx_file, f"starts with {head!r}", "an index that starts with MMIDIDX or TNTIDX")
    if size == 0 or size % dtype.itemsize:
        raise _bad(bin_file, f"{size} bytes", f"a multiple of {dtype.itemsize}, the size of a {dtype} id")
    return np.memmap(bin_file, dtype, mode="r"), lens, docs


def _unpack(index: np.ndarray, layout: str, offset: int, file: str) -> tuple[int, ...]:
    needed = offset + struct.calcsize(layout)
    if len(index) < needed:
        raise _bad(file, f"{len(index)} bytes, cut short", f"at least {needed}, its header")
    return struct.unpack(layout, index[offset:needed].tobytes())


def _integer_type(code: int, file: str) -> np.dtype:
    dtype = np.dtype(_DTYPE_OF_CODE.get(code, object))
    if dtype.kind not in "iu":
        seen = f"type code {code}" + (f" ({dtype})" if code in _DTYPE_OF_CODE else "")
        raise _bad(file, seen, "an integer type: code 1-5 or 8-10")
    return dtype


def _read_mmap_index(index: np.ndarray, file: str) -> tuple[np.dtype, np.ndarray, np.ndarray]:
    """magic(9) version(8) type(1) sequences(8) boundaries(8) sizes[int32] pointers[int64] docs[int64]
    modes[int8]?"""
    version, code, sequences, boundaries = _unpack(index, "<QBQQ", 9, file)
    if version != 1:
        raise _bad(file, f"version {version}", "version 1")
    dtype = _integer_type(code, file)
    offset = 9 + struct.calcsize("<QBQQ")
    end = offset + 12 * sequences + 8 * boundaries
    if len(index) != end + sequences:  # Megatron-LM's multimodal files end in a mode a sequence
        _check_size(file, len(index), end)
    lens = np.frombuffer(index, "<i4", sequences, offset)
    pointers = np.frombuffer(index, "<i8", sequences, offset + 4 * sequences)
    docs = np.frombuffer(index, "<i8", boundaries, offset + 12 * sequences)
    _check_contiguous(pointers, lens, dtype.itemsize, file)
    return dtype, lens, docs


def _read_lazy_index(index: np.ndarray, file: str) -> tuple[np.dtype, np.ndarray, np.ndarray]:
    """magic(8) version type size sequences sides boundaries (8 each) dims data[int64] sizes[int32 or int64]
    docs[int64]

    Megatron-LM wrote the sizes as int64, PaddleNLP as int32: the length of the file tells which.
    """
    version, code, itemsize, sequences, sides, boundaries = _unpack(index, "<6Q", 8, file)
    if version != 1:
        raise _bad(file, f"version {version}", "version 1")
    dtype = _integer_type(code, file)
    if itemsize != dtype.itemsize or sides != sequences:
        raise _bad(
            file, f"ids of {itemsize} bytes, {sides} sides", f"{dtype.itemsize} bytes, {sequences} sides"
        )
    offset = 8 + struct.calcsize("<6Q")
    fixed = offset + 16 * (sequences + 1) + 8 * boundaries
    side = "<i8" if len(index) == fixed + 8 * sides else "<i4"
    _check_size(file, len(index), fixed + np.dtype(side).itemsize * sides)
    pointers = np.frombuffer(index, "<i8", sequences, offset + 8 * (sequences + 1))
    lens = np.frombuffer(index, side, sides, offset + 16 * (sequences + 1))
    docs = np.frombuffer(index, "<i8", boundaries, len(index) - 8 * boundaries)
    _check_contiguous(pointers, lens, 1, file)
    return dtype, lens, docs


def _check_contiguous(pointers: np.ndarray, lens: np.ndarray, itemsize: int, file: str) -> None:
    expected = np.zeros(len(lens), np.int64)
    np.cumsum(lens[:-1], dtype=np.int64, out=expected[1:])
    wrong = np.flatnonzero(pointers != expected * itemsize)
    if len(wrong):
        place = int(wrong[0])
        raise _bad(
            file,
            f"sequence {place} starts at {int(pointers[place])}",
            f"{int(expected[place]) * itemsize}, so that sequences follow one another",
        )


# ----------------------------------------------------------------------------------------------------
# Writing


class TokenFileWriter:
    """Writes `<prefix>_ids.npy` and `<prefix>_idx.npz` in constant memory.

        with TokenFileWriter("data/corpus", vocab_size=32000) as writer:
            writer.add_document(ids)

    Everything streams into a hidden folder beside the target. Only a successful exit renames both files into
    place; an exception, or no document at all (a ValueError), leaves nothing new behind and the old files as
    they were.
    """

    def __init__(self, prefix: str | os.PathLike, vocab_size: int):
        self.prefix = os.fspath(prefix)
        self.vocab_size = vocab_size
        self.dtype = token_dtype(vocab_size)
        self.num_documents = self.num_sequences = self.num_tokens = 0
        if os.path.isdir(self.prefix) or not os.path.basename(self.prefix):
            raise ValueError(
                f"{self.prefix}: a folder; expected a prefix, such as {Path(self.prefix) / 'corpus'}"
            )
        self._folder = None

    def __enter__(self) -> TokenFileWriter:
        parent, name = os.path.split(os.path.abspath(self.prefix))
        try:
            self._new_parent = None if os.path.isdir(parent) else parent
            os.makedirs(parent, exist_ok=True)
            self._folder = tempfile.mkdtemp(prefix=f".{name}.", suffix=".tmp", dir=parent)
        except OSError as error:
            raise ValueError(
                f"{parent}: cannot be written to ({error.strerror}); choose another output"
            ) from error
        self._ids, self._lens, self._docs = (
            open(os.path.join(self._folder, part), "wb", buffering=1 << 20)
            for part in ("ids.npy", "lens", "docs")
        )
        self._ids.write(bytes(_NPY_HEADER_BYTES))
        self._docs.write(struct.pack("<q", 0))
        return self

    def add_document(self, ids: np.ndarray, lens: np.ndarray | None = None) -> None:
        """Append one document: 1-D integer ids within 0..vocab_size-1, one or more.

        `lens` divides it into sequences (default: one). Raises ValueError for anything else; nothing of it is
        kept.
        """
        ids = np.asarray(ids)
        where = f"document {self.num_documents} for {self.prefix}"
        _check_integers(where, ids.dtype, ids.shape)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            outside = low if low < 0 else high
            raise _bad(
                where,
                f"id {outside}",
                f"ids within 0..{self.vocab_size - 1}",
                "Use the tokenizer of this size.",
            )
        lens = np.array([len(ids)]) if lens is None else np.asarray(lens)
        if lens.sum() != len(ids) or lens.min() < 0 or lens.max() > INT32_MAX:
            raise _bad(
                where,
                f"sequence lengths {lens[:5]}..., {len(ids)} ids",
                "int32 lengths that add up",
                "Split it.",
            )
        self._ids.write(np.ascontiguousarray(ids, self.dtype))
        self._lens.write(lens.astype("<i4"))
        self.num_documents += 1
        self.num_sequences += len(lens)
        self.num_tokens += len(ids)
        self._docs.write(struct.pack("<q", self.num_sequences))

    def __exit__(self, kind, error, trace) -> None:
        try:
            if kind is None:
                self._finish()
        except BaseException:
            kind = True
            raise
        finally:
            for stream in (self._ids, self._lens, self._docs):
                with contextlib.suppress(OSError):  # a full disk: `_finish` or the body has raised it already
                    stream.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            if kind is not None and self._new_parent and not os.listdir(self._new_parent):
                os.rmdir(self._new_parent)

    def _finish(self) -> None:
        if not self.num_documents:
            raise ValueError(f"{self.prefix}: no document to write; expected at least one. Check the input.")
        self._ids.seek(0)
        self._ids.write(_npy_header_block(self.dtype, self.num_tokens))
        for stream in (self._lens, self._docs):
            stream.flush()
        idx = os.path.join(self._folder, "idx.npz")
        np.savez(  # streams from the memory maps
            idx,
            lens=np.memmap(self._lens.name, "<i4", mode="r"),
            docs=np.memmap(self._docs.name, "<i8", mode="r"),
        )
        sync(self._ids)
        with open(idx, "rb") as stream:
            sync(stream)
        self._swap_in(self._ids.name, idx)

    def _swap_in(self, *new: str) -> None:
        """Rename the new files into place, or on a fault put the old ones back.

        The old ones move away first, so that a process killed in between never leaves new ids with an old
        index: a file is missing then, which readers report.
        """
        targets = [self.prefix + ending for ending in NPY_ENDINGS]
        renames = [(target, os.path.join(self._folder, f"old{i}")) for i, target in enumerate(targets)]
        renames = [pair for pair in renames if os.path.exists(pair[0])] + list(zip(new, targets))
        done = []
        try:
            for before, after in renames:
                os.replace(before, after)
                done.append((before, after))
        except OSError:
            for before, after in reversed(done):
                os.rename(after, before)
            raise


def sync(stream: BinaryIO) -> None:
    """Push a file to the disk, so that a rename after it never exposes missing bytes."""
    stream.flush()
    os.fsync(stream.fileno())


def _npy_header_block(dtype: np.dtype, count: int) -> bytes:
    """A .npy 1.0 header padded to a fixed size (numpy's own padding depends on the count)."""
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': ({count},), }}"
    head = np.lib.format.magic(1, 0) + struct.pack("<H", _NPY_HEADER_BYTES - 10)
    return head + text.ljust(_NPY_HEADER_BYTES - 11).encode("latin1") + b"\n"
