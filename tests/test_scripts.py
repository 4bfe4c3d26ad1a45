"""The shell scripts: their syntax, how they choose Python and install, and what the launch script would run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHELL_SCRIPTS = sorted(ROOT.glob("scripts/**/*.sh")) + [ROOT / ".ci" / "run"]


def bash(*words: str, cwd: Path = ROOT, **settings: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "ERNIE35SE_EXTRA", "ERNIE35SE_DEMO_DIR")}
    return subprocess.run(
        ["bash", *words], cwd=cwd, env={**environment, **settings}, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_syntax(script: Path):
    done = bash("-n", str(script))
    assert done.returncode == 0, done.stderr


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


# ------------------------------------------------------------------------------------------------------ venv.sh


def fake_python(path: Path, version: str, ensurepip: bool = True) -> Path:
    """A shell script that answers what venv.sh asks an interpreter."""
    major, minor = version.split(".")[:2]
    return executable(path, f"""#!/bin/bash
case "$*" in
    *"3, 10"*) [ {major} = 3 ] && [ {minor} -ge 10 ] && [ {minor} -lt 13 ] ;;
    *python_version*) echo {version} ;;
    *sys.version_info*) echo {major}.{minor} ;;
    *ensurepip*) {"true" if ensurepip else "false"} ;;
esac
""")  # fmt: skip


def chosen(folder: Path, **settings: str) -> subprocess.CompletedProcess:
    """choose_python with only the folder, and the basic commands that the script itself needs, on the PATH."""
    for command in ("bash", "dirname"):
        if not (folder / command).exists():
            (folder / command).symlink_to(shutil.which(command))
    return bash("-c", f"source {ROOT}/scripts/venv.sh; choose_python", PATH=str(folder), **settings)


def test_the_first_suitable_python_is_chosen(tmp_path):
    fake_python(tmp_path / "python3", "3.13.1")
    fake_python(tmp_path / "python3.11", "3.11.7")
    assert chosen(tmp_path).stdout == "python3.11\n"
    fake_python(tmp_path / "python3", "3.10.2")
    assert chosen(tmp_path).stdout == "python3\n"
    assert chosen(tmp_path, PYTHON="python3.11").stdout == "python3.11\n"


def test_no_suitable_python_says_what_is_needed_and_what_was_seen(tmp_path):
    done = chosen(tmp_path)
    assert done.returncode == 1 and "3.10, 3.11 or 3.12 is needed; seen: none" in done.stderr
    fake_python(tmp_path / "python3", "3.9.18")
    fake_python(tmp_path / "python", "3.13.0")
    done = chosen(tmp_path)
    assert done.returncode == 1 and "seen: python3 (3.9.18), python (3.13.0)" in done.stderr
    fake_python(tmp_path / "python3.12", "3.12.1")
    done = chosen(tmp_path, PYTHON="python3")
    assert done.returncode == 1 and "seen: python3 (3.9.18) (PYTHON=python3)" in done.stderr


def test_a_python_without_ensurepip_names_the_package(tmp_path):
    fake_python(tmp_path / "python3", "3.11.2", ensurepip=False)
    done = chosen(tmp_path)
    assert done.returncode == 1 and "apt-get install python3.11-venv" in done.stderr
    fake_python(tmp_path / "python3.12", "3.12.1")
    assert chosen(tmp_path).stdout == "python3.12\n"


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of what venv.sh looks at, with an interpreter in .venv that logs what pip is asked for."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "venv.sh", tmp_path / "scripts")
    shutil.copy(ROOT / "setup.py", tmp_path)
    executable(tmp_path / ".venv" / "bin" / "python", f"""#!/bin/bash
case "$*" in
    *"pip install"*) echo "$*" >>"{tmp_path}/installs"; cat "{tmp_path}/pip_says" 2>/dev/null; [ ! -e "{tmp_path}/pip_says" ] ;;
