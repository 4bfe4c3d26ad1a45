"""Checkpoint folders that are either whole or not there.

    output_dir/
      checkpoint-200/             whole: it got this name only after everything in it had reached the disk
      .tmp-checkpoint-400/        being written (or left behind by a kill)
      .old-checkpoint-100/        being deleted (or left behind by a kill)
      .replaced-checkpoint-200/   the former checkpoint-200 while its successor takes the name
      previous/checkpoint-600/    set aside: later than the point at which a new run started

A folder changes its meaning by one rename, which a file system does wholly or not at all, so a kill at any
moment leaves names that tell the truth. Each checkpoint also lists its files and their sizes
(`complete.json`, written last), which shows a copy that broke off. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Iterable, Iterator, List, Optional, Tuple, Union

MANIFEST = "complete.json"
TEMPORARY, DELETED, REPLACED = ".tmp-", ".old-", ".replaced-"
SET_ASIDE = "previous"
_NAME = re.compile(r"checkpoint-(\d+)")
_LEFTOVER = re.compile(r"(\.tmp-|\.old-|\.replaced-)(checkpoint-\d+|model)")
# What a checkpoint without a manifest (one that plain PaddleNLP wrote) must hold at least.
_ESSENTIAL = ("trainer_state.json", "scheduler.pdparams", "optimizer*", "model*")


def step_of(folder: Union[str, Path]) -> Optional[int]:
    """Number of completed steps in a checkpoint's name, None where the name is another one."""
    match = _NAME.fullmatch(Path(folder).name)
    return int(match.group(1)) if match else None


def checkpoints(output_dir: Union[str, Path]) -> List[Path]:
    """Folders named checkpoint-N, by rising N; whole or not."""
    output_dir = Path(output_dir)
    if not output_dir.is_dir():
        return []
    folders = [path for path in output_dir.iterdir() if step_of(path) is not None and path.is_dir()]
    return sorted(folders, key=step_of)


def what_is_missing(folder: Union[str, Path]) -> Optional[str]:
    """Why this folder is no whole checkpoint: a file that is missing or cut short. None when it is whole."""
    folder = Path(folder)
    if not folder.is_dir():
        return "it is not a folder"
    if not (folder / MANIFEST).is_file():
        absent = [pattern for pattern in _ESSENTIAL if not any(folder.glob(pattern))]
        return f"{absent[0]} is missing" if absent else None
    try:
        sizes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes of {size}"
    return None


def last_checkpoint(output_dir: Union[str, Path]) -> Tuple[Optional[Path], List[str]]:
    """The whole checkpoint with the most steps, and a sentence for each later folder that was passed over."""
    passed_over = []
    for folder in reversed(checkpoints(output_dir)):
        reason = what_is_missing(folder)
        if reason is None:
            return folder, passed_over
        passed_over.append(f"{folder} is not a whole checkpoint: {reason}")
    return None, passed_over


def staging_folder(final: Union[str, Path]) -> Path:
    """Where a checkpoint (or the final model) is written before it gets its name."""
    final = Path(final)
    return final.with_name(TEMPORARY + final.name)


def publish(written: Path, final: Path) -> None:
    """Give a finished folder its final name, in one step and only after its content is on the disk.

    An older folder of that name steps aside first and is deleted afterwards; after a kill in between,
    `clean_leftovers` brings it back.
    """
    files = [path for path in sorted(written.rglob("*")) if path.is_file()]
    sizes = {str(path.relative_to(written)): path.stat().st_size for path in files if path.name != MANIFEST}
    (written / MANIFEST).write_text(json.dumps({"files": sizes}, indent=1) + "\n", encoding="utf-8")
    flush_to_disk(written)
    replaced = final.with_name(REPLACED + final.name)
    if final.exists():
        os.rename(final, replaced)
    os.rename(written, final)
    _flush(final.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def move_files(written: Path, final: Path, last: Iterable[str] = ()) -> List[Path]:
    """Move each file of a finished folder into an existing one by a rename; those named in `last` at the end.

    Returns:
        The files at their new place.
    """
    flush_to_disk(written)
    last = tuple(last)
    files = [path for path in written.rglob("*") if path.is_file()]
    files.sort(key=lambda path: (path.name in last, path))
    moved = []
    for path in files:
        target = final / path.relative_to(written)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)
        moved.append(target)
    _flush(final)
    shutil.rmtree(written)
    return moved


