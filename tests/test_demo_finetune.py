"""scripts/demo_finetune.sh in a copy of the repository, on a tiny model in place of the one that demo.sh trains."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import paddle
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from ernie35se.configuration import Ernie35Config  # noqa: E402
from ernie35se.modeling import Ernie35ForCausalLM  # noqa: E402

SHORT = "--max_steps 30 --eval_steps 15 --save_steps 15 --learning_rate 0.02 --report_to none".split()


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of what the script uses, whose .venv counts as installed and runs this interpreter."""
    folder = tmp_path / "checkout"
    for name in ("configs", "ernie35se", "scripts", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.py", folder)
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/bash\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (folder / ".venv" / "installed").write_text(f"# .[cpu,test] at {folder}\n" + (folder / "setup.py").read_text())
    return folder


def write_pretrained(folder: Path) -> None:
    """A model of random weights, 128 positions, and a tokenizer of the texts that the demo's data are made of."""
    import argparse
    import difflib

    from train_tokenizer import main as train_tokenizer

    texts = (inspect.getsource(argparse) + inspect.getsource(difflib)).split("\n\n")
    file = folder.parent / "texts.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ["--input_path", file, "--output_dir", folder, "--vocab_size", 512]
    assert not train_tokenizer([str(word) for word in words])
    paddle.seed(0)
    Ernie35ForCausalLM(
        Ernie35Config(
            vocab_size=512, hidden_size=24, intermediate_size=48, num_hidden_layers=3, num_attention_heads=3,
            max_position_embeddings=128, use_flash_attention=False,
        )
    ).save_pretrained(str(folder))  # fmt: skip


def demo(checkout: Path, folder: Path) -> str:
    """What the script prints."""
    environment = {**os.environ, "ERNIE35SE_DEMO_DIR": str(folder), "ERNIE35SE_EXTRA": "cpu"}
    command = ["bash", "scripts/demo_finetune.sh", *SHORT]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_held_out_loss_falls_and_three_answers_are_shown(checkout, tmp_path):
    folder = tmp_path / "my demo"
    write_pretrained(folder / "model")
    out = demo(checkout, folder)
    before, after = (json.loads((folder / name / "eval_results.json").read_text()) for name in ("before", "lora"))
    assert after["eval_loss"] < before["eval_loss"] - 0.1
    said = re.search(r"Held-out loss ([\d.]+) -> ([\d.]+) nats per token", out)
    assert [float(loss) for loss in said.groups()] == pytest.approx([before["eval_loss"], after["eval_loss"]], abs=1e-3)
    dev = [json.loads(line) for line in (folder / "instructions" / "dev.jsonl").read_text().splitlines()]
    assert out.count("(the docstring: ") == 3
    answers = [json.loads(line) for line in (folder / "answers" / "generated-0.jsonl").read_text().splitlines()]
    assert [answer["reference"] for answer in answers] == [dev[number]["output"] for number in (1, 59, 139)]
    for answer in answers:
        assert f"{answer['prompt']}{answer['generated']}\n  (the docstring: {answer['reference']})" in out
    assert (folder / "lora" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "lora" / "lora_model_state.safetensors").is_file()
    Ernie35ForCausalLM.from_pretrained(str(folder / "merged"))
    again = demo(checkout, folder)
    assert again.count(": reusing ") == 5 and said.group() in again
