"""Starts a worker script on several CPU processes, as users start the scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def environment() -> dict[str, str]:
    """This process's, without what would send Paddle to GPUs or into another job."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "FLAGS_selected"))}
    kept.pop("CUDA_VISIBLE_DEVICES", None)
    paths = [str(ROOT), str(ROOT / "tests"), str(HERE), str(HERE / "in_workers")]
    threads = {"OMP_NUM_THREADS": "1", "KMP_BLOCKTIME": "0"}
    return {**kept, **threads, "PYTHONPATH": os.pathsep.join(paths + [kept.get("PYTHONPATH", "")])}


def run_group(command: list[str], log: Path, timeout: float, **options) -> int:
    """Run a command with its output in `log`; exit status, -1 past the time limit. All it started ends with it."""
    with open(log, "w", encoding="utf-8") as out:
        job = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, **options)
        try:
            return job.wait(timeout)
        except subprocess.TimeoutExpired:
            return -1
        finally:
            end_group(job.pid)
            job.wait()


def launch(command: list, log_dir: Path, processes: int = 2, timeout: float = 240) -> tuple[int, str]:
    """Run `python -m paddle.distributed.launch command`; the whole group of processes ends with it.

    Returns:
        Exit status, and the workers' logs one after the other.
    """
    words = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", str(processes)]
    words += ["--log_dir", str(log_dir), *map(str, command)]
    log_dir.mkdir(parents=True, exist_ok=True)
    status = run_group(words, log_dir / "launcher.log", timeout, env=environment())
    logs = sorted(log_dir.glob("workerlog.*"))
    return status, "\n".join(f"== {path.name}\n{path.read_text(errors='replace')}" for path in logs)


def end_group(leader: int) -> None:
    """End what the launcher (its own session's leader) may have left running."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        pass


def launch_worker(script: str, folder: Path, *arguments, **options) -> None:
    """Run `tests/parallel/<script>` with the output folder as its first argument; a failure shows the logs."""
    status, logs = launch([HERE / script, folder, *arguments], folder / "log", **options)
    assert status == 0, f"{script} ended with status {status} (-1: time over)\n{logs[-6000:]}"
