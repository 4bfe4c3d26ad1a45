"""Splits, --input_dir, datasets: reference values, brute force, several processes, and what is refused."""

import logging
import multiprocessing
import os
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ernie35se.data import index_maps
from ernie35se.data.index_maps import build_index_maps
from ernie35se.data.indexed import open_tokens
from ernie35se.data.pretrain import (
    PretrainDataset,
    build_train_valid_test_datasets,
    collate,
    parse_input_dir,
    parse_splits,
    split_bounds,
)

# ----------------------------------------------------------------------------------------------------
# Reference values and brute force


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("case", ["one_epoch", "multi_epoch", "blend"])
def test_reference_values(reference, tmp_path, monkeypatch, case, compiled):
    if not compiled:
        for module in ("index_maps", "blend"):
            monkeypatch.setattr(f"ernie35se.data.{module}.compiled_helpers", lambda: None)
    with np.load(reference / f"data_{case}.npz") as file:
        expected = dict(file)
    prefixes = []
    for i, documents in enumerate(expected["ndocs"]):
        rng = np.random.default_rng(100 + i)
        lens = rng.integers(1, 60, documents).astype(np.int32)
        ids = rng.integers(3, 320, lens.sum()).astype(np.uint16)
        np.save(tmp_path / f"c{i}_ids.npy", ids)
        np.savez(tmp_path / f"c{i}_idx.npz", lens=lens, docs=np.arange(documents + 1))
        prefixes += [expected["weights"][i]] if "weights" in expected else []
        prefixes.append(str(tmp_path / f"c{i}"))
    datasets = build_train_valid_test_datasets(
        prefixes,
        str(expected["splits"]),
        expected["num_samples"].tolist(),
        int(expected["seq_length"]),
        int(expected["seed"]),
    )
    for name, dataset in zip(("train", "valid", "test"), datasets):
        assert (dataset is None) == (f"{name}_len" not in expected)
        if dataset is None:
            continue
        assert len(dataset) == expected[f"{name}_len"]
        first = expected[f"{name}_first"]
        assert [dataset[i]["text"].tolist() for i in range(len(first))] == first.tolist()
        for field in ("doc_idx", "sample_idx", "shuffle_idx"):
            if f"{name}_{field}" in expected:
                array = getattr(dataset.maps, field)
                assert array.dtype == expected[f"{name}_{field}"].dtype
                assert array.tolist() == expected[f"{name}_{field}"].tolist()


@pytest.mark.parametrize("seq_length, wanted", [(1, 3), (7, 100), (13, 1), (64, 9)])
def test_samples_are_slices_of_the_laid_out_corpus(make_corpus, seq_length, wanted):
    lens = np.random.default_rng(5).integers(1, 25, 41)
    lens[[3, 17]] = 0
    prefix = make_corpus("c", lens)
    train, valid, test = build_train_valid_test_datasets([prefix], "7/3", [wanted, 2, 0], seq_length, 11)
    assert test is None
    ids = np.load(f"{prefix}_ids.npy")
    documents = np.split(ids, np.cumsum(lens)[:-1])
    for dataset, owned in ((train, range(29)), (valid, range(29, 41))):
        row = np.concatenate([documents[i] for i in dataset.maps.doc_idx])
        assert set(dataset.maps.doc_idx) == set(owned)
        assert len(dataset) == (len(row) - 1) // seq_length
        for i in range(len(dataset)):
            text, start = dataset[i]["text"], int(dataset.maps.shuffle_idx[i]) * seq_length
            assert text.dtype == np.int64 and text.tolist() == row[start : start + seq_length + 1].tolist()
        for index in (-1, len(dataset)):
            with pytest.raises(IndexError, match=f"sample {index} of {len(dataset)}"):
                dataset[index]


def test_collate_aligns_labels():
    items = [{"text": np.arange(5) + 10 * i} for i in range(3)]
    batch = collate(items)
    assert batch["input_ids"].tolist() == [[10 * i, 10 * i + 1, 10 * i + 2, 10 * i + 3] for i in range(3)]
    assert batch["labels"].tolist() == [[10 * i + 1, 10 * i + 2, 10 * i + 3, 10 * i + 4] for i in range(3)]
    assert all(a.dtype == np.int64 and a.flags.c_contiguous and a.flags.owndata for a in batch.values())


