"""The launch scripts with a tiny model on two CPU processes, and jobs of which one rank fails."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import paddle
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from launching import HERE, ROOT, environment, launch, run_group  # noqa: E402

sys.path.insert(0, str(ROOT / "scripts"))
import run_pretrain  # noqa: E402

from ernie35se.data.indexed import TokenFileWriter  # noqa: E402
from ernie35se.modeling import Ernie35ForCausalLM  # noqa: E402
from ernie35se.training import build  # noqa: E402
from ernie35se.training.arguments import parse_pretrain_arguments  # noqa: E402

MODEL = {
    "model_type": "ernie",
    "architectures": ["Ernie35ForCausalLM"],
    "vocab_size": 101,  # training makes it 128
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
SHORT = (
    "--max_steps 2 --eval_steps 2 --save_steps 2 --logging_steps 1 --eval_iters 1 --warmup_steps 0 --max_seq_length 16 "
    "--gradient_accumulation_steps 2 --per_device_eval_batch_size 2 --use_fused_ln false --report_to none"
).split()
RUNS = {
    "stage2": ("pretrain_3b_stage2.sh", "3b_stage2.json", ["--sharding_parallel_degree", "2"]),
    "stage3": ("pretrain_3b_4d.sh", "3b_stage3.json", ["--sharding_parallel_degree", "2"]),
    "tensor": (
        "pretrain_3b_4d.sh",
        "3b_tp2_pp2.json",
        ["--pipeline_parallel_degree", "1", "--sharding_parallel_degree", "1"],
    ),
    "pipeline": (
        "pretrain_3b_4d.sh",
        "3b_tp2_pp2.json",
        ["--tensor_parallel_degree", "1", "--sequence_parallel", "false", "--sharding_parallel_degree", "1",
         "--unified_checkpoint", "false"],
    ),
}  # fmt: skip


pytestmark = pytest.mark.slow  # several launches


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    draw = np.random.default_rng(0)
    with TokenFileWriter(str(folder / "toy"), 101) as writer:
        for length in draw.integers(5, 60, 200):
            writer.add_document(draw.integers(3, 101, length).astype("uint16"))
    (folder / "model.json").write_text(json.dumps(MODEL))
    return folder


def run_script(place: Path, name: str, script: str, config: str, flags: list, timeout: float = 180):
    """Exit status and rank 0's log of a launch script on two CPU processes."""
    variables = {
        "DEVICE": "cpu",
        "NPROC": "2",
        "MODEL": str(place / "model.json"),
        "INPUT_DIR": str(place / "toy"),
        "OUTPUT_DIR": str(place / name),
        "LOG_DIR": str(place / f"{name}-log"),
        "CONFIG": str(ROOT / "configs" / "pretrain" / config),
        "PYTHON": sys.executable,
    }
    command = ["bash", str(ROOT / "scripts" / "launch" / script), *SHORT, *flags]
    output = place / f"{name}.out"
    status = run_group(command, output, timeout, cwd=place, env={**environment(), **variables})
    logs = place / f"{name}-log" / "workerlog.0"
    return status, logs.read_text(errors="replace") if logs.is_file() else output.read_text()


@pytest.mark.parametrize("name", RUNS)
def test_a_launch_script_trains_and_leaves_a_whole_model(place, name):
    script, config, flags = RUNS[name]
    status, log = run_script(place, name, script, config, flags)
    assert status == 0, log[-3000:]
    results = json.loads((place / name / "all_results.json").read_text())
    assert math.isfinite(results["train_loss"]) and math.isfinite(results["eval_loss"])
    assert abs(results["train_loss"] - math.log(128)) < 0.5
    model = Ernie35ForCausalLM.from_pretrained(str(place / name))
    model.eval()
    ids = paddle.to_tensor([[3, 4, 5, 6]])
    assert np.isfinite(model(ids, labels=ids)[0].item())
    assert (place / name / "checkpoint-2" / "complete.json").is_file()


