"""The same settings under paddle.distributed.launch: two data ranks fine-tune as one process does."""

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
from finetune_run import losses, settings, words_of, write_base  # noqa: E402
from launching import launch  # noqa: E402


@pytest.mark.parametrize("sharding", ["", "stage1", "stage2"])
def test_two_data_ranks_equal_one_process(sharding, tmp_path):
    base = write_base(tmp_path / "base", enable_random_position_ids=False)
    data = tmp_path / "data"
    data.mkdir()
    words = "one two moon star".split()
    records = [{"src": f"swap: {a} {b}", "tgt": "moon"} for a in words for b in words]  # a mean over ranks is
    for split in ("train", "dev"):  # the mean over tokens only where all responses are equally long
        (data / f"{split}.json").write_text("\n".join(map(json.dumps, records)))
    common = dict(lora=1, lora_plus_scale=2.0, max_steps=4, gradient_accumulation_steps=1, logging_steps=1)
    alone = settings(base, data, tmp_path / "alone", **common, per_device_train_batch_size=4)
    assert run_finetune.main(words_of(alone)) == 0
    two = settings(base, data, tmp_path / "two", **common, per_device_train_batch_size=2)
    if sharding:
        two["sharding"] = sharding
    status, logs = launch([ROOT / "scripts" / "run_finetune.py", *words_of(two)], tmp_path / "log")
    assert status == 0, logs[-6000:]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "alone"), abs=1e-5)
    results = [json.loads((tmp_path / name / "all_results.json").read_text()) for name in ("alone", "two")]
    assert results[1]["eval_loss"] == pytest.approx(results[0]["eval_loss"], abs=1e-5)
    assert results[1]["eval_accuracy"] == results[0]["eval_accuracy"]
    states = [load_file(tmp_path / name / "lora_model_state.safetensors") for name in ("alone", "two")]
    for name, value in states[0].items():
        np.testing.assert_allclose(states[1][name], value, atol=2e-4, err_msg=name)