def test_the_order_is_the_same_from_any_start_and_process(make_corpus, tmp_path):
    """What a resumed run relies on: sample i is the same whatever was read before, cached or built afresh."""
    prefixes = [0.3, make_corpus("a", [9] * 30), 0.7, make_corpus("b", [5] * 50, seed=1)]

    def samples(cache, order):
        train = build_train_valid_test_datasets(prefixes, "1", [40, 0, 0], 8, 5, str(tmp_path / cache))[0]
        return {i: train[i]["text"].tolist() for i in order}

    straight = samples("one", range(40))
    assert straight == samples("one", reversed(range(40))) == samples("two", range(40))
    assert {i: straight[i] for i in range(25, 40)} == samples("one", range(25, 40))


def test_corpus_past_int32_is_read_right(tmp_path):
    """A real (sparse) file of more than 2^31 ids, known ids at known places."""
    count = 2**31 + 5000
    head = f"{{'descr': '<u2', 'fortran_order': False, 'shape': ({count},), }}".encode().ljust(117) + b"\n"
    marks = {0: 7, 2**31 - 1: 8, 2**31: 9, 2**31 + 1: 10, count - 1: 11}
    with open(tmp_path / "c_ids.npy", "wb") as stream:
        stream.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head)
        start = stream.tell()
        for place, value in marks.items():
            stream.seek(start + 2 * place)
            stream.write(struct.pack("<H", value))
    lens = np.array([2**31 - 1, 3, 4998], np.int32)
    np.savez(tmp_path / "c_idx.npz", lens=lens, docs=np.arange(4))
    tokens = open_tokens(tmp_path / "c")
    assert tokens.read(1).tolist() == [8, 9, 10] and tokens.read(2)[-1] == 11
    seq_length = 2**20 - 1
    dataset = PretrainDataset(tokens, build_index_maps(tokens.lens, 0, 3, 1, seq_length, 0))
    order = np.concatenate([[0], np.cumsum(lens[dataset.maps.doc_idx].astype(np.int64))])
    served = {int(sample): i for i, sample in enumerate(dataset.maps.shuffle_idx)}
    seen = 0
    for place, value in marks.items():
        document = int(np.searchsorted(tokens.starts, place, side="right")) - 1
        row = dataset.maps.doc_idx.tolist().index(document)
        position = int(order[row]) + place - int(tokens.starts[document])
        if position // seq_length in served:
            seen += 1
            assert dataset[served[position // seq_length]]["text"][position % seq_length] == value
    assert seen >= 4


# ----------------------------------------------------------------------------------------------------
# Splits


def test_parse_splits():
    assert (
        parse_splits("949,50,1")
        == parse_splits("949/50/1")
        == parse_splits(" 949 , 50, 1 ")
        == [0.949, 0.05, 0.001]
    )
    assert parse_splits("1") == parse_splits("3,0") == [1.0, 0.0, 0.0]
    assert parse_splits("0,1,0") == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("text, words", [
    ("0,0,0", "the sum is 0"), ("", "'' is not a number"), ("949,50,", "'' is not a number"),
    ("1,-1,1", "-1 is not a finite number"), ("nan,1,1", "nan is not"), ("inf", "inf is not"),
    ("1,2,3,4", "4 numbers"), ("a,b", "'a' is not"), ("1e308,1e308,1e308", "the sum is inf"),
    ("1 2", "'1 2' is not"),
])  # fmt: skip
def test_splits_that_are_refused(text, words):
    with pytest.raises(ValueError, match=f"--split .*{words}.*expected up to three shares.*949,50,1"):
        parse_splits(text)


@settings(max_examples=60, deadline=None)
@given(text=st.one_of(st.text(), st.text("0123456789.,/-+einfa_ ", max_size=30)), size=st.integers(0, 10**12))
def test_any_split_text_is_shares_or_a_value_error(text, size):
    try:
        shares = parse_splits(text)
    except ValueError as error:
        assert repr(text) in str(error)
        return
    assert len(shares) == 3 and min(shares) >= 0 and abs(sum(shares) - 1) < 1e-9
    bounds = split_bounds(shares, size)
    assert bounds[0] == 0 and bounds[3] == size and bounds == sorted(bounds)


@given(shares=st.lists(st.integers(0, 999), min_size=3, max_size=3).filter(any), size=st.integers(0, 5000))
def test_split_bounds(shares, size):
    """Every split within two documents of its share; none for a share of 0."""
    shares = parse_splits(",".join(map(str, shares)))
    bounds = split_bounds(shares, size)
    for share, first, last in zip(shares, bounds, bounds[1:]):
        assert abs((last - first) - share * size) <= 2
        assert share > 0 or first == last


@pytest.mark.parametrize(
    "size, bounds", [(200, [0, 190, 200, 200]), (1, [0, 1, 1, 1]), (3, [0, 3, 3, 3]), (20, [0, 19, 20, 20])]
)
def test_split_bounds_round_as_megatron(size, bounds):
    assert split_bounds(parse_splits("949,50,1"), size) == bounds


def test_split_bounds_never_fall_below_zero():
    assert split_bounds(parse_splits("1e-17,1,1"), 3) == [0, 0, 1, 3]  # both halves of 3 round up to 2


@pytest.mark.parametrize("size, bounds", [(1, [0, 0, 1, 1]), (5, [0, 0, 3, 5]), (3, [0, 0, 1, 3])])
def test_a_split_without_a_share_gets_nothing_of_the_rounding(size, bounds):
    assert split_bounds(parse_splits("0,1,1"), size) == bounds


# ----------------------------------------------------------------------------------------------------
# --input_dir


def test_input_dir_forms(make_corpus, tmp_path, monkeypatch):
    a, b = make_corpus("folder/a", [4]), make_corpus("folder/b", [4])
    spaced = make_corpus("0.3 other data/0.5", [4])
    number = make_corpus("2024", [4])
    folder, spaced_folder = str(tmp_path / "folder"), str(tmp_path / "0.3 other data")
    assert parse_input_dir(folder) == [1.0, a, 1.0, b]
    assert parse_input_dir(a) == parse_input_dir(f" {a} ") == parse_input_dir(f"{a}_ids.npy") == [a]
    assert (
        parse_input_dir(spaced_folder)
        == parse_input_dir(spaced)
        == parse_input_dir(f"'{spaced}'")
        == [spaced]
    )
    assert parse_input_dir(number) == parse_input_dir(f"1 {number}") == [number]
    assert parse_input_dir(f"0.3 {a} 0.7 {b}") == parse_input_dir(f"0.3  {a}\n.7 {b}") == [0.3, a, 0.7, b]
    assert parse_input_dir(f"0.3 '{spaced}' 7e-1 {number}") == [0.3, spaced, 0.7, number]
    assert parse_input_dir(f'2 "{spaced_folder}" 1 {a}') == [2.0, spaced, 1.0, a]
    monkeypatch.chdir(tmp_path)
    assert parse_input_dir("2024") == ["2024"] and parse_input_dir("1 2024 2 2024") == [
        1.0,
        "2024",
        2.0,
        "2024",
    ]
    assert parse_input_dir(Path("folder/a")) == ["folder/a"]


@pytest.mark.parametrize("text, words", [
    ("", "empty"), ("  ", "empty"),
    ("nowhere", "neither a folder of token files nor the prefix"),
    ("a b", "wrong at 'a'"), ("0.3 {a} 0.7", "wrong at '0.7'"), ("{a} {a}", "wrong at '.*a'"),
    ("-1 {a} 2 {a}", "wrong at '-1'"), ("0 {a} 2 {a}", "wrong at '0'"), ("nan {a} 2 {a}", "wrong at 'nan'"),
    ("0.3 {a} 0.7 nowhere", "nowhere: neither"), ("0.3 {a} 0.7 {folder}", "holds 2 token files"),
    ("{empty}", "no token files in this folder.*empty"), ("it's here", "neither a folder"),
    ("''", "neither a folder"),
])  # fmt: skip
def test_input_dirs_that_are_refused(make_corpus, tmp_path, text, words):
    a = make_corpus("folder/a", [4])
    make_corpus("folder/b", [4])
    (tmp_path / "empty").mkdir()
    text = text.format(a=a, folder=tmp_path / "folder", empty=tmp_path / "empty")
    with pytest.raises(ValueError, match=words):
        parse_input_dir(text)


@settings(deadline=None)
@given(text=st.one_of(st.text(), st.text("01. ab/'\"\\\n-", max_size=20)))
def test_any_input_dir_text_is_read_or_a_value_error(text):
    try:
        parse_input_dir(text)
    except ValueError:
        pass


# ----------------------------------------------------------------------------------------------------
# Building


def test_a_tiny_corpus_in_a_mixture_wraps(make_corpus):
    """Asked for 12 times what it has: every sample of it is served, in its share of the places."""
    tiny, large = make_corpus("tiny", [6, 5]), make_corpus("large", [40] * 50, seed=1, low=1000, high=2000)
    train = build_train_valid_test_datasets([0.5, tiny, 0.5, large], "1", [30, 0, 0], 8, 3)[0]
    assert len(train) == 32  # 1.005 x 15 each, rounded up
    from_tiny = [i for i in range(len(train)) if train[i]["text"].max() < 1000]
    assert len(from_tiny) == 16
    laid_out = np.load(f"{tiny}_ids.npy")
    assert {t for i in from_tiny for t in train[i]["text"].tolist()} == set(laid_out.tolist())


def test_few_documents_are_named(make_corpus, caplog):
    seven = make_corpus("seven", [100] * 7)
    with pytest.raises(
        ValueError, match="train split of .*seven: its 7 documents hold 700 tokens; expected at least 4097"
    ):
        build_train_valid_test_datasets([seven], "1", [100, 0, 0], 4096, 1)
    with pytest.raises(
        ValueError, match="valid split .*1 documents hold 100 tokens; expected at least 129.*--split"
    ):
        build_train_valid_test_datasets([seven], "6,1", [10, 10, 0], 128, 1)
    train, valid, test = build_train_valid_test_datasets([seven], "6,1", [10, 0, 0], 128, 1)
    assert len(train) >= 10 and valid is None and test is None  # nothing was asked of the short split
    train, valid, _ = build_train_valid_test_datasets([seven], "949,50,1", [10, 10, 10], 128, 1)
    assert (
        valid is None
        and "the valid split of " in caplog.text
        and "has none of its 7 documents" in caplog.text
    )
    train, valid, _ = build_train_valid_test_datasets([seven], "6,1", [0, 0, 0], 50, 1)
    assert len(train) == 11 and len(valid) == 1  # one epoch where none were asked for


def test_mixture_without_or_with_a_short_split(make_corpus, caplog):
    small, large = make_corpus("small", [10] * 4), make_corpus("large", [10] * 400, seed=1)
    _, valid, _ = build_train_valid_test_datasets([1, small, 3, large], "9,1", [1, 20, 0], 16, 1)
    assert f"the valid mixture goes without {small}" in caplog.text and len(valid) == 21
    _, valid, _ = build_train_valid_test_datasets(
        [1, small, 3, large], "3,1", [1, 20, 0], 16, 1
    )  # 10 tokens of 17
    assert "holds 10 tokens, a sample needs 17" in caplog.text and len(valid) == 21
    with pytest.raises(
        ValueError, match="train split of .*small: its 4 documents hold 40 tokens; expected at least 65"
    ):
        build_train_valid_test_datasets([1, small, 3, large], "1", [10, 0, 0], 64, 1)
    with pytest.raises(ValueError, match="valid split of .*small"):
        build_train_valid_test_datasets([1, small, 1, small], "3,1", [1, 1, 0], 16, 1)
    assert build_train_valid_test_datasets([1, small, 1, small], "1", [1, 1, 0], 16, 1)[1] is None


def test_ids_past_the_vocabulary_are_refused(make_corpus):
    prefix = make_corpus("c", [30] * 3)
    top = int(np.load(f"{prefix}_ids.npy").max())
    build_train_valid_test_datasets([prefix], "1", [1, 0, 0], 8, 1, vocab_size=top + 1)
    with pytest.raises(ValueError, match=f"c_ids.npy: id {top} at token .*0..{top - 1} .the vocabulary"):
        build_train_valid_test_datasets([prefix], "1", [1, 0, 0], 8, 1, vocab_size=top)


@pytest.mark.parametrize("change, words", [
    ({"prefixes": "c"}, "expected a list"), ({"prefixes": []}, r"expected \[prefix\]"),
    ({"prefixes": [1, "c", 2]}, r"expected \[prefix\]"), ({"prefixes": ["c", 1]}, "weight 'c'"),
    ({"prefixes": [-1, "c"]}, "weight -1"), ({"prefixes": ["nowhere"]}, "no token file there"),
    ({"prefixes": [1, "c"] * 32768}, "at most 32767"),
    ({"splits": "0"}, "--split"), ({"num_samples": [1, 2]}, "three counts"),
    ({"num_samples": [1, -2, 0]}, "three counts"),
    ({"seq_length": 0}, "seq_length 0"), ({"seed": -1}, "seed -1"), ({"seed": 2**32}, "seed"),
])  # fmt: skip
def test_arguments_that_are_refused(make_corpus, tmp_path, monkeypatch, change, words):
    make_corpus("c", [30] * 3)
    monkeypatch.chdir(tmp_path)
    good = {"prefixes": ["c"], "splits": "1", "num_samples": [1, 0, 0], "seq_length": 8, "seed": 1}
    assert build_train_valid_test_datasets(**good)[0] is not None
    with pytest.raises(ValueError, match=words):
        build_train_valid_test_datasets(**{**good, **change})


# ----------------------------------------------------------------------------------------------------
# Several processes


def test_one_builder_a_node_others_wait_and_load(make_corpus, monkeypatch):
    prefixes = [0.4, make_corpus("a", [20] * 40), 0.6, make_corpus("b", [20] * 40, seed=1)]
    built_by, results = [], {}
    real = index_maps.build_index_maps
    monkeypatch.setattr(
        index_maps,
        "build_index_maps",
        lambda *a: built_by.append(threading.current_thread().name) or real(*a),
    )
    barrier = threading.Barrier(3, timeout=30)

    def run(rank):
        datasets = build_train_valid_test_datasets(
            prefixes, "8,1,1", [30, 5, 5], 16, 7, is_builder=rank == 1, barrier=barrier.wait
        )
        results[rank] = [[d[i]["text"].tolist() for i in range(len(d))] for d in datasets]

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank{rank}") for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert built_by == ["rank1"] * 6 and results[0] == results[1] == results[2]


def _build_in_process(prefix, rank, barrier, queue):
    try:
        datasets = build_train_valid_test_datasets(
            [prefix], "8,2", [30, 5, 0], 16, 7, is_builder=rank == 0, barrier=barrier.wait
        )
        queue.put((rank, [int(d[i]["text"].sum()) for d in datasets[:2] for i in range(len(d))]))
    except ValueError as error:
        queue.put((rank, str(error)))


@pytest.mark.parametrize("fails", [False, True])
def test_processes_agree_and_a_failing_builder_hangs_nobody(make_corpus, fails):
    prefix = make_corpus("c", [20] * 40)
    if fails:
        (Path(prefix).parent / "index-cache").write_text("in the way")
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=_build_in_process, args=(prefix, rank, barrier, queue)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    results = dict(queue.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    if fails:
        assert "cannot be written there" in results[0] and "no index maps there" in results[1]
    else:
        assert results[0] == results[1] and len(results[0]) > 35


def test_the_log_says_what_is_used(make_corpus, caplog):
    caplog.set_level(logging.INFO, "ernie35se")
    a, b = make_corpus("a", [20] * 40), make_corpus("b", [20] * 40, seed=1)
    build_train_valid_test_datasets([1, a, 3, b], "8,2", [30, 5, 0], 16, 7)
    cache = os.path.join(os.path.dirname(a), "index-cache")
    assert f"index maps of the train split of {a}: built {cache}" in caplog.text
    assert f"the train mixture takes 25.00 % from {a}" in caplog.text
    assert f"the valid mixture takes 75.00 % from {b}" in caplog.text