def delete(folder: Path) -> None:
    """Delete a checkpoint so that a kill on the way never leaves a part of it under its name."""
    doomed = folder.with_name(DELETED + folder.name)
    if doomed.exists():
        shutil.rmtree(doomed)
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def rotate(output_dir: Union[str, Path], limit: Optional[int], keep: Iterable = ()) -> List[Path]:
    """Delete the oldest checkpoints beyond `limit`.

    Args:
        limit: how many may stay; None or below 1 means all.
        keep: paths or names (or None) of checkpoints that stay in any case, such as the best one.

    Returns:
        What was deleted.
    """
    if limit is None or limit < 1:
        return []
    kept_names = {Path(path).name for path in keep if path}
    found = checkpoints(output_dir)
    removable = [path for path in found if path.name not in kept_names]
    surplus = removable[: max(0, len(found) - limit)]
    for folder in surplus:
        delete(folder)
    return surplus


def clean_leftovers(output_dir: Union[str, Path]) -> List[str]:
    """Remove what a kill left behind; bring back a checkpoint whose successor never arrived.

    Returns:
        A sentence for each.
    """
    output_dir, said = Path(output_dir), []
    if not output_dir.is_dir():
        return said
    for folder in sorted(output_dir.iterdir()):
        leftover = _LEFTOVER.fullmatch(folder.name)
        if not leftover or not folder.is_dir():
            continue
        kind, name = leftover.groups()
        if kind == REPLACED and not (output_dir / name).exists():
            os.rename(folder, output_dir / name)
            said.append(f"brought back {name}: its replacement was interrupted")
        else:
            shutil.rmtree(folder)
            said.append(f"removed {folder.name}: left behind when an earlier run was interrupted")
    return said


def set_aside(output_dir: Union[str, Path], after_step: int) -> List[Path]:
    """Move checkpoints of later steps than the one a run starts from out of its way, losing nothing.

    Otherwise the next start would take one of an older, different run for the latest of this one.

    Returns:
        Where they are now.
    """
    later = [folder for folder in checkpoints(output_dir) if step_of(folder) > after_step]
    if not later:
        return []
    home = Path(output_dir) / SET_ASIDE
    number = 1
    while home.exists():
        number += 1
        home = Path(output_dir) / f"{SET_ASIDE}-{number}"
    home.mkdir()
    for folder in later:
        os.rename(folder, home / folder.name)
    return [home / folder.name for folder in later]


@contextlib.contextmanager
def removed_on_error(folder: Path) -> Iterator[Path]:
    """A folder to write into that disappears if the writing fails: a full disk gets its room back."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def filled_at_once(final: Path, last: Iterable[str] = (), unless: Iterable[str] = ()) -> Iterator[Path]:
    """A folder to write into whose files move into `final` when all are there; a failure leaves `final` as it was.

    Args:
        last: files that move at the end. unless: patterns of files that must not be in `final` yet.

    Raises:
        ValueError: such a file is there, or the writing failed.
    """
    found = sorted(path.name for pattern in unless for path in final.glob(pattern))
    if found:
        raise ValueError(f"{final} holds {found[0]} already; the two would be mixed. Name another folder, or empty it")
    made, staging = not final.exists(), final / f"{TEMPORARY}model"
    try:
        if staging.exists():  # left behind by a kill
            shutil.rmtree(staging)
        with removed_on_error(staging):
            yield staging
            move_files(staging, final, last)
    except OSError as error:
        raise ValueError(f"{final} could not be written: {error}; make room there, or name another folder") from error
    finally:
        if made and final.is_dir() and not any(final.iterdir()):
            final.rmdir()


def flush_to_disk(folder: Path) -> None:
    """Wait until every file under `folder`, and the folders' own entries, are on the disk."""
    for path in sorted(folder.rglob("*")):
        _flush(path)
    _flush(folder)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
