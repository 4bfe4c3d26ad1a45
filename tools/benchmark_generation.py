#!/usr/bin/env python3
"""Time generate() beside PaddleNLP's own loop, both on this model with random weights, in one process.

Each case runs one and then the other, several times; the table shows the medians, the lowest and the highest, and the
median of the rounds' ratios: of the time that passed and of the processor time that all threads used, which a busy machine
disturbs less. Both answer greedily, never end early, and must give the same tokens. PaddleNLP's loop joins a
growing cache at every step and scores the vocabulary at every position of the prompt, as its models do, and computes with
Paddle's operators alone, as the public implementation does; ours with the CPU ops where they are built. The second table is
the time of a step by context length, greedy and, in rows of their own, with sampling (top_k 3, top_p 0.8); beneath it
stands the time in which this machine reads every weight of a step once: what a step is bound by as long as the weights
come from memory. """

from __future__ import annotations

import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Sequence

from _common import make_parser, positive, run_tool, write_json

EXAMPLE = "  python tools/benchmark_generation.py --repeats 5"
CASES = ((1, 64, 64), (8, 64, 64), (1, 2048, 64))  # batch, tokens of the prompt, new tokens
CONTEXTS = (64, 256, 1024)
DECODING = {
    "greedy": {"decode_strategy": "greedy_search"},
    "sampling": {"decode_strategy": "sampling", "top_k": 3, "top_p": 0.8},
}


