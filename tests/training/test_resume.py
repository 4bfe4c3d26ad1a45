"""Interrupted at any point, a run continues as if nothing had happened."""

from __future__ import annotations

import builtins
import io
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import paddle
import pytest
import safetensors.numpy
import tiny_run
from paddlenlp.trainer import TrainerCallback
from paddlenlp.trainer.unified_checkpoint import load_save_single_card
from tiny_run import Listener, RandomText, tiny_trainer

from ernie35se.training import checkpoint

REPOSITORY = Path(__file__).resolve().parents[2]


class Killed(Exception):
    pass


class KillAfter(TrainerCallback):
    """Ends the run without a goodbye after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Killed


def history(trainer):
    """Log records without what depends on the clock."""
    return [
        {key: value for key, value in record.items() if key != "tokens_per_second"}
        for record in trainer.state.log_history
    ]


@pytest.fixture
def said():
    with Listener() as listener:
        yield listener


# 11 samples, 2 x 2 a step: the data run out in the middle of a micro-batch of the third step.
SETTINGS = [
    dict(gradient_accumulation_steps=2, logging_steps=2),
    dict(gradient_accumulation_steps=2, logging_steps=2, unified_checkpoint=True),
    dict(dataloader_num_workers=2, do_eval=True, evaluation_strategy="steps", eval_steps=3),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["accumulation", "unified", "workers"])
def test_a_run_killed_at_any_step_continues_bit_for_bit(tmp_path, settings):
    def run(name):
        return tiny_trainer(
            tmp_path / name,
            train=RandomText(11),
            evaluate_on=RandomText(5, seed=1),
            max_steps=7,
            save_steps=2,
            **settings,
        )

    whole = run("whole")
    result = whole.train()
    assert [step for step, _ in whole.losses] == sorted(
        list(range(7)) * settings.get("gradient_accumulation_steps", 1)
    )
    for kill_after in range(1, 7):
        name = f"killed-{kill_after}"
        first = run(name)
        first.add_callback(KillAfter(kill_after))
        with pytest.raises(Killed):
            first.train()
        second = run(name)
        resumed_result = second.train()
        saved_step = kill_after // 2 * 2
        assert second.losses == [(step, loss) for step, loss in whole.losses if step >= saved_step]
        assert second.losses[0][0] == saved_step
        assert history(second) == history(whole)
        assert resumed_result.training_loss == result.training_loss
        for ours, theirs in zip(second.model.parameters(), whole.model.parameters()):
            assert np.array_equal(ours.numpy(), theirs.numpy())
        shutil.rmtree(tmp_path / name)


def test_a_resumed_run_reads_only_what_is_left(tmp_path):
    first = tiny_trainer(tmp_path, save_steps=4)
    first.add_callback(KillAfter(5))
    with pytest.raises(Killed):
        first.train()
    data = RandomText(100)
    tiny_trainer(tmp_path, train=data, save_steps=4).train()
    assert set(data.read) == {8, 9, 10, 11, 12}  # the last: only its checksum


def test_the_three_ways_to_start_are_said(tmp_path, said):
    tiny_trainer(tmp_path, max_steps=2, save_steps=2).train()
    assert "Trains from scratch: 2 steps" in said()

    again = tiny_trainer(tmp_path, max_steps=2, save_steps=2)
    result = again.train()
    assert "Nothing left to do" in said()
    assert not hasattr(again, "losses") and result.global_step == 2
    assert result.training_loss > 1 and result.metrics["train_loss"] == result.training_loss
    assert np.isfinite(again.evaluate(RandomText(4))["eval_loss"])

    longer = tiny_trainer(tmp_path, max_steps=3, save_steps=2)
    longer.train()
    text = said()
    assert "Resumes from" in text and "checkpoint-2 (step 2 of 3)" in text
    assert "max_steps has changed since checkpoint-2: 2 -> 3" in text


def test_nothing_left_restores_the_trained_weights(tmp_path):
    trained = tiny_trainer(tmp_path, max_steps=2, save_steps=2)
    trained.train()
    again = tiny_trainer(tmp_path, max_steps=2)
    again.train()
    for ours, theirs in zip(again.model.parameters(), trained.model.parameters()):
        assert np.array_equal(ours.numpy(), theirs.numpy())


def test_changed_data_and_settings_are_said_and_unchanged_ones_are_not(tmp_path, said):
    tiny_trainer(tmp_path, max_steps=2, save_steps=2).train()
    said()
    tiny_trainer(tmp_path, max_steps=3, save_steps=2, train=RandomText(100)).train()
    text = said()
    assert "max_steps has changed" in text and text.count("changed since") == 1
    tiny_trainer(tmp_path, max_steps=4, train=RandomText(100, seed=5), learning_rate=2e-2).train()
    text = said()
    assert "training data or their order have changed" in text and "sample 6 is another one" in text
    assert "learning_rate has changed since checkpoint-3: 0.01 -> 0.02" in text
    assert "seed has changed" not in text


def test_a_changed_learning_rate_counts_from_the_first_step(tmp_path):
    tiny_trainer(tmp_path, max_steps=4, save_steps=2).train()
    second = tiny_trainer(tmp_path, max_steps=4, learning_rate=5e-3)
    rates = []

    class Watch(TrainerCallback):
        def on_optimizer_begin(self, args, state, control, optimizer=None, **kwargs):
            rates.append(optimizer.get_lr())

    second.add_callback(Watch())
    second.train(str(tmp_path / "checkpoint-2"))
    assert rates == pytest.approx([1e-5 + (5e-3 - 1e-5) / 2, 1e-5])  # linear, warm until 2 of 4


def test_a_changed_batch_size_continues_with_the_next_sample(tmp_path):
    tiny_trainer(tmp_path, max_steps=3, save_steps=3).train()
    for max_steps, batch_size, expected in ((4, 3, {6, 7, 8}), (5, 1, {9})):
        data = RandomText(100)
        tiny_trainer(
            tmp_path, train=data, max_steps=max_steps, save_steps=1, per_device_train_batch_size=batch_size
        ).train()
        assert set(data.read) - {max(data.read)} == expected  # the last: only its checksum


def test_overwriting_starts_from_scratch_and_loses_nothing(tmp_path, said):
    tiny_trainer(tmp_path, max_steps=4, save_steps=2).train()
    fresh = tiny_trainer(tmp_path, max_steps=2, save_steps=2, overwrite_output_dir=True)
    fresh.train()
    assert fresh.losses[0][0] == 0
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2"]
    assert sorted(path.name for path in (tmp_path / "previous").iterdir()) == ["checkpoint-2", "checkpoint-4"]
    assert "moved to" in said()


def test_a_named_checkpoint_is_taken_and_a_broken_one_refused(tmp_path):
    whole = tiny_trainer(tmp_path, max_steps=4, save_steps=2)
    whole.train()
    second = tiny_trainer(
        tmp_path, max_steps=4, save_steps=2, resume_from_checkpoint=str(tmp_path / "checkpoint-2")
    )
    second.train()
    assert second.losses == whole.losses[2:]
    (tmp_path / "checkpoint-4" / "optimizer.pdopt").write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"checkpoint-4.*optimizer.pdopt has 3 bytes of \d+.*checkpoint-2"):
        tiny_trainer(tmp_path).train(str(tmp_path / "checkpoint-4"))
    with pytest.raises(ValueError, match="not a folder"):
        tiny_trainer(tmp_path).train(str(tmp_path / "checkpoint-9"))


def test_a_checkpoint_that_is_not_whole_is_passed_over(tmp_path, said):
    whole = tiny_trainer(tmp_path, max_steps=4, save_steps=2)
    whole.train()
    (tmp_path / "checkpoint-4" / "optimizer.pdopt").unlink()
    second = tiny_trainer(tmp_path, max_steps=4, save_steps=2)
    second.train()
    assert second.losses == whole.losses[2:]
    assert "checkpoint-4 is not a whole checkpoint: optimizer.pdopt is missing" in said()


def test_a_checkpoint_of_plain_paddlenlp_can_be_resumed(tmp_path):
    whole = tiny_trainer(tmp_path, max_steps=4, save_steps=2)
    whole.train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    for name in ("complete.json", "progress.json"):
        (tmp_path / "checkpoint-2" / name).unlink()
    second = tiny_trainer(tmp_path, max_steps=4, save_steps=2)
    result = second.train()
    assert second.losses == whole.losses[2:]
    assert result.training_loss == pytest.approx(np.mean([loss for _, loss in second.losses]))


# ---------------------------------------------------------------- faults at each file operation


class Faults:
    """Counts calls of everything that changes files while saving, and makes the k-th fail."""

    TARGETS = (
        (builtins, "open"),
        (io, "open"),
        (os, "fsync"),
        (os, "rename"),
        (os, "replace"),
        (os, "mkdir"),
        (os, "rmdir"),
        (os, "unlink"),
        (paddle, "save"),
        (load_save_single_card, "safe_save_file"),
        (shutil, "rmtree"),
    )

    def __init__(self, monkeypatch, fail_at):
        self.monkeypatch, self.fail_at = monkeypatch, fail_at
        self.names = []

    @property
    def failed(self):
        return len(self.names) >= self.fail_at

    def __enter__(self):
        for owner, name in self.TARGETS:
            self.monkeypatch.setattr(owner, name, self._counting(name, getattr(owner, name)))
        return self

    def __exit__(self, *_):
        self.monkeypatch.undo()

    def _counting(self, name, plain):
        def call(*args, **kwargs):
            mode = args[1] if len(args) > 1 else kwargs.get("mode", "r")
            if name == "open" and not set(mode) & set("wax+"):
                return plain(*args, **kwargs)
            self.names.append(name)
            if len(self.names) == self.fail_at:
                if name in ("save", "safe_save_file"):  # half the bytes get there
                    self.monkeypatch.undo()
                    plain(*args, **kwargs)
                    os.truncate(args[1], os.path.getsize(args[1]) // 2)
                raise OSError(28, f"no space left (injected at call {self.fail_at}: {name})")
            return plain(*args, **kwargs)

        return call


def content(folder):
    """Checksum of a checkpoint's bytes; its progress holds a time, which differs."""
    files = [path for path in sorted(folder.iterdir()) if path.name not in ("progress.json", "complete.json")]
    return folder.name, zlib.crc32(b"".join(path.name.encode() + path.read_bytes() for path in files))


