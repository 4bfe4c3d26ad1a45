"""Index maps: which tokens make up which training sample.

As in Megatron-LM's GPT dataset (Shoeybi et al. 2019, arXiv:1909.08053), all sequences of a split are laid end
to end in a shuffled order, as many epochs of them as are needed; the row of tokens is cut every `seq_length`
tokens; the cuts are shuffled. Sample i is `seq_length + 1` tokens, so neighbouring samples share one: a
sample's last label is the next one's first input. Three arrays say this:

- `doc_idx`: the order in which sequences are laid;
- `sample_idx` (samples + 1, 2): where each cut falls, as (row of doc_idx, offset in that sequence);
- `shuffle_idx`: the order in which the samples are served.

("doc" is the tradition's word for an entry of `lens`: one sequence, which is a document unless the corpus was
split into sentences.)

A worked example: three sequences of 3, 2 and 4 tokens, samples of length 3 (so 4 tokens are read), 5 samples
wanted. One epoch has 9 tokens and gives (9 - 1) // 3 = 2 samples, two epochs give (18 - 1) // 3 = 5:

>>> import numpy as np
>>> lens = np.array([3, 2, 4], np.int32)
>>> num_epochs(tokens_per_epoch=9, seq_length=3, num_samples=5)
2
>>> maps = build_index_maps(lens, first=0, last=3, num_samples=5, seq_length=3, seed=9)
>>> maps.doc_idx
array([2, 1, 2, 0, 0, 1], dtype=int32)

Laid out, with the sequences named a (3 tokens), b (2) and c (4), and a cut at every third token:

    row of doc_idx   0         1     2         3       4       5
    tokens           c0c1c2c3  b0b1  c0c1c2c3  a0a1a2  a0a1a2  b0b1
    cuts             ^     ^         ^     ^       ^       ^

>>> maps.sample_idx.tolist()
[[0, 0], [0, 3], [2, 0], [2, 3], [3, 2], [4, 2]]
>>> maps.shuffle_idx
array([3, 4, 0, 2, 1], dtype=uint32)

Sample 1 runs from cut 1 to cut 2, both included: c3 b0 b1 c0. It is served last, as shuffle_idx[4] is 1.

The last epoch is shuffled apart, documents and samples, when less than 80 % of it is needed: otherwise some
documents would be seen more often than others early in the run.

Maps are kept in a cache folder, one file each, keyed by a hash of all that they depend on, the corpus's
content included; `IndexCache` reads, verifies, builds and writes them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import uuid
from typing import BinaryIO, Callable, NamedTuple

import numpy as np

from ernie35se.data.indexed import INT32_MAX, ContentScan, TokenFile, read_npy_header, sync

logger = logging.getLogger("ernie35se")

VERSION = 1  # part of every cache key: raise it when the maps or their files change


class IndexMaps(NamedTuple):
    """`doc_idx` (epochs * sequences,), `sample_idx` (samples + 1, 2) and `shuffle_idx` (samples,)."""

    doc_idx: np.ndarray
    sample_idx: np.ndarray
    shuffle_idx: np.ndarray


# ----------------------------------------------------------------------------------------------------
# Building


def num_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int) -> int:
    """Smallest n >= 1 with (n * tokens_per_epoch - 1) // seq_length >= num_samples."""
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def build_index_maps(
    lens: np.ndarray, first: int, last: int, num_samples: int, seq_length: int, seed: int
) -> IndexMaps:
    """Maps of at least `num_samples` samples over the sequences first..last-1, whole epochs of them.

    The caller has made sure that these sequences hold at least seq_length + 1 tokens.
    """
    rng = np.random.RandomState(seed)
    tokens = int(lens[first:last].sum(dtype=np.int64))
    epochs = num_epochs(tokens, seq_length, num_samples)
    before_last = (
        ((epochs - 1) * tokens - 1) // seq_length if epochs > 1 else 0
    )  # samples without the last epoch
    per_epoch = (tokens - 1) // seq_length
    apart = epochs > 1 and num_samples - before_last < int(0.80 * per_epoch)

    documents = np.arange(first, last, dtype=np.int32 if last <= INT32_MAX else np.int64)
    if apart:
        doc_idx = np.concatenate([_shuffled_epochs(documents, n, rng) for n in (epochs - 1, 1)])
    else:
        doc_idx = _shuffled_epochs(documents, epochs, rng)
    sample_idx = build_sample_idx(lens, doc_idx, seq_length, epochs)
    samples = len(sample_idx) - 1
    return IndexMaps(doc_idx, sample_idx, _build_shuffle_idx(before_last if apart else samples, samples, rng))


def _shuffled_epochs(documents: np.ndarray, epochs: int, rng: np.random.RandomState) -> np.ndarray:
    order = np.tile(documents, epochs)
    rng.shuffle(order)
    return order


def _build_shuffle_idx(apart_from: int, samples: int, rng: np.random.RandomState) -> np.ndarray:
    """0..samples-1, the samples before and from `apart_from` on shuffled among themselves."""
    order = np.arange(samples, dtype=np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64)
    rng.shuffle(order[:apart_from])
    if apart_from < samples:
        rng.shuffle(order[apart_from:])
    return order


