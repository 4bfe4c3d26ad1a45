"""What a process needs before Paddle computes: the right versions, and on CPU the fast math path.

    check_versions()   the installed packages are those that setup.py pins
    tune_cpu()         threads and MKL's code path, for a process that computes on CPU
    log_to_stderr()    shows what this package logs

The scripts call these first, before they import Paddle: the module itself needs the standard library only. It is the
only one of the package that reads or writes environment variables.
"""

from __future__ import annotations

import ast
import ctypes
import logging
import os
import re
import sys
from importlib import metadata
from pathlib import Path

logger = logging.getLogger("ernie35se")

OFF_SWITCH = "ERNIE35SE_NO_TUNE"
CPU_OPS_SWITCH = "ERNIE35SE_CPU_OPS"

_tuned: str | None = None  # what the first call of tune_cpu did


def log_to_stderr() -> None:
    """Shows the package's log from level INFO on stderr, unless the program set up logging itself."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)8s] - %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


# ---------------------------------------------------------------------------------------------------------- CPU


def tune_cpu(device: str | None = None) -> str:
    """Gives a CPU process the fast path, threads and MKL's code path; logs and returns one line that says so.

    Call it before Paddle's first matmul, best before `import paddle`; further calls change nothing. What the user
    set in the environment stays as it is, and `ERNIE35SE_NO_TUNE=1` turns all of it off.

    - `OMP_NUM_THREADS` = this process's cores / processes on this machine. (Paddle's import would make it 1.)
    - `KMP_BLOCKTIME=0`: threads sleep between parallel regions, so they do not slow what runs there.
    - `MKL_DEBUG_CPU_TYPE=5`, on AMD processors with AVX2 only: the MKL in Paddle's wheel otherwise takes its slowest
      path there. (On Intel it chooses rightly by itself.)

    The allocator stays as it is: keeping freed memory (mallopt M_MMAP_MAX=0, no trimming) saved 13 % of a step's CPU
    time at 2 x 256 tokens, but took 45 % more memory at 1 x 2048, and no estimate of memory would hold.

    Args:
        device: "cpu", or "gpu..." for a process that leaves the computing to a GPU and is not touched;
            None finds out from the installed Paddle and the visible GPUs.
    """
    global _tuned
    if _tuned is None:
        _tuned = _tune(device)
        logger.info(_tuned)
    return _tuned


def wants_cpu_ops() -> bool:
    """Whether the CPU ops (cpu_ops.py) may run: unless ERNIE35SE_CPU_OPS=0."""
    return os.environ.get(CPU_OPS_SWITCH, "1") != "0"


def module_path(spec) -> str:
    """Where a module comes from, by its import spec; a folder without __init__.py has no file, only search locations."""
    if spec is None:
        return "(no path)"
    return spec.origin if spec.origin not in (None, "namespace") else ", ".join(spec.submodule_search_locations or [])


def last_words(error: Exception) -> str:
    """The error's own words; its last line, because Paddle puts a stack of C++ calls before it."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1].strip()}" if lines else type(error).__name__


