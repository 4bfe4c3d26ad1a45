"""Measure speed and memory as ratios, both sides in one run and in turn, so that a busy machine slows both.

    python tools/benchmark.py all --json benchmarks.json --chart benchmarks.png
    python tools/benchmark.py train --profile
    python tools/benchmark.py all --resume --json benchmarks.json    only the groups that the file lacks
    python tools/benchmark.py page --json docs/benchmarks.json       renew docs/benchmarks.md, measuring nothing

Each group's rows are written to the JSON file as soon as it is done. docs/benchmarks.md says how to read them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from _common import write_json

from benchmarks import measure, preparation, report, training
from benchmarks.workers import Workers
from ernie35se.runtime import OFF_SWITCH


# Times that generate() is to be faster than PaddleNLP's, by batch and tokens of the prompt.
DECODE_TARGETS = {(1, 64): 1.4, (8, 64): 3.0, (1, 2048): 5.0}


def decode(options: measure.Options):
    """tools/benchmark_generation.py's figures as rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "decode.json"
        words = [sys.executable, ROOT / "tools" / "benchmark_generation.py", "--repeats", 1 if options.toy else options.rounds]
        measure.run_successfully([*words, "--output", path])
        found = json.loads(path.read_text(encoding="utf-8"))
    for case in found["cases"]:
        sides = {"PaddleNLP's loop": measure.spread(case["theirs"]), "ours": measure.spread(case["ours"])}
        target = DECODE_TARGETS.get((case["batch"], case["prompt"]))
        checks = [
            measure.Check("PaddleNLP's loop / ours", measure.ratios(case["theirs"], case["ours"]), least=target),
            measure.Check("the same, processor time", measure.ratios(case["theirs_cpu"], case["ours_cpu"])),
        ]
        yield measure.Row(f"generate, {case['batch']} x {case['prompt']}, {case['new']} new", "s", sides, checks)
    for row in found["steps"]:
        times = {int(context): [value] for context, value in row.items() if context.isdigit()}
        yield training.growth_row(f"decoding step against context, batch {row['batch']}, {row['how']}", "ms", times)
    yield measure.Row("reading a step's weights once", "ms", {"floor": measure.spread([found["floor_ms"]])})


GROUPS = {
    "train": training.train, "long": training.long, "memory": training.memory, "growth": training.growth, "decode": decode,
    "data": preparation.data, "index": preparation.index, "loader": preparation.loader, "startup": preparation.startup,
}  # fmt: skip


def tuning(rounds: int, batch: int, length: int) -> dict:
    """Medians of a step with and without the CPU settings, and their ratio."""
    with Workers() as workers:
        sides = {
            name: workers.start("ours", {OFF_SWITCH: off}, batch=batch, length=length)
            for name, off in (("tuned", "0"), ("plain", "1"))
        }
        found = measure.in_turn({name: lambda w=w: w.ask("step") for name, w in sides.items()}, rounds)
    times = {name: measure.spread(values["seconds"]) for name, values in found.items()}
    ratio = measure.ratios(found["plain"]["seconds"], found["tuned"]["seconds"]).median
    medians, ranges = {n: t.median for n, t in times.items()}, {n: [t.low, t.high] for n, t in times.items()}
    return {"seconds": medians, "range": ranges, "ratio": ratio, "rounds": rounds, "batch": batch, "length": length}


def print_tuning(arguments) -> int:
    result = tuning(arguments.rounds, arguments.batch, arguments.length)
    print(f"training step of ernie/tiny-random-ernie, {arguments.batch} x {arguments.length} tokens, median of {arguments.rounds}")
    for name, seconds in result["seconds"].items():
        low, high = result["range"][name]
        print(f"  {name:<8} {seconds:7.2f} s   ({low:.2f} to {high:.2f})")
    print(f"  ratio    {result['ratio']:7.2f}")
    if arguments.json:
        write_json(arguments.json, result)
    return 0


def run_groups(names: list[str], options: measure.Options, results: dict, json_file: Path | None) -> int:
    """Measure groups into `results`; one that fails is told and does not stop the others. Returns the exit status."""
    status = 0
    for name in names:
        print(f"measuring: {name}", file=sys.stderr, flush=True)
        rows = []
        try:
            rows = [row.as_json() for row in GROUPS[name](options)]
        except (RuntimeError, ValueError, OSError) as error:
            print(f"benchmark.py: {name}: {error}", file=sys.stderr)
            status = 1
            continue
        results["groups"][name] = {"machine": measure.machine(), "full": options.full, "rows": rows}
        print(report.table({"groups": {name: results["groups"][name]}}), flush=True)
        if json_file:
            write_json(json_file, results)
    return status


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("what", choices=[*GROUPS, "all", "tuning", "page"], help="what is measured")
    parser.add_argument("--rounds", type=int, default=5, help="times each side runs (default 5), after one that is not counted")
    parser.add_argument("--batch", type=int, default=2, help="samples a step (default 2)")
    parser.add_argument("--length", type=int, default=256, help="tokens a sample (default 256)")
    parser.add_argument("--profile", action="store_true", help="train: also print where the step's time goes")
    parser.add_argument("--full", action="store_true", help="add 1 GB of text, a 4 GB token file and length 8192")
    parser.add_argument("--resume", action="store_true", help="keep the groups that the --json file holds, measure the others")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the numbers there; groups in it that are not measured stay")
    parser.add_argument("--chart", metavar="FILE", type=Path, help="draw the figures that have targets (PNG)")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to see that it runs; the figures mean nothing")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if min(arguments.rounds, arguments.batch, arguments.length) < 1:
        parser.error("rounds, batch and length must be at least 1")
    if arguments.profile and arguments.what != "train":
        parser.error(f"--profile goes with train, not with {arguments.what}")
    if (arguments.resume or arguments.what == "page") and arguments.json is None:
        parser.error("--resume and page read the file that --json names; give one")
    if arguments.what == "tuning":
        return print_tuning(arguments)
    results = {"groups": {}}
    if arguments.json and arguments.json.exists():
        results = json.loads(arguments.json.read_text(encoding="utf-8"))
    if arguments.what == "page":
        report.renew(ROOT / "docs" / "benchmarks.md", results)
        return 0
    options = measure.Options(arguments.rounds, arguments.batch, arguments.length, arguments.full, arguments.toy)
    names = list(GROUPS) if arguments.what == "all" else [arguments.what]
    names = [name for name in names if not (arguments.resume and name in results["groups"])]
    status = run_groups(names, options, results, arguments.json)
    if arguments.profile:
        print(training.profile(options))
    if arguments.chart:
        report.chart(results, arguments.chart)
    return status


if __name__ == "__main__":
    sys.exit(main())
