"""The order of samples, against one spelt out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tiny_run import RandomText, collate

from ernie35se.training.loader import DataLoader, SequentialBatchSampler


def whole_run(num_items, batch_size, num_batches, num_replicas):
    """All micro-batches of all ranks: [micro-batch][rank] -> sample numbers."""
    numbers = itertools.cycle(range(num_items))
    return [
        [[next(numbers) for _ in range(batch_size)] for _ in range(num_replicas)] for _ in range(num_batches)
    ]


@pytest.mark.parametrize("num_items", [1, 5, 24, 1000])
@pytest.mark.parametrize("batch_size, num_replicas", [(1, 1), (3, 1), (2, 3)])
@pytest.mark.parametrize("done", [0, 1, 4, 5])
def test_order_and_resumption(num_items, batch_size, num_replicas, done):
    expected = whole_run(num_items, batch_size, 5, num_replicas)
    for rank in range(num_replicas):
        sampler = SequentialBatchSampler(
            num_items,
            batch_size,
            5,
            num_replicas,
            rank,
            first_batch=done,
            first_sample=done * batch_size * num_replicas,
        )
        assert len(sampler) == 5
        sampler.set_epoch(0, consumed_samples=12345)  # the loop's own count is not used
        assert list(sampler) == [batch[rank] for batch in expected[done:]]
        assert list(sampler) == list(sampler)


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_yields_the_samples_in_order(workers):
    data = RandomText(7)
    loader = DataLoader(data, SequentialBatchSampler(7, 2, 5), collate, num_workers=workers)
    batches = [batch["input_ids"].numpy() for batch in loader]
    expected = np.stack([RandomText(7)[number % 7]["text"][:-1] for number in range(10)])
    assert np.array_equal(np.concatenate(batches), expected)
