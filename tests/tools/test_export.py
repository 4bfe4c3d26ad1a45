"""export_model.py, export_hf.py and benchmark_generation.py on a tiny checkpoint."""

import json
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import benchmark_generation  # noqa: E402
import export_hf  # noqa: E402
import export_model  # noqa: E402
from model_helpers import numpy_logits, tiny_config  # noqa: E402
from predict_helpers import write_checkpoint  # noqa: E402

from ernie35se import peft  # noqa: E402
from ernie35se.modeling import Ernie35ForCausalLM  # noqa: E402

IDS = np.array([[1, 5, 300, 7, 8], [9, 10, 11, 12, 13]])
POSITIONS = np.array([[7, 15, 23, 31, 39], [0, 1, 2, 3, 4]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("export") / "base")


def logits_of(folder, lora=None):
    model = Ernie35ForCausalLM.from_pretrained(str(folder))
    if lora:
        peft.load(model, lora)
    model.eval()
    return model(paddle.to_tensor(IDS), position_ids=paddle.to_tensor(POSITIONS))[0].numpy()


def run_exported(folder):
    exported = paddle.jit.load(str(folder / "model"))
    return exported(paddle.to_tensor(IDS), paddle.to_tensor(POSITIONS)).numpy()


def test_the_exported_graph_gives_the_dynamic_logits(folder, tmp_path, capsys):
    assert export_model.main([str(folder), str(tmp_path / "out")]) == 0
    assert "logits equal the model's" in capsys.readouterr().out
    np.testing.assert_allclose(run_exported(tmp_path / "out"), logits_of(folder), rtol=1e-4, atol=1e-4)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"config.json", "sentencepiece.bpe.model", "model.pdiparams"} <= names
    assert not [name for name in names if name.startswith(".tmp") or name.startswith("model_state")]
    with pytest.raises(ValueError, match="is the input itself"):
        export_model.main([str(folder), str(folder)])


def test_adapters_are_merged_before_the_export(folder, tmp_path):
    model = Ernie35ForCausalLM.from_pretrained(str(folder))
    peft.wrap(model, peft.LoRAConfig(r=2))
    for parameter in peft.adapter_state(model).values():
        parameter.set_value(parameter + 0.1)
    peft.save(model, tmp_path / "lora")
    export_model.main([str(folder), str(tmp_path / "out"), "--lora_path", str(tmp_path / "lora")])
    expected = logits_of(folder, tmp_path / "lora")
    np.testing.assert_allclose(run_exported(tmp_path / "out"), expected, rtol=1e-3, atol=1e-3)
    assert np.abs(expected - logits_of(folder)).max() > 0.1


def test_a_graph_that_differs_is_not_written(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(export_model, "compare", lambda *_: 0.5)
    with pytest.raises(ValueError, match="differ by 5.0e-01; nothing is written"):
        export_model.main([str(folder), str(tmp_path / "out")])
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    "settings", [{}, {"tie_word_embeddings": True}, {"parallel_attn_hatf": False, "use_bias": False}]
)
def test_safetensors_hold_the_network_in_numpys_hands(tmp_path, settings):
    folder = write_checkpoint(tmp_path / "base", **settings)
    assert export_hf.main([str(folder), str(tmp_path / "hf")]) == 0
    weights = load_file(str(tmp_path / "hf" / "model.safetensors"))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert {name: list(value.shape) for name, value in weights.items()} == config["weights"]
    fused = [name for name in weights if "qkv_gate_up_proj.weight" in name]
    rows = config["layout"]["fused"]["qkv_gate_up_proj"]["rows"]
    assert fused and all(len(weights[name]) == sum(size for _, size in rows) for name in fused)
    ours = {}
    for name, value in weights.items():
        linear = name.endswith("_proj.weight") or name == "lm_head.weight"
        ours["ernie." + name.removeprefix("model.") if name.startswith("model.") else name] = (
            value.T if linear else value
        )
    allowed = np.tril(np.ones((2, 5, 5), dtype=bool))
    network = tiny_config(vocab_size=320, **settings)
    expected = numpy_logits(
        network, {n: v.astype(np.float64) for n, v in ours.items()}, IDS, POSITIONS, allowed
    )
    np.testing.assert_allclose(logits_of(folder), expected, rtol=1e-3, atol=1e-3)
    assert (tmp_path / "hf" / "tokenizer.model").read_bytes() == (
        folder / "sentencepiece.bpe.model"
    ).read_bytes()


def test_the_benchmark_compares_loops_that_agree(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark_generation, "CASES", ((2, 5, 4),))
    monkeypatch.setattr(benchmark_generation, "CONTEXTS", (8, 16))
    words = ["--model", str(folder), "--repeats", "2", "--output", str(tmp_path / "times.json")]
    assert benchmark_generation.main(words) == 0
    (case,) = json.loads((tmp_path / "times.json").read_text())["cases"]
    assert len(case["theirs"]) == len(case["ours"]) == 2 and min(case["theirs"] + case["ours"]) > 0
    written, printed = json.loads((tmp_path / "times.json").read_text()), capsys.readouterr().out
    assert "| 2 | 5 | 4 |" in printed and "| floor: reading the weights |" in printed
    rows = [(row["batch"], row["how"]) for row in written["steps"]]
    assert rows == [(1, "greedy"), (8, "greedy"), (1, "sampling"), (8, "sampling")] and written["floor_ms"] > 0
    assert min(row[context] for row in written["steps"] for context in ("8", "16")) > 0
