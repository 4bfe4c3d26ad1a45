"""Instruction data out of Python's standard library: from a function's signature to the first line of its
docstring.

    {"instruction": "def copyfile(src, dst, *, follow_symlinks=True):", "output": "Copy data from src ..."}

Writes train.jsonl and dev.jsonl into a folder. Modules, not functions, are divided between the two, by a hash
of their names, so that no module is in both. The sources are parsed, never imported; the same Python gives
the same files.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import sysconfig
import warnings
from pathlib import Path
from typing import Iterator, Sequence

from _common import make_parser, positive, run_tool, written_whole
from make_demo_corpus import module_name, source_files

EXAMPLE = "  python tools/make_demo_instructions.py --output_dir output/demo/instructions"
DEV_SHARE = 10  # one module of so many is held out
LONGEST_SIGNATURE, LONGEST_SUMMARY = 160, 160  # characters


def signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The `def` line as one line."""
    return f"def {function.name}({ast.unparse(function.args)}):"


def first_line(docstring: str) -> str:
    """The docstring's first paragraph up to its first full stop, as one line."""
    paragraph = " ".join(inspect.cleandoc(docstring).strip().split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", paragraph)[0]


def records(tree: ast.AST) -> Iterator[dict[str, str]]:
    """One record for each public function with a docstring."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.name.startswith("_"):
            continue
        text = first_line(ast.get_docstring(node, clean=False) or "")
        line = signature(node)
        if (
            len(text) >= 10
            and len(text) <= LONGEST_SUMMARY
            and len(line) <= LONGEST_SIGNATURE
            and text.isascii()
        ):
            yield {"instruction": line, "output": text}


def collect(root: Path) -> dict[str, list[dict[str, str]]]:
    """Records by split; an output that has come already is left out, so that dev asks for nothing that train
    tells."""
    made: dict[str, list[dict[str, str]]] = {"train": [], "dev": []}
    seen: set[str] = set()
    for path in source_files(root):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError, RecursionError):
            continue
        name = module_name(path, root)
        held_out = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % DEV_SHARE == 0
        for record in records(tree):
            if record["output"] not in seen:
                seen.add(record["output"])
                made["dev" if held_out else "train"].append(record)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLE)
    parser.add_argument(
        "--output_dir", required=True, help="the folder to write train.jsonl and dev.jsonl into"
    )
    parser.add_argument("--max_records", type=positive, help="at most so many records a split (default: all)")
    args = parser.parse_args(argv)
    made = collect(Path(sysconfig.get_paths()["stdlib"]))
    if not all(made.values()):
        raise ValueError(
            "this Python's standard library has no sources with docstrings; use one that ships them"
        )
    for split, found in made.items():
        kept = found[: args.max_records]
        with written_whole(Path(args.output_dir) / f"{split}.jsonl") as stream:
            stream.writelines(json.dumps(record) + "\n" for record in kept)
        print(f"{args.output_dir}/{split}.jsonl: {len(kept)} records")
    return 0


if __name__ == "__main__":
    run_tool(main)
