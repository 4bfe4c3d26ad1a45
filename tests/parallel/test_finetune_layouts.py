"""Fine-tuning that goes on under tensor parallel: after an interruption, from one process's work, and back."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tests" / "training"), str(ROOT / "scripts")]

import run_finetune  # noqa: E402
from finetune_run import losses, settings, words_of, write_base, write_records  # noqa: E402
from launching import launch_worker  # noqa: E402

pytestmark = pytest.mark.slow  # one launch for all

METHODS = {
    "sft": dict(learning_rate=1e-3),
    "sft_unified": dict(learning_rate=1e-3, unified_checkpoint=True),
    "lora": dict(lora=1, lora_plus_scale=2.0),
    "pissa": dict(lora=1, pissa=True, lora_rank=3),
    "linchain": dict(lora=1, rslora=True, lora_use_mixer=True, mixer_num=2),
}
SAVED = ("lora", "pissa", "linchain")  # what an adapter's folder is named by
TWO = dict(tensor_parallel_degree=2)


class Runs:
    """Two epochs, six steps, a checkpoint after each epoch; FOLDER/<name>-<method> is what a run leaves."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.base = write_base(folder / "base", num_attention_heads=4)  # random positions are on
        self.data = write_records(folder / "data")

    def output(self, name: str, method: str) -> Path:
        return self.folder / f"{name}-{method}"

    def words(self, name: str, method: str, **changes) -> list[str]:
        common = dict(max_grad_norm=0.3, load_best_model_at_end=False, **METHODS[method])
        return words_of(settings(self.base, self.data, self.output(name, method), **{**common, **changes}))

    def resumed(self, name: str, maker: str, method: str, **changes) -> list[str]:
        """From the checkpoint after step 3, as a kill leaves it: with the schedule of the whole run."""
        checkpoint = self.output(maker, method) / "checkpoint-3"
        return self.words(name, method, resume_from_checkpoint=checkpoint, **changes)

    def started(self, name: str, method: str, **changes) -> list[str]:
        """From the adapter that one process has saved."""
        return self.words(name, method, lora_path=self.output("one", method), seed=5, **changes)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("runs"))
    for method in METHODS:
        assert run_finetune.main(runs.words("one", method)) == 0
    of_ranks = [runs.words("two", method, **TWO) for method in METHODS]
    of_ranks += [runs.resumed("two-from-two", "two", method, **TWO) for method in METHODS]
    of_ranks += [runs.resumed("two-from-one", "one", method, **TWO) for method in METHODS]
    of_ranks += [runs.started("two-started", method, **TWO) for method in SAVED]
    plan = runs.folder / "runs.json"
    plan.write_text(json.dumps(of_ranks))
    launch_worker("finetune_worker.py", runs.folder, plan)
    for method in METHODS:
        assert run_finetune.main(runs.resumed("one-from-two", "two", method)) == 0
    for method in SAVED:
        assert run_finetune.main(runs.started("one-started", method)) == 0
    return runs


@pytest.mark.parametrize("name", ["two", "two-from-two", "two-from-one", "one-from-two"])
@pytest.mark.parametrize("method", METHODS)
def test_interrupted_and_resumed_the_losses_are_one_uninterrupted_process_s(runs, method, name):
    expected = losses(runs.output("one", method))
    assert len(expected) == 6 and expected[0] - expected[-1] > 0.02
    assert losses(runs.output(name, method)) == pytest.approx(expected, abs=1e-5)
    same_ending(runs.output("one", method), runs.output(name, method))


@pytest.mark.parametrize("method", SAVED)
def test_two_ranks_start_from_a_saved_adapter_as_one_process_does(runs, method):
    expected = losses(runs.output("one-started", method))
    afresh = losses(runs.output("one", method))
    assert len(expected) == 6 and afresh[0] - expected[0] > 0.02  # it did start from what had been learnt
    assert losses(runs.output("two-started", method)) == pytest.approx(expected, abs=1e-5)
    same_ending(runs.output("one-started", method), runs.output("two-started", method))


def same_ending(one: Path, other: Path) -> None:
    """The same evaluation, and the same adapter where there is one."""
    results = [json.loads((output / "all_results.json").read_text()) for output in (one, other)]
    assert results[1]["eval_loss"] == pytest.approx(results[0]["eval_loss"], abs=1e-5)
    assert results[1]["eval_accuracy"] == results[0]["eval_accuracy"]
    file = "lora_model_state.safetensors"
    if (one / file).is_file():
        states = [load_file(output / file) for output in (one, other)]
        assert states[0].keys() == states[1].keys()
        for name, value in states[0].items():
            np.testing.assert_allclose(states[1][name], value, atol=2e-4, err_msg=name)
