"""Positions: the designed draws, the table's end, and padded rows against single ones."""

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ernie35se import positions


def test_random_positions_are_the_designed_draw():
    drawn = positions.random_position_ids(5, 32, seed=7)
    expected = sorted(np.random.RandomState(7).permutation(32)[:5])
    assert drawn.tolist() == expected and drawn.dtype == np.int64


@given(st.integers(1, 200), st.integers(0, 300), st.integers(0, 2**32 - 1))
def test_random_positions_are_sorted_distinct_and_inside(length, spare, seed):
    drawn = positions.random_position_ids(length, length + spare, seed)
    assert len(drawn) == length and (np.diff(drawn) > 0).all()
    assert 0 <= drawn[0] and drawn[-1] < length + spare


@pytest.mark.parametrize(
    "length, table, interval",
    [(24, 1024, 8), (128, 1024, 8), (129, 1024, 7), (4096, 32768, 8), (4097, 65536, 15), (4096, 4096, 1), (5000, 32768, 6)],
)
def test_interval_by_hand(length, table, interval):
    assert positions.position_interval(length, table) == interval


@given(st.integers(1, 70_000), st.integers(1, 70_000))
def test_interval_positions_stay_inside_the_table(length, table):
    if length > table:
        with pytest.raises(ValueError, match=f"{length} tokens .* {table}"):
            positions.position_interval(length, table)
        return
    ids = positions.interval_position_ids(length, positions.position_interval(length, table))
    assert 0 <= ids[0] and ids[-1] < table and (np.diff(ids) > 0).all()


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("table", [40, 1024, 70_000])
def test_a_padded_row_counts_as_if_it_stood_alone(as_tensor, spaced, table):
    lengths, width = [1, 3, 7, 0, 20], 20
    mask = np.array([[0] * (width - n) + [1] * n for n in lengths])
    got = positions.masked_position_ids(paddle.to_tensor(mask) if as_tensor else mask, table, spaced)
    got = np.asarray(got)
    for row, length in zip(got, lengths):
        interval = positions.position_interval(length, table) if spaced else 1
        assert row[width - length :].tolist() == positions.interval_position_ids(length, interval).tolist()
        assert (row[: width - length] == 0).all()


def test_masked_interval_beyond_4096_tokens():
    mask = np.ones((1, 5000), dtype=np.int64)
    got = positions.masked_position_ids(mask, 65536, spaced=True)
    assert got[0].tolist() == positions.interval_position_ids(5000, 13).tolist()


def test_warm_up_of_the_sequence_length():
    steps = [0, 499, 500, 999, 1000, 1499, 1500, 10**6]
    assert [positions.progressive_sequence_length(s, 4096) for s in steps] == [
        512, 512, 1024, 1024, 2048, 2048, 4096, 4096
    ]  # fmt: skip
    assert positions.progressive_sequence_length(0, 256) == 256
    assert positions.progressive_sequence_length(700, 1000) == 1000
