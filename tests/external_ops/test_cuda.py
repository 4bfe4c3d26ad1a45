"""The CUDA kernels: nvcc compiles them, and, run thread by thread on the CPU, they give what float64 gives.

On a GPU: external_ops/check_cuda.py.
"""

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import check_cuda
import numpy as np
import pytest
from kernels import BFLOAT16, FLOAT16, FLOAT32, NUMPY_TYPES, LnBackward, LnForward
from tensors_in_memory import Memory, run_backward

SOURCES = Path(__file__).resolve().parents[2] / "external_ops" / "csrc"
NVCC = shutil.which("nvcc", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))


# ----------------------------------------------------------------------------------------------------- compiling


@pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
def test_nvcc_compiles_for_sm_80_and_sm_90_with_16_byte_accesses(tmp_path):
    target = tmp_path / "ln_cuda.o"
    archs = [f"-gencode=arch=compute_{arch},code=[compute_{arch},sm_{arch}]" for arch in (80, 90)]
    command = [NVCC, "-O3", "-std=c++17", *archs, "-keep", "-keep-dir", tmp_path, "-Xptxas", "-v", "-c", SOURCES / "ln_cuda.cu"]
    done = subprocess.run([*map(str, command), "-o", target], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compiled = re.findall(r"Compiling entry function '\w*(?:in_registers|streamed|partial)\w*' for 'sm_(\d+)'", done.stderr)
    assert compiled.count("80") == compiled.count("90") > 30
    assert set(re.findall(r"(\d+) bytes spill stores", done.stderr)) == {"0"}

    (ptx,) = tmp_path.glob("*compute_90.ptx")
    kernels = re.findall(r"\.entry \w*in_registers\w*\(.*?\n\}", ptx.read_text(), flags=re.DOTALL)
    assert len(kernels) == 22  # forward and backward of 4 pairs of types with 2 layouts, and of float32 with 3
    for kernel in kernels:
        accesses = re.findall(r"(?:ld|st)\.global\.(?:v4\.\w32|v2\.\w64|\S+)", kernel)
        wide = re.findall(r"(?:ld|st)\.global\.(?:v4\.\w32|v2\.\w64)", kernel)
        assert len(wide) >= 3, accesses


@pytest.mark.skipif(NVCC is None, reason="there is no nvcc, which knows where CUDA's headers are")
def test_the_binding_compiles_as_for_a_paddle_with_cuda():
    paddle = pytest.importorskip("paddle")
    include = Path(paddle.sysconfig.get_include())
    dry_run = subprocess.run([NVCC, "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull], capture_output=True, text=True)
    cuda_includes = [word for line in re.findall(r"INCLUDES=(.*)", dry_run.stderr) for word in shlex.split(line)]
    folders = [SOURCES, include, include / "third_party"]
    flags = ["-std=c++17", "-fsyntax-only", "-w", "-DPADDLE_NO_PYTHON", "-DPADDLE_WITH_CUDA", "-DPADDLE_WITH_CUSTOM_KERNEL"]
    command = ["g++", *flags, *(f"-I{folder}" for folder in folders), *cuda_includes, str(SOURCES / "binding.cc")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ----------------------------------------------------------------------------------------- running, on the CPU


class Kernels:
    """The library behind the two calls that tensors_in_memory makes."""

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        self.library.ln_cuda_workspace.restype = ctypes.c_int64

    def forward(self, args):
        return self.library.ln_cuda_forward(ctypes.byref(args), None)

    def backward(self, args):
        size = self.library.ln_cuda_workspace(ctypes.c_int64(args.rows), ctypes.c_int64(args.cols))
        workspace = Memory((size // 4,), FLOAT32)
        status = self.library.ln_cuda_backward(ctypes.byref(args), ctypes.c_void_p(workspace.address), None)
        workspace.check_guards()
        return status


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """ln_cuda.cu as a library for the CPU: see cuda_emulation.h."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    folder = tmp_path_factory.mktemp("emulated")
    launch = "kernel<<<grid, block, shared, stream>>>(arguments...);"
    source = (SOURCES / "ln_cuda.cu").read_text()
    assert source.count("<<<") == source.count(launch) == 1
    emulated = "launch_status = emulation::launch(grid, block, [&] { kernel(arguments...); });"
    shared = "namespace ln_cuda { __thread float block_sums[1 << 14]; }\n"
    (folder / "ln_cuda.cc").write_text('#include "cuda_runtime.h"\n' + shared + source.replace(launch, emulated))
    for header in ("cuda_runtime.h", "cuda_bf16.h", "cuda_fp16.h"):
        shutil.copy(Path(__file__).with_name("cuda_emulation.h"), folder / header)
    command = ["g++", "-O1", "-std=c++17", "-w", "-fPIC", "-shared", f"-I{folder}", f"-I{SOURCES}", "ln_cuda.cc", "-o", "ln_cuda.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if "_Float16" in done.stderr:
        pytest.skip("this g++ has no _Float16")
    assert done.returncode == 0, done.stderr
    return Kernels(folder / "ln_cuda.so")


TYPES = [(FLOAT32, FLOAT32), (BFLOAT16, FLOAT32), (BFLOAT16, BFLOAT16), (FLOAT16, FLOAT32), (FLOAT16, FLOAT16)]
# In registers: 1, 2 and 4 packs a thread, idle threads, several rows a block, more rows than the blocks take at once.
SHAPES = [(150, 8), (37, 96), (35, 264), (5, 768), (3, 3072), (2, 8192)]
STREAMED = [(1, 1), (3, 7), (40, 33), (2, 771), (2, 8200), (2, 8201)]


@pytest.mark.parametrize("dtype, param_dtype", TYPES)
@pytest.mark.parametrize("rows, cols", SHAPES + STREAMED)
def test_kernels_agree_with_float64(emulated, dtype, param_dtype, rows, cols):
    run_backward(emulated, dtype, param_dtype, rows, cols, with_residual=False, with_statistics=False)
    run_backward(emulated, dtype, param_dtype, rows, cols, with_residual=True, with_statistics=True)


@pytest.mark.parametrize("cols", [64, 771])
def test_rows_that_do_not_start_at_16_bytes(emulated, cols):
    for dtype in (FLOAT32, BFLOAT16):
        run_backward(emulated, dtype, dtype, 5, cols, with_residual=True, with_statistics=False, misaligned=True)


@pytest.mark.parametrize("cols", [96, 33])
def test_the_same_input_gives_the_same_bits(emulated, cols):
    first, second = (run_backward(emulated, BFLOAT16, FLOAT32, 70, cols, True, False) for _ in range(2))
    for a, b in zip(first, second):
        np.testing.assert_array_equal(a, b)


def test_no_rows_and_unknown_types(emulated):
    assert emulated.forward(LnForward(dtype=FLOAT32, param_dtype=FLOAT32, rows=0, cols=8)) == 0
    for dtype, param_dtype in ((7, FLOAT32), (FLOAT32, BFLOAT16), (FLOAT16, BFLOAT16)):
        assert emulated.forward(LnForward(dtype=dtype, param_dtype=param_dtype, rows=1, cols=8)) == -1
        assert emulated.backward(LnBackward(dtype=dtype, param_dtype=param_dtype, rows=1, cols=8)) == -1


# --------------------------------------------------------------------------------------------- the harness for GPUs


class NumpyArrays:
    """What check_cuda.py has PyTorch or CuPy for."""

    card, stream = "emulated", None

    def put(self, array):
        memory = Memory(array.shape, {np.dtype(t): d for d, t in NUMPY_TYPES.items()}[array.dtype])
        memory.body[:] = array
        return memory

    def get(self, memory, numpy_type):
        memory.check_guards()
        return memory.body.view(numpy_type).copy()

    def address(self, memory):
        return memory.address

    def copy(self, target, source):
        target.body[:] = source.body

    def milliseconds(self, call):
        call()
        return 1.0


def test_check_cuda_on_the_emulation(emulated, monkeypatch, capsys):
    monkeypatch.setattr(check_cuda, "SHAPES", [(5, 96), (3, 7)])
    monkeypatch.setattr(check_cuda, "SPEED_SHAPE", (4, 64))
    monkeypatch.setattr(check_cuda, "ROUNDS", 1)
    kernels = check_cuda.Kernels(emulated.library._name, NumpyArrays())
    assert check_cuda.check(kernels) == 0
    check_cuda.speed(kernels)
    assert "LayerNorm backward | 1.0000" in capsys.readouterr().out

    honest = kernels.backward

    def wrong(*args):
        honest(*args)
        args[-1]["dscale"].body[:] = 0

    monkeypatch.setattr(kernels, "backward", wrong)
    assert check_cuda.check(kernels) == 20
    assert "dscale" in capsys.readouterr().out


def test_check_cuda_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["check_cuda.py"])
    for library in ("torch", "cupy"):
        monkeypatch.setitem(sys.modules, library, None)
    assert check_cuda.main() == 2
    assert "torch: " in (said := capsys.readouterr().err) and "cupy: " in said
