"""An adapter knows the weights it was trained on."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import paddle
import pytest
from model_helpers import build_model, tiny_config
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from test_methods import METHODS

from ernie35se import peft
from ernie35se.peft import base_weights


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(peft.logger, "warning", lines.append)
    return lines


@pytest.mark.parametrize("name", METHODS)
def test_another_base_is_named_and_its_own_is_not(name, tmp_path, said):
    """Whatever the method does to the base, and after it trained; one linear layer that differs is enough."""
    base = build_model(tiny_config())
    weight = base.ernie.layers[3].mlp.up_proj.weight.numpy()
    model = peft.wrap(base, dataclasses.replace(METHODS[name]))
    for parameter in peft.adapter_state(model).values():
        if not parameter.stop_gradient:
            parameter.set_value(parameter + 0.01)
    peft.save(model, tmp_path)
    with safe_open(next(tmp_path.glob("*.safetensors")), framework="np") as file:
        held = json.loads(file.metadata()["base"])
    assert len(held) == 11
    np.testing.assert_array_equal(held["ernie.layers.3.mlp.up_proj.weight"], [weight[8, 6], weight[16, 13]])  # of (24, 20)
    again = peft.load(build_model(tiny_config()), tmp_path)
    assert not said
    peft.check_fits(again, tmp_path)
    other = build_model(tiny_config())
    other.ernie.layers[3].mlp.up_proj.weight.set_value(paddle.to_tensor(weight) * 1.001)
    other = peft.load(other, tmp_path)
    words = "trained on other weights than these (1 of 11 linear layers differ, such as ernie.layers.3.mlp.up_proj.weight)"
    assert len(said) == 1 and said[0].startswith(f"{tmp_path}: ") and words in said[0]
    with pytest.raises(ValueError, match="trained on other weights"):
        peft.check_fits(other, tmp_path)


def test_sixteen_bits_are_the_same_base_and_an_adapter_without_notes_fits(tmp_path, said):
    weights = {"a": np.random.default_rng(0).normal(size=(9, 7)).astype("float32")}
    whole = {name: base_weights.sample(paddle.to_tensor(value)) for name, value in weights.items()}
    for kind in ("bfloat16", "float16"):
        halved = {name: base_weights.sample(paddle.to_tensor(value).astype(kind)) for name, value in weights.items()}
        assert halved != whole and base_weights.difference(whole, halved) is None and base_weights.difference(halved, whole) is None
    moved = {"a": [value * 1.01 for value in whole["a"]]}
    assert "1 of 1 linear layers differ" in base_weights.difference(whole, moved)
    assert base_weights.difference(None, whole) is None and base_weights.difference(whole, None) is None
    peft.save(peft.wrap(build_model(tiny_config()), peft.LoRAConfig()), tmp_path)
    file = tmp_path / "lora_model_state.safetensors"
    save_file(load_file(file), str(file))
    other = build_model(tiny_config())
    other.lm_head.weight.set_value(other.lm_head.weight * 2)
    peft.load(other, tmp_path)
    assert not said


def test_a_saved_configuration_arrives_whole(tmp_path, monkeypatch):
    """A writer that is stopped half way leaves the former file."""
    from pathlib import Path

    model = peft.wrap(build_model(tiny_config()), peft.LoRAConfig(r=3))
    peft.save(model, tmp_path)
    before = (tmp_path / "lora_config.json").read_bytes()
    real = Path.write_text

    def half(path, text, **named):
        real(path, text[: len(text) // 2], **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        peft.save(model, tmp_path)
    assert (tmp_path / "lora_config.json").read_bytes() == before
