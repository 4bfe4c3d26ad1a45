"""Numbers and how they are taken: both sides in turn, medians with their spread, ratios round by round, power laws."""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Callable, NamedTuple, Sequence

ROOT = Path(__file__).resolve().parents[2]


class Spread(NamedTuple):
    """A quantity measured `rounds` times."""

    median: float
    low: float
    high: float
    rounds: int


def spread(values: Sequence[float]) -> Spread:
    """Raises ValueError for no values at all."""
    if not values:
        raise ValueError("nothing was measured; expected at least one value")
    return Spread(statistics.median(values), min(values), max(values), len(values))


def ratios(over: Sequence[float], under: Sequence[float]) -> Spread:
    """over / under, round by round: what slows a whole round falls out."""
    return spread([a / b for a, b in zip(over, under, strict=True)])


@dataclass(frozen=True)
class Check:
    """A figure that has a target: at least `least`, or at most `most`; neither where it is only told."""

    name: str
    value: Spread
    least: float | None = None
    most: float | None = None
    unit: str = ""

    @property
    def target(self) -> str:
        if self.least is None and self.most is None:
            return ""
        return f"≥ {self.least:g}" if self.most is None else f"≤ {self.most:g}"

    @property
    def met(self) -> bool | None:
        """Whether the median meets the target; None without one."""
        if self.least is None and self.most is None:
            return None
        return self.value.median >= self.least if self.most is None else self.value.median <= self.most


@dataclass(frozen=True)
class Row:
    """One thing measured: the sides with their spreads in `unit`, and what follows from them."""

    name: str
    unit: str
    sides: dict[str, Spread]
    checks: list[Check] = field(default_factory=list)
    note: str = ""

    def as_json(self) -> dict:
        row = asdict(self)
        row["sides"] = {name: value._asdict() for name, value in self.sides.items()}
        for check, made in zip(self.checks, row["checks"]):
            made.update(value=check.value._asdict(), met=check.met)
        return row

    @classmethod
    def from_json(cls, row: dict) -> Row:
        checks = [
            Check(**{**{k: v for k, v in c.items() if k != "met"}, "value": Spread(**c["value"])}) for c in row["checks"]
        ]
        sides = {name: Spread(**value) for name, value in row["sides"].items()}
        return cls(row["name"], row["unit"], sides, checks, row["note"])


@dataclass(frozen=True)
class Options:
    """How much is measured. `toy`: sizes for tests, whose figures mean nothing."""

    rounds: int = 5
    batch: int = 2
    length: int = 256
    full: bool = False
    toy: bool = False


def in_turn(
    sides: dict[str, Callable[[], dict[str, float]]], rounds: int, warm_up: int = 1
) -> dict[str, dict[str, list[float]]]:
    """Call each side once a round, one after the other, so that a busy machine slows all of them.

    A side returns named numbers; the result is {side: {name: [a number a round]}}, without the first `warm_up` rounds.
    """
    found: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    for turn in range(-warm_up, rounds):
        for name, side in sides.items():
            for quantity, value in side().items():
                if turn >= 0:
                    found[name].setdefault(quantity, []).append(value)
    return found


class PowerLaw(NamedTuple):
    """y = factor * x ** exponent, fitted to the logarithms by least squares; `worst` is the largest |log(y / fit)|."""

    factor: float
    exponent: float
    worst: float


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw:
    """Raises ValueError for fewer than two different x, or anything that has no logarithm."""
    if len(x) != len(y) or len(set(x)) < 2 or min(*x, *y) <= 0:
        raise ValueError(f"x {list(x)}, y {list(y)}: expected positive numbers, at least two different x")
    log_x, log_y = [math.log(v) for v in x], [math.log(v) for v in y]
    slope, intercept = statistics.linear_regression(log_x, log_y)
    worst = max(abs(b - intercept - slope * a) for a, b in zip(log_x, log_y))
    return PowerLaw(math.exp(intercept), slope, worst)


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Finished(NamedTuple):
    """A command that has run: how long, its largest resident set in bytes, its status and what it printed."""

    seconds: float
    peak_bytes: int
    status: int
    output: str


def run_command(words: Sequence, environment: dict | None = None) -> Finished:
    """Run a command to its end. Its peak comes from the kernel (wait4), so the process need not report it."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [str(word) for word in words], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output = process.stdout.read()
    _, wait_status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.stdout.close()
    process.returncode = os.waitstatus_to_exitcode(wait_status)
    unit = 1 if sys.platform == "darwin" else 1024
    return Finished(seconds, usage.ru_maxrss * unit, process.returncode, output)


def run_successfully(words: Sequence, environment: dict | None = None) -> Finished:
    """run_command, raising RuntimeError with the end of its output where it fails."""
    done = run_command(words, environment)
    if done.status:
        raise RuntimeError(f"{' '.join(map(str, words))} ended with status {done.status}:\n{done.output[-2000:]}")
    return done


def machine() -> dict:
    """What the figures belong to: processor, cores, memory, system, versions, date."""
    versions = {}
    for name in ("paddlepaddle", "paddlepaddle-gpu", "paddlenlp", "torch", "sentencepiece", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
    }


def processor() -> str:
    """The processor as the system names it, with the widest vector unit that it tells of."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or "unknown"
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    flags = fields.get("flags", "").split()
    widest = next((name for name in ("avx512f", "avx2", "avx") if name in flags), "no AVX known")
    return f"{fields.get('model name', platform.machine())} ({fields.get('vendor_id', 'unknown maker')}, {widest})"
