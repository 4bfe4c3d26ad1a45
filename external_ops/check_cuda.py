"""Runs the CUDA kernels on a GPU without Paddle, through ctypes, on arrays of PyTorch or CuPy.

    python external_ops/check_cuda.py                       builds the kernels with nvcc for this GPU, then both parts
    python external_ops/check_cuda.py --library ln_cuda.so  kernels built before: nvcc -shared -Xcompiler -fPIC ...
    python external_ops/check_cuda.py --arrays cupy --no-speed

1. Correctness: every pair of dtypes, widths in and out of registers, with and without the add, against float64.
2. Speed at [8192, 3072] bfloat16: time, bandwidth, its share of what a device-to-device copy reaches, and the time of
   torch.nn.functional.layer_norm where PyTorch is there. Medians of interleaved rounds, caches emptied before each call.

Ends with exit status 1 where a result is wrong, 2 where the GPU, nvcc or both array libraries are missing.
"""

import argparse
import ctypes
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from kernels import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    NUMPY_TYPES,
    ROUNDING,
    LnBackward,
    LnForward,
    decode,
    encode,
    reference_backward,
    reference_forward,
)

EPSILON = 1e-5
NAMES = {FLOAT32: "float32", BFLOAT16: "bfloat16", FLOAT16: "float16"}
TYPES = [(FLOAT32, FLOAT32), (BFLOAT16, FLOAT32), (BFLOAT16, BFLOAT16), (FLOAT16, FLOAT32), (FLOAT16, FLOAT16)]
SHAPES = [(1, 1), (3, 7), (5, 771), (1031, 96), (515, 768), (257, 3072), (33, 8192), (9, 8200), (4, 20001)]
SPEED_SHAPE = (8192, 3072)
ROUNDS = 30


# ------------------------------------------------------------------------------------------------- array libraries


class TorchArrays:
    """Arrays on the GPU, through PyTorch. bfloat16 travels as its bits."""

    def __init__(self):
        import torch

        if not torch.cuda.is_available():
            raise ImportError("PyTorch sees no GPU")
        self.torch = torch
        self.card = torch.cuda.get_device_name()
        self.stream = torch.cuda.current_stream().cuda_stream

    def put(self, array):
        bits = array.view(np.int16) if array.dtype == np.uint16 else array
        return self.torch.from_numpy(np.ascontiguousarray(bits)).cuda()

    def get(self, array, numpy_type):
        return array.cpu().numpy().view(numpy_type)

    def address(self, array):
        return array.data_ptr()

    def copy(self, target, source):
        target.copy_(source)

    def milliseconds(self, call):
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


class CupyArrays:
    """The same through CuPy."""

    def __init__(self):
        import cupy

        self.cupy = cupy
        self.card = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
        self.stream = cupy.cuda.get_current_stream().ptr

    def put(self, array):
        return self.cupy.asarray(array)

    def get(self, array, numpy_type):
        return self.cupy.asnumpy(array).view(numpy_type)

    def address(self, array):
        return array.data.ptr

    def copy(self, target, source):
        self.cupy.copyto(target, source)

    def milliseconds(self, call):
        start, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        start.record()
        call()
        end.record()
        end.synchronize()
        return self.cupy.cuda.get_elapsed_time(start, end)


def find_arrays(wish):
    """PyTorch's arrays, or else CuPy's.

    Raises:
        ImportError: what each of them lacks.
    """
    faults = []
    for name, arrays in (("torch", TorchArrays), ("cupy", CupyArrays)):
        if wish in (None, name):
            try:
                return arrays()
            except Exception as error:  # CuPy's errors about drivers are of its own kinds
                faults.append(f"{name}: {error}")
    raise ImportError("; ".join(faults))


# --------------------------------------------------------------------------------------------------------- kernels


