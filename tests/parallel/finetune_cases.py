"""What the fine-tuning tests share: the ends of two runs, compared."""

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

from cases import weights_of  # noqa: E402

from ernie35se import peft  # noqa: E402
from ernie35se.modeling import Ernie35ForCausalLM  # noqa: E402


def same_ending(base: Path, one: Path, other: Path) -> None:
    """The same evaluation, the same adapter where there is one, and the same model: whole, adapters merged."""
    results = [json.loads((output / "all_results.json").read_text()) for output in (one, other)]
    assert results[1]["eval_loss"] == pytest.approx(results[0]["eval_loss"], abs=1e-5)
    assert results[1]["eval_accuracy"] == results[0]["eval_accuracy"]
    file = "lora_model_state.safetensors"
    if (one / file).is_file():
        same_arrays(*(load_file(output / file) for output in (one, other)))
    start = weights_of(Ernie35ForCausalLM.from_pretrained(str(base)))
    merged = [merged_weights(base, output) for output in (one, other)]
    assert max(np.abs(merged[0][name] - start[name]).max() for name in start) > 1e-3
    same_arrays(*merged)


def ranks_of(output: Path) -> list[dict[str, np.ndarray]]:
    """What each of two ranks held in the end, by parameter."""
    return [dict(np.load(output / f"rank.{rank}.npz")) for rank in range(2)]


def same_arrays(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_allclose(second[name], value, atol=2e-4, err_msg=name)


def merged_weights(base: Path, output: Path) -> dict[str, np.ndarray]:
    """Of the model that a run made, in one piece; its adapters merged."""
    if not peft.saved_method(output):
        return weights_of(Ernie35ForCausalLM.from_pretrained(str(output)))
    model = Ernie35ForCausalLM.from_pretrained(str(base))
    return weights_of(peft.merge(peft.load(model, output)))
