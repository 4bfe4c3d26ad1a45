"""tools/plan_parallel.py: what it suggests fits, is complete, and is what a dry run says."""

import argparse
from pathlib import Path

import plan_parallel
import pytest

from ernie35se.configuration import Ernie35Config
from ernie35se.training import estimate

CONFIG = Ernie35Config.from_pretrained("baidu/ernie-3.5-se-3b")


def options(**changes):
    given = dict(
        devices=8, memory=80.0, global_batch=64, max_seq_length=4096, devices_per_machine=8, tflops=312.0,
        efficiency=0.5, bandwidth=250.0, network=20.0, float32=False, show=8,
    )  # fmt: skip
    return argparse.Namespace(**{**given, **changes})


@pytest.mark.parametrize("devices, memory", [(1, 80), (8, 80), (8, 16), (64, 40), (1024, 24)])
def test_every_suggestion_fits_devices_batch_and_memory(devices, memory):
    batch = max(64, 2 * devices)
    choices = plan_parallel.suggest(CONFIG, options(devices=devices, memory=float(memory), global_batch=batch))
    assert choices == sorted(choices, key=lambda choice: (round(choice.seconds, 2), choice.memory))
    for choice in choices:
        plan = choice.plan
        assert plan.devices == devices and plan.samples_per_step == batch
        assert choice.memory == estimate.total_bytes(estimate.memory_per_device(CONFIG, plan)) <= 0.9 * memory * 2**30
        assert CONFIG.num_attention_heads % plan.tensor_parallel == 0
        assert plan.pipeline_parallel == 1 or plan.sharding_stage in (0, 1)


def test_less_memory_never_opens_a_layout():
    known = None
    for memory in (80.0, 40.0, 16.0, 10.0):
        found = {choice.plan for choice in plan_parallel.suggest(CONFIG, options(memory=memory))}
        assert found and (known is None or found <= known)
        known = found


def test_what_cannot_be_done_is_said_with_the_numbers():
    with pytest.raises(ValueError, match="4 GiB: no layout of 8 devices fits; the smallest needs"):
        plan_parallel.suggest(CONFIG, options(memory=4.0))
    with pytest.raises(ValueError, match="global_batch 7"):
        plan_parallel.suggest(CONFIG, options(devices=1024, global_batch=7))


def test_the_flags_give_the_plan_in_a_dry_run(capsys, monkeypatch):
    from ernie35se.training import build
    from ernie35se.training.arguments import parse_pretrain_arguments

    choice = plan_parallel.suggest(CONFIG, options(memory=16.0))[0]
    words = plan_parallel.flags(choice.plan).split() + "--dry_run --dry_run_devices 8 --per_device_train_batch_size 1".split()
    words += "--model_name_or_path baidu/ernie-3.5-se-3b --max_seq_length 4096 --device gpu --bf16".split()
    words += "--fp16_opt_level O2 --use_flash_attention".split()
    settings = build.Settings(*parse_pretrain_arguments(words))
    config = build.load_config(settings, None, None)
    assert build.make_plan(settings, config) == choice.plan


def test_it_prints_a_table(capsys):
    assert plan_parallel.main("--devices 8 --memory 80 --global_batch 64 --show 2".split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "layouts fit" in lines[0] and len(lines) == 4
    assert Path(plan_parallel.__file__).name == "plan_parallel.py"


def test_it_agrees_with_the_rules_of_the_parallel_page():
    def best(devices):
        choices = plan_parallel.suggest(CONFIG, options(devices=devices, global_batch=512))
        flat = [c for c in choices if c.plan.tensor_parallel == c.plan.pipeline_parallel == 1]
        return choices[0], flat[0]

    first, flat = best(8)
    assert first == flat and first.plan.sharding_stage == 1  # stage 2 reduces gradients in every micro-batch
    first, flat = best(64)
    assert 1 < first.plan.pipeline_parallel <= 8 and first.plan.virtual > 1
    assert first.seconds < flat.seconds < 1.2 * first.seconds


@pytest.mark.parametrize("flag, value", [("--memory", "inf"), ("--memory", "nan"), ("--efficiency", "50"), ("--efficiency", "0")])
def test_a_number_that_cannot_be_is_refused_by_its_flag(capsys, flag, value):
    with pytest.raises(SystemExit):
        plan_parallel.main(["--devices", "8", "--memory", "80", "--global_batch", "64", flag, value])
    assert f"argument {flag}: '{value}' is not a" in capsys.readouterr().err


def test_a_model_file_that_is_no_config_is_named(tmp_path):
    (tmp_path / "notes.md").write_text("# notes")
    with pytest.raises(ValueError, match="notes.md: not a config.json of a model"):
        plan_parallel.main(["--devices", "8", "--memory", "80", "--global_batch", "64", "--model", str(tmp_path / "notes.md")])