def _tune(device: str | None) -> str:
    if os.environ.get(OFF_SWITCH, "0") not in ("", "0"):
        return f"CPU left as it is ({OFF_SWITCH}={os.environ[OFF_SWITCH]})"
    if not _computes_on_cpu(device):
        return "CPU left as it is: this process computes on a GPU"
    settings = {"OMP_NUM_THREADS": str(max(1, cpu_cores() // local_processes())), "KMP_BLOCKTIME": "0"}
    if _is_amd_with_avx2():
        settings["MKL_DEBUG_CPU_TYPE"] = "5"
    done = []
    for name, value in settings.items():
        if _is_users_own(name):
            done.append(f"{name}={os.environ[name]} (yours)")
        else:
            os.environ[name] = value
            done.append(f"{name}={value}")
    if "paddle" in sys.modules:
        _set_loaded_threads(os.environ["OMP_NUM_THREADS"])
    return f"CPU tuned: {', '.join(done)}; {OFF_SWITCH}=1 turns this off"


def _computes_on_cpu(device: str | None) -> bool:
    """Whether the process computes on CPU: as told, else because its Paddle has no CUDA or it sees no GPU."""
    if device is not None:
        return device.split(":")[0] == "cpu"
    if _installed_version("paddlepaddle-gpu") is None:
        return True
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return True
    return not any(Path("/dev").glob("nvidia[0-9]*"))


def cpu_cores() -> int:
    """Physical cores that this process may use: those of its affinity mask, capped by its cgroup's CPU quota.

    Two hardware threads of one core share its multiply units, so a matrix product gains nothing from the second.
    """
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    topology = Path("/sys/devices/system/cpu")
    cores = {_read(topology / f"cpu{cpu}/topology/thread_siblings_list") or f"cpu{cpu}" for cpu in cpus}
    quota = _cgroup_quota()
    return max(1, len(cores) if quota is None else min(len(cores), int(quota)))


def _cgroup_quota() -> float | None:
    """CPUs' worth of time that the cgroup grants, None without a limit. A container sees its own group at the root."""
    group = _read(Path("/proc/self/cgroup"))
    quotas = []
    v2 = re.search(r"^0::(/.*)$", group, re.MULTILINE)
    folder = Path("/sys/fs/cgroup") / (v2.group(1).lstrip("/") if v2 else "")
    for parent in (folder, *folder.parents):  # a group is bound by the limits of those above it too
        quota, _, period = _read(parent / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    v1 = re.search(r"^\d+:(?:[^:]*,)?cpu(?:,[^:]*)?:(/.*)$", group, re.MULTILINE)
    for folder in (Path("/sys/fs/cgroup/cpu") / (v1.group(1).lstrip("/") if v1 else ""), Path("/sys/fs/cgroup/cpu")):
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():  # no limit is "-1"
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def local_processes() -> int:
    """Processes of this run on this machine, as `paddle.distributed.launch` (or `spawn`) tells its children."""
    if os.environ.get("PADDLE_LOCAL_SIZE", "").isdigit():
        return max(1, int(os.environ["PADDLE_LOCAL_SIZE"]))
    host = os.environ.get("PADDLE_CURRENT_ENDPOINT", "").rpartition(":")[0]
    endpoints = os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")
    return max(1, sum(bool(host) and endpoint.rpartition(":")[0] == host for endpoint in endpoints))


def _is_users_own(name: str) -> bool:
    """Whether the user set the variable.

    `import paddle` sets OMP_NUM_THREADS=1 where it is unset, and a launched process inherits that from its launcher,
    so a 1 counts as the user's only if it was there when the first Python process of the two was started.
    """
    if name not in os.environ:
        return False
    if name != "OMP_NUM_THREADS" or os.environ[name] != "1":
        return True
    launched = "PADDLE_TRAINER_ID" in os.environ
    if "paddle" not in sys.modules and not launched:
        return True
    origins = [os.getpid(), os.getppid()] if launched else [os.getpid()]
    return all(_started_with(process, name) for process in origins)


def _started_with(process: int, name: str) -> bool:
    """Whether the process was started with the variable (/proc keeps the environment of the start)."""
    return any(entry.startswith(f"{name}=") for entry in _read(Path(f"/proc/{process}/environ")).split("\0"))


def _is_amd_with_avx2() -> bool:
    info = _read(Path("/proc/cpuinfo"))
    return "AuthenticAMD" in info and re.search(r"^flags\s*:.*\bavx2\b", info, re.MULTILINE) is not None


def _set_loaded_threads(threads: str) -> None:
    """Tells the math libraries already loaded: they read their variables once."""
    if not threads.isdigit():
        return  # OpenMP also knows lists, "2,1": the library has read its user's list itself
    for path in _mapped_libraries():
        name = Path(path).name
        if name.startswith("libmklml"):
            ctypes.CDLL(path).MKL_Set_Num_Threads(int(threads))
        elif name.startswith(("libiomp5", "libgomp")):
            ctypes.CDLL(path).omp_set_num_threads(int(threads))
            if name.startswith("libiomp5"):
                ctypes.CDLL(path).kmp_set_blocktime(int(os.environ["KMP_BLOCKTIME"]))


def _mapped_libraries() -> set[str]:
    return {line.split(maxsplit=5)[5] for line in _read(Path("/proc/self/maps")).splitlines() if ".so" in line}


def _read(path: Path) -> str:
    """The file's text, stripped; empty where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


# ----------------------------------------------------------------------------------------------------- versions


def check_versions() -> None:
    """Compares the installed packages with the pins of setup.py.

    Raises:
        ValueError: names each package that is missing or of another version, the version found, the one needed,
            and the command that mends it.
    """
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        raise ValueError(f"the package packaging is not installed: {_pip('install packaging')}") from None
    required, builds = _pins()
    faults, mend = [], []
    for text in required + [_chosen_paddle(builds)]:
        requirement = Requirement(text)
        found = _installed_version(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            faults.append(f"{requirement.name} {found or 'is not installed'}, needed {requirement.specifier}")
            mend.append(f'"{text}"')
    if faults:
        raise ValueError(
            f"the installed packages are not those that ernie35se works with: {'; '.join(faults)}. "
            f"Mend it with: {_pip('install ' + ' '.join(mend))}"
        )


def _pins() -> tuple[list[str], dict[str, str]]:
    """The requirements, and the one for each build of Paddle: {"paddlepaddle": "paddlepaddle==3.3.1", ...}.

    A checkout's own setup.py is read where there is one: after `git pull` it is newer than what was installed.
    """
    checkout = Path(__file__).resolve().parents[1] / "setup.py"
    if checkout.is_file():
        literals = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in ast.parse(checkout.read_text(encoding="utf-8")).body
            if isinstance(node, ast.Assign) and node.targets[0].id in ("REQUIREMENTS", "EXTRAS")
        }
        required, paddles = literals["REQUIREMENTS"], literals["EXTRAS"]["cpu"] + literals["EXTRAS"]["gpu"]
    else:
        lines = [line.partition(";") for line in metadata.requires("ernie35se")]
        required = [text.strip() for text, _, marker in lines if "extra" not in marker]
        paddles = [text.strip() for text, _, marker in lines if re.search(r"extra == .(cpu|gpu)", marker)]
    return required, {re.match(r"[\w-]+", text).group(): text for text in paddles}


def _chosen_paddle(builds: dict[str, str]) -> str:
    """The pin of the build of Paddle that is installed, of the CPU's where there is none."""
    installed = [name for name in builds if _installed_version(name) is not None]
    if len(installed) > 1:
        raise ValueError(
            f"{' and '.join(installed)} are both installed and overwrite each other's files. Mend it with: "
            f"{_pip('uninstall -y ' + ' '.join(installed))}, then install one of: {', '.join(builds.values())}"
        )
    return builds[installed[0]] if installed else builds["paddlepaddle"]


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _pip(command: str) -> str:
    return f"{sys.executable} -m pip {command}"
