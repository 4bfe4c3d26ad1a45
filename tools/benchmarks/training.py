"""Rows about training: the step, long sequences, memory, recomputation, parallel blocks, growth."""

from __future__ import annotations

import importlib.util
import tempfile
from typing import Iterator

from benchmarks.measure import Check, Options, Row, Spread, fit_power_law, in_turn, ratios, spread
from benchmarks.sides import TOY, model_fields
from benchmarks.workers import Worker, Workers

OPS_OFF = {"ERNIE35SE_CPU_OPS": "0"}
EQUIVALENT = 1e-3  # of a gradient's largest element: float32 sums in another order stay far below
MB = 1e6


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


NO_TORCH = "PyTorch is not installed (pip install '.[bench]'): its sides are left out"


def config_of(options: Options, **changes) -> dict:
    return {**(TOY if options.toy else {}), **changes}


def start_networks(workers: Workers, config: dict, batch: int, length: int) -> dict[str, Worker]:
    """ours, plain and, where it is installed, PyTorch."""
    sizes = {"batch": batch, "length": length, "config": config}
    sides = {"ours": workers.start("ours", **sizes), "plain": workers.start("ours", OPS_OFF, plain=True, **sizes)}
    if has_torch():
        sides["PyTorch"] = workers.start("pytorch", **sizes)
    return sides


def told_ops(worker: Worker) -> str:
    ops = worker.ask("describe")["ops"]
    return "; ".join(f"{name} {'in use' if there else 'not installed'}" for name, there in ops.items())


def medians_of(found: dict, quantity: str, scale: float = 1.0) -> dict[str, Spread]:
    return {side: spread([value / scale for value in values[quantity]]) for side, values in found.items()}


# ---------------------------------------------------------------------------------------------------- the step


def train(options: Options) -> Iterator[Row]:
    """The training step against the plain form, PyTorch and the floor; then the parallel blocks."""
    config = config_of(options)
    with Workers() as workers:
        sides = start_networks(workers, config, options.batch, options.length)
        if has_torch():
            yield equivalence(sides["ours"], sides["PyTorch"])
            sides["PyTorch, fused AdamW"] = workers.start(
                "pytorch", batch=options.batch, length=options.length, config=config, fused=True
            )
        floors = Floors(workers, options)
        asked = {name: lambda worker=worker: worker.ask("step") for name, worker in sides.items()}
        found = in_turn({**asked, "floor": floors.measure}, options.rounds)
        note = told_ops(sides["ours"]) + ("" if has_torch() else f". {NO_TORCH}")
        parameters = sides["ours"].ask("describe")["parameters"]
    floor = found.pop("floor")
    yield step_row(options, found, note)
    yield floor_row(options, found["ours"], floor, parameters)
    yield from blocks(options)


def equivalence(ours: Worker, theirs: Worker) -> Row:
    """Loss and gradients of both networks from the same weights. Raises RuntimeError where they are not the same."""
    with tempfile.TemporaryDirectory() as folder:
        loss = ours.ask("export", path=folder)["loss"]
        apart = theirs.ask("compare", path=folder, loss=loss)
    if max(apart["loss"], apart["gradient"]) > EQUIVALENT:
        raise RuntimeError(f"the PyTorch network is not ours: {apart}; expected differences below {EQUIVALENT}")
    checks = [
        Check(name, spread([apart[key]]), most=EQUIVALENT)
        for name, key in (("relative difference of the loss", "loss"), ("largest relative difference of a gradient", "gradient"))
    ]
    return Row("PyTorch's network and ours, same weights", "", {}, checks, f"furthest apart: {apart['weight']}")


def step_row(options: Options, found: dict, note: str) -> Row:
    checks = [Check("plain / ours", ratios(found["plain"]["seconds"], found["ours"]["seconds"]))]
    for side in found:
        if side.startswith("PyTorch"):
            checks.append(Check(f"{side} / ours", ratios(found[side]["seconds"], found["ours"]["seconds"]), least=1.25))
    parts = {
        f"{side}: {part}": value
        for part in ("forward and backward", "optimizer")
        for side, value in medians_of(found, part).items()
    }
    name = f"training step, {options.batch} x {options.length} tokens"
    return Row(name, "s", {**medians_of(found, "seconds"), **parts}, checks, note)