esac
""")  # fmt: skip
    return tmp_path


def install(checkout: Path, **settings: str) -> subprocess.CompletedProcess:
    return bash("-c", "set -euo pipefail; source scripts/venv.sh; make_venv", cwd=checkout, **settings)


def installs(checkout: Path) -> list[str]:
    return (checkout / "installs").read_text().splitlines()


def test_an_unchanged_setup_is_installed_once(checkout):
    assert install(checkout).returncode == 0
    assert f"-e {checkout}[cpu,test]" in installs(checkout)[0]
    done = install(checkout)
    assert done.returncode == 0 and "reusing .venv" in done.stdout
    assert len(installs(checkout)) == 1
    with (checkout / "setup.py").open("a") as file:
        file.write("# changed\n")
    assert install(checkout).returncode == 0 and len(installs(checkout)) == 2
    assert install(checkout, ERNIE35SE_EXTRA="gpu").returncode == 0
    assert f"-e {checkout}[gpu,test]" in installs(checkout)[2]


def test_a_failed_install_is_explained_and_done_again(checkout):
    (checkout / "pip_says").write_text("NewConnectionError: failed to establish a new connection\n")
    done = install(checkout)
    assert done.returncode == 1 and "could not reach its package index" in done.stderr
    (checkout / "pip_says").write_text("error: metadata-generation-failed\n")
    done = install(checkout)
    assert done.returncode == 1 and "pip install failed" in done.stderr and "index" not in done.stderr
    (checkout / "pip_says").unlink()
    assert install(checkout).returncode == 0
    assert len(installs(checkout)) == 3


def test_an_interrupted_reinstall_does_not_count(checkout):
    assert install(checkout).returncode == 0
    (checkout / "pip_says").write_text("")
    assert install(checkout, ERNIE35SE_EXTRA="gpu").returncode == 1
    (checkout / "pip_says").unlink()
    assert "reusing" not in install(checkout).stdout and len(installs(checkout)) == 3


def test_an_unsuitable_environment_is_not_touched(checkout):
    executable(checkout / ".venv" / "bin" / "python", """#!/bin/bash
case "$*" in
    *"3, 10"*) exit 1 ;;
    *python_version*) echo 3.9.18 ;;
esac
""")  # fmt: skip
    done = install(checkout)
    assert done.returncode == 1 and "holds Python 3.9.18" in done.stderr and "remove that folder" in done.stderr


def build(checkout: Path, **settings: str) -> subprocess.CompletedProcess:
    command = 'set -euo pipefail; source scripts/venv.sh; make_venv; build_op; echo "fused_ln=$fused_ln"'
    return bash("-c", command, cwd=checkout, **{"ERNIE35SE_CPU_OPS": "0", **settings})


@pytest.fixture
def with_op(checkout) -> Path:
    """That checkout, with the op's sources; a compiler is there."""
    shutil.copytree(ROOT / "external_ops" / "csrc", checkout / "external_ops" / "csrc")
    shutil.copy(ROOT / "external_ops" / "setup.py", checkout / "external_ops")
    executable(checkout / "bin" / "compiler", "")
    assert install(checkout).returncode == 0
    (checkout / "installs").unlink()
    return checkout


def test_the_op_is_built_once_for_its_sources(with_op):
    compiler = f"{with_op}/bin/compiler -flag"
    done = build(with_op, CXX=compiler)
    assert done.returncode == 0 and done.stdout.endswith("fused_ln=1\n")
    (command,) = installs(with_op)
    assert "--no-build-isolation" in command and command.endswith(f"{with_op}/external_ops")
    done = build(with_op, CXX=compiler)
    assert "reusing the fused LayerNorm op" in done.stdout and done.stdout.endswith("fused_ln=1\n")
    assert len(installs(with_op)) == 1
    with (with_op / "external_ops" / "csrc" / "ln_cpu.cc").open("a") as file:
        file.write("// changed\n")
    assert build(with_op, CXX=compiler).returncode == 0 and len(installs(with_op)) == 2


def test_the_cpu_ops_are_built_beside_it_once(with_op):
    shutil.copytree(ROOT / "external_ops" / "cpu_ops", with_op / "external_ops" / "cpu_ops")
    settings = {"CXX": f"{with_op}/bin/compiler", "ERNIE35SE_CPU_OPS": "1"}
    assert build(with_op, **settings).returncode == 0
    assert [line.rpartition("/")[2] for line in installs(with_op)] == ["external_ops", "cpu_ops"]
    done = build(with_op, **settings)
    assert "reusing the CPU ops" in done.stdout and done.stdout.endswith("fused_ln=1\n") and len(installs(with_op)) == 2


def test_no_compiler_means_no_op_and_is_said(with_op):
    for settings, words in (({"CXX": "no-such-compiler"}, "no C++ compiler (no-such-compiler)"),
                            ({"ERNIE35SE_FUSED_LN": "0"}, "ERNIE35SE_FUSED_LN=0")):  # fmt: skip
        done = build(with_op, **settings)
        assert done.returncode == 0 and words in done.stdout and done.stdout.endswith("fused_ln=0\n")
    assert not (with_op / "installs").exists()


def test_a_failed_build_of_the_op_is_told_and_done_again(with_op):
    compiler = f"{with_op}/bin/compiler"
    (with_op / "pip_says").write_text("error: fused_ln: something is missing\n")
    for _ in range(2):
        done = build(with_op, CXX=compiler)
        assert done.returncode == 1 and "something is missing" in done.stderr and "ERNIE35SE_FUSED_LN=0" in done.stderr
    assert len(installs(with_op)) == 2