@pytest.mark.parametrize("unified", [False, True])
def test_a_fault_at_any_file_operation_of_a_save_leaves_a_loadable_checkpoint(tmp_path, monkeypatch, unified):
    folder = tmp_path / "run"

    def run():
        trainer = tiny_trainer(folder, max_steps=4, save_total_limit=1, unified_checkpoint=unified)
        trainer.noise = False  # other runs draw between the saves of the trainer below
        return trainer

    class SaveFirst(TrainerCallback):
        """Checkpoint 1 is saved and kept aside; the run stops before checkpoint 2."""

        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = state.global_step == 1

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                shutil.copytree(folder, tmp_path / "with-checkpoint-1")
                raise Killed

    whole = run()
    whole.train(False)
    trainer = run()
    trainer.add_callback(SaveFirst())
    with pytest.raises(Killed):
        trainer.train(False)

    fail_at, seen, proven = 0, set(), set()
    while True:
        fail_at += 1
        with Faults(monkeypatch, fail_at) as faults:
            try:
                trainer.runtime_timer.timer.started_ = False  # PaddleNLP's does not survive an exception
                trainer._save_checkpoint(trainer.model)
            except OSError as error:
                assert "injected" in str(error)
        if not faults.failed:
            break
        seen.add(faults.names[fail_at - 1])
        last, _ = checkpoint.last_checkpoint(folder)
        assert last is not None, f"call {fail_at}: {faults.names}"
        assert all(checkpoint.what_is_missing(path) is None for path in checkpoint.checkpoints(folder))
        if content(last) not in proven:  # one with the same bytes has been resumed already
            proven.add(content(last))
            second = run()
            second.train()
            assert (
                second.losses == whole.losses[checkpoint.step_of(last) :]
            ), f"call {fail_at}: {faults.names}"
        checkpoint.clean_leftovers(folder)
        assert not list(folder.glob(".*checkpoint-*"))
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "with-checkpoint-1", folder)
    assert {name for name, _ in proven} == {"checkpoint-1", "checkpoint-2"}
    assert {
        "open",
        "fsync",
        "rename",
        "mkdir",
        "rmdir",
        "rmtree",
        "safe_save_file" if unified else "save",
    } <= seen
    assert [path.name for path in checkpoint.checkpoints(folder)] == ["checkpoint-2"]


