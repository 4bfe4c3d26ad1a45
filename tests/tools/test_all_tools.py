"""What holds for every tool: --help teaches, starts without Paddle, and abbreviated flags are refused."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
NAMES = ["make_demo_corpus", "train_tokenizer", "create_pretraining_data", "inspect_data", "merge_data"]
NAMES += ["make_demo_instructions", *(f"merge_{method}_params" for method in ("lora", "vera", "lokr", "dislora"))]


@pytest.mark.parametrize("name", NAMES)
def test_help(name, tmp_path):
    command = [sys.executable, "-X", "importtime", str(TOOLS / f"{name}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=30)
    assert done.returncode == 0 and f"example:\n  python tools/{name}.py --" in done.stdout
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert not imported & {"paddle", "paddlenlp", "matplotlib", "torch"}


@pytest.mark.parametrize("name", NAMES)
def test_flags_are_strict(name, tool):
    done = tool(name, "--output_pat", "x", "--inp", "x", "--inputs_", "y")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "required" in done.stderr
