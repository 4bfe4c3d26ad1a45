"""Pretraining data: which corpora, which share of each for training, validation and testing, and the samples.

parse_input_dir            the --input_dir flag      ->  [prefix]  or  [weight, prefix, weight, prefix,
...] parse_splits, split_bounds the --split flag          ->  ranges of sequences
build_train_valid_test_datasets                      ->  three datasets of {"text": int64 (seq_length +
1,)} collate                    a list of samples         ->  {"input_ids", "labels"}, int64 (B, T)
"""

from __future__ import annotations

import logging
import math
import os
import shlex
from typing import Callable, NamedTuple, Sequence

import numpy as np

from ernie35se.data.blend import BlendedDataset
from ernie35se.data.index_maps import IndexCache, IndexMaps
from ernie35se.data.indexed import TokenFile, find_prefixes, open_tokens

logger = logging.getLogger("ernie35se")

SPLIT_NAMES = ("train", "valid", "test")
MAX_BLENDED = 32767  # the mixture's index is int16
# A blended dataset prepares 0.5 % more than its share, as in Megatron-LM: the mixture may run a little ahead
# of it.
BLEND_MARGIN = 1.005


# ----------------------------------------------------------------------------------------------------
# Flags


def parse_splits(text: str) -> list[float]:
    """Shares of train, valid and test that add up to 1, from "949,50,1" or "949/50/1"; missing ones are 0.

    Raises ValueError for more than three, or anything but finite numbers of 0 or more with a sum above 0.
    """

    def bad(seen: str) -> ValueError:
        return ValueError(
            f"--split {text!r}: {seen}; expected up to three shares (train, valid, test) of 0 or more, "
            "such as 949,50,1"
        )

    parts = str(text).replace("/", ",").split(",")
    if len(parts) > len(SPLIT_NAMES):
        raise bad(f"{len(parts)} numbers")
    shares = []
    for part in parts:
        try:
            shares.append(float(part))
        except ValueError:
            raise bad(f"{part.strip()!r} is not a number") from None
        if not math.isfinite(shares[-1]) or shares[-1] < 0:
            raise bad(f"{part.strip()} is not a finite number of 0 or more")
    total = sum(shares)
    if not 0 < total < math.inf:
        raise bad(f"the sum is {total}")
    shares += [0.0] * (len(SPLIT_NAMES) - len(shares))
    return [share / total for share in shares]


def split_bounds(shares: Sequence[float], size: int) -> list[int]:
    """Four bounds that divide 0..size-1 among train, valid and test, each rounded to the nearest.

    What rounding leaves over or lacks goes to the first split that has a share, as in Megatron-LM.
    """
    bounds = np.cumsum([0] + [int(round(share * size)) for share in shares])
    first = next(i for i, share in enumerate(shares) if share > 0)
    bounds[first + 1 :] += size - bounds[-1]
    return [int(bound) for bound in np.maximum(bounds, 0)]


def parse_input_dir(text: str | os.PathLike) -> list:
    """`--input_dir` as prefixes: [p] for one corpus, else [weight, p, weight, p, ...] with float weights.

    It is a folder (all token files in it, sorted, weight 1.0 each), one prefix, or "weight prefix weight
    prefix ...". What exists under the whole text is taken as that, so paths may hold spaces or look like
    numbers; in a list, quote such a path: `0.3 "my data/a" 0.7 b`. Raises ValueError for anything else.
    """
    text = os.fspath(text)
    if not text.strip():
        raise ValueError(
            "--input_dir is empty; expected a folder of token files, a prefix, or: weight prefix ..."
        )
    try:
        words = shlex.split(text)
    except ValueError as error:  # an unclosed quote: one path, or nothing that can be read
        words = [text]
        logger.debug("--input_dir %r is taken as one path: %s", text, error)
    if len(words) == 1 or _is_corpus(text):
        prefixes = find_prefixes(text if _is_corpus(text) else words[0])
        return prefixes if len(prefixes) == 1 else [item for prefix in prefixes for item in (1.0, prefix)]
    weights = [_weight(word) for word in words[0::2]]
    if len(words) % 2 or None in weights:
        wrong = words[2 * weights.index(None)] if None in weights else words[-1]
        raise ValueError(
            f"--input_dir {text!r}: no such folder or prefix, and as a mixture it is wrong at {wrong!r}; "
            'expected a weight above 0 before each prefix, such as "0.3 data/a 0.7 data/b" (quote a path '
            "that holds spaces)"
        )
    prefixes = [_only_prefix(word) for word in words[1::2]]
    return prefixes if len(prefixes) == 1 else [item for pair in zip(weights, prefixes) for item in pair]


