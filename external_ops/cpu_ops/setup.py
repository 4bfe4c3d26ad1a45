"""Builds and installs the module `cpu_ops`: ops for training on CPU (docs/cpu_ops.md).

    pip install ./external_ops/cpu_ops --no-build-isolation     from the repository
    python setup.py build_ext --inplace                         in this folder: leaves the module beside this file

    CC=gcc CXX=g++               the C++ compiler and linker
    MAX_JOBS=2                   files compiled at a time

Ends with exit status 1 and one line that says why where something that the build needs is missing.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from building import build  # noqa: E402

if __name__ == "__main__":
    build(
        "cpu_ops",
        HERE,
        "Causal attention, softmax cross entropy, AdamW and silu(gate) * up on CPU, for PaddlePaddle",
        sources=sorted(str(path.relative_to(HERE)) for path in (HERE / "csrc").glob("*.cc")),
        cxx_flags=["-O3", "-fno-math-errno", "-fno-trapping-math"],
    )
