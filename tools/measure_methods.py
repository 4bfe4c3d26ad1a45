"""What each fine-tuning method costs: parameters, CPU time and memory, and the same counted for a large model.

Each settings file of a folder is run for a few steps on random tokens, in a process of its own, on a model with
random weights. The memory is the process's peak beyond what it held before the model was built. For the large
model only shapes are made; its memory is that of weights, gradients and optimizer under bf16 with O2.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Sequence

from _common import make_parser, positive, run_tool

EXAMPLE = "  python tools/measure_methods.py --config_dir configs/finetune --batch 2 --length 128"
SKIPPED = ("demo_cpu", "neftune", "sft_packed")  # not a method of its own
BYTES_TRAINED = 16  # bf16 weight and gradient, float32 master weight and two moments
BYTES_FROZEN = 2


def settings_of(file: Path):
    import dataclasses

    from ernie35se.training.finetune_arguments import FinetuneModelArguments

    values = json.loads(file.read_text(encoding="utf-8"))
    known = {item.name for item in dataclasses.fields(FinetuneModelArguments)}
    return FinetuneModelArguments(**{key: value for key, value in values.items() if key in known})


def measure(file: Path, model_name: str, batch: int, length: int, steps: int) -> dict:
    """Run in a process of its own: parameters that train, CPU seconds a step, MiB."""
    import paddle

    from ernie35se import peft
    from ernie35se.configuration import Ernie35Config
    from ernie35se.modeling import Ernie35ForCausalLM
    from ernie35se.runtime import tune_cpu

    paddle.set_device("cpu")
    tune_cpu("cpu")
    arguments = settings_of(file)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = Ernie35ForCausalLM(Ernie35Config.from_pretrained(model_name, use_flash_attention=False))
    config = arguments.adapter_config()
    if config is not None:
        peft.wrap(model, config)
    trained = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
    optimizer = paddle.optimizer.AdamW(1e-4, parameters=trained)
    ids = paddle.randint(3, model.config.vocab_size, [batch, length])
    labels = ids.clone()
    labels[:, : length // 2] = -100
    model.train()
    times = []
    for step in range(steps):
        start = time.process_time()
        loss = model(input_ids=ids, labels=labels)[0]
        extra = peft.extra_loss(model)
        (loss if extra is None else loss + extra).backward()
        optimizer.step()
        optimizer.clear_grad()
        times.append(time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"trained": sum(p.size for p in trained), "seconds": min(times), "mib": peak / 1024}


def count_large(file: Path, model_name: str) -> dict:
    """Parameters of the large model that train, and GB of weights, gradients and optimizer."""
    from ernie35se.configuration import Ernie35Config
    from ernie35se.training.finetune_estimate import count

    config = Ernie35Config.from_pretrained(model_name, use_flash_attention=False)
    counts = count(config, settings_of(file).adapter_config())
    size = counts.frozen * BYTES_FROZEN + counts.quantised_bytes + counts.trained * BYTES_TRAINED
    return {"trained": counts.trained, "gb": size / 1e9}


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLE)
    parser.add_argument("--config_dir", default="configs/finetune", help="folder of settings files")
    parser.add_argument(
        "--model", default="ernie/tiny-random-ernie", help="built-in model to run (default: %(default)s)"
    )
    parser.add_argument(
        "--large_model", default="baidu/ernie-3.5-se-3b", help="to count for (default: %(default)s)"
    )
    parser.add_argument("--batch", type=positive, default=2, help="rows a step (default: %(default)s)")
    parser.add_argument("--length", type=positive, default=128, help="tokens a row (default: %(default)s)")
    parser.add_argument(
        "--steps", type=positive, default=4, help="steps; the fastest counts (default: %(default)s)"
    )
    parser.add_argument("--one", help="measure this file alone and print JSON; how the tool calls itself")
    args = parser.parse_args(argv)
    if args.one:
        file = Path(args.one)
        made = measure(file, args.model, args.batch, args.length, args.steps)
        print(json.dumps({**made, "large": count_large(file, args.large_model)}))
        return 0
    files = [file for file in sorted(Path(args.config_dir).glob("*.json")) if file.stem not in SKIPPED]
    if not files:
        raise ValueError(f"{args.config_dir}: holds no settings files (.json)")
    print(f"| settings file | trains | CPU s/step | peak MiB | trains, {args.large_model} | GB there |")
    print("|---|---|---|---|---|---|")
    for file in files:
        words = ["--one", file, "--model", args.model, "--large_model", args.large_model]
        words += ["--batch", args.batch, "--length", args.length, "--steps", args.steps]
        done = subprocess.run([sys.executable, __file__, *map(str, words)], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{file}: ended with status {done.returncode}:\n{done.stderr[-1500:]}")
        made = json.loads(done.stdout.splitlines()[-1])
        large = made["large"]
        print(
            f"| `{file.stem}` | {made['trained']:,} | {made['seconds']:.2f} | {made['mib']:,.0f} "
            f"| {large['trained']:,} | {large['gb']:.1f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    run_tool(main)
