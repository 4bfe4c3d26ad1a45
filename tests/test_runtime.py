"""runtime.py: the CPU fast path and the version check."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ernie35se import runtime

ROOT = Path(__file__).resolve().parents[1]
OURS = ("OMP_NUM_THREADS", "KMP_BLOCKTIME", "MKL_DEBUG_CPU_TYPE")
TUNE = """
import json, os
from ernie35se import runtime
line = runtime.tune_cpu()
print(json.dumps({"line": line, "cores": runtime.cpu_cores(), **{name: os.environ.get(name) for name in %r}}))
""" % (OURS,)


def clean_environment(**settings: str) -> dict[str, str]:
    """This process's environment without anything that tune_cpu looks at, and with these settings."""
    dropped = OURS + (runtime.OFF_SWITCH, "CUDA_VISIBLE_DEVICES")
    kept = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith("PADDLE_")}
    return {**kept, "PYTHONPATH": str(ROOT), **settings}


def tuned(code: str = TUNE, **settings: str) -> dict:
    """What the last line of a fresh process says after running the code with these settings of the environment."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=clean_environment(**settings), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# ---------------------------------------------------------------------------------------------------------- CPU


def test_sets_threads_and_math_path():
    seen = tuned()
    assert seen["OMP_NUM_THREADS"] == str(seen["cores"])
    assert seen["KMP_BLOCKTIME"] == "0"
    assert seen["MKL_DEBUG_CPU_TYPE"] == ("5" if runtime._is_amd_with_avx2() else None)
    for name in OURS:
        assert seen[name] is None or f"{name}={seen[name]}" in seen["line"]


def test_users_environment_wins():
    seen = tuned(OMP_NUM_THREADS="1", KMP_BLOCKTIME="200", MKL_DEBUG_CPU_TYPE="4")
    assert (seen["OMP_NUM_THREADS"], seen["KMP_BLOCKTIME"], seen["MKL_DEBUG_CPU_TYPE"]) == ("1", "200", "4")
    assert "OMP_NUM_THREADS=1 (yours)" in seen["line"]


def test_off_switch():
    seen = tuned(ERNIE35SE_NO_TUNE="1")
    assert [seen[name] for name in OURS] == [None, None, None]
    assert "ERNIE35SE_NO_TUNE=1" in seen["line"]
    assert tuned(ERNIE35SE_NO_TUNE="0")["KMP_BLOCKTIME"] == "0"


def test_gpu_process_is_left_alone():
    code = TUNE.replace("tune_cpu()", "tune_cpu('gpu:0')")
    assert [tuned(code)[name] for name in OURS] == [None, None, None]


@pytest.mark.parametrize(
    "device, gpu_build, visible, devices, on_cpu",
    [
        ("cpu", True, None, True, True),
        ("gpu", False, None, False, False),
        (None, False, None, True, True),
        (None, True, None, True, False),
        (None, True, None, False, True),
        (None, True, "", True, True),
        (None, True, "-1", True, True),
        (None, True, "0,1", True, False),
    ],
)
def test_which_processes_compute_on_cpu(monkeypatch, device, gpu_build, visible, devices, on_cpu):
    monkeypatch.setattr(runtime, "_installed_version", lambda name: "3.3.1" if gpu_build else None)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self / "nvidia0"] if devices else []))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert runtime._computes_on_cpu(device) is on_cpu


def test_threads_are_divided_among_local_processes(monkeypatch):
    monkeypatch.setattr(runtime, "cpu_cores", lambda: 12)
    for name in OURS + (runtime.OFF_SWITCH,):
        monkeypatch.delenv(name, raising=False)
    for processes, threads in (("1", "12"), ("5", "2"), ("40", "1")):
        monkeypatch.setenv("PADDLE_LOCAL_SIZE", processes)
        # setenv first, so that monkeypatch restores what _tune writes
        for name in OURS:
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        assert f"OMP_NUM_THREADS={threads}," in runtime._tune("cpu")


def test_local_processes(monkeypatch):
    for name in list(os.environ):
        if name.startswith("PADDLE_"):
            monkeypatch.delenv(name)
    assert runtime.local_processes() == 1
    monkeypatch.setenv("PADDLE_CURRENT_ENDPOINT", "10.0.0.2:6170")
    monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", "10.0.0.1:6170,10.0.0.2:6170,10.0.0.2:6171")
    assert runtime.local_processes() == 2
    monkeypatch.setenv("PADDLE_LOCAL_SIZE", "8")
    assert runtime.local_processes() == 8


def test_tuning_after_paddle_was_imported():
    """Paddle's own OMP_NUM_THREADS=1 is not the user's, and libraries already loaded are told."""
    code = """
