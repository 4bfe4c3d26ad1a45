"""The CPU kernels without Paddle: each instruction set, each number of threads, on tensors between guards."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from kernels import BFLOAT16, FLOAT16, FLOAT32, LnBackward, LnForward
from tensors_in_memory import run_backward

SOURCES = Path(__file__).resolve().parents[2] / "external_ops" / "csrc"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    library = tmp_path_factory.mktemp("kernels") / "ln_cpu.so"
    command = ["g++", "-O2", "-g0", "-std=c++17", "-fopenmp", "-fPIC", "-shared"]
    done = subprocess.run([*command, str(SOURCES / "ln_cpu.cc"), "-o", str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


class Kernels:
    """The library behind the two calls that tensors_in_memory makes."""

    def __init__(self, path, threads):
        self.library, self.threads = ctypes.CDLL(str(path)), threads
        self.library.ln_cpu_isa.restype = ctypes.c_char_p
        self.isa = self.library.ln_cpu_isa().decode()

    def forward(self, args):
        return self.library.ln_cpu_forward(ctypes.byref(args), self.threads)

    def backward(self, args):
        return self.library.ln_cpu_backward(ctypes.byref(args), self.threads)


@pytest.fixture(params=["baseline", "whatever this processor has"])
def kernels(request, built, monkeypatch, tmp_path):
    """A copy of the library, which chooses its instruction set at its first call."""
    monkeypatch.setenv("FUSED_LN_ISA", "baseline" if request.param == "baseline" else "")
    found = Kernels(shutil.copy(built, tmp_path / "copy.so"), threads=1)
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    expected = "avx2" if request.param != "baseline" and " avx2 " in flags and " fma " in flags else "baseline"
    assert found.isa == expected
    return found


# Widths around the width of a vector and the four quarters of a sum; rows around the four rows of a backward pass.
@pytest.mark.parametrize("dtype, param_dtype", [(FLOAT32, FLOAT32), (BFLOAT16, FLOAT32), (BFLOAT16, BFLOAT16)])
def test_every_instruction_set_agrees_with_float64(kernels, dtype, param_dtype):
    for rows, cols in [(1, 1), (2, 3), (3, 4), (4, 5), (5, 31), (6, 32), (7, 33), (9, 127), (13, 771), (8, 3072)]:
        run_backward(kernels, dtype, param_dtype, rows, cols, with_residual=False, with_statistics=False)
        run_backward(kernels, dtype, param_dtype, rows, cols, with_residual=True, with_statistics=True, misaligned=True)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_share_the_rows(built, threads):
    kernels = Kernels(built, threads)
    for rows, cols in [(101, 771), (6, 65536), (3, 5)]:  # the last is too small for a second thread
        first, again = (run_backward(kernels, FLOAT32, FLOAT32, rows, cols, True, True) for _ in range(2))
        for a, b in zip(first, again):
            np.testing.assert_array_equal(a, b)
        dx_of_one_thread = run_backward(Kernels(built, 1), FLOAT32, FLOAT32, rows, cols, True, True)[0]
        np.testing.assert_allclose(first[0], dx_of_one_thread, rtol=1e-5, atol=1e-6)


def test_outputs_of_whole_huge_pages(built):
    run_backward(Kernels(built, 1), FLOAT32, FLOAT32, 1500, 1024, with_residual=True, with_statistics=False)


def test_unknown_types_are_refused(built):
    kernels = Kernels(built, 1)
    for dtype, param_dtype in ((FLOAT16, FLOAT32), (FLOAT16, FLOAT16), (FLOAT32, BFLOAT16), (7, FLOAT32)):
        assert kernels.forward(LnForward(dtype=dtype, param_dtype=param_dtype, rows=1, cols=8)) == -1
        assert kernels.backward(LnBackward(dtype=dtype, param_dtype=param_dtype, rows=1, cols=8)) == -1
