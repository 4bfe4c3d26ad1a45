"""Index maps against brute force, past int32, and their cache."""

import doctest
import json
import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ernie35se.data import index_maps
from ernie35se.data.index_maps import (
    IndexCache,
    build_index_maps,
    build_sample_idx,
    num_epochs,
    sample_idx_by_search,
)
from ernie35se.data.indexed import open_tokens


def test_worked_example():
    result = doctest.testmod(index_maps)
    assert result.attempted >= 6 and result.failed == 0


@given(tokens=st.integers(1, 500), seq_length=st.integers(1, 60), num_samples=st.integers(0, 400))
def test_num_epochs(tokens, seq_length, num_samples):
    n = 1
    while (n * tokens - 1) // seq_length < num_samples:
        n += 1
    assert num_epochs(tokens, seq_length, num_samples) == n


def walk_sample_idx(lens, doc_idx, seq_length):
    """The cuts, found by walking token by token."""
    tokens = [(row, offset) for row, doc in enumerate(doc_idx) for offset in range(int(lens[doc]))]
    cuts = [tokens[i] for i in range(0, len(tokens), seq_length)]
    return [[0, 0]] + [list(cut) for cut in cuts[1:]]


@settings(max_examples=200, deadline=None)
@given(
    lens=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    epochs=st.integers(1, 4),
    seq_length=st.integers(1, 17),
    seed=st.integers(0, 9),
)
def test_sample_idx_both_ways(lens, epochs, seq_length, seed):
    lens = np.array(lens, np.int32)
    if lens.sum() < seq_length + 1:
        return
    doc_idx = np.tile(np.arange(len(lens), dtype=np.int32), epochs)
    np.random.default_rng(seed).shuffle(doc_idx)
    expected = walk_sample_idx(lens, doc_idx, seq_length)
    found = sample_idx_by_search(lens, doc_idx, seq_length)
    assert found.tolist() == expected and found.dtype == np.int32
    compiled = build_sample_idx(lens, doc_idx, seq_length, epochs)
    assert compiled.tolist() == expected and compiled.dtype == np.int32