# ------------------------------------------------------------------------------------------------------ demo.sh


@pytest.mark.skipif(
    not (ROOT / ".venv" / "installed").exists() or Path(sys.prefix) != ROOT / ".venv",
    reason="the demo would install .venv: run the tests with scripts/test.sh",
)
def test_the_demo_runs_and_a_second_run_reuses_everything(tmp_path):
    flags = ["--max_steps", "2", "--eval_steps", "2", "--save_steps", "2", "--eval_iters", "1"]
    first = bash(str(ROOT / "scripts" / "demo.sh"), *flags, cwd=tmp_path, ERNIE35SE_DEMO_DIR="my demo")
    assert first.returncode == 0, first.stderr
    model = tmp_path / "my demo" / "model"
    assert (model / "curves.png").read_bytes().startswith(b"\x89PNG")
    unigram, trained = (line for line in first.stdout.splitlines() if "nats per token" in line)
    assert "Unigram model:" in unigram and "The trained model:" in trained and "inspect_data.py" in first.stdout
    second = bash(str(ROOT / "scripts" / "demo.sh"), *flags, cwd=tmp_path, ERNIE35SE_DEMO_DIR="my demo")
    assert second.returncode == 0 and second.stdout.count(": reusing ") == 4
    assert unigram in second.stdout and trained in second.stdout


# -------------------------------------------------------------------------------------------------- the launcher


LAUNCH = ROOT / "scripts" / "launch" / "pretrain_3b_stage2.sh"


@pytest.fixture
def launched(tmp_path):
    """The words that the launch script gives to Python."""
    echo = executable(tmp_path / "echo-words", '#!/bin/bash\nprintf "%s\\n" "$@"\n')

    def words(*flags: str, **settings: str) -> list[str]:
        done = bash(str(LAUNCH), *flags, cwd=tmp_path, PYTHON=str(echo), **settings)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return words


def test_launches_one_process_a_gpu_and_says_where_logs_are(launched):
    logs, *words = launched("--max_steps", "7", CUDA_VISIBLE_DEVICES="")
    assert logs.startswith("logs: ./log/pretrain_3b_stage2/workerlog.0 to workerlog.7")
    assert words[:2] == ["-m", "paddle.distributed.launch"]
    assert words[words.index("--devices") + 1] == "0,1,2,3,4,5,6,7"
    assert str(ROOT / "configs/pretrain/3b_stage2.json") in words
    assert words[words.index("--model_name_or_path") + 1] == "baidu/ernie-3.5-se-3b"
    assert words[-2:] == ["--max_steps", "7"]
    logs, *words = launched(CUDA_VISIBLE_DEVICES="4,6")
    assert "workerlog.0 to workerlog.1;" in logs and words[words.index("--devices") + 1] == "4,6"


def test_the_environment_overrides(launched):
    words = launched(
        NPROC="2", DEVICE="cpu", MODEL="m", INPUT_DIR="0.3 a 0.7 b", OUTPUT_DIR="o", LOG_DIR="l", CONFIG="c.json",
        TOKENIZER="t t", NNODES="2", MASTER="10.0.0.1:80",
    )  # fmt: skip
    for flag, value in {
        "--nproc_per_node": "2", "--device": "cpu", "--model_name_or_path": "m", "--input_dir": "0.3 a 0.7 b",
        "--output_dir": "o", "--log_dir": "l", "--tokenizer_name_or_path": "t t", "--nnodes": "2",
        "--master": "10.0.0.1:80",
    }.items():  # fmt: skip
        assert words[words.index(flag) + 1] == value
    assert "c.json" in words and "--devices" not in words


def test_a_dry_run_launches_nothing(launched):
    for flags in (["--dry_run"], ["--dry_run", "1"], ["--dry_run=true"], ["--max_steps", "3", "--dry_run"]):
        assert launched(*flags)[0] == str(ROOT / "scripts" / "run_pretrain.py")
    for flags in ([], ["--dry_run", "false"], ["--dry_run=0"]):
        assert "paddle.distributed.launch" in launched(*flags)


def test_dry_run_describes_the_3b_run_on_one_cpu(tmp_path):
    done = bash(str(LAUNCH), "--dry_run", cwd=tmp_path, PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    # The numbers are this configuration's: 8 devices x 1 sample x 4096 tokens.
    for words in ("sharding = 'stage2'", "max_steps = 300000", "of 8 device", "Tokens per step: 32,768 (8 samples"):
        assert words in done.stdout
