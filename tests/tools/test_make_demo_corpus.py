"""The demo corpus: docstrings as Python itself has them, in an order that depends on names alone."""

import inspect
import json
import re
import sysconfig
from pathlib import Path

import make_demo_corpus
import pytest
from make_demo_corpus import collect, main, source_files

STDLIB = Path(sysconfig.get_paths()["stdlib"])
SOURCE = '''
"""Module.

    Indented."""
class A:
    """Class."""
    async def f(self):
        r"""Method \\d."""
        def inner():
            """Inner."""
    def g(self):
        """Class."""
if True:
    def late():
        """  Late.  """
def bare(): pass
"""no docstring"""
'''


@pytest.fixture
def library(tmp_path, monkeypatch) -> Path:
    root = tmp_path / "lib"
    for name, content in {
        "one.py": SOURCE,
        "pack/__init__.py": '"""Class."""\ndef f():\n    """Of the package."""',
        "pack/deep/two.py": '"""Dépôt 中文, long enough to be kept when few characters are asked for."""',
        "broken.py": "def (:",
        "bytes.py": b'"""\xff"""',
        "surrogate.py": '"""\\ud800"""',
        "test/three.py": '"""Never."""',
        "site-packages/four.py": '"""Never."""',
        "none.py": "x = 1",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.setattr(make_demo_corpus.sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    return root


def test_docstrings_of_a_made_up_library(library):
    modules, strings, unparsed = collect(library)
    assert modules["one"] == "Module.\n\nIndented.\n\nClass.\n\nMethod \\d.\n\nInner.\n\nLate."
    assert modules["pack"] == "Of the package."  # "Class." has come already
    assert set(modules) == {"one", "pack", "pack.deep.two"} and strings == 7
    assert unparsed == ["broken", "bytes"]


def test_the_real_library_agrees_with_its_own_doc():
    modules, _, unparsed = collect(STDLIB / "json")
    assert unparsed == []
    import json.decoder

    for thing in (json, json.load, json.decoder.JSONDecoder, json.decoder.JSONDecoder.raw_decode):
        assert (
            inspect.cleandoc(thing.__doc__).strip()
            in modules["" if thing in (json, json.load) else "decoder"]
        )


def test_the_real_library_is_large_and_without_tests():
    files = {path.relative_to(STDLIB).as_posix() for path in source_files(STDLIB)}
    assert len(files) > 300 and {"argparse.py", "json/__init__.py"} <= files
    assert not [
        name for name in files if re.search(r"(^|/)(test|tests|idlelib|lib2to3|site-packages)/", name)
    ]


def test_output_and_counts(library, tmp_path, capsys):
    out = tmp_path / "new" / "corpus.jsonl"
    assert main(["--output_path", str(out), "--min_chars", "20"]) == 0
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert {record["module"] for record in records} == {"one", "pack.deep.two"}
    assert all(len(record["text"]) >= 20 for record in records)
    said = capsys.readouterr().out
    assert (
        "2 documents" in said
        and "1 shorter than 20 characters" in said
        and "2 that could not be parsed" in said
    )
    first = out.read_bytes()
    main(["--output_path", str(out), "--min_chars", "20"])
    assert out.read_bytes() == first
    main(["--output_path", str(out), "--min_chars", "20", "--max_docs", "1"])
    assert out.read_bytes() == first.splitlines(keepends=True)[0]
    assert [path.name for path in out.parent.iterdir()] == ["corpus.jsonl"]


def test_nothing_long_enough_is_an_error(library, tmp_path):
    with pytest.raises(ValueError, match="lower --min_chars"):
        main(["--output_path", str(tmp_path / "a.jsonl"), "--min_chars", "100000"])
    assert not (tmp_path / "a.jsonl").exists()
    with pytest.raises(ValueError, match="is a folder"):
        main(["--output_path", str(tmp_path), "--min_chars", "20"])
