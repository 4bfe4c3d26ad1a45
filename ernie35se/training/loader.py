"""The order in which training reads samples, and a loader whose errors reach the user.

Order: the data are shuffled already (`data/index_maps.py`), so samples are taken one after the other. A
micro-batch of all data ranks together is one contiguous block, of which each rank takes its slice:

    sample      0 1 2 3 | 4 5 6 7 | 8 9 ...       2 data ranks, batch size 2
    rank 0      0 1     | 4 5     | 8 9
    rank 1          2 3 |     6 7 | ...

Sample n of the run is item n modulo the dataset's length, wherever the run was interrupted.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any, Callable, Dict, Iterator, List, Sequence

import numpy as np
import paddle
from paddlenlp.utils.batch_sampler import DistributedBatchSampler
from paddlenlp.utils.log import logger

_ERROR = "error while reading data"


class SequentialBatchSampler(DistributedBatchSampler):
    """Batches of sample numbers for one data rank, from any point of the run on.

    It is PaddleNLP's sampler by type because the training loop then leaves skipping to the sampler (others it
    lets load every batch already seen) and restores the random state after the first batch has been read. The
    whole run is one epoch, so that no micro-batches are left over at an epoch's end and mixed into the next
    step's gradient.

    Args:
        num_items: length of the dataset.
        batch_size: samples per micro-batch and rank.
        num_batches: micro-batches of the whole run, those before `first_batch` included.
        num_replicas, rank: number of data ranks, and which one this is.
        first_batch: micro-batches that are done.
        first_sample: samples that are done, all ranks together.
    """

    def __init__(
        self,
        num_items: int,
        batch_size: int,
        num_batches: int,
        num_replicas: int = 1,
        rank: int = 0,
        first_batch: int = 0,
        first_sample: int = 0,
    ):
        self.num_items = num_items
        self.batch_size = batch_size
        self.num_batches = num_batches
        self.nranks = num_replicas
        self.local_rank = rank
        self.first_batch = first_batch
        self.first_sample = first_sample

    def __iter__(self) -> Iterator[List[int]]:
        for batch in range(self.num_batches - self.first_batch):
            start = self.first_sample + (batch * self.nranks + self.local_rank) * self.batch_size
            yield [sample % self.num_items for sample in range(start, start + self.batch_size)]

    def __len__(self) -> int:
        return self.num_batches

    def set_epoch(self, epoch: int = 0, consumed_samples: int = 0) -> None:
        """Nothing: the loop's count is wrong after a change of batch size, `first_sample` is right."""


class DataLoader(paddle.io.DataLoader):
    """Paddle's loader, but an exception in a dataset or a collate function ends the iteration.

    Paddle reads in a thread. An exception there kills the thread and leaves the main one waiting for ever for
    its next batch (StopIteration even ends the epoch silently; in worker processes the message is lost). So
    here the thread hands the error over as if it were a batch, and the main thread raises it.

    Raises, while iterating:
        ValueError: with the message of a ValueError in the data path.
        RuntimeError: with type, message and traceback of any other exception there.
    """

    def __init__(self, dataset: Sequence, batch_sampler, collate_fn: Callable, num_workers: int = 0):
        super().__init__(
            range(len(dataset)),
            batch_sampler=batch_sampler,
            collate_fn=_ReadBatch(dataset, collate_fn),
            num_workers=num_workers,
        )

    def __iter__(self):
        for batch in super().__iter__():
            if isinstance(batch, Mapping) and _ERROR in batch:
                _raise(*batch[_ERROR])
            yield batch


class _ReadBatch:
    """Collate function over sample numbers: it reads them too, so one place catches what goes wrong."""

    def __init__(self, dataset: Sequence, collate_fn: Callable[[List[Any]], Dict]):
        self.dataset = dataset
        self.collate_fn = collate_fn

    def __call__(self, numbers: Sequence[int]) -> Dict:
        try:
            return self.collate_fn([self.dataset[number] for number in numbers])
        except Exception as error:
            where = f"samples {numbers[0]} to {numbers[-1]}"
            # Text, since an exception need not survive the way between processes; and an array, since Paddle
            # takes a batch without any for the end of the data.
            report = [where, type(error).__name__, str(error), traceback.format_exc()]
            return {_ERROR: report, "array": np.zeros(1)}


def _raise(where: str, kind: str, message: str, trace: str) -> None:
    if kind == "ValueError":
        logger.debug(f"While reading {where}:\n{trace}")
        raise ValueError(f"reading {where}: {message}")
    raise RuntimeError(f"{kind} while reading {where}: {message}\n{trace}")