def build(folder):
    """The kernels as a shared library for the GPU of this machine."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    source = Path(__file__).resolve().parent / "csrc" / "ln_cuda.cu"
    library = Path(folder) / "ln_cuda.so"
    command = [nvcc, "-O3", "-std=c++17", "-arch=native", "-shared", "-Xcompiler", "-fPIC", str(source), "-o", str(library)]
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}. Build it by hand and pass --library", file=sys.stderr)
        sys.exit(2)
    return library


class Kernels:
    """The C functions on named arrays. Each call checks the status."""

    def __init__(self, library, arrays):
        self.library, self.arrays = ctypes.CDLL(str(library)), arrays
        self.library.ln_cuda_workspace.restype = ctypes.c_int64
        self.workspace = None

    def forward(self, dtype, param_dtype, rows, cols, tensors):
        args = LnForward(dtype, param_dtype, rows, cols, EPSILON, **self.addresses(tensors))
        self.check(self.library.ln_cuda_forward(ctypes.byref(args), ctypes.c_void_p(self.arrays.stream)))

    def backward(self, dtype, param_dtype, rows, cols, tensors):
        size = self.library.ln_cuda_workspace(ctypes.c_int64(rows), ctypes.c_int64(cols))
        self.check(min(size, 0))
        if self.workspace is None or self.workspace[1] < size:
            self.workspace = self.arrays.put(np.zeros(size // 4, dtype=np.float32)), size
        args = LnBackward(dtype, param_dtype, rows, cols, **self.addresses(tensors))
        workspace = ctypes.c_void_p(self.arrays.address(self.workspace[0]))
        self.check(self.library.ln_cuda_backward(ctypes.byref(args), workspace, ctypes.c_void_p(self.arrays.stream)))

    def addresses(self, tensors):
        return {name: self.arrays.address(array) for name, array in tensors.items()}

    @staticmethod
    def check(status):
        if status:
            raise RuntimeError(f"the kernels return {status}: -1 is an unknown dtype, others are a cudaError_t")


def random_tensors(arrays, dtype, param_dtype, rows, cols, with_add):
    """Inputs with values, outputs filled with a number that no result has; forward's and backward's names."""
    rng = np.random.default_rng(rows + cols)

    def values(shape, dtype):
        return arrays.put(encode(rng.standard_normal(shape), dtype))

    def blank(shape, dtype):
        return arrays.put(encode(np.full(shape, 77.0), dtype))

    wide, narrow = ((rows, cols), dtype), ((cols,), param_dtype)
    forward = {"x": values(*wide), "scale": values(*narrow), "bias": values(*narrow), "y": blank(*wide)}
    forward |= {name: blank((rows,), FLOAT32) for name in ("mean", "invvar")}
    backward = {"dy": values(*wide), "dx": blank(*wide), "dscale": blank(*narrow), "dbias": blank(*narrow)}
    if with_add:
        forward |= {"residual": values(*wide), "sum": blank(*wide)}
        backward |= {"dsum": values(*wide), "dresidual": blank(*wide)}
    backward |= {"input": forward["sum" if with_add else "x"], **{n: forward[n] for n in ("scale", "mean", "invvar")}}
    return forward, backward


# ----------------------------------------------------------------------------------------------------- correctness


def largest_excess(kernels, dtype, param_dtype, rows, cols, with_add):
    """The name of the worst tensor and its error, as a part of what is allowed: rounding to its dtype, plus 1e-5."""
    arrays = kernels.arrays
    forward, backward = random_tensors(arrays, dtype, param_dtype, rows, cols, with_add)
    kernels.forward(dtype, param_dtype, rows, cols, forward)
    kernels.backward(dtype, param_dtype, rows, cols, backward)
    dtypes = {name: param_dtype for name in ("scale", "bias", "dscale", "dbias")} | {"mean": FLOAT32, "invvar": FLOAT32}
    found = {
        name: decode(arrays.get(array, NUMPY_TYPES[dtypes.get(name, dtype)]), dtypes.get(name, dtype))
        for name, array in {**forward, **backward}.items()
    }
    expected = dict(zip(("y", "mean", "invvar"), reference_forward(found["input"], found["scale"], found["bias"], EPSILON)))
    gradients = reference_backward(found["input"], found["scale"], EPSILON, found["dy"])
    expected |= dict(zip(("dx", "dscale", "dbias"), gradients))
    if with_add:
        expected["sum"] = found["x"] + found["residual"]
        expected["dx"] = expected["dresidual"] = expected["dx"] + found["dsum"]
    worst = ("", 0.0)
    for name, right in expected.items():
        size = max(1.0, np.abs(right).max(), found["invvar"].max() if name in ("dx", "dresidual") else 0.0)
        allowed = ROUNDING[dtypes.get(name, dtype)] * np.abs(right) + 1e-5 * size
        excess = float((np.abs(found[name] - right) / allowed).max())
        if not excess <= worst[1]:  # a NaN is the worst
            worst = (name, excess)
    return worst


def check(kernels):
    """Prints a line a case; returns how many are wrong."""
    wrong = 0
    print("| dtype | parameters | shape | op | worst tensor: error / allowed |\n|---|---|---|---|---|")
    for dtype, param_dtype in TYPES:
        for rows, cols in SHAPES:
            for with_add in (False, True):
                name, excess = largest_excess(kernels, dtype, param_dtype, rows, cols, with_add)
                wrong += not excess <= 1
                op = "add + LayerNorm" if with_add else "LayerNorm"
                verdict = "" if excess <= 1 else " WRONG"
                print(f"| {NAMES[dtype]} | {NAMES[param_dtype]} | [{rows}, {cols}] | {op} | {name}: {excess:.2f}{verdict} |")
    return wrong


# ----------------------------------------------------------------------------------------------------------- speed


def speed(kernels):
    """Prints the table of times."""
    arrays, (rows, cols) = kernels.arrays, SPEED_SHAPE
    single, added = (random_tensors(arrays, BFLOAT16, FLOAT32, rows, cols, with_add) for with_add in (False, True))
    flush = [arrays.put(np.zeros(1 << 26, dtype=np.float32)) for _ in range(2)]  # 256 MiB: more than any cache
    types = (BFLOAT16, FLOAT32, rows, cols)
    calls = {  # name -> (call, tensors that it has to move)
        "copy": (lambda: arrays.copy(single[1]["dx"], single[0]["x"]), 2),
        "LayerNorm forward": (lambda: kernels.forward(*types, single[0]), 2),
        "LayerNorm backward": (lambda: kernels.backward(*types, single[1]), 3),
        "add + LayerNorm forward": (lambda: kernels.forward(*types, added[0]), 4),
        "add + LayerNorm backward": (lambda: kernels.backward(*types, added[1]), 5),
        **torch_calls(arrays, single),
    }
    times = {name: [] for name in calls}
    for round_ in range(ROUNDS + 5):
        for name, (call, _) in calls.items():
            arrays.copy(*flush)
            elapsed = arrays.milliseconds(call)
            if round_ >= 5:
                times[name].append(elapsed)
    print(f"\n{arrays.card}, [{rows}, {cols}] bfloat16 with float32 parameters, median of {ROUNDS}\n")
    print("| what | ms | GB/s | share of the copy's |\n|---|---|---|---|")
    bandwidth = {}
    for name, (_, moved) in calls.items():
        median = statistics.median(times[name])
        bandwidth[name] = moved * rows * cols * 2 / median / 1e6
        print(f"| {name} | {median:.4f} | {bandwidth[name]:.0f} | {bandwidth[name] / bandwidth['copy']:.2f} |")


def torch_calls(arrays, tensors):
    """PyTorch's own LayerNorm on the same values, where the arrays are PyTorch's. (It wants x and parameters alike.)"""
    if not isinstance(arrays, TorchArrays):
        return {}
    torch = arrays.torch
    x = tensors[0]["x"].view(torch.bfloat16).detach().requires_grad_()
    scale, bias = (tensors[0][name].bfloat16().detach().requires_grad_() for name in ("scale", "bias"))
    dy = tensors[1]["dy"].view(torch.bfloat16)
    y = torch.nn.functional.layer_norm(x, x.shape[-1:], scale, bias, EPSILON)
    return {
        "torch layer_norm forward": (lambda: torch.nn.functional.layer_norm(x, x.shape[-1:], scale, bias, EPSILON), 2),
        "torch layer_norm backward": (lambda: torch.autograd.grad(y, (x, scale, bias), dy, retain_graph=True), 3),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--library", type=Path, help="the kernels, built before")
    parser.add_argument("--arrays", choices=["torch", "cupy"], help="whose arrays (default: the first that works)")
    parser.add_argument("--no-speed", action="store_true")
    args = parser.parse_args()
    if args.library is not None and not args.library.is_file():
        parser.error(f"--library {args.library}: no such file")
    try:
        arrays = find_arrays(args.arrays)
    except ImportError as error:
        print(f"error: no arrays on a GPU: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        kernels = Kernels(args.library.resolve() if args.library else build(folder), arrays)
        wrong = check(kernels)
        if not args.no_speed:
            speed(kernels)
    print(f"\n{arrays.card}: {wrong} of {len(TYPES) * len(SHAPES) * 2} cases wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
