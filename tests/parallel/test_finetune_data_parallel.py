"""Fine-tuning on two data ranks, through the script: as one process does it, and when one of them fails."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from finetune_cases import HERE, ranks_of, same_ending  # noqa: E402  before the next, whose places it knows

import run_finetune  # noqa: E402
from finetune_run import losses, settings, words_of, write_base, write_records  # noqa: E402
from launching import launch, launch_worker  # noqa: E402

METHODS = {"sft": dict(learning_rate=1e-3), "lora": dict(lora=1, lora_plus_scale=2.0)}
LAYOUTS = {"data": {}, **{stage: dict(sharding=stage) for stage in ("stage1", "stage2", "stage3")}}


class Runs:
    """Three epochs, six steps of two micro-batches; FOLDER/<layout>-<method> is what a run leaves."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.base = write_base(folder / "base", enable_random_position_ids=False)  # data ranks draw their own
        self.data = folder / "data"
        self.data.mkdir()
        words = "one two moon star".split()
        records = [{"src": f"swap: {a} {b}", "tgt": "moon"} for a in words for b in words]  # a mean over ranks is
        for split in ("train", "dev"):  # the mean over tokens only where all responses are equally long
            (self.data / f"{split}.json").write_text("\n".join(map(json.dumps, records)))

    def output(self, layout: str, method: str) -> Path:
        return self.folder / f"{layout}-{method}"

    def words(self, layout: str, method: str, **changes) -> list[str]:
        common = dict(num_train_epochs=3, max_grad_norm=0.3, **METHODS[method])
        return words_of(settings(self.base, self.data, self.output(layout, method), **{**common, **changes}))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("runs"))
    for method in METHODS:
        assert run_finetune.main(runs.words("one", method, per_device_train_batch_size=4)) == 0
    for kind, layouts in (("data", ["data"]), ("sharding", ["stage1", "stage2", "stage3"])):
        plan = runs.folder / f"{kind}.json"
        words = [runs.words(layout, method, **LAYOUTS[layout]) for layout in layouts for method in METHODS]
        plan.write_text(json.dumps(words))
        launch_worker("finetune_worker.py", runs.folder, plan)
        (runs.folder / "log").rename(runs.folder / f"log-{kind}")
    return runs


@pytest.mark.slow  # two launches
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_two_data_ranks_equal_one_process(runs, method, layout):
    expected = losses(runs.output("one", method))
    assert len(expected) == 6 and expected[0] - expected[-1] > 0.02
    assert losses(runs.output(layout, method)) == pytest.approx(expected, abs=1e-5)
    same_ending(runs.base, runs.output("one", method), runs.output(layout, method))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_replicas_are_equal_in_the_end(runs, method, layout):
    first, second = ranks_of(runs.output(layout, method))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.size
        np.testing.assert_array_equal(value, second[name], err_msg=name)


@pytest.mark.slow  # a launch each
@pytest.mark.parametrize("fault, reason", [("missing", "not-on-this-disk"), ("broken", "batch 4 is broken on this disk")])
def test_a_rank_that_fails_ends_the_whole_job_with_the_reason(fault, reason, tmp_path):
    base, data, plan = write_base(tmp_path / "base"), write_records(tmp_path / "data"), tmp_path / "runs.json"
    plan.write_text(json.dumps([words_of(settings(base, data, tmp_path / "output", lora=1))]))
    started = time.monotonic()
    status, logs = launch([HERE / "finetune_worker.py", tmp_path, plan, fault], tmp_path / "log", timeout=120)
    assert status not in (0, -1) and time.monotonic() - started < 90
    assert reason in logs.partition("== workerlog.1")[2]
    assert not (tmp_path / "output" / "all_results.json").exists()
