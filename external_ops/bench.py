"""Times the op against Paddle's LayerNorm and against copying the same bytes, and prints a table.

    python external_ops/bench.py                               one thread, [4096, 768] and [4096, 3072]
    python external_ops/bench.py --shape 512 768 --threads 2
    python external_ops/bench.py --dtype bfloat16              Paddle has no such LayerNorm on CPU

Each number is a median over rounds; a round runs every variant once, so that whatever else the machine does meets all of
them. "copy floor" is the time of a copy that moves as many bytes as the best possible kernel: forward reads x and writes
y; backward reads x and dy and writes dx; with the add, forward reads one more tensor and writes one more (the sum), and
backward does the same (the sum's gradient, and the residual's own copy of dx).
"""

import argparse
import os
import platform
import re
import statistics
import sys
import time
from pathlib import Path

TENSORS_MOVED = {"LayerNorm": {"forward": 2, "backward": 3}, "add + LayerNorm": {"forward": 4, "backward": 5}}


def processor() -> str:
    """The processor's name, and how many of its cores this machine has."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"^model name\s*: (.*)$", info, re.MULTILINE)
    return f"{name.group(1) if name else platform.processor()}, {os.cpu_count()} cores"


def variants(shape, dtype):
    """{op: {"fused" or "Paddle": (leaves, function)}}: function() gives the outputs, leaves get gradients."""
    import fused_ln
    import paddle
    import paddle.nn.functional as F

    width = shape[-1]
    x, residual = (paddle.randn(shape).astype(dtype) for _ in range(2))
    scale, bias = paddle.randn([width]), paddle.randn([width])
    leaves = [x, residual, scale, bias]
    for leaf in leaves:
        leaf.stop_gradient = False

    def paddle_add():
        total = x + residual
        return F.layer_norm(total, width, scale, bias, 1e-5), total

    single, added = [x, scale, bias], leaves
    made = {
        "LayerNorm": {
            "Paddle": (single, lambda: (F.layer_norm(x, width, scale, bias, 1e-5),)),
            "fused": (single, lambda: fused_ln.fused_ln(*single, 1e-5)[:1]),
        },
        "add + LayerNorm": {
            "Paddle": (added, paddle_add),
            "fused": (added, lambda: fused_ln.fused_add_ln(*added, 1e-5)[:2]),
        },
    }
    if dtype != "float32" and not paddle.is_compiled_with_cuda():
        for pair in made.values():
            del pair["Paddle"]
    return made


def measure(shape, dtype, rounds):
    """{(op, variant, "forward" or "backward"): median seconds}, and under ("copy", op, pass) the floor."""
    import paddle

    ops = variants(shape, dtype)
    gradients = [paddle.randn(shape).astype(dtype) for _ in range(2)]

    class Consumer(paddle.autograd.PyLayer):
        """Stands for what follows in a model: hands back gradients that are there already. (`paddle.grad` itself first
        copies those that it is given.)"""

        @staticmethod
        def forward(ctx, *outputs):
            ctx.count = len(outputs)
            return paddle.zeros([1])

        @staticmethod
        def backward(ctx, _):
            return tuple(gradients[: ctx.count]) if ctx.count > 1 else gradients[0]

    moved = {pair: count for op in TENSORS_MOVED for pair, count in ((((op, way), n)) for way, n in TENSORS_MOVED[op].items())}
    source = gradients[0].numpy()
    target = source.copy()
    times = {}

    def record(key, start):
        times.setdefault(key, []).append(time.perf_counter() - start)

    for round_ in range(rounds + 3):
        if round_ == 3:  # the first rounds fill caches and the allocator
            times.clear()
        start = time.perf_counter()
        target[...] = source
        record("copy", start)
        for op, pair in ops.items():
            for name, (leaves, function) in pair.items():
                start = time.perf_counter()
                outputs = function()
                record((op, name, "forward"), start)
                loss = Consumer.apply(*outputs)
                start = time.perf_counter()
                found = paddle.grad(loss, leaves)
                record((op, name, "backward"), start)
                del outputs, loss, found
    medians = {key: statistics.median(values) for key, values in times.items()}
    copy = medians.pop("copy")  # moves two tensors: reads one, writes one
    medians.update({("copy", *key): copy * count / 2 for key, count in moved.items()})
    return medians


def rows_of_table(shape, dtype, medians):
    for op in TENSORS_MOVED:
        for way in ("forward", "backward", "both"):
            ways = ("forward", "backward") if way == "both" else (way,)

            def total(*key):
                found = [medians.get((*key, way_) if key[0] == "copy" else (*key, way_)) for way_ in ways]
                return None if None in found else sum(found)

            fused, paddles, floor = total(op, "fused"), total(op, "Paddle"), total("copy", op)
            yield [
                f"[{', '.join(map(str, shape))}] {dtype}", op, way, f"{fused * 1e3:.2f}",
                "-" if paddles is None else f"{paddles * 1e3:.2f}",
                "-" if paddles is None else f"{paddles / fused:.1f}",
                f"{floor * 1e3:.2f}", f"{fused / floor:.2f}",
            ]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--shape", type=int, nargs="+", action="append", help="rows ... width; may be given several times")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=31)
    args = parser.parse_args()
    if args.threads < 1 or args.rounds < 1 or any(size < 1 for shape in args.shape or [] for size in shape):
        parser.error("--threads, --rounds and the sizes of --shape are at least 1")
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # before Paddle is imported
    try:
        import fused_ln
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: build the op first: {sys.executable} -m pip install ./external_ops --no-build-isolation")
    import paddle

    paddle.set_device("cpu")
    print(f"{processor()}; Paddle {paddle.__version__}, {args.threads} thread(s), median of {args.rounds}; {fused_ln.__file__}\n")
    print("| shape | op | pass | fused ms | Paddle ms | Paddle / fused | copy floor ms | fused / floor |")
    print("|---|---|---|---|---|---|---|---|")
    for shape in args.shape or [[4096, 768], [4096, 3072]]:
        for row in rows_of_table(shape, args.dtype, measure(shape, args.dtype, args.rounds)):
            print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
