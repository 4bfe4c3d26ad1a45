"""Checkpoint folders: whole or not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ernie35se.training import checkpoint


def write(folder: Path, **files):
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder


def published(output_dir: Path, step: int, content="weights") -> Path:
    final = output_dir / f"checkpoint-{step}"
    checkpoint.publish(write(checkpoint.staging_folder(final), model=content), final)
    return final


def names(folder: Path):
    return sorted(path.name for path in folder.iterdir())


def test_publishing_lists_every_file(tmp_path):
    folder = published(tmp_path, 3)
    assert names(tmp_path) == ["checkpoint-3"]
    assert json.loads((folder / "complete.json").read_text()) == {"files": {"model": 7}}
    assert checkpoint.what_is_missing(folder) is None


def test_publishing_over_an_older_one_replaces_it(tmp_path):
    published(tmp_path, 3, "old")
    folder = published(tmp_path, 3, "newer")
    assert names(tmp_path) == ["checkpoint-3"] and (folder / "model").read_text() == "newer"


@pytest.mark.parametrize(
    "harm, reason",
    [
        (lambda folder: (folder / "model").unlink(), "model is missing"),
        (lambda folder: (folder / "model").write_text("w"), "model has 1 bytes of 7"),
        (lambda folder: (folder / "complete.json").write_text("{"), "complete.json cannot be read"),
        (lambda folder: (folder / "complete.json").write_text("{}"), "complete.json cannot be read"),
        (lambda folder: (folder / "complete.json").write_text("[1]"), "complete.json cannot be read"),
        (lambda folder: (folder / "complete.json").write_bytes(b"\xff\xfe"), "complete.json cannot be read"),
        (lambda folder: (folder / "complete.json").unlink(), "trainer_state.json is missing"),
    ],
)
def test_the_last_whole_checkpoint_is_found_and_the_rest_explained(tmp_path, harm, reason):
    good = published(tmp_path, 9)
    harm(published(tmp_path, 10))
    (tmp_path / "checkpoint-11.bak").mkdir()
    (tmp_path / "checkpoint-12").write_text("a file")
    found, passed_over = checkpoint.last_checkpoint(tmp_path)
    assert found == good
    assert len(passed_over) == 1 and "checkpoint-10" in passed_over[0] and reason in passed_over[0]


def test_steps_are_compared_as_numbers(tmp_path):
    for step in (2, 10, 9):
        published(tmp_path, step)
    assert checkpoint.last_checkpoint(tmp_path)[0].name == "checkpoint-10"
    assert [checkpoint.step_of(path) for path in checkpoint.checkpoints(tmp_path)] == [2, 9, 10]


def test_no_folder_and_no_checkpoint(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        assert checkpoint.last_checkpoint(folder) == (None, [])
        assert checkpoint.clean_leftovers(folder) == [] and checkpoint.set_aside(folder, 0) == []


@pytest.mark.parametrize(
    "limit, keep, left",
    [
        (None, (), [1, 2, 3, 4]),
        (0, (), [1, 2, 3, 4]),
        (-1, (), [1, 2, 3, 4]),
        (9, (), [1, 2, 3, 4]),
        (2, (), [3, 4]),
        (2, ("checkpoint-1",), [1, 4]),
        (1, ("checkpoint-1", "/elsewhere/checkpoint-4", None), [1, 4]),
        (1, ("checkpoint-2",), [2]),
    ],
)
def test_rotation(tmp_path, limit, keep, left):
    for step in (1, 2, 3, 4):
        published(tmp_path, step)
    checkpoint.rotate(tmp_path, limit, keep)
    assert [checkpoint.step_of(path) for path in checkpoint.checkpoints(tmp_path)] == left
    assert names(tmp_path) == [f"checkpoint-{step}" for step in left]


def test_leftovers_are_removed_and_a_replaced_checkpoint_comes_back(tmp_path):
    write(tmp_path / ".tmp-checkpoint-5" / "checkpoint-5", model="half")
    write(tmp_path / ".tmp-model", model="half")
    write(tmp_path / ".old-checkpoint-1", model="half")
    write(tmp_path / ".replaced-checkpoint-2", model="former")
    published(tmp_path, 3, "newer")
    write(tmp_path / ".replaced-checkpoint-3", model="former")
    write(tmp_path / ".tmp-of-the-user", model="his")
    said = checkpoint.clean_leftovers(tmp_path)
    assert len(said) == 5, said
    assert sum("brought back checkpoint-2" in sentence for sentence in said) == 1
    assert names(tmp_path) == [".tmp-of-the-user", "checkpoint-2", "checkpoint-3"]
    assert (tmp_path / "checkpoint-2" / "model").read_text() == "former"
    assert (tmp_path / "checkpoint-3" / "model").read_text() == "newer"


def test_later_checkpoints_are_set_aside_each_time_in_a_new_place(tmp_path):
    for _ in range(2):
        for step in (1, 2, 3):
            published(tmp_path, step)
        checkpoint.set_aside(tmp_path, after_step=1)
    assert names(tmp_path) == ["checkpoint-1", "previous", "previous-2"]
    assert names(tmp_path / "previous") == names(tmp_path / "previous-2") == ["checkpoint-2", "checkpoint-3"]


def test_moving_files_keeps_what_else_is_there(tmp_path):
    final = write(tmp_path / "out", other="kept", model="old")
    staging = write(final / ".tmp-model", model="new", config="c")
    write(staging / "sub", deep="d")
    moved = checkpoint.move_files(staging, final, last=("config",))
    assert names(final) == ["config", "model", "other", "sub"] and moved[-1].name == "config"
    assert (final / "model").read_text() == "new" and (final / "sub" / "deep").read_text() == "d"


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        with checkpoint.removed_on_error(tmp_path / "half") as folder:
            (folder / "model").write_text("half")
            raise KeyboardInterrupt
    assert names(tmp_path) == []


def test_a_folder_is_filled_at_once_or_left_as_it_was(tmp_path):
    final = tmp_path / "model"
    with pytest.raises(ValueError, match=r"model could not be written: .*No space left.*make room"):
        with checkpoint.filled_at_once(final) as staging:
            (staging / "first").write_text("1")
            raise OSError(28, "No space left on device")
    assert not final.exists()
    (final / ".tmp-model").mkdir(parents=True)  # as a kill leaves it
    (final / ".tmp-model" / "half").write_text("")
    with checkpoint.filled_at_once(final, unless=["*.pdparams"]) as staging:
        (staging / "w.pdparams").write_text("1")
        assert not (final / "w.pdparams").exists()
    assert [path.name for path in final.iterdir()] == ["w.pdparams"]
    with pytest.raises(ValueError, match="model holds w.pdparams already"):
        with checkpoint.filled_at_once(final, unless=["*.pdparams"]):
            pass
    with pytest.raises(KeyboardInterrupt):
        with checkpoint.filled_at_once(final) as staging:
            (staging / "second").write_text("2")
            raise KeyboardInterrupt
    assert [path.name for path in final.iterdir()] == ["w.pdparams"]