def main(argv: Sequence[str] | None) -> int:
    parser = make_parser(__doc__, EXAMPLE)
    parser.add_argument(
        "--model", default="ernie/tiny-random-ernie", help="a configuration (default %(default)s)"
    )
    parser.add_argument("--repeats", type=positive, default=5, help="runs of each case (default %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file to write all times to")
    arguments = parser.parse_args(argv)

    from ernie35se import cpu_ops
    from ernie35se.runtime import tune_cpu

    print(tune_cpu())
    print("CPU ops:", "none" if cpu_ops.usable() is None else "in use")
    ours, theirs = build_models(arguments.model)
    rows = [compare(ours, theirs, *case, arguments.repeats) for case in CASES]
    print(
        "\n| batch | prompt | new | PaddleNLP's generate(), s | ours, s | times faster | processor time, s | ratio |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for row in rows:
        print(
            f"| {row['batch']} | {row['prompt']} | {row['new']} | {spread(row['theirs'])} | {spread(row['ours'])} | "
            f"{median_ratio(row):.1f} | {median(row['theirs_cpu'])} / {median(row['ours_cpu'])} | "
            f"{median_ratio(row, '_cpu'):.1f} |"
        )
    steps = [step_times(ours, batch, arguments.repeats, how) for how in DECODING for batch in (1, 8)]
    floor = floor_time(ours, arguments.repeats)
    print(f"\n| ms a step at context | {' | '.join(map(str, CONTEXTS))} |\n|---|{'---|' * len(CONTEXTS)}")
    for row in steps:
        print(f"| batch {row['batch']}, {row['how']} | {' | '.join(f'{row[str(c)]:.1f}' for c in CONTEXTS)} |")
    print(f"| floor: reading the weights | {' | '.join([f'{floor:.1f}'] * len(CONTEXTS))} |")
    if arguments.output:
        write_json(arguments.output, {"cases": rows, "steps": steps, "floor_ms": floor})
    return 0


def build_models(name: str):
    """(our model, the same weights with PaddleNLP's loop)."""
    import paddle
    from paddlenlp.generation import GenerationMixin

    from ernie35se.configuration import Ernie35Config
    from ernie35se.modeling import Ernie35ForCausalLM

    class PaddleNLPLoop(Ernie35ForCausalLM):
        """What PaddleNLP's loop needs of a model."""

        generate = paddle.no_grad()(GenerationMixin.generate)

        def prepare_inputs_for_generation(self, input_ids, use_cache=True, past_key_values=None, **kwargs):
            new = slice(-1, None) if past_key_values else slice(None)
            return {
                "input_ids": input_ids[:, new],
                "position_ids": kwargs["position_ids"][:, new],
                "attention_mask": kwargs["attention_mask"],
                "past_key_values": past_key_values,
                "use_cache": True,
                "return_dict": True,
            }

    config = Ernie35Config.from_pretrained(name)
    paddle.seed(0)
    ours = Ernie35ForCausalLM(config)
    theirs = PaddleNLPLoop(config)
    theirs.ernie, theirs.lm_head = ours.ernie, ours.lm_head  # one set of weights
    ours.eval()
    theirs.eval()
    return ours, theirs


def compare(ours, theirs, batch: int, prompt: int, new: int, repeats: int) -> dict:
    """Seconds of each run of a case. Raises RuntimeError where the two give different tokens."""
    import paddle

    paddle.seed(1)
    ids = paddle.randint(3, ours.config.vocab_size, [batch, prompt])
    positions = paddle.arange(prompt).unsqueeze(0).expand([batch, prompt])
    shared = dict(
        decode_strategy="greedy_search", max_new_tokens=new, eos_token_id=None, position_ids=positions
    )
    ours.config.eos_token_id = theirs.config.eos_token_id = -1
    runs = {
        "theirs": lambda: plainly(
            theirs.generate, ids, attention_mask=paddle.ones_like(ids), use_cache=True, **{**shared, "eos_token_id": -1}
        ),
        "ours": lambda: ours.generate(ids, **shared),
    }
    answers = {name: run()[0] for name, run in runs.items()}  # warms up, too
    if answers["ours"].tolist() != answers["theirs"].tolist():
        raise RuntimeError(f"batch {batch}, prompt {prompt}: the two loops give different tokens")
    times: dict = {name + clock: [] for name in runs for clock in ("", "_cpu")}
    for _ in range(repeats):
        for name, run in runs.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            run()
            times[name].append(time.perf_counter() - start)
            times[f"{name}_cpu"].append(time.process_time() - start_cpu)
    return {"batch": batch, "prompt": prompt, "new": new, **times}


def plainly(function, *args, **kwargs):
    """The function's result, computed without the CPU ops."""
    from ernie35se.runtime import CPU_OPS_SWITCH

    before = os.environ.get(CPU_OPS_SWITCH)
    os.environ[CPU_OPS_SWITCH] = "0"
    try:
        return function(*args, **kwargs)
    finally:
        if before is None:
            del os.environ[CPU_OPS_SWITCH]
        else:
            os.environ[CPU_OPS_SWITCH] = before


def step_times(model, batch: int, repeats: int, how: str) -> dict:
    """Median milliseconds of a step just behind a context of each length, prefill not counted."""
    import paddle

    row = {"batch": batch, "how": how}
    for context in CONTEXTS:
        ids, times = paddle.randint(3, model.config.vocab_size, [batch, context]), []
        steps = model.generate_steps(
            ids, max_new_tokens=1 + 4 * repeats, eos_token_id=-1, **DECODING[how]
        )
        next(steps)
        for _ in range(4 * repeats):
            start = time.perf_counter()
            next(steps)
            times.append(time.perf_counter() - start)
        row[str(context)] = statistics.median(times) * 1000
    return row


def floor_time(model, repeats: int) -> float:
    """Median milliseconds of reading each weight that a step multiplies by once, on all threads. Of the embedding
    a step reads a row, unless it is tied to the LM head."""
    import numpy as np

    from ernie35se.runtime import cpu_cores

    embedding = "ernie.embed_tokens.weight"
    skipped = () if model.config.tie_word_embeddings else (embedding,)
    weights = [p for name, p in model.named_parameters() if p.ndim == 2 and name not in skipped]
    whole = np.concatenate([p.numpy().ravel() for p in weights])
    cores = cpu_cores()
    parts, times = np.array_split(whole, cores), []
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(4 * repeats):
            start = time.perf_counter()
            list(pool.map(lambda part: np.dot(part, part), parts))  # numpy lets other threads run meanwhile
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1000


def spread(times: list) -> str:
    return f"{median(times)} ({min(times):.2f}-{max(times):.2f})"


def median(times: list) -> str:
    return f"{statistics.median(times):.2f}"


def median_ratio(row: dict, clock: str = "") -> float:
    """How many times longer PaddleNLP's took, by the clock: "" or "_cpu"."""
    return statistics.median(theirs / ours for theirs, ours in zip(row["theirs" + clock], row["ours" + clock]))


if __name__ == "__main__":
    run_tool(main)
