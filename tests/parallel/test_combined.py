"""Several modes at once, on four and on eight processes, against one process."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from cases import merged, small_config, train_alone  # noqa: E402
from combined_cases import COMBINED  # noqa: E402
from launching import launch_worker  # noqa: E402

CASES = [(ranks, case) for ranks, cases in COMBINED.items() for case in cases]


pytestmark = pytest.mark.slow  # more processes than cores


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[int, Path]:
    folders = {ranks: tmp_path_factory.mktemp(f"combined-{ranks}") for ranks in COMBINED}
    for ranks, folder in folders.items():
        launch_worker("combined_worker.py", folder, processes=ranks)
    return folders


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    """Losses and weights of one process, by whether positions are random."""
    runs = {}
    for random_positions in (False, True):
        config = small_config(use_progressive_seq_len=True, enable_random_position_ids=random_positions)
        runs[random_positions] = train_alone(tmp_path_factory.mktemp("alone"), config)
    return runs


@pytest.mark.parametrize("ranks, case", CASES)
def test_six_steps_of_training_equal_one_process(results, alone, ranks, case):
    """Warm-up of the sequence length, clipping and gradient accumulation on; random positions with one data rank."""
    expected, weights = alone[case == "tensor_pipeline"]
    got = [dict(np.load(results[ranks] / f"{case}.{rank}.npz")) for rank in range(ranks)]
    for rank in got:
        np.testing.assert_allclose(rank["losses"], expected, atol=1e-5, rtol=0)
    seen = set()
    for stage in sorted({int(rank["stage"]) for rank in got}):
        mine = [rank for rank in got if rank["stage"] == stage]
        tensor = sorted({int(rank["tensor"]) for rank in mine})
        pieces = [[rank for rank in mine if rank["tensor"] == n] for n in tensor]
        for replica in zip(*pieces):
            for name, value in whole_weights(replica).items():
                np.testing.assert_allclose(value, weights[name], atol=2e-4, err_msg=name)
                seen.add(name)
    assert seen == set(weights)


def whole_weights(pieces) -> dict[str, np.ndarray]:
    """Of one stage, from its tensor-parallel ranks'."""
    kept = [{name[7:]: value for name, value in piece.items() if name.startswith("weight/")} for piece in pieces]
    return merged(kept, small_config())
