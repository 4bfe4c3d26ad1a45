"""Rows about data and start-up: writing token files, index maps, drawing samples, --help, the first training step."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Iterator

from benchmarks.measure import ROOT, Check, Options, Row, in_turn, ratios, run_command, run_successfully, spread
from benchmarks.workers import Workers

LIGHT_TOOLS = ("inspect_data", "merge_data", "make_demo_corpus", "train_tokenizer", "create_pretraining_data")
OURS = "ernie35se.auto, ernie35se.training.build, ernie35se.training.trainer, ernie35se.predictor"


def tool(name: str, *words):
    return run_successfully([sys.executable, ROOT / "tools" / f"{name}.py", *words])


def make_tokenizer(folder: Path) -> tuple[Path, Path]:
    """(a corpus of docstrings, a tokenizer of it) in the folder."""
    corpus, tokenizer = folder / "corpus.jsonl", folder / "tokenizer"
    tool("make_demo_corpus", "--output_path", corpus)
    tool("train_tokenizer", "--input_path", corpus, "--output_dir", tokenizer, "--vocab_size", "4096")
    return corpus, tokenizer


def make_text(corpus: Path, target: Path, megabytes: float) -> Path:
    """JSONL of documents of 1 to 20 paragraphs drawn from a corpus, always the same ones."""
    documents = [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines()]
    paragraphs = [part for text in documents for part in text.split("\n\n") if part.strip()]
    rng, size = random.Random(0), 0
    with open(target, "w", encoding="utf-8") as stream:
        while size < megabytes * 1e6:
            size += stream.write(json.dumps({"text": "\n\n".join(rng.choices(paragraphs, k=rng.randint(1, 20)))}) + "\n")
    return target


def data(options: Options) -> Iterator[Row]:
    """Rate and memory of create_pretraining_data.py beside SentencePiece's own encode() and PaddleNLP's tokenizer."""
    megabytes = 1 if options.toy else 1000 if options.full else 100
    with tempfile.TemporaryDirectory() as name, Workers() as workers:
        folder = Path(name)
        corpus, tokenizer = make_tokenizer(folder)
        text = make_text(corpus, folder / "text.jsonl", megabytes)
        with open(text, encoding="utf-8") as stream:
            size = sum(len(json.loads(line)["text"].encode()) for line in stream)
        model = str(tokenizer / "sentencepiece.bpe.model")
        own = workers.start("sentencepiece", model=model, text=str(text), megabytes=min(megabytes, 20))
        theirs = workers.start("paddlenlp tokenizer", folder=str(tokenizer), text=str(text), megabytes=min(megabytes, 2))
        words = ["--input_path", text, "--tokenizer_name_or_path", tokenizer, "--output_prefix", folder / "out"]

        def prepare() -> dict:
            done = tool("create_pretraining_data", *words, "--workers", 2)
            return {"rate": size / done.seconds / 1e6, "peak": done.peak_bytes / 1e6}

        def encode() -> dict:
            return {kind: rate / 1e6 for kind, rate in own.ask("encode", threads=2).items()}

        sides = {"tool": prepare, "sentencepiece": encode, "paddlenlp": lambda: {"rate": theirs.ask("encode")["bytes a second"] / 1e6}}
        found = in_turn(sides, 1 if options.full else min(options.rounds, 3), warm_up=0)
    rate, kinds = found["tool"]["rate"], found["sentencepiece"]
    best = [max(pair) for pair in zip(*kinds.values())]
    yield Row(
        f"text to token file, {megabytes} MB, 2 workers, start-up included", "MB/s",
        {"create_pretraining_data.py": spread(rate), **{f"SentencePiece, 2 threads, {k}": spread(v) for k, v in kinds.items()},
         "PaddleNLP tokenize + convert, 1 process": spread(found["paddlenlp"]["rate"])},
        [Check("ours / SentencePiece's faster form", ratios(rate, best), least=0.85)],
    )  # fmt: skip
    peak = spread(found["tool"]["peak"])
    yield Row(f"text to token file, {megabytes} MB: memory", "MB", {"peak": peak}, [Check("peak", peak, most=300, unit="MB")])


def index(options: Options) -> Iterator[Row]:
    """Index maps of 10^9 and 10^10 tokens, and a mixture of 10^8 samples."""
    small, mixed = (10**5, 10**4) if options.toy else (10**9, 10**8)
    with Workers() as workers:
        worker = workers.start("index")
        sides = {str(n): lambda n=n: {"s": worker.ask("build", tokens=n, length=4096)["seconds"]} for n in (small, 10 * small)}
        found = in_turn(sides, min(options.rounds, 3))
        mix = spread([worker.ask("mix", samples=mixed)["seconds"] for _ in range(min(options.rounds, 3))])
    one, ten = (found[str(n)]["s"] for n in (small, 10 * small))
    checks = [Check(f"{small:.0e} tokens", spread(one), most=0.1, unit="s"), Check("ten times the tokens / one", ratios(ten, one))]
    yield Row("index maps, documents of 1,000 tokens, length 4096", "s", {f"{small:.0e}": spread(one), f"{10 * small:.0e}": spread(ten)}, checks)
    yield Row(f"mixture of {mixed:.0e} samples from 3 corpora", "s", {"blend": mix}, [Check("blend", mix, most=10, unit="s")])


def loader(options: Options) -> Iterator[Row]:
    """Samples a second that shuffled loading gives, beside what a training step of the tiny model eats."""
    import numpy as np

    sys.path.insert(0, str(ROOT))
    from benchmarks.training import config_of
    from ernie35se.data.indexed import TokenFileWriter

    tokens = 10**5 if options.toy else 2 * 10**9 if options.full else 5 * 10**7  # two bytes each
    with tempfile.TemporaryDirectory() as name, Workers() as workers:
        prefix, rng = str(Path(name) / "corpus"), np.random.default_rng(0)
        with TokenFileWriter(prefix, 32000) as writer:
            for _ in range(tokens // 1000):
                writer.add_document(rng.integers(3, 32000, 1000, dtype=np.uint16))
        sizes = {"batch": options.batch, "length": options.length}
        draws = workers.start("loader", prefix=prefix, **sizes)
        trains = workers.start("ours", config=config_of(options), **sizes)
        sides = {
            "loader": lambda: draws.ask("draw", count=20 if options.toy else 500),
            "training": lambda: {"samples a second": options.batch / trains.ask("step")["seconds"]},
        }
        found = {side: values["samples a second"] for side, values in in_turn(sides, options.rounds).items()}
    yield Row(
        f"loader, shuffled, {2 * tokens / 1e9:g} GB, {options.batch} x {options.length}", "samples/s",
        {side: spread(values) for side, values in found.items()},
        [Check("loader / training", ratios(found["loader"], found["training"]), least=10)],
    )  # fmt: skip


def startup(options: Options) -> Iterator[Row]:
    """What our imports add, --help of the light tools, refusal of a wrong flag, the demo's first step."""
    rounds = min(options.rounds, 2 if options.toy else 5)
    python = [sys.executable, "-W", "ignore"]
    imports = {"paddlenlp": "import paddlenlp", "with ours": f"import paddlenlp, {OURS}"}
    sides = {name: lambda code=code: {"s": run_successfully([*python, "-c", code]).seconds} for name, code in imports.items()}
    found = {name: values["s"] for name, values in in_turn(sides, rounds).items()}
    added = spread([ours - base for ours, base in zip(found["with ours"], found["paddlenlp"])])
    yield Row("imports", "s", {k: spread(v) for k, v in found.items()}, [Check("our modules add", added, most=0.3, unit="s")])
    helps = in_turn({n: lambda n=n: {"s": tool(n, "--help").seconds} for n in LIGHT_TOOLS}, rounds)
    helps = {name: spread(values["s"]) for name, values in helps.items()}
    yield Row("--help", "s", helps, [Check(f"{name}.py", value, most=0.7, unit="s") for name, value in helps.items()])
    refused = {name: spread([refusal(python, name) for _ in range(rounds)]) for name in ("run_pretrain", "run_finetune", "predict")}
    yield Row("a wrong flag is refused after", "s", refused, [], "the imports are most of it")
    with tempfile.TemporaryDirectory() as name:
        first = first_step(Path(name), python)
    yield Row("demo configuration: launch to first step", "s", {"first step": first}, [Check("first step", first, most=15, unit="s")])