def plain_maps(lens, first, last, wanted, seq_length, seed):
    """The three maps by their definition, in lists."""
    rng = np.random.RandomState(seed)

    def shuffled(values):
        values = np.array(values)
        rng.shuffle(values)
        return values.tolist()

    documents, tokens, epochs = list(range(first, last)), sum(lens[first:last].tolist()), 1
    while (epochs * tokens - 1) // seq_length < wanted:
        epochs += 1
    samples, whole = (epochs * tokens - 1) // seq_length, ((epochs - 1) * tokens - 1) // seq_length
    if epochs > 1 and wanted - whole < int(0.8 * ((tokens - 1) // seq_length)):
        doc_idx = shuffled(documents * (epochs - 1)) + shuffled(documents)
        shuffle_idx = shuffled(range(whole)) + shuffled(range(whole, samples))
    else:
        doc_idx, shuffle_idx = shuffled(documents * epochs), shuffled(range(samples))
    return doc_idx, walk_sample_idx(lens, doc_idx, seq_length), shuffle_idx


@settings(max_examples=150, deadline=None)
@given(
    lens=st.lists(st.integers(1, 30), min_size=3, max_size=30),
    wanted=st.integers(0, 90),
    seq_length=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
)
def test_maps_are_as_defined(lens, wanted, seq_length, seed):
    lens, first, last = np.array([7, 9, *lens, 5], np.int32), 2, 2 + len(lens)
    if lens[first:last].sum() < seq_length + 1:
        return
    maps = build_index_maps(lens, first, last, wanted, seq_length, seed)
    assert tuple(array.tolist() for array in maps) == plain_maps(lens, first, last, wanted, seq_length, seed)
    assert (
        sorted(maps.shuffle_idx.tolist()) == list(range(len(maps.sample_idx) - 1))
        and len(maps.shuffle_idx) >= wanted
    )
    assert [array.dtype for array in maps] == [np.int32, np.int32, np.uint32]


def python_cuts(lens, doc_idx, seq_length):
    """Cuts in Python's integers, document by document."""
    starts = [0]
    for doc in doc_idx.tolist():
        starts.append(starts[-1] + int(lens[doc]))
    row, cuts = 0, []
    for cut in range(0, starts[-1] - 1 - (starts[-1] - 1) % seq_length + 1, seq_length):
        while starts[row + 1] <= cut:
            row += 1
        cuts.append([row, cut - starts[row]])
    return cuts


@pytest.mark.parametrize("lens, seq_length", [
    (np.array([2**31 - 1, 5, 2**31 - 2, 2**30, 17], np.int32), 2**24 + 1),
    (np.full(20, 2_000_000_000, np.int32), 2**25 - 3),  # 40 billion tokens
    (np.array([2**33, 3, 2**32 + 1], np.int64), 2**26 + 1),  # documents past int32 themselves
])  # fmt: skip
def test_past_int32(lens, seq_length):
    maps = build_index_maps(lens, 0, len(lens), 10, seq_length, seed=1)
    total = sum(lens.tolist())
    assert total > 2**31 and len(maps.shuffle_idx) == (total - 1) // seq_length
    assert maps.sample_idx.tolist() == python_cuts(lens, maps.doc_idx, seq_length)
    assert maps.sample_idx.min() >= 0
    assert maps.sample_idx.dtype == (np.int64 if lens.max() >= 2**31 else np.int32)


def test_many_epochs_past_int32():
    lens = np.array([2**30, 2**29 + 7], np.int32)  # one epoch fits int32, five do not
    seq_length = 2**22 + 3
    maps = build_index_maps(lens, 0, 2, 5 * (int(lens.sum()) // seq_length), seq_length, seed=3)
    assert len(maps.doc_idx) == 10 and maps.sample_idx.tolist() == python_cuts(lens, maps.doc_idx, seq_length)


# ----------------------------------------------------------------------------------------------------
# Cache


LENS = [5, 9, 3, 14, 8, 2, 11]


@pytest.fixture
def corpus(make_corpus):
    return make_corpus("my corpus/c", LENS)


@pytest.fixture
def builds(monkeypatch):
    """Number of times that maps were built."""
    count = []
    real = index_maps.build_index_maps
    monkeypatch.setattr(index_maps, "build_index_maps", lambda *args: count.append(args) or real(*args))
    return count


def get(corpus, cache=None, is_builder=True, args=("train", 0, 7, 20, 6, 1)):
    return IndexCache(open_tokens(corpus), cache, is_builder).maps(*args)


def same(a, b):
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(a, b))


def files(folder, ending=".maps"):
    return sorted(Path(folder).glob(f"*{ending}"))


def test_built_once_then_reused_and_said(corpus, builds, caplog):
    caplog.set_level(logging.INFO, "ernie35se")
    first = get(corpus)
    folder = Path(corpus).parent / "index-cache"
    [path] = files(folder)
    assert "checked" in caplog.text and f"built {path}" in caplog.text
    caplog.clear()
    assert same(first, get(corpus)) and len(builds) == 1
    assert f"reusing {path}" in caplog.text and "checked" not in caplog.text
    assert same(first, build_index_maps(np.array(LENS, np.int32), 0, 7, 20, 6, 1))
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
    with open(path, "rb") as stream:  # as the docstring says, plain .npy arrays in a row
        assert same(first, [np.load(stream) for _ in range(3)])


def test_keyed_by_everything_it_depends_on(corpus, builds):
    base = ("train", 0, 7, 20, 6, 1)
    get(corpus, args=base)
    for i, value in [(1, 1), (2, 6), (3, 21), (4, 7), (5, 2)]:
        get(corpus, args=(*base[:i], value, *base[i + 1 :]))
        assert len(builds) == i + 1
    assert len(files(Path(corpus).parent / "index-cache")) == 6


def test_changed_content_is_checked_and_built_again(corpus, builds, caplog):
    get(corpus)
    ids = np.load(f"{corpus}_ids.npy")
    ids[4] += 1
    np.save(f"{corpus}_ids.npy", ids)
    caplog.set_level(logging.INFO, "ernie35se")
    get(corpus)
    assert len(builds) == 2 and "checked" in caplog.text
    os.utime(f"{corpus}_ids.npy")  # touched only: checked, but the maps stay
    caplog.clear()
    get(corpus)
    assert len(builds) == 2 and "checked" in caplog.text and "reusing" in caplog.text


def test_ids_are_checked_also_from_the_record(corpus):
    cache = IndexCache(open_tokens(corpus))
    top = cache.scan().max_id
    for _ in range(2):
        assert IndexCache(open_tokens(corpus)).scan(top + 1).max_id == top
        with pytest.raises(
            ValueError, match=f"c_ids.npy: id {top} at token .*expected ids within 0..{top - 1}"
        ):
            IndexCache(open_tokens(corpus)).scan(top)


@settings(max_examples=150, deadline=None, database=None)
@given(data=st.data())
def test_damaged_cache_is_rebuilt(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("cache")
    prefix = str(folder / "c")
    np.save(f"{prefix}_ids.npy", np.arange(sum(LENS), dtype=np.int32))
    np.savez(f"{prefix}_idx.npz", lens=np.array(LENS, np.int32), docs=np.arange(len(LENS) + 1))
    first = get(prefix)
    path = data.draw(st.sampled_from(files(folder / "index-cache") + files(folder / "index-cache", ".json")))
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[place:]
    else:
        content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    assert same(first, get(prefix))
    assert same(first, get(prefix, is_builder=False))  # whole again


def test_damaged_cache_is_said(corpus, builds, caplog):
    get(corpus)
    [path] = files(Path(corpus).parent / "index-cache")
    content = path.read_bytes()
    for damaged in (content[:-1], content[:200], b"", content[:300] + b"\x07" + content[301:]):
        path.write_bytes(damaged)
        caplog.clear()
        get(corpus)
        assert "damaged and will be built again" in caplog.text and str(path) in caplog.text
        assert path.read_bytes() == content
    assert len(builds) == 5


@pytest.mark.parametrize("record", ["[]", "{}", '{"version": 1, "files": 3, "scan": 4}', '"x"', "nul"])
def test_strange_records_are_checked_again(corpus, record):
    fingerprint = IndexCache(open_tokens(corpus)).scan().fingerprint
    [path] = files(Path(corpus).parent / "index-cache", ".content.json")
    good = path.read_text()
    path.write_text(record)
    assert IndexCache(open_tokens(corpus)).scan().fingerprint == fingerprint and path.read_text() == good
    path.write_text(json.dumps({**json.loads(good), "scan": {"fingerprint": 1, "min_id": 0, "max_id": 9}}))
    assert IndexCache(open_tokens(corpus)).scan().fingerprint == fingerprint


def test_data_cache_path(corpus, tmp_path):
    get(corpus, cache=str(tmp_path / "elsewhere" / "deep"))
    assert len(files(tmp_path / "elsewhere" / "deep")) == 1
    assert not (Path(corpus).parent / "index-cache").exists()


def test_folder_that_cannot_be_written(corpus, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="file: index maps cannot be written there.*--data_cache_path"):
        get(corpus, cache=str(tmp_path / "file"))
    maps = get(corpus)

    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    assert same(maps, get(corpus))  # what is there is still used
    with pytest.raises(
        ValueError, match="index-cache: index maps cannot be written there .Permission denied"
    ):
        get(corpus, args=("train", 0, 7, 21, 6, 1))
    assert len(os.listdir(Path(corpus).parent / "index-cache")) == 2  # nothing half-written stays


def test_few_tokens_are_named_instead_of_endless_epochs(make_corpus):
    corpus = make_corpus("seven", [3, 4, 5, 6, 7, 8, 9])
    with pytest.raises(
        ValueError, match="train split of .*seven: its 7 documents hold 42 tokens; expected at least 4097"
    ):
        get(corpus, args=("train", 0, 7, 1000, 4096, 1))
    with pytest.raises(
        ValueError, match="valid split of .*seven: its 1 documents hold 8 tokens; expected at least 9"
    ):
        get(corpus, args=("valid", 5, 6, 1, 8, 1))
    assert len(get(corpus, args=("valid", 5, 6, 1, 7, 1)).shuffle_idx) == 1


def test_maps_larger_than_the_memory_are_refused(make_corpus, monkeypatch):
    corpus = make_corpus("seven", [3, 4, 5, 6, 7, 8, 9])
    monkeypatch.setattr(index_maps, "physical_memory", lambda: 24 * 2**30)
    with pytest.raises(
        ValueError, match="10,000,000,000 samples .* its 7 documents; .* this machine has 24 GiB .* --max_steps"
    ):
        get(corpus, args=("train", 0, 7, 10**10, 4, 1))
    assert not any(name.endswith(".maps") for name in os.listdir(Path(corpus).parent / "index-cache"))
    monkeypatch.undo()
    assert 2**27 < index_maps.physical_memory() < 2**60


def test_a_process_that_does_not_build_waits_for_the_file(corpus, builds):
    with pytest.raises(
        ValueError, match="no index maps there; expected the node's building process.*--data_cache_path"
    ):
        get(corpus, is_builder=False)
    assert not builds and not (Path(corpus).parent / "index-cache").exists()
    maps = get(corpus)
    assert same(maps, get(corpus, is_builder=False)) and len(builds) == 1


def test_two_nodes_may_build_into_one_folder(corpus):
    results = []
    threads = [threading.Thread(target=lambda: results.append(get(corpus))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 6 and all(same(results[0], maps) for maps in results)
    assert len(os.listdir(Path(corpus).parent / "index-cache")) == 2