import paddle, ctypes, json, os
x = paddle.ones([64, 64]) @ paddle.ones([64, 64])
before = os.environ["OMP_NUM_THREADS"]
from ernie35se import runtime
line = runtime.tune_cpu()
libraries = {path.rpartition("/")[2]: ctypes.CDLL(path) for path in runtime._mapped_libraries()}
mkl, omp = libraries["libmklml_intel.so"], libraries["libiomp5.so"]
print(json.dumps([before, os.environ["OMP_NUM_THREADS"], runtime.cpu_cores(), mkl.MKL_Get_Max_Threads(),
                  omp.omp_get_max_threads(), omp.kmp_get_blocktime()]))
"""
    before, variable, cores, mkl, omp, blocktime = tuned(code)
    assert before == "1"
    assert (variable, mkl, omp, blocktime) == (str(cores), cores, cores, 0)
    before, variable, cores, mkl, omp, blocktime = tuned(code, OMP_NUM_THREADS="1")
    assert (variable, mkl, omp) == ("1", 1, 1)


@pytest.mark.parametrize("users, yours", [({}, False), ({"OMP_NUM_THREADS": "1"}, True)])
def test_a_launched_process_tells_the_launchers_setting_from_the_users(users, yours):
    """paddle.distributed.launch imports Paddle, so its children inherit OMP_NUM_THREADS=1 whatever the user set."""
    launcher = f"""
import os, subprocess, sys
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.update(PADDLE_TRAINER_ID="0", PADDLE_LOCAL_SIZE="1")
subprocess.run([sys.executable, "-c", {TUNE!r}], check=True)
"""
    seen = tuned(launcher, **users)
    assert ("OMP_NUM_THREADS=1 (yours)" in seen["line"]) is yours
    assert seen["OMP_NUM_THREADS"] == ("1" if yours else str(seen["cores"]))


def test_second_call_does_nothing_and_logs_nothing(monkeypatch, caplog):
    monkeypatch.setattr(runtime, "_tuned", None)
    monkeypatch.setenv(runtime.OFF_SWITCH, "1")
    monkeypatch.setattr(runtime.logger, "propagate", True)
    with caplog.at_level(logging.INFO, logger="ernie35se"):
        first = runtime.tune_cpu()
        monkeypatch.delenv(runtime.OFF_SWITCH)
        assert runtime.tune_cpu() == first
    assert [record.getMessage() for record in caplog.records] == [first]


def test_log_is_shown_once_on_stderr():
    code = """
from ernie35se import runtime
runtime.log_to_stderr(); runtime.log_to_stderr()
runtime.tune_cpu(); runtime.tune_cpu()
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True)
    assert done.stdout == "" and done.stderr.count("CPU tuned:") == 1


def test_cores_respect_affinity():
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("no affinity on this system")
    one = next(iter(os.sched_getaffinity(0)))
    assert tuned(f"import os; os.sched_setaffinity(0, [{one}])\n" + TUNE)["OMP_NUM_THREADS"] == "1"


def fake_files(monkeypatch, files: dict[str, str]) -> None:
    monkeypatch.setattr(runtime, "_read", lambda path: files.get(str(path), ""))


def test_two_hardware_threads_are_one_core(monkeypatch):
    siblings = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}
    fake_files(monkeypatch, {
        f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": text for cpu, text in siblings.items()
    })  # fmt: skip
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    assert runtime.cpu_cores() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2}, raising=False)
    assert runtime.cpu_cores() == 1


