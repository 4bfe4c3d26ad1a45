"""Mixtures: the index against a brute-force greedy, the two implementations, wrapping."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ernie35se.data import blend
from ernie35se.data.blend import BlendedDataset, blending_indices_by_loop, build_blending_indices

WEIGHTS = st.lists(st.integers(1, 1000), min_size=1, max_size=7).map(lambda w: np.array(w) / np.sum(w))


@settings(max_examples=60, deadline=None)
@given(weights=WEIGHTS, size=st.integers(0, 300))
def test_both_implementations_agree(weights, size):
    compiled, looped = build_blending_indices(weights, size), blending_indices_by_loop(weights, size)
    for a, b in zip(compiled, looped):
        assert a.dtype == b.dtype and a.tolist() == b.tolist()


@settings(max_examples=60, deadline=None)
@given(weights=WEIGHTS, size=st.integers(1, 300))
def test_shares_hold_in_every_prefix(weights, size):
    datasets, samples = build_blending_indices(weights, size)
    given_so_far = np.zeros(len(weights), int)
    for i, (dataset, sample) in enumerate(zip(datasets, samples), start=1):
        assert sample == given_so_far[dataset]
        given_so_far[dataset] += 1
        assert (given_so_far - weights * i < 1 + 1e-9).all()  # never a whole sample ahead of its share


@pytest.mark.parametrize("compiled", [True, False])
def test_blended_dataset_wraps_a_tiny_one(monkeypatch, compiled):
    if not compiled:
        monkeypatch.setattr(blend, "compiled_helpers", lambda: None)
    tiny, large = [f"t{i}" for i in range(2)], [f"l{i}" for i in range(100)]
    mixed = BlendedDataset([tiny, large], [6.0, 4.0], 50)
    items = [mixed[i] for i in range(50)]
    assert [item for item in items if item[0] == "t"] == [f"t{i % 2}" for i in range(30)]
    assert [item for item in items if item[0] == "l"] == [f"l{i}" for i in range(20)]
    assert len(mixed) == 50
    for index in (50, -1):
        with pytest.raises(IndexError, match=f"sample {index} of 50"):
            mixed[index]
