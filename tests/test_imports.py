"""The house's rules about imports: which way they point, what stays light, and what no file may hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ernie35se"

# A module imports from its own layer and the layers below it. `training` stands for all modules inside it.
LAYERS = [
    {"runtime", "positions", "configuration", "tokenizer", "data"},
    {"cpu_ops"},
    {"linear"},
    {"attention", "norm", "parallel", "loss", "rope", "conversion", "weight_files", "stages", "generation"},
    {"modeling", "modeling_pipe"},
    {"auto", "peft"},
    {"training", "predictor", "prediction", "server"},
    {"scripts", "tools"},
]
# What these may import, of the package and from outside the standard library: nothing else.
ONLY = {
    "positions": {"numpy"},
    "data": {"numpy", "fast_dataindex", "zstandard", "jinja2", "data", "positions"},
    "conversion": {"numpy", "configuration"},
    "runtime": {"packaging"},
}
# What a function of it may import besides: paddle.concat, to join what are Paddle's tensors already.
ONLY_INSIDE_FUNCTIONS = {"conversion": {"paddle"}}
ONLY_IMPORTER = {"fleet": "parallel", "fused_ln": "norm"}


def imported_names(tree: ast.AST, package: str) -> set[str]:
    """Every dotted name that the tree imports, anywhere in it; `from a import b` gives `a.b`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join(parents + ([node.module] if node.module else []))
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def part_of(name: str) -> str | None:
    """`ernie35se.data.indexed.open_tokens` -> `data`; None for names outside the package and for the package itself."""
    top, _, rest = name.partition(".")
    part = rest.partition(".")[0]
    return part if top == "ernie35se" and part and not part.startswith("__") else None


def layer(part: str) -> int:
    places = [number for number, parts in enumerate(LAYERS) if part in parts]
    assert places, f"{part} has no place in LAYERS of {__file__}: give it one"
    return places[0]


def without_functions(tree: ast.Module) -> list[ast.stmt]:
    return [node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]


def faults(source: str, part: str, package: str = "ernie35se") -> list[str]:
    """What in the source of a module of that part breaks the house's rules."""
    found = []
    tree = ast.parse(source)
    names = imported_names(tree, package)
    at_import = imported_names(ast.Module(without_functions(tree), []), package)
    for name in names:
        target = part_of(name)
        if target is not None and layer(target) > layer(part):
            found.append(f"imports {name}, which is above it")
        top = name.partition(".")[0]
        if part in ONLY and (top != "ernie35se" or target is not None):
            allowed = ONLY[part] | (set() if name in at_import else ONLY_INSIDE_FUNCTIONS.get(part, set()))
            if (target or top) not in allowed | sys.stdlib_module_names:
                found.append(f"imports {name}, but may import {sorted(allowed)} only")
    touched = {word for name in names for word in name.split(".")}
    touched |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for name, owner in ONLY_IMPORTER.items():
        if name in touched and part != owner:
            found.append(f"uses {name}, which {owner}.py alone may")
    if part in LAYERS[-1] or part == "runtime":
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "print":
            found.append(f"line {node.lineno}: print")
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
            found.append(f"line {node.lineno}: os.{node.attr}")
    found += [f"imports {name}" for name in names if name in ("os.environ", "os.getenv", "os.putenv")]
    return found


def source_files() -> list[Path]:
    folders = [PACKAGE, ROOT / "scripts", ROOT / "tools"]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


@pytest.mark.parametrize("path", source_files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_one_way(path: Path):
    source = path.read_text(encoding="utf-8")
    folder = path.parent.relative_to(ROOT).as_posix()
    if path == PACKAGE / "__init__.py":
        assert imported_names(ast.parse(source), "ernie35se") == set()
        return
    inside = path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT)
    part = inside.parts[0].removesuffix(".py")
    assert faults(source, part, folder.replace("/", ".")) == []


@pytest.mark.parametrize(
    "part, source",
    [
        ("configuration", "from ernie35se.modeling import Ernie35ForCausalLM"),
        ("attention", "from .training import trainer"),
        ("data", "def f():\n    import paddle"),
        ("data", "from ernie35se.configuration import Ernie35Config"),
        ("positions", "import paddlenlp.utils.log"),
        ("conversion", "import paddle"),
        ("conversion", "from ernie35se import parallel"),
        ("modeling", "from paddle.distributed import fleet"),
        ("modeling", "import paddle\npaddle.distributed.fleet.init()"),
        ("modeling", "import paddle.distributed.fleet.meta_parallel as mp"),
        ("attention", "import fused_ln"),
        ("modeling", "import os\nif os.environ.get('X'):\n    pass"),
        ("modeling", "from os import environ"),
        ("modeling", "import os\nos.getenv('X')"),
        ("training", "print('done')"),
        ("training", "log = print"),
    ],
)
def test_each_rule_can_fail(part: str, source: str):
    assert faults(source, part) != []


def test_allowed_sources_pass():
    assert faults("from ernie35se.configuration import Ernie35Config\nimport numpy", "conversion") == []
    assert faults("def join():\n    import paddle", "conversion") == []
    assert faults("from . import index_maps\nfrom .indexed import open_tokens", "data", "ernie35se.data") == []
    assert faults("from paddle.distributed import fleet", "parallel") == []
    assert faults("import fused_ln", "norm") == []
    assert faults("import os\nos.environ['X'] = 'y'\nprint(1)", "runtime") == []
    assert faults("from ernie35se.training.arguments import parse_pretrain_arguments\nprint(1)", "scripts") == []


def test_light_modules_import_neither_paddle_nor_paddlenlp():
    light = [PACKAGE / "__init__.py", PACKAGE / "runtime.py", PACKAGE / "positions.py", *PACKAGE.glob("data/*.py")]
    modules = sorted(path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in light)
    modules = [module.removesuffix(".__init__") for module in modules]
    code = f"""
import importlib, sys
for module in {modules}:
    importlib.import_module(module)
    heavy = sorted({{"paddle", "paddlenlp", "torch", "transformers", "datasets", "matplotlib"}} & set(sys.modules))
    assert not heavy, f"importing {{module}} imports {{heavy}}"
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------ tracked files

MACHINE_PATH = re.compile(r"(?<![\w.$}~-])/(?:home|root|work|Users|usr/local/lib)/[\w.]")
# PaddlePaddle's own index is where its GPU builds are, so the documentation may name it.
REGISTRY_HOST = re.compile(r"(?:pypi|pythonhosted|npmjs|debian|anaconda|conda)\.(?:org|com|io)\b|://[\w.-]*/(?:pypi|simple)\b")


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_no_tracked_file_names_this_machine_or_a_package_registry():
    here = {str(ROOT), sys.prefix, str(Path.home())} - {"/", "/root", "/usr"}
    found = []
    for path in tracked_files():
        text = path.read_bytes().decode("utf-8", errors="ignore") if path.is_file() else ""
        for pattern in (MACHINE_PATH, REGISTRY_HOST):
            found += [f"{path.name}: {match.group()}" for match in pattern.finditer(text)]
        found += [f"{path.name}: {place}" for place in here if place in text]
    assert found == []


def test_those_patterns_can_match():
    assert MACHINE_PATH.search('open("/' + 'home/someone/x")')
    assert not MACHINE_PATH.search("./work/x a/root/b $HOME/root/c")
    assert REGISTRY_HOST.search("https://py" + "pi.org/simple")
    assert REGISTRY_HOST.search("https://mirror.example.edu/" + "simple")
    assert not REGISTRY_HOST.search("https://www.paddlepaddle.org.cn/packages/stable/cu126/")
