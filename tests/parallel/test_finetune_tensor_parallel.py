"""Fine-tuning on two tensor-parallel ranks, through the script, equals one process's: from the start, after an
interruption, from one process's work, and back."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from finetune_cases import ranks_of, same_ending  # noqa: E402  before the next, whose places it knows

import run_finetune  # noqa: E402
from finetune_run import losses, settings, words_of, write_base, write_records  # noqa: E402
from launching import launch_worker  # noqa: E402

from ernie35se import conversion  # noqa: E402
from ernie35se.configuration import Ernie35Config  # noqa: E402
from ernie35se.training.finetune_arguments import parse_finetune_arguments  # noqa: E402

METHODS = {
    "sft": dict(learning_rate=1e-3),
    "sft_unified": dict(learning_rate=1e-3, unified_checkpoint=True),
    "lora": dict(lora=1, lora_plus_scale=2.0, merge_weights=True),
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


@pytest.mark.slow  # one launch for all
@pytest.mark.parametrize("name", ["two", "two-from-two", "two-from-one", "one-from-two"])
@pytest.mark.parametrize("method", METHODS)
def test_losses_and_results_are_one_uninterrupted_process_s(runs, method, name):
    expected = losses(runs.output("one", method))
    assert len(expected) == 6 and expected[0] - expected[-1] > 0.02
    assert losses(runs.output(name, method)) == pytest.approx(expected, abs=1e-5)
    same_ending(runs.base, runs.output("one", method), runs.output(name, method))


@pytest.mark.slow
@pytest.mark.parametrize("method", SAVED)
def test_two_ranks_start_from_a_saved_adapter_as_one_process_does(runs, method):
    expected = losses(runs.output("one-started", method))
    afresh = losses(runs.output("one", method))
    assert len(expected) == 6 and afresh[0] - expected[0] > 0.02  # it did start from what had been learnt
    assert losses(runs.output("two-started", method)) == pytest.approx(expected, abs=1e-5)
    same_ending(runs.base, runs.output("one-started", method), runs.output("two-started", method))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two", "two-from-two", "two-from-one"])
@pytest.mark.parametrize("method", SAVED)
def test_what_ranks_both_hold_of_an_adapter_is_equal(runs, method, name):
    """A of the layers cut by column, B of those cut by row, all mixers."""
    config = Ernie35Config.from_pretrained(str(runs.base))
    ranks = ranks_of(runs.output(name, method))
    assert ranks[0].keys() == ranks[1].keys()
    shared = {name for name in ranks[0] if conversion.layout(name, config) is None}
    block = "ernie.layers.1.self_attn_mlp"
    assert {f"{block}.qkv_gate_up_proj.lora_A", f"{block}.o_proj.lora_B"} <= shared < set(ranks[0])
    for name in shared:
        np.testing.assert_array_equal(ranks[0][name], ranks[1][name], err_msg=name)
    for name in ranks[0].keys() - shared:
        assert np.abs(ranks[0][name] - ranks[1][name]).max() > 0, name


@pytest.mark.parametrize("switch", ["vera", "lokr", "dislora", "reft", "tare", "prefix_tuning", "lora --use_mora"])
def test_methods_that_cannot_be_cut_are_refused_by_name(switch, tmp_path):
    words = [word for flag in switch.split() for word in (f"--{flag.lstrip('-')}", "1")]
    with pytest.raises(ValueError, match="is not made for tensor parallel"):
        parse_finetune_arguments(
            ["--model_name_or_path", "x", "--dataset_name_or_path", "y", "--output_dir", str(tmp_path), "--device", "cpu",
             "--dry_run", "--dry_run_devices", "2", "--tensor_parallel_degree", "2", *words]
        )  # fmt: skip
