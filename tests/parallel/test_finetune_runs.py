"""The fine-tuning launch scripts with a tiny model on two CPU processes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tests" / "training")]

from finetune_run import write_base, write_records  # noqa: E402
from launching import environment, run_group  # noqa: E402

from ernie35se import peft  # noqa: E402
from ernie35se.modeling import Ernie35ForCausalLM  # noqa: E402

SHORT = (
    "--max_steps 2 --src_length 24 --max_length 48 --logging_steps 1 --warmup_steps 0 --use_flash_attention false "
    "--use_fused_ln false --report_to none --gradient_accumulation_steps 1"
).split()
RUNS = {"sft_3b.sh": [], "lora_3b.sh": ["--tensor_parallel_degree", "2"]}


@pytest.mark.slow
@pytest.mark.parametrize("script", RUNS)
def test_a_launch_script_trains_and_leaves_what_one_device_loads(script, tmp_path):
    output = tmp_path / "output"
    variables = {
        "DEVICE": "cpu",
        "NPROC": "2",
        "MODEL": str(write_base(tmp_path / "base", num_attention_heads=4)),
        "DATA": str(write_records(tmp_path / "data")),
        "OUTPUT_DIR": str(output),
        "LOG_DIR": str(tmp_path / "log"),
        "PYTHON": sys.executable,
    }
    command = ["bash", str(ROOT / "scripts" / "launch" / script), *SHORT, *RUNS[script]]
    status = run_group(command, tmp_path / "out", 180, cwd=tmp_path, env={**environment(), **variables})
    log = tmp_path / "log" / "workerlog.0"
    assert status == 0, (log if log.is_file() else tmp_path / "out").read_text(errors="replace")[-3000:]
    assert math.isfinite(json.loads((output / "all_results.json").read_text())["train_loss"])
    if script == "lora_3b.sh":
        peft.load(Ernie35ForCausalLM.from_pretrained(str(tmp_path / "base")), output)
    else:
        Ernie35ForCausalLM.from_pretrained(str(output))


@pytest.mark.parametrize("script", RUNS)
def test_a_dry_run_of_a_launch_script_is_one_process_that_describes_and_writes_nothing(script, tmp_path):
    base = write_base(tmp_path / "base", num_attention_heads=4, hidden_size=120, intermediate_size=200)
    variables = {"MODEL": str(base), "DATA": str(write_records(tmp_path / "data")), "PYTHON": sys.executable}
    command = ["bash", str(ROOT / "scripts" / "launch" / script), *SHORT, *RUNS[script], "--dry_run"]
    done = subprocess.run(  # DEVICE is left at gpu: describing a run needs none
        command, cwd=tmp_path, env={**environment(), **variables}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    weights = Ernie35ForCausalLM.from_pretrained(str(base)).parameters()
    mib = sum(math.prod(weight.shape) for weight in weights) * 4 / 2**20
    sizes = [f"  {part:<14} {f'{times * mib:.1f} MiB':>12}" for part, times in (("weights", 1), ("optimizer", 2))]
    words = {
        "sft_3b.sh": ["lora = False", "sharding = 'stage2'", *sizes],
        "lora_3b.sh": ["lora = True", "tensor_parallel_degree = 2", "LoRA: "],
    }
    for text in (*words[script], "device = 'gpu'", "12 rows, 3 optimizer steps"):
        assert text in done.stdout, text
    assert "workerlog" not in done.stdout and {path.name for path in tmp_path.iterdir()} == {"base", "data"}


@pytest.mark.parametrize("count", ["0", "-1", "two"])
@pytest.mark.parametrize("script", [*RUNS, "pretrain_3b_4d.sh", "predict_tp.sh"])
def test_a_number_of_processes_that_is_none_starts_nothing(script, count, tmp_path):
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "launch" / script)], cwd=tmp_path, env={**environment(), "NPROC": count, "PYTHON": "true"},
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 2 and f"NPROC={count}: expected a number of processes" in done.stderr
