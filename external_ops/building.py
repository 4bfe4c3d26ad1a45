"""What the setup.py files of this folder share: the checks before a build of a Paddle custom op, and the build."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path


def fail(module, message):
    """End with exit status 1 and one line that says why."""
    sys.exit(f"error: {module}: {message}")


def check_wheel_builder(module):
    """pip makes a wheel, which setuptools can do from 70.1 on, and before with the package wheel."""
    from setuptools import __version__ as found

    by_pip = {"bdist_wheel", "dist_info", "editable_wheel"} & set(sys.argv)
    able = tuple(map(int, re.findall(r"\d+", found)[:2])) >= (70, 1) or importlib.util.find_spec("wheel") is not None
    if by_pip and not able:
        fail(module, f"setuptools {found} makes no wheels: {sys.executable} -m pip install 'setuptools>=70.1,<81'")


def check_compiler(module):
    """The C++ compiler (CC, as Python's build tools call it) and linker (CXX) run, with C++17 and OpenMP."""
    compilers = [os.environ.get(name) or sysconfig.get_config_var(name) or name for name in ("CC", "CXX")]
    for compiler in compilers:
        if shutil.which(compiler.split()[0]) is None:
            fail(
                module,
                f"no C++ compiler: {compiler.split()[0]} is not on the PATH. On Debian and Ubuntu: apt-get install g++; "
                "or name yours in CC and CXX",
            )
    program = "#include <omp.h>\n#include <string_view>\nint main() { return omp_get_max_threads() < 1; }\n"
    command = [*compilers[0].split(), "-std=c++17", "-fopenmp", "-fsyntax-only", "-x", "c++", "-"]
    done = subprocess.run(command, input=program, capture_output=True, text=True)
    if done.returncode:
        fail(module, f"`{' '.join(command)}` fails, but C++17 and OpenMP are needed:\n{done.stderr}")


def openmp_flags():
    """Paddle's own OpenMP library where it brings one: one set of threads in the process, which tune_cpu() governs."""
    from paddle.sysconfig import get_lib

    if (Path(get_lib()) / "libiomp5.so").is_file():
        return ["-Wl,--no-as-needed", "-l:libiomp5.so", "-Wl,--as-needed"]
    return ["-fopenmp"]


def check_environment(module):
    """All that a build needs is there: setuptools, a compiler, Paddle."""
    try:
        import setuptools  # noqa: F401  Paddle's build tools need it, and Python 3.12 environments lack it
    except ModuleNotFoundError:
        fail(module, f"the package setuptools is missing: {sys.executable} -m pip install 'setuptools>=70.1,<81'")
    check_wheel_builder(module)
    check_compiler(module)
    try:
        import paddle  # noqa: F401
    except ImportError as error:
        fail(
            module,
            f"Paddle cannot be imported by {sys.executable} ({error}). Install it first; with pip, build with "
            "--no-build-isolation, so that the build sees the installed Paddle",
        )


def build(module, folder, description, sources, cxx_flags=("-O2",), cuda_sources=(), cuda_flags=list):
    """Run setuptools for one module of `folder`, whose sources lie in its csrc/.

    Args:
        cuda_sources: compiled as well where the installed Paddle has CUDA, with the flags that `cuda_flags()` returns.
    """
    check_environment(module)
    import paddle
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

    os.chdir(folder)
    with_cuda = bool(cuda_sources) and paddle.is_compiled_with_cuda() and not paddle.is_compiled_with_rocm()
    flags = {"cxx": [*cxx_flags, "-g0", "-fopenmp", "-DPADDLE_NO_PYTHON"], "nvcc": cuda_flags() if with_cuda else []}
    extension = CUDAExtension if with_cuda else CppExtension
    setup(
        name=module,
        version="1.0.0",
        description=description,
        ext_modules=extension(
            sources=[*sources, *(cuda_sources if with_cuda else [])],
            include_dirs=[str(Path(folder) / "csrc")],
            extra_compile_args=flags,
            extra_link_args=openmp_flags(),
        ),
        cmdclass={"build_ext": Build.with_options(no_python_abi_suffix=True)},
    )
