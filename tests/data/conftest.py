"""Synthetic corpora for the data tests."""

import numpy as np
import pytest


@pytest.fixture
def make_corpus(tmp_path):
    """make_corpus(name, lens, seed=0, low=3, high=320) -> prefix of an .npy/.npz corpus of random ids, one
    sequence a document."""

    def make(name, lens, seed=0, low=3, high=320):
        prefix = tmp_path / name
        prefix.parent.mkdir(parents=True, exist_ok=True)
        ids = np.random.default_rng(seed).integers(low, high, int(np.sum(lens))).astype(np.uint16)
        np.save(f"{prefix}_ids.npy", ids)
        np.savez(f"{prefix}_idx.npz", lens=np.asarray(lens, np.int32), docs=np.arange(len(lens) + 1))
        return str(prefix)

    return make
