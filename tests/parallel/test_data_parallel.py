"""Two data ranks against one process: plain data parallel, and sharding of optimizer, gradients and weights."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from cases import length_of_step, small_config, train_alone  # noqa: E402
from launching import launch_worker  # noqa: E402

from ernie35se.positions import random_position_ids  # noqa: E402
from ernie35se.training.estimate import Plan, communication_per_step  # noqa: E402

CASES = ["data", "stage1", "stage2", "stage3", "stage3_recompute"]

pytestmark = pytest.mark.slow  # several launches


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, Path]:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("data", "sharding")}
    for kind, folder in folders.items():
        launch_worker("data_worker.py", folder, kind)
    return folders


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    config = small_config(use_progressive_seq_len=True, enable_random_position_ids=False)
    return train_alone(tmp_path_factory.mktemp("alone"), config)


def ranks_of(results, case: str) -> list[dict]:
    folder = results["data" if case.startswith("data") else "sharding"]
    return [dict(np.load(folder / f"{case}.{rank}.npz")) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_six_steps_of_training_equal_one_process(results, alone, case):
    """Same global batch, warm-up of the sequence length, clipping and gradient accumulation on."""
    expected, weights = alone
    for rank in ranks_of(results, case):
        np.testing.assert_allclose(rank["losses"], expected, atol=1e-5, rtol=0)
        for name, value in weights.items():
            np.testing.assert_allclose(rank[f"weight/{name}"], value, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_batches_of_the_ranks_are_disjoint_and_cover_the_data_in_order(results, case):
    first, second = (list(rank["read"]) for rank in ranks_of(results, case))
    steps = 6 * 2  # micro-batches of one sample a rank
    assert first[:steps] == list(range(0, 24, 2)) and second[:steps] == list(range(1, 24, 2))


@pytest.mark.parametrize("case", CASES)
def test_each_data_rank_draws_its_own_positions_once_a_step(results, case):
    for rank, arrays in enumerate(ranks_of(results, f"{case}-random")):
        for micro_batch in range(12):
            step = micro_batch // 2
            expected = random_position_ids(length_of_step(step, 24), 96, step + 100_000 * rank)
            np.testing.assert_array_equal(arrays[f"drawn/{micro_batch}"], expected)
        assert np.isfinite(arrays["losses"]).all() and len(arrays["losses"]) == 6


@pytest.mark.parametrize("case", CASES)
def test_replicas_stay_equal_though_their_positions_differ(results, case):
    first, second = ranks_of(results, f"{case}-random")
    for name, value in first.items():
        if name.startswith("weight/"):
            np.testing.assert_array_equal(value, second[name], err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_the_estimate_of_what_is_sent_is_what_was_counted(results, case):
    """Data parallel by the bytes of its connections, messages' heads and all; sharding by what went into collectives, of
    which each of two ranks sends half. Stage 2 fills its buffers up to equal lengths; stage 3 does not slice the norms."""
    config = small_config(use_recompute="recompute" in case)
    recompute = "full" if config.use_recompute else "none"
    stage = int(case[5]) if case.startswith("stage") else 0
    layout = dict(sharding_stage=stage, sharding_degree=2) if stage else dict(data_parallel=2)
    (row,) = communication_per_step(config, Plan(24, accumulation=2, recompute=recompute, **layout))
    assert row.part == ("sharding" if stage else "data")
    for rank in ranks_of(results, case):
        collectives, connections = rank["traffic"].T
        assert len(collectives) == 5  # the first step also starts the layout
        if case == "stage1":
            assert set(collectives // 2) == {row.bytes}
        else:
            counted = collectives / 2 if stage else connections
            np.testing.assert_allclose(counted, row.bytes, rtol=0.04)