def test_a_fault_while_the_final_model_is_saved_leaves_whole_files(tmp_path, monkeypatch):
    trainer = tiny_trainer(tmp_path, max_steps=1)
    trainer.train()
    trainer.save_model()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    for parameter in trainer.model.parameters():
        parameter.set_value(parameter * 2)
    fail_at = 0
    while True:
        fail_at += 1
        with Faults(monkeypatch, fail_at) as faults:
            try:
                trainer.save_model()
            except OSError:
                pass
        if not faults.failed:
            break
        for name, content in before.items():
            now = (tmp_path / name).read_bytes()
            assert now == content or len(now) >= 0.9 * len(content), (fail_at, name)
        paddle.load(str(tmp_path / "model_state.pdparams"))
    assert fail_at > 8
    assert not list(tmp_path.glob(".tmp-*"))
    weights = paddle.load(str(tmp_path / "model_state.pdparams"))
    for name, parameter in trainer.model.state_dict().items():
        assert np.array_equal(weights[name].numpy(), parameter.numpy())


def test_weights_in_another_format_do_not_stay_beside_the_new_ones(tmp_path):
    tiny_trainer(tmp_path, max_steps=1).save_model()
    assert (tmp_path / "model_state.pdparams").exists()
    new = tiny_trainer(tmp_path, max_steps=1, unified_checkpoint=True)
    new.train()
    new.save_model()
    assert not (tmp_path / "model_state.pdparams").exists()
    stored = safetensors.numpy.load_file(tmp_path / "model-00001-of-00001.safetensors")
    name, parameter = next(iter(new.model.state_dict().items()))
    assert np.array_equal(stored[name], parameter.numpy())