def build_sample_idx(lens: np.ndarray, doc_idx: np.ndarray, seq_length: int, epochs: int = 1) -> np.ndarray:
    """(samples + 1, 2) cuts as (row of doc_idx, offset): by `fast_dataindex` where all numbers fit int32.

    `doc_idx` holds `epochs` times the same sequences.
    """
    total = int(lens[doc_idx].sum(dtype=np.int64))
    helpers = compiled_helpers()
    if helpers and total <= INT32_MAX and lens.dtype == doc_idx.dtype == np.int32:
        return helpers.build_sample_idx(lens, doc_idx, seq_length, epochs, total // epochs)
    return sample_idx_by_search(lens, doc_idx, seq_length)


def sample_idx_by_search(lens: np.ndarray, doc_idx: np.ndarray, seq_length: int) -> np.ndarray:
    """`build_sample_idx` in numpy: cut i is token i * seq_length, found in the running sum of lengths."""
    starts = np.zeros(len(doc_idx) + 1, np.int64)
    np.cumsum(lens[doc_idx], dtype=np.int64, out=starts[1:])
    cuts = np.arange((int(starts[-1]) - 1) // seq_length + 1, dtype=np.int64) * seq_length
    rows = (
        np.searchsorted(starts, cuts, side="right") - 1
    )  # the last sequence that starts at or before the cut
    rows[0] = 0  # where leading sequences are empty, the first sample still starts at the first
    small = len(doc_idx) <= INT32_MAX and lens.max() <= INT32_MAX
    return np.stack([rows, cuts - starts[rows]], axis=1).astype(np.int32 if small else np.int64)


def compiled_helpers():
    """The module `fast_dataindex.helpers`, or None where it is not installed."""
    try:
        from fast_dataindex import helpers
    except ImportError:
        return None
    return helpers


# ----------------------------------------------------------------------------------------------------
# Caching


class IndexCache:
    """Keeps a corpus's scan and index maps in a folder.

    `folder` is `data_cache_path`, or by default `index-cache` beside the data. Only a builder (one process a
    node) scans, builds and writes; others load what it wrote. Every file is written beside and renamed. The
    scan is filed under the corpus's path with the sizes and times of its files, so changed files are scanned
    again; maps are filed under the content, so moved or touched files keep theirs.
    """

    def __init__(self, tokens: TokenFile, data_cache_path: str | None = None, is_builder: bool = True):
        self.tokens = tokens
        self.is_builder = is_builder
        self.folder = data_cache_path or os.path.join(os.path.dirname(tokens.prefix), "index-cache")
        self.name = os.path.basename(tokens.prefix)

    def scan(self, vocab_size: int | None = None) -> ContentScan:
        """The corpus's fingerprint, smallest and largest id; every id is read once per content.

        Raises ValueError when an id is negative or, where `vocab_size` is given, not below it.
        """
        path = os.path.join(
            self.folder, f"{self.name}-{_key(os.path.abspath(self.tokens.prefix))}.content.json"
        )
        scan = self._recorded_scan(path)
        if scan is None:
            started = time.time()
            logger.info("checking every id of %s, once for this content", self.tokens.prefix)
            scan = self.tokens.scan()
            logger.info(
                "checked %s: %d tokens in %d documents, ids %d to %d, %.1f s",
                self.tokens.prefix,
                self.tokens.num_tokens,
                self.tokens.num_documents,
                scan.min_id,
                scan.max_id,
                time.time() - started,
            )
            if self.is_builder:
                self._record_scan(path, scan)
        self.tokens.check_scan(scan, vocab_size)
        return scan

    def _recorded_scan(self, path: str) -> ContentScan | None:
        try:
            with open(path, encoding="utf-8") as stream:
                record = json.load(stream)
            if record["version"] == VERSION and record["files"] == self.tokens.signature():
                scan = ContentScan(**record["scan"])
                return scan if [type(value) for value in scan] == [str, int, int] else None
        except (OSError, ValueError, KeyError, TypeError):
            pass  # missing or damaged: scanned and written again
        return None

    def _record_scan(self, path: str, scan: ContentScan) -> None:
        record = {"version": VERSION, "files": self.tokens.signature(), "scan": scan._asdict()}
        try:
            _write_whole(path, lambda stream: stream.write(json.dumps(record).encode()))
        except (
            OSError
        ) as error:  # only costs another scan next time; the maps decide whether the folder must do
            logger.warning(
                "%s cannot be written (%s): the next run will check the data again", path, error.strerror
            )

    def maps(
        self, split: str, first: int, last: int, num_samples: int, seq_length: int, seed: int
    ) -> IndexMaps:
        """Maps for the sequences first..last-1, from the cache where they are there and whole, else built.

        Raises ValueError when the sequences hold too few tokens for one sample, when the maps would not fit
        into memory, when the folder cannot be written, or, in a process that is no builder, when the maps are
        not there.
        """
        label = f"{split} split of {self.tokens.prefix}"
        _check_enough(label, self.tokens.lens[first:last], seq_length)
        depends_on = [VERSION, self.scan().fingerprint, first, last, num_samples, seq_length, seed]
        path = os.path.join(self.folder, f"{self.name}-{split}-{_key(json.dumps(depends_on))}.maps")
        maps = self._load(path)
        if maps is not None:
            logger.info("index maps of the %s: reusing %s (%d samples)", label, path, len(maps.shuffle_idx))
            return maps
        if not self.is_builder:
            raise ValueError(
                f"{path}: no index maps there; expected the node's building process to have written them. "
                "Its log says why not; if the processes do not share this folder, choose one with --data_cache_path."
            )
        _check_memory(label, self.tokens.lens[first:last], num_samples, seq_length)
        started = time.time()
        maps = build_index_maps(self.tokens.lens, first, last, num_samples, seq_length, seed)
        try:
            _write_whole(path, lambda stream: _save_maps(stream, maps))
        except OSError as error:
            raise ValueError(
                f"{self.folder}: index maps cannot be written there ({error.strerror or error}). "
                "Choose a folder that can be written with --data_cache_path."
            ) from error
        logger.info(
            "index maps of the %s: built %s (%d sequences x %d epochs, %d samples, %d asked for, %.1f s)",
            label,
            path,
            last - first,
            len(maps.doc_idx) // (last - first),
            len(maps.shuffle_idx),
            num_samples,
            time.time() - started,
        )
        return maps

    def _load(self, path: str) -> IndexMaps | None:
        if not os.path.exists(path):
            return None
        try:
            return _load_maps(path)
        except (OSError, ValueError) as error:
            logger.warning("index maps are damaged and will be built again: %s", error)
            return None


def _check_enough(label: str, lens: np.ndarray, seq_length: int) -> None:
    tokens = int(lens.sum(dtype=np.int64))
    if tokens < seq_length + 1:
        raise ValueError(
            f"{label}: its {len(lens)} documents hold {tokens} tokens; expected at least {seq_length + 1}, "
            f"one sample of --max_seq_length {seq_length} and its last label. Add data, give this split a larger "
            "share with --split, or lower --max_seq_length."
        )


def _check_memory(label: str, lens: np.ndarray, num_samples: int, seq_length: int) -> None:
    """ValueError where the maps are larger than this machine's memory: it would swap or kill the process."""
    epochs = num_epochs(int(lens.sum(dtype=np.int64)), seq_length, num_samples)
    # At the least: int32 rows of doc_idx, pairs of int32 in sample_idx, uint32 in shuffle_idx.
    needed, memory = 4 * epochs * len(lens) + 12 * num_samples, physical_memory()
    if needed > memory:
        raise ValueError(
            f"{label}: {num_samples:,} samples of --max_seq_length {seq_length} are asked for, {epochs:,} epochs of its "
            f"{len(lens):,} documents; their index maps take {needed / 2**30:,.0f} GiB, this machine has "
            f"{memory / 2**30:,.0f} GiB of memory. Lower --max_steps or the batch size, or add data."
        )


def physical_memory() -> float:
    """Bytes of this machine's memory; infinity where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return float("inf")


def _key(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _write_whole(path: str, write: Callable[[BinaryIO], object]) -> None:
    """Write beside, then rename: whoever reads `path` finds all of it or the file from before."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    beside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{uuid.uuid4().hex}.tmp")
    try:
        with open(beside, "xb") as stream:
            write(stream)
            sync(stream)
        os.replace(beside, path)
    finally:
        if os.path.exists(beside):
            os.remove(beside)


def _digest(maps: IndexMaps) -> np.ndarray:
    digest = hashlib.sha256()
    for array in maps:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array))
    return np.frombuffer(digest.digest(), np.uint8)


def _save_maps(stream: BinaryIO, maps: IndexMaps) -> None:
    """The three arrays and their checksum as four .npy arrays in a row (`numpy.load` from the open file reads
    each)."""
    for array in (*maps, _digest(maps)):
        np.save(stream, array, allow_pickle=False)


def _load_maps(path: str) -> IndexMaps:
    """Memory-mapped maps. Raises ValueError for anything but what `_save_maps` wrote."""
    arrays, size = [], os.path.getsize(path)
    with open(path, "rb") as stream:
        for name in (*IndexMaps._fields, "checksum"):
            header = read_npy_header(stream, f"{name} in {path}")
            end = header.offset + header.nbytes
            if header.nbytes == 0 or end > size:
                raise ValueError(f"{path}: {size} bytes; expected at least {end} to hold {name}")
            arrays.append(np.memmap(path, header.dtype, "r", header.offset, header.shape).view(np.ndarray))
            stream.seek(end)
    maps = IndexMaps(*arrays[:3])
    if not np.array_equal(_digest(maps), arrays[3]):
        raise ValueError(f"{path}: its content does not agree with its checksum")
    return maps