def _is_corpus(path: str) -> bool:
    return os.path.exists(path) or any(
        os.path.exists(path + end) for end in ("_ids.npy", "_idx.npz", ".bin", ".idx")
    )


def _weight(word: str | float) -> float | None:
    try:
        weight = float(word)
    except (TypeError, ValueError):
        return None
    return weight if 0 < weight < math.inf else None


def _only_prefix(path: str) -> str:
    prefixes = find_prefixes(path)
    if len(prefixes) > 1:
        raise ValueError(
            f"--input_dir: {path} holds {len(prefixes)} token files ({', '.join(prefixes[:5])}); expected "
            "one prefix after a weight. Name each with its own weight."
        )
    return prefixes[0]


# ----------------------------------------------------------------------------------------------------
# Datasets


class PretrainDataset:
    """Samples {"text": int64 (seq_length + 1,)} of one corpus, in the order of its index maps."""

    def __init__(self, tokens: TokenFile, maps: IndexMaps):
        self.tokens = tokens
        self.maps = maps

    def __len__(self) -> int:
        return len(self.maps.shuffle_idx)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        sample = int(self.maps.shuffle_idx[index])
        (first, start), (last, end) = self.maps.sample_idx[sample : sample + 2].tolist()
        sequences = self.maps.doc_idx[first : last + 1].tolist()
        if first == last:
            text = self.tokens.read(sequences[0], start, end + 1 - start)
        else:
            parts = [self.tokens.read(sequences[0], start)]
            parts += [self.tokens.read(sequence) for sequence in sequences[1:-1]]
            parts.append(self.tokens.read(sequences[-1], 0, end + 1))
            text = np.concatenate(parts)
        return {"text": text.astype(np.int64)}


