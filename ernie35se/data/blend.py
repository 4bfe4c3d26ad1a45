"""Weighted mixture of datasets.

Sample after sample is taken from the dataset that lags furthest behind its share, so that every prefix of the
mixture is as close to the weights as it can be (Megatron-LM's blending).
"""

from __future__ import annotations

import numpy as np

from ernie35se.data.index_maps import compiled_helpers


def build_blending_indices(weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """For each of `size` samples, (the dataset it comes from, how many that dataset has given before it).

    `weights` (datasets,) float64 add up to 1. Returns int16 (size,) and int64 (size,).
    """
    weights = np.ascontiguousarray(weights, np.float64)
    helpers = compiled_helpers()
    if helpers is None:
        return blending_indices_by_loop(weights, size)
    dataset_index, sample_index = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(dataset_index, sample_index, weights, len(weights), size, False)
    return dataset_index, sample_index


def blending_indices_by_loop(weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """`build_blending_indices` in numpy, some microseconds a sample."""
    dataset_index, sample_index = np.zeros(size, np.int16), np.zeros(size, np.int64)
    given = np.zeros(len(weights), np.int64)
    for i in range(size):
        lagging = int(np.argmax(weights * max(float(i), 1.0) - given))
        dataset_index[i], sample_index[i] = lagging, given[lagging]
        given[lagging] += 1
    return dataset_index, sample_index


class BlendedDataset:
    """`size` samples drawn from `datasets` by `weights` (one each, normalised here).

    A dataset asked for more samples than it has starts over.
    """

    def __init__(self, datasets: list, weights: list[float], size: int):
        self.datasets = datasets
        self.weights = np.array(weights, np.float64) / np.sum(weights, dtype=np.float64)
        self.dataset_index, self.sample_index = build_blending_indices(self.weights, size)

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        dataset = self.datasets[self.dataset_index[index]]
        return dataset[int(self.sample_index[index]) % len(dataset)]