def refusal(python: list, script: str) -> float:
    """Seconds until a script refuses a flag that it does not have. Raises RuntimeError where it does not."""
    done = run_command([*python, ROOT / "scripts" / f"{script}.py", "--no_such_flag", "1"])
    if done.status != 2:
        raise RuntimeError(f"{script}.py --no_such_flag: status {done.status}, expected 2:\n{done.output[-1000:]}")
    return done.seconds


def first_step(folder: Path, python: list):
    """Seconds from launch to the log line of the first step."""
    corpus, tokenizer = make_tokenizer(folder)
    tool("create_pretraining_data", "--input_path", corpus, "--tokenizer_name_or_path", tokenizer, "--output_prefix", folder / "c")
    words = [*python, ROOT / "scripts" / "run_pretrain.py", ROOT / "configs" / "pretrain" / "demo_cpu.json"]
    words += ["--input_dir", folder / "c", "--tokenizer_name_or_path", tokenizer, "--output_dir", folder / "m", "--logging_steps", 1]
    start = time.perf_counter()
    process = subprocess.Popen([str(w) for w in words], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    seen = []
    try:
        for line in process.stdout:
            seen.append(line)
            if "loss:" in line and "global_step: 1," in line:
                return spread([time.perf_counter() - start])
    finally:
        process.kill()
        process.communicate()
    raise RuntimeError(f"no first step was logged:\n{''.join(seen[-20:])}")