# ---------------------------------------------------------------- real kills


def test_kill_9_while_saving(tmp_path):
    """Three processes die while writing, while flushing and while deleting; each run continues exactly."""
    signs = {
        "writing": lambda folder: (folder / ".tmp-checkpoint-3" / "checkpoint-3" / "config.json").exists(),
        "flushing": lambda folder: (folder / ".tmp-checkpoint-4" / "checkpoint-4" / "complete.json").exists(),
        "deleting": lambda folder: bool(list(folder.glob(".old-checkpoint-*"))),
    }
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
    }
    processes = {}
    for name in signs:
        with open(tmp_path / f"{name}.log", "w") as log:
            processes[name] = subprocess.Popen(
                [sys.executable, tiny_run.__file__, str(tmp_path / name), "0.1"],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
    try:
        deadline = time.monotonic() + 180
        waiting = set(signs)
        while waiting:
            for name in sorted(waiting):
                if processes[name].poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"{name} was never seen:\n" + (tmp_path / f"{name}.log").read_text()[-3000:])
                if signs[name](tmp_path / name):
                    os.kill(processes[name].pid, signal.SIGKILL)
                    assert processes[name].wait() == -signal.SIGKILL
                    waiting.discard(name)
            time.sleep(0.002)
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    whole = tiny_run.killable_run(tmp_path / "whole")
    whole.train()
    for name, step in (("writing", 2), ("flushing", 3), ("deleting", 3)):
        assert list((tmp_path / name).glob(".*-checkpoint-*")), name  # it did die in the middle
        second = tiny_run.killable_run(tmp_path / name)
        second.train()
        assert second.losses == whole.losses[step:], name
        assert history(second) == history(whole)
        kept = sorted(path.name for path in (tmp_path / name).glob("*checkpoint-*"))
        assert kept == ["checkpoint-5", "checkpoint-6"] and not list((tmp_path / name).glob(".*"))
