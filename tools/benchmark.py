"""Measure speed as ratios, both sides in one run, step by step in turn, so that a busy machine slows both.

    python tools/benchmark.py tuning

tuning: a training step (forward, backward, clipping, AdamW) of ernie/tiny-random-ernie with the CPU settings of
        ernie35se.runtime and without them, each side in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ernie35se.runtime import OFF_SWITCH

WORKER = "--as-worker"


class Worker:
    """A process that does one training step each time it is asked, and says how long it took."""

    def __init__(self, environment: dict, batch: int, length: int):
        command = [sys.executable, __file__, WORKER, str(batch), str(length)]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def step(self) -> float:
        """Seconds of one step."""
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        for line in self.process.stdout:  # libraries print too
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise RuntimeError(f"a worker ended with status {self.process.wait()}; run: {' '.join(self.process.args)}")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def work(batch: int, length: int) -> None:
    """Do a training step for each line on stdin; print its seconds."""
    import time

    from ernie35se.runtime import tune_cpu

    tune_cpu("cpu")
    import paddle

    from ernie35se.configuration import Ernie35Config
    from ernie35se.modeling import Ernie35ForCausalLM

    paddle.set_device("cpu")
    config = Ernie35Config.from_pretrained("ernie/tiny-random-ernie")
    model = Ernie35ForCausalLM(config)
    model.train()
    clip = paddle.nn.ClipGradByGlobalNorm(1.0)
    optimizer = paddle.optimizer.AdamW(1e-4, parameters=model.parameters(), grad_clip=clip)
    ids = paddle.randint(3, config.vocab_size, [batch, length])
    for _ in sys.stdin:
        start = time.perf_counter()
        loss, _ = model(ids, labels=ids)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        loss.item()
        print(f"seconds {time.perf_counter() - start}", flush=True)


def tuning(rounds: int, batch: int, length: int) -> dict:
    """Medians of a step with and without the CPU settings, and their ratio."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_", "KMP_"))}
    workers = {"tuned": Worker({**plain, OFF_SWITCH: "0"}, batch, length), "plain": Worker({**plain, OFF_SWITCH: "1"}, batch, length)}
    times = {name: [] for name in workers}
    try:
        for turn in range(rounds + 1):
            for name, worker in workers.items():
                seconds = worker.step()
                if turn:  # the first step allocates
                    times[name].append(seconds)
    finally:
        for worker in workers.values():
            worker.close()
    medians = {name: statistics.median(values) for name, values in times.items()}
    spread = {name: [min(values), max(values)] for name, values in times.items()}
    ratios = [p / t for p, t in zip(times["plain"], times["tuned"])]
    return {"seconds": medians, "range": spread, "ratio": statistics.median(ratios), "rounds": rounds, "batch": batch, "length": length}


def main() -> int:
    if sys.argv[1:2] == [WORKER]:
        work(*map(int, sys.argv[2:4]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("what", choices=["tuning"], help="what is measured")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each side (default 5), after one that is not counted")
    parser.add_argument("--batch", type=int, default=2, help="samples a step (default 2)")
    parser.add_argument("--length", type=int, default=256, help="tokens a sample (default 256)")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there too")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.batch, arguments.length) < 1:
        parser.error("rounds, batch and length must be at least 1")
    result = tuning(arguments.rounds, arguments.batch, arguments.length)
    print(f"training step of ernie/tiny-random-ernie, {arguments.batch} x {arguments.length} tokens, median of {arguments.rounds}")
    for name, seconds in result["seconds"].items():
        low, high = result["range"][name]
        print(f"  {name:<8} {seconds:7.2f} s   ({low:.2f} to {high:.2f})")
    print(f"  ratio    {result['ratio']:7.2f}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
