"""Collect the docstrings of Python's standard library into a JSONL corpus: text that every machine has.

One document a module, {"text": ..., "module": ...}: the docstrings of the module, its classes and its
functions in the order of the source, separated by blank lines. A docstring that has come already is left out.
The sources are parsed, never imported. Documents are ordered by a hash of the module's name, so that any
stretch of them, such as the last ones that training holds out (--split), is a fair sample, and the same
Python gives the same file.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import platform
import sysconfig
import warnings
from pathlib import Path
from typing import Iterator, Sequence

from _common import make_parser, positive, run_tool, written_whole

# Tests, generated code and whatever is installed on top of the standard library.
SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
EXAMPLE = "  python tools/make_demo_corpus.py --output_path data/demo/corpus.jsonl"


def source_files(root: Path) -> list[Path]:
    """The standard library's .py files, sorted."""
    return sorted(
        path for path in root.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(root).parts)
    )


def docstrings(tree: ast.AST) -> Iterator[str]:
    """Cleaned docstrings of a syntax tree, in the order of the source."""
    if isinstance(tree, DOCUMENTED) and (text := ast.get_docstring(tree, clean=False)):
        yield inspect.cleandoc(text).strip()
    for child in ast.iter_child_nodes(tree):
        yield from docstrings(child)


def module_name(path: Path, root: Path) -> str:
    """lib/json/__init__.py -> "json"."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def collect(root: Path) -> tuple[dict[str, str], int, list[str]]:
    """({module: its docstrings joined}, how many docstrings, modules that this Python cannot parse)."""
    seen: set[str] = set()
    modules: dict[str, str] = {}
    unparsed = []
    for path in source_files(root):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in old sources
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError, RecursionError):
            unparsed.append(module_name(path, root))
            continue
        new = [text for text in dict.fromkeys(docstrings(tree)) if text and text not in seen]
        new = [text for text in new if text.isascii() or _is_unicode(text)]
        seen.update(new)
        if new:
            modules[module_name(path, root)] = "\n\n".join(new)
    return modules, len(seen), unparsed


def _is_unicode(text: str) -> bool:
    return not any(0xD800 <= ord(character) <= 0xDFFF for character in text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLE)
    parser.add_argument(
        "--output_path", required=True, help="the .jsonl file to write (replaced if it exists)"
    )
    parser.add_argument(
        "--min_chars", type=positive, default=100, help="leave out shorter documents (default: %(default)s)"
    )
    parser.add_argument("--max_docs", type=positive, help="write at most so many documents (default: all)")
    args = parser.parse_args(argv)

    root = Path(sysconfig.get_paths()["stdlib"])
    modules, strings, unparsed = collect(root)
    long_enough = [name for name in modules if len(modules[name]) >= args.min_chars]
    chosen = sorted(long_enough, key=lambda name: hashlib.sha256(name.encode()).digest())[: args.max_docs]
    if not chosen:
        raise ValueError(
            f"{root}: no docstrings of {args.min_chars} characters or more there ({len(modules)} modules "
            "with any); lower --min_chars, or use a Python that ships its library as source"
        )
    size = 0
    with written_whole(args.output_path) as output:
        for name in chosen:
            line = json.dumps({"text": modules[name], "module": name}, ensure_ascii=False)
            size += len(modules[name])
            output.write(line + "\n")
    print(
        f"{args.output_path}: {len(chosen)} documents, {size / 1e6:.2f} million characters, from Python "
        f"{platform.python_version()} ({strings} docstrings in {len(modules)} modules; left out: "
        f"{len(modules) - len(long_enough)} shorter than {args.min_chars} characters, "
        f"{len(long_enough) - len(chosen)} above --max_docs, {len(unparsed)} that could not be parsed)"
    )
    return 0


if __name__ == "__main__":
    run_tool(main)
