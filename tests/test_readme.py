"""The documentation stays true: its settings table, its links, its commands, in both languages.

To renew the settings table after a change of arguments.py: python tests/test_readme.py
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TRANSLATED = [(ROOT / "README.md", ROOT / "docs" / "README_zh.md")]
BEGIN, END = "<!-- settings: begin -->\n", "<!-- settings: end -->"

# What a test cannot run as it stands: it installs, or starts the test suite inside itself.
NOT_RUN = ("python3 -m venv", ".venv/bin/python -m pip", "bash scripts/test.sh")


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """Each command of a page's bash blocks on one line; comment lines left out."""
    found = []
    for block in code_blocks(page, "bash"):
        lines = block.replace("\\\n", " ").splitlines()
        found += [re.sub(r"\s+", " ", line).strip() for line in lines if line.strip() and not line.startswith("#")]
    return found


def settings_markdown() -> str:
    from ernie35se.training.arguments import settings_table

    parts = []
    for group, rows in settings_table().items():
        parts.append(f"| {group} | default | |\n|---|---|---|\n")
        parts += [f"| `{flag}` | {f'`{default}`' if default else ''} | {text} |\n" for flag, default, text in rows]
        parts.append("\n")
    return "".join(parts)


def test_the_settings_table_is_that_of_the_code():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    written = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    assert written == settings_markdown(), "run: python tests/test_readme.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [t for t in targets if not t.startswith("https://") and not (page.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("original, translation", TRANSLATED)
@pytest.mark.parametrize("language", ["bash", "python"])
def test_both_languages_have_the_same_commands(original, translation, language):
    assert code_blocks(original, language) == code_blocks(translation, language)


def test_python_examples_run(tmp_path):
    blocks = code_blocks(ROOT / "README.md", "python")
    assert blocks
    for block in blocks:
        subprocess.run([sys.executable, "-c", block], cwd=ROOT, check=True, timeout=300)


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    """A short demo run. The script makes .venv, so it is run only where it has been made (scripts/test.sh does)."""
    if not (ROOT / ".venv" / "installed").is_file():
        pytest.skip("there is no .venv made by scripts/test.sh")
    folder = tmp_path_factory.mktemp("demo")
    short = "--max_steps 4 --save_steps 2 --eval_steps 2 --eval_iters 1 --max_seq_length 64 --warmup_steps 1".split()
    run = _run(["bash", "scripts/demo.sh", *short], folder)
    assert "unigram" in run.stdout and (folder / "model" / "curves.png").is_file()
    again = _run(["bash", "scripts/demo.sh", *short], folder)
    assert again.stdout.count("reusing") >= 4
    return folder


def _run(command, demo_folder: Path, **variables):
    environment = {**os.environ, "ERNIE35SE_DEMO_DIR": str(demo_folder), **variables}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, f"{command}\n{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
    return run


def test_the_commands_run(demo, tmp_path):
    """Every command of the README: the demo's own files stand for ./data and ./tokenizer; what would train for hours, or
    wants a GPU, is run with --dry_run."""
    done = 0
    for command in commands(ROOT / "README.md"):
        if command.startswith(NOT_RUN) or command == "bash scripts/demo.sh":  # the fixture has run it
            continue
        command = command.replace("output/demo/again", str(tmp_path / "again")).replace("output/demo", str(demo))
        command = re.sub(r"\./data\b", str(demo / "corpus"), command).replace("./tokenizer", str(demo / "tokenizer"))
        command = command.replace("./output", str(tmp_path / "output"))
        if "demo_cpu.json" in command:  # names output/demo inside
            command += f" --input_dir {demo}/corpus --tokenizer_name_or_path {demo}/tokenizer --output_dir {demo}/model"
        if ("run_pretrain" in command or "launch/" in command) and "--dry_run" not in command:
            command += " --dry_run"
        if command.startswith("visualdl"):
            assert shutil.which("visualdl", path=str(Path(sys.executable).parent))
            continue
        _run(["bash", "-c", command], demo)
        done += 1
    assert done >= 4


def test_every_configuration_is_mentioned():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    missing = [str(p.relative_to(ROOT)) for p in (ROOT / "configs" / "pretrain").glob("*.json") if p.name not in text]
    assert not missing


def _renew() -> None:
    page = ROOT / "README.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(text[: text.index(BEGIN) + len(BEGIN)] + settings_markdown() + text[text.index(END) :], encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    _renew()
