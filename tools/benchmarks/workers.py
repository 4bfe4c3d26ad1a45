"""Sides that would disturb each other (thread pools, allocators, MKL's state) run in processes of their own.

    with Workers() as workers:
        ours = workers.start("ours", batch=2, length=256)
        ours.ask("step")             # {"seconds": ..., ...}

A worker is this file run as a program. It reads one JSON request a line, {"do": name, ...}, and calls the method of
that name of its side (side.py); one line "answer <JSON>" comes back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":  # run as a program: the packages are two folders up, and tools/benchmarks is one of them
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    sys.path.append(str(Path(__file__).resolve().parents[2]))

ANSWER = "answer "
# What the user or a parent process set for the math libraries would hold for one side and not for another.
TUNING = ("OMP_", "MKL_", "KMP_", "GOMP_")


class Worker:
    """One side in its own process. `environment` is laid over this process's, without the math libraries' variables."""

    def __init__(self, side: str, environment: dict[str, str], settings: dict):
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(TUNING)}
        self.side = side
        self._log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, side, json.dumps(settings)],
            env={**inherited, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def ask(self, what: str, **arguments) -> dict:
        """The answer to one request. Raises RuntimeError with the end of the worker's log where it has died."""
        try:
            self.process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        for line in self.process.stdout:  # libraries print too
            if line.startswith(ANSWER):
                return json.loads(line[len(ANSWER) :])
        raise self._died()

    def _died(self) -> RuntimeError:
        status = self.process.wait()
        self._log.seek(0)
        return RuntimeError(f"the worker {self.side!r} ended with status {status}:\n{self._log.read()[-2000:]}")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()
        self._log.close()


class Workers:
    """Starts workers and ends all of them when the block is left."""

    def __init__(self):
        self.started: list[Worker] = []

    def __enter__(self) -> Workers:
        return self

    def start(self, side: str, environment: dict[str, str] | None = None, **settings) -> Worker:
        self.started.append(Worker(side, environment or {}, settings))
        return self.started[-1]

    def __exit__(self, *error) -> None:
        for worker in self.started:
            worker.close()


def main() -> None:
    from benchmarks import sides

    side = sides.make(sys.argv[1], json.loads(sys.argv[2]))
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(side, request.pop("do"))(**request)
        print(ANSWER + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