def collate(items: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Samples of T + 1 tokens as {"input_ids": text[:-1], "labels": text[1:]}, both int64 (B, T)."""
    text = np.stack([item["text"] for item in items])  # (B, T + 1)
    return {"input_ids": text[:, :-1].copy(), "labels": text[:, 1:].copy()}


class _Corpus(NamedTuple):
    tokens: TokenFile
    cache: IndexCache
    weight: float
    bounds: list[int]

    def tokens_in(self, split: int) -> int:
        first, last = self.bounds[split : split + 2]
        return int(self.tokens.starts[last] - self.tokens.starts[first])


class _Request(NamedTuple):
    seq_length: int
    seed: int


def build_train_valid_test_datasets(
    prefixes: Sequence,
    splits: str,
    num_samples: Sequence[int],
    seq_length: int,
    seed: int,
    data_cache_path: str | None = None,
    *,
    vocab_size: int | None = None,
    is_builder: bool = True,
    barrier: Callable[[], object] | None = None,
) -> list:
    """[train, valid, test] datasets with at least `num_samples` samples each, whole epochs of their split.

    prefixes: [p], or [weight, p, weight, p, ...] for a mixture. splits: "949,50,1". vocab_size: where given,
    every id must be below it. A dataset is None where its split has no documents, and where no samples are
    asked of a split that is too short to give one or of a mixture.

    Several processes: exactly one a node has `is_builder`, and all pass `barrier` (a function that returns
    once all have called it; called once, also when building fails). The others wait and load what the builder
    wrote.

    Raises ValueError for malformed files, ids outside the vocabulary, a split that is asked for samples and
    has fewer than seq_length + 1 tokens, and a cache folder that cannot be written.
    """
    weights, paths = _parse_prefixes(prefixes)
    shares = parse_splits(splits)
    _check_numbers(num_samples, seq_length, seed)

    def build() -> list:
        corpora = []
        for weight, path in zip(weights, paths):
            tokens = open_tokens(path)
            cache = IndexCache(tokens, data_cache_path, is_builder)
            cache.scan(vocab_size)
            corpora.append(_Corpus(tokens, cache, weight, split_bounds(shares, tokens.num_sequences)))
        one = len(prefixes) == 1
        request = _Request(seq_length, seed)
        build_split = _build_single if one else _build_blend
        return [build_split(corpora[0] if one else corpora, i, num_samples[i], request) for i in range(3)]

    if barrier is None:
        return build()
    if not is_builder:
        barrier()
        return build()
    try:
        return build()
    finally:
        barrier()


def _build_single(corpus: _Corpus, split: int, num_samples: int, request: _Request) -> PretrainDataset | None:
    first, last = corpus.bounds[split : split + 2]
    if first == last:
        if num_samples:
            logger.warning(
                "the %s split of %s has none of its %d documents",
                SPLIT_NAMES[split], corpus.tokens.prefix, corpus.tokens.num_sequences,
            )  # fmt: skip
        return None
    if num_samples == 0 and corpus.tokens_in(split) <= request.seq_length:
        return None
    maps = corpus.cache.maps(SPLIT_NAMES[split], first, last, num_samples, request.seq_length, request.seed)
    return PretrainDataset(corpus.tokens, maps)


def _build_blend(
    corpora: list[_Corpus], split: int, num_samples: int, request: _Request
) -> BlendedDataset | None:
    """Mixture of one split. A corpus without documents in it is left out; so is one too short for a sample,
    unless it is the training split (then, or when nothing is left, building it raises): both are said."""
    if num_samples == 0:
        return None
    present = [corpus for corpus in corpora if corpus.bounds[split] < corpus.bounds[split + 1]]
    long_enough = [corpus for corpus in present if corpus.tokens_in(split) > request.seq_length]
    used = long_enough if split > 0 and long_enough else present
    for corpus in corpora:
        if corpus not in used:
            logger.warning(
                "the %s mixture goes without %s: that split of it holds %d tokens, a sample needs %d",
                SPLIT_NAMES[split], corpus.tokens.prefix, corpus.tokens_in(split), request.seq_length + 1,
            )  # fmt: skip
    if not used:
        return None
    total = sum(corpus.weight for corpus in used)
    weights = [corpus.weight / total for corpus in used]
    sizes = [math.ceil(num_samples * weight * BLEND_MARGIN) for weight in weights]
    datasets = [_build_single(corpus, split, size, request) for corpus, size in zip(used, sizes)]
    for corpus, weight in zip(used, weights):
        logger.info(
            "the %s mixture takes %.2f %% from %s", SPLIT_NAMES[split], 100 * weight, corpus.tokens.prefix
        )
    return BlendedDataset(datasets, weights, sum(sizes))


def _parse_prefixes(prefixes: Sequence) -> tuple[list[float], list[str]]:
    if isinstance(prefixes, (str, os.PathLike)):
        raise ValueError(f"prefixes {prefixes!r}: expected a list; parse_input_dir makes one from the flag")
    if len(prefixes) == 1:
        return [1.0], [os.fspath(prefixes[0])]
    if len(prefixes) == 0 or len(prefixes) % 2:
        raise ValueError(
            f"prefixes {list(prefixes)!r}: expected [prefix] or [weight, prefix, weight, prefix, ...]"
        )
    if len(prefixes) // 2 > MAX_BLENDED:
        raise ValueError(
            f"{len(prefixes) // 2} corpora to blend; expected at most {MAX_BLENDED}. Merge some first."
        )
    weights = [_weight(weight) for weight in prefixes[0::2]]
    if None in weights:
        wrong = prefixes[2 * weights.index(None)]
        raise ValueError(f"prefixes: weight {wrong!r}; expected a number above 0 before each prefix")
    return weights, [os.fspath(path) for path in prefixes[1::2]]


def _check_numbers(num_samples: Sequence[int], seq_length: int, seed: int) -> None:
    if len(num_samples) != 3 or min(num_samples) < 0:
        raise ValueError(
            f"num_samples {list(num_samples)}: expected three counts of 0 or more (train, valid, test)"
        )
    if seq_length < 1:
        raise ValueError(f"seq_length {seq_length}: expected at least 1")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed {seed}: expected 0 to {2**32 - 1}")
