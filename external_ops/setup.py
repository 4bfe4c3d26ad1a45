"""Builds and installs the module `fused_ln`: CPU kernels always, CUDA kernels where the installed Paddle has CUDA.

    python setup.py install                          in this folder
    python setup.py build_ext --inplace              in this folder: leaves the module beside this file
    pip install ./external_ops --no-build-isolation  from the folder above

    FUSED_LN_CUDA_ARCHS=80;90    the compute capabilities to compile CUDA kernels for
    CC=gcc CXX=g++               the C++ compiler and linker
    MAX_JOBS=2                   files compiled at a time

Ends with exit status 1 and one line that says why where something that the build needs is missing.
"""

import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from building import build, fail  # noqa: E402


def cuda_flags():
    """nvcc's flags; checks that nvcc and CUDA's headers are there, and that the list of architectures is one."""
    from paddle.utils.cpp_extension.cpp_extension import CUDA_HOME

    for part in ("bin/nvcc", "include/cuda_runtime.h", "include/cuda_bf16.h"):
        if not (Path(CUDA_HOME or "CUDA_HOME") / part).is_file():
            fail(
                "fused_ln",
                f"this Paddle has CUDA, but {CUDA_HOME} has no {part}. Install the CUDA toolkit or set CUDA_HOME to its folder",
            )
    wanted = os.environ.get("FUSED_LN_CUDA_ARCHS", "80;90")
    archs = [arch for arch in re.split(r"[;, ]+", wanted) if arch]
    if not archs or not all(re.fullmatch(r"\d{2,3}[af]?", arch) for arch in archs):
        fail("fused_ln", f"FUSED_LN_CUDA_ARCHS is {wanted!r}, expected compute capabilities without the dot, such as 80;90")
    return ["-O3", "-std=c++17", *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs)]


if __name__ == "__main__":
    build(
        "fused_ln",
        HERE,
        "LayerNorm, and residual add + LayerNorm, forward and backward, for PaddlePaddle",
        sources=["csrc/binding.cc", "csrc/ln_cpu.cc"],
        cuda_sources=["csrc/ln_cuda.cu"],
        cuda_flags=cuda_flags,
    )
