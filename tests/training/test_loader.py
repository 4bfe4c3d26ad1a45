"""The order of samples, against one spelt out."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from tiny_run import RandomText, collate

from ernie35se.training.finetune import ShuffledEpochs
from ernie35se.training.loader import DataLoader, SequentialBatchSampler
from ernie35se.training.resumable import Progress
from ernie35se.training.trainer import PretrainTrainer


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


# ---- a run whose number of data ranks changes ------------------------------------------------------------------------


class Numbers(list):
    """A data set whose item n is n."""

    @staticmethod
    def collate(items):
        return {"input_ids": np.array(items)}


class Phase(NamedTuple):
    """A part of a run, between two interruptions."""

    steps: int
    ranks: int
    batch_size: int
    accumulation: int = 1


def read_by(rank: int, phase: Phase, start: Progress, data, max_steps: int) -> tuple[list[list[int]], Progress]:
    """The samples of each step of a phase that one rank reads, and where the next phase starts: the trainer's own
    loader and counts."""
    args = SimpleNamespace(
        per_device_train_batch_size=phase.batch_size,
        gradient_accumulation_steps=phase.accumulation,
        max_steps=max_steps,
        dataset_world_size=phase.ranks,
        dataset_rank=rank,
        dataloader_num_workers=0,
    )
    trainer = SimpleNamespace(args=args, train_dataset=data, data_collator=Numbers.collate, start=start)
    batches = (batch["input_ids"].tolist() for batch in PretrainTrainer.get_train_dataloader(trainer))
    steps = [sum((next(batches) for _ in range(phase.accumulation)), []) for _ in range(phase.steps)]
    trainer.state = SimpleNamespace(global_step=start.step + phase.steps)
    return steps, Progress(trainer.state.global_step, PretrainTrainer._consumed_samples(trainer))


RUNS = {
    "1 to 2, same global batch": [Phase(3, 1, 4), Phase(4, 2, 2)],
    "2 to 1, same global batch": [Phase(3, 2, 2), Phase(4, 1, 4)],
    "1 to 2 by accumulation": [Phase(2, 1, 2, 4), Phase(3, 2, 2, 2)],
    "4 to 3 to 1 to 2, global batch 4, 6, 5, 8": [Phase(2, 4, 1), Phase(1, 3, 2), Phase(2, 1, 5), Phase(3, 2, 2, 2)],
    "8 to 8, interrupted twice": [Phase(1, 8, 3), Phase(1, 8, 3), Phase(2, 8, 3)],
}


@pytest.mark.parametrize("phases", RUNS.values(), ids=list(RUNS))
@pytest.mark.parametrize("size", [1000, 30])  # once with room, once read more than once
def test_ranks_share_out_what_one_process_would_read_though_their_number_changes(phases, size):
    one_process = itertools.cycle(range(size))
    start, max_steps = Progress(), sum(phase.steps for phase in phases)
    for phase in phases:
        data = Numbers(range(size))
        ranks, ends = zip(*[read_by(rank, phase, start, data, max_steps) for rank in range(phase.ranks)])
        for of_ranks in zip(*ranks):
            read = sum(of_ranks, [])
            assert len(set(read)) == len(read)  # no sample is read by two ranks, or twice by one
            assert Counter(read) == Counter(itertools.islice(one_process, len(read)))
            assert {len(samples) for samples in of_ranks} == {phase.batch_size * phase.accumulation}
        assert all(end == ends[0] for end in ends)  # whichever rank writes the checkpoint
        start = ends[0]
    assert start.step == max_steps
    assert start.consumed_samples == sum(p.steps * p.ranks * p.batch_size * p.accumulation for p in phases)


def test_fine_tuning_reads_every_row_once_an_epoch_though_the_ranks_change_within_one():
    rows, (before, after) = Numbers(range(12)), (Phase(2, 1, 4), Phase(4, 2, 2))  # three steps an epoch
    data = ShuffledEpochs(rows, epoch_size=12, epochs=2, seed=5)
    first, start = read_by(0, before, Progress(), data, 6)
    second = [read_by(rank, after, start, data, 6)[0] for rank in range(2)]
    steps = first + [a + b for a, b in zip(*second)]
    for epoch in range(2):
        order = np.random.default_rng([5, epoch]).permutation(12)
        for step in range(3):
            assert set(steps[3 * epoch + step]) == set(order[4 * step : 4 * step + 4])
