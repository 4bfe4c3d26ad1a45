"""Fine-tuning on two tensor-parallel ranks, through the script: losses, and what is saved, equal one process's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tests" / "training"), str(ROOT / "scripts")]

import run_finetune  # noqa: E402
from cases import weights_of  # noqa: E402
from finetune_run import losses, settings, words_of, write_base, write_records  # noqa: E402
from launching import launch  # noqa: E402

from ernie35se import peft  # noqa: E402
from ernie35se.modeling import Ernie35ForCausalLM  # noqa: E402
from ernie35se.training.finetune_arguments import parse_finetune_arguments  # noqa: E402

METHODS = {
    "sft": dict(learning_rate=1e-3),
    "lora": dict(lora=1, lora_plus_scale=2.0, merge_weights=True),
    "pissa": dict(lora=1, pissa=True, lora_rank=3),
    "linchain": dict(lora=1, rslora=True, lora_use_mixer=True, mixer_num=2),
}


@pytest.mark.slow  # a launch each
@pytest.mark.parametrize("method", METHODS)
def test_two_tensor_parallel_ranks_equal_one_process(method, tmp_path):
    base = write_base(tmp_path / "base", num_attention_heads=4)  # random positions are on
    data = write_records(tmp_path / "data")
    common = dict(max_grad_norm=0.3, **METHODS[method])
    alone = settings(base, data, tmp_path / "alone", **common)
    assert run_finetune.main(words_of(alone)) == 0
    two = settings(base, data, tmp_path / "two", tensor_parallel_degree=2, **common)
    status, logs = launch([ROOT / "scripts" / "run_finetune.py", *words_of(two)], tmp_path / "log")
    assert status == 0, logs[-6000:]
    expected = losses(tmp_path / "alone")
    assert len(expected) == 6 and expected[0] - expected[-1] > 0.02
    assert losses(tmp_path / "two") == pytest.approx(expected, abs=1e-5)
    results = [json.loads((tmp_path / name / "all_results.json").read_text()) for name in ("alone", "two")]
    assert results[1]["eval_loss"] == pytest.approx(results[0]["eval_loss"], abs=1e-5)
    assert results[1]["eval_accuracy"] == results[0]["eval_accuracy"]
    merged = [merged_weights(base, tmp_path / name) for name in ("alone", "two")]
    start = weights_of(Ernie35ForCausalLM.from_pretrained(str(base)))
    assert max(np.abs(merged[0][name] - start[name]).max() for name in start) > 1e-3
    assert merged[0].keys() == merged[1].keys()
    for name, value in merged[0].items():
        np.testing.assert_allclose(merged[1][name], value, atol=2e-4, err_msg=name)


def merged_weights(base: Path, output: Path) -> dict[str, np.ndarray]:
    """Of the model that a run made, in one piece; its adapters merged."""
    if not peft.saved_method(output):
        return weights_of(Ernie35ForCausalLM.from_pretrained(str(output)))
    model = Ernie35ForCausalLM.from_pretrained(str(base))
    return weights_of(peft.merge(peft.load(model, output)))


@pytest.mark.parametrize("switch", ["vera", "lokr", "dislora", "reft", "tare", "prefix_tuning", "lora --use_mora"])
def test_methods_that_cannot_be_cut_are_refused_by_name(switch, tmp_path):
    words = [word for flag in switch.split() for word in (f"--{flag.lstrip('-')}", "1")]
    with pytest.raises(ValueError, match="is not made for tensor parallel"):
        parse_finetune_arguments(
            ["--model_name_or_path", "x", "--dataset_name_or_path", "y", "--output_dir", str(tmp_path), "--device", "cpu",
             "--dry_run", "--dry_run_devices", "2", "--tensor_parallel_degree", "2", *words]
        )  # fmt: skip
