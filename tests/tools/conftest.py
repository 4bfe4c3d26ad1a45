"""What the tests of the tools share: a tiny tokenizer, a corpus and a way to run a tool as users do."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

from train_tokenizer import main as train_main  # noqa: E402

TRICKY = [
    "plain words, twice over: plain words",
    "a <s> in the text </s> and <unk> <0x41>",
    "new\nline\r\nand\ttab\x00nul   runs of   spaces  ",
    "中文也可以。 emoji 🙂 é ü ñ \u2028 \u2029 \x85",
    "def f(x):\n    return x + 1234567890\n",
    "x",
]


def module_texts() -> list[str]:
    """Some hundred pieces of real text that every Python has: the paragraphs of two modules' sources."""
    import argparse
    import difflib

    text = inspect.getsource(argparse) + inspect.getsource(difflib)
    return [part for part in text.split("\n\n") if part.strip()]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return module_texts()


@pytest.fixture(scope="session")
def tricky() -> list[str]:
    return list(TRICKY)


@pytest.fixture(scope="session")
def write_jsonl():
    def write(path: Path, documents: list[str]) -> Path:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory, write_jsonl, texts) -> Path:
    """Folder with a tokenizer of 600 pieces."""
    folder = tmp_path_factory.mktemp("tokenizer")
    corpus = write_jsonl(folder / "corpus.jsonl", texts)
    train_main(["--input_path", str(corpus), "--output_dir", str(folder / "t"), "--vocab_size", "600"])
    return folder / "t"


@pytest.fixture(scope="session")
def tool():
    """tool("inspect_data", "--flag", value, ...) -> CompletedProcess with stdout and stderr as text."""

    def run(name: str, *args, timeout: float = 60) -> subprocess.CompletedProcess:
        command = [sys.executable, str(TOOLS / f"{name}.py"), *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout)

    return run
