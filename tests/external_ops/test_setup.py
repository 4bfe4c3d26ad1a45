"""setup.py says what it lacks, and ends with a failure where the build fails."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXTERNAL_OPS = Path(__file__).resolve().parents[2] / "external_ops"


def failure(*command, folder=EXTERNAL_OPS, **environment) -> str:
    """Stderr and stdout of a build that has to fail."""
    import os

    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, env={**os.environ, "MAX_JOBS": "1", **environment}
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr + done.stdout


def module(folder: Path, name: str, content: str = "") -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(content)


# -S leaves out site-packages: an interpreter without any package.


def test_no_setuptools():
    said = failure("-S", "setup.py", "build_ext", PYTHONPATH="")
    assert "error: fused_ln: the package setuptools is missing" in said and "pip install 'setuptools" in said
    assert "Traceback" not in said


def test_no_paddle(tmp_path):
    module(tmp_path, "setuptools", "__version__ = '80.9.0'")
    said = failure("-S", "setup.py", "build_ext", PYTHONPATH=str(tmp_path))
    assert "Paddle cannot be imported" in said and "--no-build-isolation" in said and "Traceback" not in said


def test_pip_with_a_setuptools_that_makes_no_wheels(tmp_path):
    module(tmp_path, "setuptools", "__version__ = '65.5.0'")
    said = failure("-S", "setup.py", "bdist_wheel", PYTHONPATH=str(tmp_path))
    assert "setuptools 65.5.0 makes no wheels" in said and "setuptools>=70.1" in said
    module(tmp_path, "wheel")
    assert "Paddle cannot be imported" in failure("-S", "setup.py", "bdist_wheel", PYTHONPATH=str(tmp_path))


@pytest.mark.parametrize("variable", ["CC", "CXX"])
def test_no_compiler(tmp_path, variable):
    module(tmp_path, "setuptools", "__version__ = '80.9.0'")
    said = failure("-S", "setup.py", "build_ext", PYTHONPATH=str(tmp_path), **{variable: "no-such-compiler"})
    assert "no C++ compiler: no-such-compiler is not on the PATH" in said and "apt-get install g++" in said


def test_a_compiler_without_openmp(tmp_path):
    module(tmp_path, "setuptools", "__version__ = '80.9.0'")
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'omp.h: No such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    said = failure("-S", "setup.py", "build_ext", PYTHONPATH=str(tmp_path), CC=str(compiler))
    assert "C++17 and OpenMP are needed" in said and "omp.h: No such file" in said


@pytest.mark.skipif(shutil.which("gcc") is None or shutil.which("g++") is None, reason="there is no compiler")
def test_a_source_that_does_not_compile_fails_the_build(tmp_path):
    pytest.importorskip("paddle")
    folder = shutil.copytree(EXTERNAL_OPS, tmp_path / "ops", ignore=shutil.ignore_patterns("build", "fused_ln*", "*.so"))
    for source in folder.glob("csrc/*.cc"):
        source.write_text("#error this one does not\n")
    stale = folder / "build" / "fused_ln"  # what an earlier build may have left
    assert "this one does not" in failure("setup.py", "build_ext", "--inplace", folder=folder)
    assert not list(folder.glob("fused_ln*")) and not list(stale.rglob("*.so"))


# ------------------------------------------------------------------------------------------------------------ CUDA


@pytest.fixture
def cuda_flags(monkeypatch, tmp_path):
    """The function, for a toolkit in tmp_path."""
    cpp_extension = pytest.importorskip("paddle.utils.cpp_extension.cpp_extension")
    for part in ("bin/nvcc", "include/cuda_runtime.h", "include/cuda_bf16.h"):
        (tmp_path / part).parent.mkdir(exist_ok=True)
        (tmp_path / part).touch()
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("FUSED_LN_CUDA_ARCHS", raising=False)
    spec = importlib.util.spec_from_file_location("fused_ln_setup", EXTERNAL_OPS / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    return setup.cuda_flags


def test_architectures(cuda_flags, monkeypatch):
    def chosen():
        return [flag.rpartition("code=")[2] for flag in cuda_flags() if "gencode" in flag]

    assert chosen() == ["sm_80", "sm_90"]
    for text, archs in (("90", ["sm_90"]), ("70; 86,90a", ["sm_70", "sm_86", "sm_90a"])):
        monkeypatch.setenv("FUSED_LN_CUDA_ARCHS", text)
        assert chosen() == archs
    for text in ("8.0", "sm_80", "", ";"):
        monkeypatch.setenv("FUSED_LN_CUDA_ARCHS", text)
        with pytest.raises(SystemExit, match=f"FUSED_LN_CUDA_ARCHS is '{text}'"):
            cuda_flags()


@pytest.mark.parametrize("part", ["bin/nvcc", "include/cuda_runtime.h"])
def test_an_incomplete_cuda_toolkit(cuda_flags, tmp_path, part):
    (tmp_path / part).unlink()
    with pytest.raises(SystemExit, match=f"has no {part}.*set CUDA_HOME"):
        cuda_flags()
