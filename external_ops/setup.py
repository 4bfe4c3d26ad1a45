"""Builds and installs the module `fused_ln`: CPU kernels always, CUDA kernels where the installed Paddle has CUDA.

    python setup.py install                          in this folder
    python setup.py build_ext --inplace              in this folder: leaves the module beside this file
    pip install ./external_ops --no-build-isolation  from the folder above

    FUSED_LN_CUDA_ARCHS=80;90    the compute capabilities to compile CUDA kernels for
    CC=gcc CXX=g++               the C++ compiler and linker
    MAX_JOBS=2                   files compiled at a time

Ends with exit status 1 and one line that says why where something that the build needs is missing.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
CPU_SOURCES = ["csrc/binding.cc", "csrc/ln_cpu.cc"]
CUDA_SOURCES = ["csrc/ln_cuda.cu"]


def fail(message):
    sys.exit(f"error: fused_ln: {message}")


def check_wheel_builder():
    """pip makes a wheel, which setuptools can do from 70.1 on, and before with the package wheel."""
    from setuptools import __version__ as found

    by_pip = {"bdist_wheel", "dist_info", "editable_wheel"} & set(sys.argv)
    able = tuple(map(int, re.findall(r"\d+", found)[:2])) >= (70, 1) or importlib.util.find_spec("wheel") is not None
    if by_pip and not able:
        fail(f"setuptools {found} makes no wheels: {sys.executable} -m pip install 'setuptools>=70.1,<81'")


def check_compiler():
    """The C++ compiler (CC, as Python's build tools call it) and linker (CXX) run, with C++17 and OpenMP."""
    compilers = [os.environ.get(name) or sysconfig.get_config_var(name) or name for name in ("CC", "CXX")]
    for compiler in compilers:
        if shutil.which(compiler.split()[0]) is None:
            fail(
                f"no C++ compiler: {compiler.split()[0]} is not on the PATH. On Debian and Ubuntu: apt-get install g++; "
                "or name yours in CC and CXX"
            )
    program = "#include <omp.h>\n#include <string_view>\nint main() { return omp_get_max_threads() < 1; }\n"
    command = [*compilers[0].split(), "-std=c++17", "-fopenmp", "-fsyntax-only", "-x", "c++", "-"]
    done = subprocess.run(command, input=program, capture_output=True, text=True)
    if done.returncode:
        fail(f"`{' '.join(command)}` fails, but C++17 and OpenMP are needed:\n{done.stderr}")


def cuda_flags():
    """nvcc's flags; checks that nvcc and CUDA's headers are there, and that the list of architectures is one."""
    from paddle.utils.cpp_extension.cpp_extension import CUDA_HOME

    for part in ("bin/nvcc", "include/cuda_runtime.h", "include/cuda_bf16.h"):
        if not (Path(CUDA_HOME or "CUDA_HOME") / part).is_file():
            fail(f"this Paddle has CUDA, but {CUDA_HOME} has no {part}. Install the CUDA toolkit or set CUDA_HOME to its folder")
    wanted = os.environ.get("FUSED_LN_CUDA_ARCHS", "80;90")
    archs = [arch for arch in re.split(r"[;, ]+", wanted) if arch]
    if not archs or not all(re.fullmatch(r"\d{2,3}[af]?", arch) for arch in archs):
        fail(f"FUSED_LN_CUDA_ARCHS is {wanted!r}, expected compute capabilities without the dot, such as 80;90")
    return ["-O3", "-std=c++17", *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs)]


def openmp_flags():
    """Paddle's own OpenMP library where it brings one: one set of threads in the process, which tune_cpu() governs."""
    from paddle.sysconfig import get_lib

    if (Path(get_lib()) / "libiomp5.so").is_file():
        return ["-Wl,--no-as-needed", "-l:libiomp5.so", "-Wl,--as-needed"]
    return ["-fopenmp"]


def main():
    try:
        import setuptools  # noqa: F401  Paddle's build tools need it, and Python 3.12 environments lack it
    except ModuleNotFoundError:
        fail(f"the package setuptools is missing: {sys.executable} -m pip install 'setuptools>=70.1,<81'")
    check_wheel_builder()
    check_compiler()
    try:
        import paddle
    except ImportError as error:
        fail(
            f"Paddle cannot be imported by {sys.executable} ({error}). Install it first; with pip, build with "
            "--no-build-isolation, so that the build sees the installed Paddle"
        )
    from paddle.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension, setup

    class Build(BuildExtension):
        """Paddle's, which prints a compile error and goes on to link: with the objects of an earlier build, if any."""

        def build_extensions(self):
            self.force = True  # what is here may come from another Paddle or from other flags
            for stale in Path(self.build_lib).rglob("*.o"):
                stale.unlink()
            super().build_extensions()

        def run(self):
            super().run()
            (Path(self.build_lib) / "version.txt").unlink(missing_ok=True)  # or it is installed beside the module

    os.chdir(HERE)
    with_cuda = paddle.is_compiled_with_cuda() and not paddle.is_compiled_with_rocm()
    flags = {"cxx": ["-O2", "-g0", "-fopenmp", "-DPADDLE_NO_PYTHON"], "nvcc": cuda_flags() if with_cuda else []}
    extension = CUDAExtension if with_cuda else CppExtension
    setup(
        name="fused_ln",
        version="1.0.0",
        description="LayerNorm, and residual add + LayerNorm, forward and backward, for PaddlePaddle",
        ext_modules=extension(
            sources=CPU_SOURCES + (CUDA_SOURCES if with_cuda else []),
            include_dirs=[str(HERE / "csrc")],
            extra_compile_args=flags,
            extra_link_args=openmp_flags(),
        ),
        cmdclass={"build_ext": Build.with_options(no_python_abi_suffix=True)},
    )


if __name__ == "__main__":
    main()