def test_one_process_goes_on_with_what_two_began(place):
    """The vocabulary is padded alike for one rank and for two."""
    script, config, flags = RUNS["tensor"]
    words = [str(ROOT / "configs" / "pretrain" / config), *SHORT, "--device", "cpu", "--model_name_or_path",
             str(place / "model.json"), "--input_dir", str(place / "toy"), "--output_dir", str(place / "tensor"), *flags,
             "--tensor_parallel_degree", "1", "--sequence_parallel", "false", "--max_steps", "3"]  # fmt: skip
    assert run_pretrain.main(words) == 0
    state = json.loads((place / "tensor" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "loss" in entry] == [1, 2, 3]
    model = Ernie35ForCausalLM.from_pretrained(str(place / "tensor"))
    assert model.lm_head.weight.shape == [32, 128] and model.ernie.embed_tokens.weight.shape == [128, 32]


def test_a_degree_that_the_padded_vocabulary_does_not_allow_is_refused_with_the_numbers(tmp_path):
    def vocabulary(degree, **changes):
        sizes = {"num_attention_heads": 12, "hidden_size": 48}
        (tmp_path / "model.json").write_text(json.dumps({**MODEL, **sizes, **changes}))
        words = ["--model_name_or_path", str(tmp_path / "model.json"), "--dry_run", "--dry_run_devices", str(degree),
                 "--tensor_parallel_degree", str(degree)]  # fmt: skip
        return build.load_config(build.Settings(*parse_pretrain_arguments(words)), None, None).vocab_size

    assert [vocabulary(degree) for degree in (1, 2, 4)] == [128, 128, 128]
    with pytest.raises(ValueError) as refusal:
        vocabulary(3)
    assert "tensor_parallel_degree 3 does not divide vocab_size 128 (remainder 2)" in str(refusal.value)
    assert "or a model with vocab_size 384" in str(refusal.value)
    assert vocabulary(3, vocab_size=384) == 384


def test_settings_that_do_not_fit_end_the_job_with_the_numbers(place):
    started = time.monotonic()
    script, config, _ = RUNS["tensor"]
    status, log = run_script(place, "misfit", script, config, ["--tensor_parallel_degree", "4"])
    assert status not in (0, -1)
    assert "tensor 4 x pipeline 2 x sharding 2 = 16 devices do not divide the 2 of this run" in log
    assert "Traceback" not in log and time.monotonic() - started < 90


def test_a_node_s_builder_that_fails_ends_the_whole_job_with_the_reason(place):
    (place / "no-folder").write_text("a file")
    script, config, flags = RUNS["stage2"]
    status, log = run_script(place, "unbuilt", script, config, [*flags, "--data_cache_path", str(place / "no-folder")])
    assert status not in (0, -1)
    assert "no-folder" in log and "error" in log


def test_a_rank_that_fails_ends_the_whole_job_with_the_reason(tmp_path):
    status, logs = launch([HERE / "failing_worker.py", tmp_path], tmp_path / "log", timeout=120)
    assert status not in (0, -1)
    assert "sample 8 is broken on this disk" in logs


@pytest.mark.parametrize("shared, builders", [(False, [0, 2]), (True, [0])])
def test_one_process_builds_the_index_on_each_node_or_on_a_shared_disk(place, tmp_path, monkeypatch, shared, builders):
    """Two nodes of two processes; the others wait at the barrier."""
    words = ["--model_name_or_path", str(place / "model.json"), "--input_dir", str(place / "toy"), "--output_dir",
             str(tmp_path), "--device", "cpu", "--do_train", "--max_steps", "3", "--share_folder",
             str(shared)]  # fmt: skip
    settings = build.Settings(*parse_pretrain_arguments(words))
    asked = []
    monkeypatch.setattr(build, "build_train_valid_test_datasets", lambda *_, **how: asked.append(how) or ["train"] * 3)
    monkeypatch.setattr(paddle.distributed, "get_world_size", lambda: 4)
    for rank in range(4):
        monkeypatch.setattr(paddle.distributed, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(type(settings.training), "local_process_index", property(lambda _, rank=rank: rank % 2))
        build.build_datasets(settings, 128)
    assert [rank for rank, how in enumerate(asked) if how["is_builder"]] == builders
    assert all(how["barrier"] is paddle.distributed.barrier for how in asked)


@pytest.mark.parametrize("devices", [8, 64, 1024])
def test_the_four_way_plan_is_described_without_devices(place, devices):
    command = [
        "bash", str(ROOT / "scripts" / "launch" / "pretrain_3b_4d.sh"), "--dry_run", "--dry_run_devices", str(devices),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=place, env={**environment(), "PYTHON": sys.executable}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for words in (f"fullest of {devices} device(s), bfloat16", "Sent by the busiest device", "tensor", "Pipeline idle"):
        assert words in done.stdout