class Floors:
    """Matmul peak (2048^3 and the step's own shapes) and copy bandwidth, by Paddle and by PyTorch."""

    def __init__(self, workers: Workers, options: Options):
        self.options, self.size = options, 64 if options.toy else 2048
        self.workers = {"Paddle": workers.start("paddle floor")}
        if has_torch():
            self.workers["PyTorch"] = workers.start("pytorch floor")

    def measure(self) -> dict[str, float]:
        fields = model_fields(config_of(self.options))
        tokens, width, vocab = self.options.batch * self.options.length, fields["hidden_size"], fields["vocab_size"]
        fused = 3 * width + 2 * fields["intermediate_size"]
        shapes = {"2048^3": [self.size] * 3, "LM head": [tokens, width, vocab], "fused block": [tokens, width, fused]}
        found = {}
        for framework, worker in self.workers.items():
            for name, shape in shapes.items():
                flops = worker.ask("matmul", shape=shape, repeats=3)["flops"]
                found[f"{framework}, matmul {name}"] = flops / 1e9
        found["copy"] = self.workers["Paddle"].ask("bandwidth", megabytes=1 if self.options.toy else 200, repeats=3)["bytes"] / 1e9
        return found


def step_flops(options: Options) -> int:
    """Matrix FLOPs of a step. Attention's masked half is not counted: T / 2 keys a token on average."""
    from types import SimpleNamespace

    from ernie35se.training.estimate import Plan, flops_per_step

    half = Plan(seq_length=options.length // 2, micro_batch=2 * options.batch)
    return flops_per_step(SimpleNamespace(**model_fields(config_of(options))), half)


def floor_row(options: Options, ours: dict, floor: dict, parameters: int) -> Row:
    """How much of the machine the step uses. The peak of a round is the better of the frameworks' at 2048^3."""
    flops = step_flops(options)
    peaks = [max(values) for values in zip(*(values for name, values in floor.items() if name.endswith("2048^3")))]
    share = [100 * flops / (seconds * peak * 1e9) for seconds, peak in zip(ours["seconds"], peaks)]
    own = [100 * flops / (s * p * 1e9) for s, p in zip(ours["seconds"], floor["Paddle, matmul 2048^3"])]
    # AdamW reads weight, gradient and two moments, and writes weight and moments: seven floats a parameter.
    traffic = [7 * 4 * parameters / (gigabytes * 1e9) for gigabytes in floor["copy"]]
    checks = [
        Check("share of the matmul peak, whole step", spread(share), least=75, unit="%"),
        Check("share of Paddle's own matmul peak", spread(own), unit="%"),
        Check("matmul floor of the step", spread([flops / (peak * 1e9) for peak in peaks]), unit="s"),
        Check("optimizer's time / its memory traffic at copy speed", ratios(ours["optimizer"], traffic)),
    ]
    sides = {name: spread(values) for name, values in floor.items()}
    return Row("floor: matmul (GFLOP/s) and copy (GB/s) in the same run", "G/s", sides, checks, f"{flops / 1e9:,.0f} GFLOP a step")


def blocks(options: Options) -> Iterator[Row]:
    """Parallel blocks against serial ones, and head and tail trimmed or not; a small vocabulary lets the blocks show."""
    config = config_of(options, vocab_size=96 if options.toy else 4096, parallel_attn_hatf=False, num_hidden_layers=4)
    trimmed = {**config, "parallel_attn_hatf": True}
    sizes = {"batch": options.batch, "length": options.length}
    with Workers() as workers:
        stacks = {
            kind: workers.start("ours", config=config, blocks=kind, **sizes) for kind in ("parallel", "serial")
        }
        trims = {
            "trimmed": workers.start("ours", config=trimmed, **sizes),
            "not trimmed": stacks["parallel"],
        }
        parameters = {name: worker.ask("describe")["parameters"] for name, worker in {**stacks, **trims}.items()}
        everything = {**stacks, "trimmed": trims["trimmed"]}
        found = in_turn({name: lambda worker=worker: worker.ask("step") for name, worker in everything.items()}, options.rounds)
    seconds = medians_of(found, "seconds")
    fused, serial, cut = (found[name]["seconds"] for name in ("parallel", "serial", "trimmed"))
    shape = f"4 layers, {options.batch} x {options.length} tokens, a step"
    yield Row(
        f"fused parallel blocks and serial ones of the same weights: {shape}",
        "s",
        {name: seconds[name] for name in stacks},
        [Check("serial / parallel", ratios(serial, fused), least=1.0)],
        f"parameters: {parameters['parallel']:,} and {parameters['serial']:,}",
    )
    yield Row(
        f"head and tail trimmed or not: {shape}",
        "s",
        {"trimmed": seconds["trimmed"], "not trimmed": seconds["parallel"]},
        [Check("not trimmed / trimmed", ratios(fused, cut))],
        f"parameters: {parameters['trimmed']:,} and {parameters['not trimmed']:,}",
    )


def profile(options: Options, shown: int = 25) -> str:
    """Where our step's time goes, as Paddle's profiler sees it: a table."""
    with Workers() as workers:
        worker = workers.start("ours", batch=options.batch, length=options.length, config=config_of(options))
        rows = worker.ask("profile", steps=options.rounds, shown=shown)["operators"]
    lines = ["| operator | calls a step | ms a step |", "|---|---|---|"]
    return "\n".join(lines + [f"| {name} | {calls:.0f} | {milliseconds:.1f} |" for name, calls, milliseconds in rows])


# ------------------------------------------------------------------------------------------- length and memory


def long(options: Options) -> Iterator[Row]:
    """One long sequence, forward and backward: time, and the peak of memory above the weights."""
    length = 64 if options.toy else 4096
    rounds = min(options.rounds, 3)
    with Workers() as workers:
        sides = start_networks(workers, config_of(options), 1, length)
        sides["ours without ops"] = workers.start("ours", OPS_OFF, batch=1, length=length, config=config_of(options))
        note = told_ops(sides["ours"])
        found = in_turn({name: lambda w=w: w.ask("gradient_step") for name, w in sides.items()}, rounds)
    ours, plain, without = (found[name] for name in ("ours", "plain", "ours without ops"))
    times = [Check("ours without ops / plain", ratios(without["seconds"], plain["seconds"]), most=0.5)]
    if "PyTorch" in found:
        times.insert(0, Check("ours / PyTorch", ratios(ours["seconds"], found["PyTorch"]["seconds"]), most=0.8))
    yield Row(f"1 x {length} tokens, forward and backward", "s", medians_of(found, "seconds"), times, note)
    peaks = medians_of(found, "bytes", MB)
    checks = [
        Check("ours", peaks["ours"], most=850, unit="MB"),
        Check("ours without ops", peaks["ours without ops"], most=1100, unit="MB"),
    ]
    yield Row(f"1 x {length} tokens, peak memory above the weights", "MB", peaks, checks, "gradients included")


def memory(options: Options) -> Iterator[Row]:
    """LM head and cross entropy in chunks against whole; recomputation."""
    length = 64 if options.toy else 4096
    with Workers() as workers:
        sides = {
            "in chunks": workers.start("head", length=length, config=config_of(options)),
            "logits kept": workers.start("head", OPS_OFF, length=length, config=config_of(options), plain=True),
        }
        found = in_turn({name: lambda w=w: w.ask("gradient_step") for name, w in sides.items()}, options.rounds)
    chunked, kept = found["in chunks"], found["logits kept"]
    name = f"LM head and cross entropy, {length} x {model_fields(config_of(options))['vocab_size']}"
    yield Row(
        f"{name}: time", "s", medians_of(found, "seconds"),
        [Check("in chunks / logits kept", ratios(chunked["seconds"], kept["seconds"]), most=1.0)],
    )  # fmt: skip
    yield Row(
        f"{name}: peak memory", "MB", medians_of(found, "bytes", MB),
        [Check("in chunks / logits kept", ratios(chunked["bytes"], kept["bytes"]), most=0.4)], "gradients included",
    )  # fmt: skip
    yield from recompute(options)


def recompute(options: Options) -> Iterator[Row]:
    """Time and memory of a gradient step by what the backward pass computes again."""
    length = 32 if options.toy else 1024
    choices = {
        "nothing": {},
        "core_attn": {"use_recompute": True, "recompute_granularity": "core_attn"},
        "full": {"use_recompute": True, "recompute_granularity": "full"},
    }
    config = config_of(options, num_hidden_layers=8, vocab_size=96 if options.toy else 4096)
    with Workers() as workers:
        sides = {
            name: workers.start("ours", batch=2, length=length, config={**config, **choice})
            for name, choice in choices.items()
        }
        found = in_turn({name: lambda w=w: w.ask("gradient_step") for name, w in sides.items()}, min(options.rounds, 3))
    for title, quantity, unit, scale in (("time", "seconds", "s", 1), ("peak memory", "bytes", "MB", MB)):
        none = found["nothing"][quantity]
        checks = [Check(f"{name} / nothing", ratios(found[name][quantity], none)) for name in ("core_attn", "full")]
        yield Row(f"recompute, 8 layers, 2 x {length} tokens: {title}", unit, medians_of(found, quantity, scale), checks)


# ------------------------------------------------------------------------------------------------------ growth


def growth(options: Options) -> Iterator[Row]:
    """How forward and backward grow with length, batch and width: a power law fitted to each."""
    rounds = min(options.rounds, 3)
    lengths = [16, 32, 64] if options.toy else [256, 512, 1024, 2048, 4096] + [8192] * options.full
    batches = [1, 2, 4] if options.toy else [1, 2, 4, 8]
    table = {"max_position_embeddings": 8192} if options.full else {}
    with Workers() as workers:
        worker = workers.start("ours", config=config_of(options, **table))
        yield grown("sequence length, 1 sample", lengths, rounds, lambda n: measured(worker, 1, n))
        length = 16 if options.toy else 256
        yield grown(f"batch, {length} tokens a sample", batches, rounds, lambda n: measured(worker, n, length))
    widths = [32, 64] if options.toy else [256, 512, 768, 1024, 1536]
    with Workers() as workers:
        models = {
            n: workers.start(
                "ours", batch=1, length=length,
                config=config_of(options, hidden_size=n, intermediate_size=8 * n // 3, num_attention_heads=n // 16),
            )
            for n in widths
        }  # fmt: skip
        yield grown(f"width, 1 x {length} tokens", widths, rounds, lambda n: models[n].ask("gradient_step")["seconds"])


def measured(worker: Worker, batch: int, length: int) -> float:
    worker.ask("resize", batch=batch, length=length)
    return worker.ask("gradient_step")["seconds"]


def grown(what: str, sizes: list[int], rounds: int, measure) -> Row:
    found = in_turn({str(n): lambda n=n: {"seconds": measure(n)} for n in sizes}, rounds)
    return growth_row(f"forward and backward against {what}", "s", {int(n): v["seconds"] for n, v in found.items()})


def growth_row(name: str, unit: str, times: dict[int, list[float]]) -> Row:
    """A row of times by size with the exponent of the power law through the medians, and through its last two."""
    medians = {size: spread(values) for size, values in times.items()}
    sizes = list(medians)
    fit = fit_power_law(sizes, [medians[n].median for n in sizes])
    last = fit_power_law(sizes[-2:], [medians[n].median for n in sizes[-2:]])
    checks = [
        Check("exponent of the fit", spread([fit.exponent])),
        Check(f"exponent from {sizes[-2]} to {sizes[-1]}", spread([last.exponent])),
    ]
    note = f"time = {fit.factor:.3g} x size ^ {fit.exponent:.2f}, at most {100 * fit.worst:.0f} % off"
    return Row(name, unit, {str(size): value for size, value in medians.items()}, checks, note)