@pytest.mark.parametrize(
    "files, cores",
    [
        ({}, 16),
        ({"/sys/fs/cgroup/cpu.max": "max 100000"}, 16),
        ({"/sys/fs/cgroup/cpu.max": "350000 100000"}, 3),
        ({"/sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ({"/proc/self/cgroup": "0::/a/b", "/sys/fs/cgroup/a/b/cpu.max": "400000 100000",
          "/sys/fs/cgroup/a/cpu.max": "200000 100000"}, 2),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 16),
        ({"/proc/self/cgroup": "4:cpu,cpuacct:/box\n0::/", "/sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "500000",
          "/sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000"}, 5),
    ],
)  # fmt: skip
def test_cores_respect_the_cgroup(monkeypatch, files, cores):
    fake_files(monkeypatch, files)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    assert runtime.cpu_cores() == cores


@pytest.mark.parametrize(
    "cpuinfo, amd",
    [
        ("vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx avx2 fma", True),
        ("vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx", False),
        ("vendor_id\t: GenuineIntel\nflags\t\t: fpu avx avx2", False),
        ("", False),
    ],
)
def test_the_math_path_is_for_amd_with_avx2(monkeypatch, cpuinfo, amd):
    fake_files(monkeypatch, {"/proc/cpuinfo": cpuinfo})
    assert runtime._is_amd_with_avx2() is amd


# ----------------------------------------------------------------------------------------------------- versions


def test_this_environment_is_right():
    runtime.check_versions()


def installed(monkeypatch, **versions: str | None) -> None:
    """Pretends that these versions are installed (None: not installed); a package's `-` is written `_`."""
    true_version = runtime._installed_version
    pretended = {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(
        runtime, "_installed_version", lambda name: pretended[name] if name in pretended else true_version(name)
    )


@pytest.mark.parametrize(
    "versions, words",
    [
        ({"paddlenlp": "2.8.0"}, ["paddlenlp 2.8.0", "==3.0.0b4", '-m pip install "paddlenlp==3.0.0b4"']),
        ({"numpy": "2.1.0"}, ["numpy 2.1.0", "==1.26.4"]),
        ({"protobuf": "7.0.0"}, ["protobuf 7.0.0", "<7", '"protobuf<7"']),
        ({"visualdl": None}, ["visualdl is not installed", "==2.5.3"]),
        ({"pandas": "3.0", "pyarrow": "21.0"}, ["pandas 3.0", "pyarrow 21.0", '"pyarrow<20" "pandas<3"']),
        ({"paddlepaddle": None, "paddlepaddle_gpu": None}, ['install "paddlepaddle==3.3.1"']),
        ({"paddlepaddle": None, "paddlepaddle_gpu": "3.1.0"}, ["paddlepaddle-gpu 3.1.0", '"paddlepaddle-gpu==3.3.1"']),
        ({"paddlepaddle": "3.3.1", "paddlepaddle_gpu": "3.3.1"}, ["both installed", "uninstall -y paddlepaddle"]),
    ],
)
def test_a_wrong_version_is_named_with_its_cure(monkeypatch, versions, words):
    installed(monkeypatch, **versions)
    with pytest.raises(ValueError) as error:
        runtime.check_versions()
    for word in words:
        assert word in str(error.value)


def test_the_gpu_build_counts_as_paddle(monkeypatch):
    installed(monkeypatch, paddlepaddle=None, paddlepaddle_gpu="3.3.1")
    runtime.check_versions()


def test_an_installed_package_reads_its_own_metadata(monkeypatch, tmp_path):
    """Without a checkout around it the same pins come from what pip recorded at the install."""
    required, builds = runtime._pins()
    recorded = required + [f'{pin}; extra == "{extra}"' for extra, pin in zip(("cpu", "gpu"), builds.values())]
    recorded.append('pytest<10,>=8; extra == "test"')
    monkeypatch.setattr(runtime.metadata, "requires", lambda name: recorded)
    monkeypatch.setattr(runtime, "__file__", str(tmp_path / "ernie35se" / "runtime.py"))
    assert runtime._pins() == (required, builds)
    assert set(builds) == {"paddlepaddle", "paddlepaddle-gpu"} and "numpy==1.26.4" in required
