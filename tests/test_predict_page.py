"""docs/prediction.md stays true: its commands run as they stand, its flags, records and paths exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from predict_helpers import write_checkpoint

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "prediction.md").read_text(encoding="utf-8")
MODEL = "output/demo/model"
TESTED_ELSEWHERE = {"bash scripts/long_context.sh": "tests/tools/test_eval_long_context.py"}


def blocks(language: str, heading: str) -> list[str]:
    """Code blocks of one section."""
    section = PAGE[PAGE.index(f"\n## {heading}\n") :].split("\n## ")[1]
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[str]:
    return [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where a reader stands: the repository, by links, with what scripts/demo.sh leaves."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("ernie35se", "scripts", "tools", "configs"):
        (folder / name).symlink_to(ROOT / name)
    write_checkpoint(folder / MODEL, max_position_embeddings=4096)
    return folder


def run(folder: Path, command: list[str], **settings) -> subprocess.CompletedProcess:
    done = subprocess.run(command, cwd=folder, env=environment(**settings), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done


def environment(**settings) -> dict:
    """`python` is this one, and the package is found as after an install."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **settings}


def run_line(folder: Path, line: str, *more: str) -> subprocess.CompletedProcess:
    words = [*shlex.split(line), *more]
    return run(folder, [sys.executable, *words[1:]] if words[0] == "python" else words)


def test_every_section_with_commands_is_run_by_a_test():
    tested = {"Prediction", "Prompts from a file", "From Python", "A server", "Speed", "Train short, predict long"}
    heading, found = "Prediction", set()
    for line in PAGE.splitlines():
        heading = line.removeprefix("## ") if line.startswith("## ") else heading
        if re.match(r"```(bash|python)", line):
            found.add(heading)
    assert found == tested
    (block,) = blocks("bash", "Train short, predict long")
    for command in commands(block):
        assert Path(command.split()[1]).name in (ROOT / TESTED_ELSEWHERE[command]).read_text(encoding="utf-8")


def test_examples_and_prompts_from_a_file(folder):
    """With all the records of the page's table in one file."""
    first = re.search(r"```bash\n(.*?)```", PAGE, re.DOTALL)[1]
    assert "..." in run_line(folder, first).stdout
    assert len((folder / "prediction.json").read_text(encoding="utf-8").splitlines()) == 4

    records = re.findall(r"^\| `(\{.*\})` \|", PAGE, re.MULTILINE)
    assert len(records) == 3
    (folder / "prompts.jsonl").write_text("\n".join(records))
    (block,) = blocks("bash", "Prompts from a file")
    for line in commands(block):
        run_line(folder, line)
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [list(answer) for answer in answers] == [["src", "output"]] * 3
    whole = (folder / "answers.jsonl").read_bytes()
    (folder / "answers.jsonl").write_bytes(whole[:-5])
    run_line(folder, commands(block)[0], "--resume")
    assert (folder / "answers.jsonl").read_bytes() == whole


def test_the_predictor_from_python(folder):
    (block,) = blocks("python", "From Python")
    assert run(folder, [sys.executable, "-c", block]).stdout


def test_the_server_and_its_clients(folder):
    """The page's port may be taken here: the server gets a free one, and the clients are told."""
    (bash,), (python,) = blocks("bash", "A server"), blocks("python", "A server")
    serve, curl = commands(bash)
    pytest.importorskip("openai", reason="pip install openai")
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    process = subprocess.Popen([sys.executable, *shlex.split(serve)[1:], "--port", "0"], cwd=folder, env=environment(),
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)  # fmt: skip
    try:
        address = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())[0]
        told = [text.replace("http://127.0.0.1:8000", address) for text in (curl, python)]
        assert all(address in text for text in told)
        choice = json.loads(run(folder, shlex.split(told[0])).stdout)["choices"][0]
        assert choice["text"] and choice["finish_reason"] in ("stop", "length")
        ending = "\nprint(chunk.choices[0].finish_reason)"  # a random model's answer may be empty
        assert run(folder, [sys.executable, "-c", told[1] + ending]).stdout.endswith(("stop\n", "length\n"))
        for method, path in re.findall(r"^\| `(GET|POST) (/\S*)` \|", PAGE, re.MULTILINE):
            if method == "GET":
                assert run(folder, ["curl", "-sf", address + path]).stdout
    finally:
        process.terminate()
        assert process.wait(60) == 0
        process.stdout.close()


def test_the_benchmark(folder):
    """On the tiny model, each case once: what it prints is not a measurement."""
    (block,) = blocks("bash", "Speed")
    (line,) = commands(block)
    assert "| 1 | 2048 | 64 |" in run_line(folder, line, "--model", MODEL, "--repeats", "1").stdout


def test_other_formats(folder):
    section = PAGE[PAGE.index("## Other formats") :]
    predict, *tools = re.findall(r"^\| `python (.*?)` \|", section, re.MULTILINE)
    assert len(tools) == 2
    line = predict.replace("...", f"--model_name_or_path {MODEL}").replace("OUT", "single")
    run_line(folder, f"python {line}")
    for tool in tools:
        target = Path(tool.split()[0]).stem
        run_line(folder, f"python {tool.replace('MODEL', 'single').replace('OUT', target)}")
        assert (folder / target / "config.json").is_file()


def test_every_flag_of_the_page_exists():
    from ernie35se.prediction import PredictArguments, ServeArguments
    from ernie35se.predictor import Decoding

    known = {name for kind in (PredictArguments, ServeArguments, Decoding) for name in kind.__dataclass_fields__}
    named = set(re.findall(r"--(\w+)", PAGE)) - {"help"}
    assert named <= known and len(named) > 15
    defaults = re.findall(r"`--top_k (\S+) --top_p (\S+) --temperature (\S+) --seed (\S+)`", PAGE)
    decoding = Decoding()
    assert [(float(k), float(p), float(t), float(s)) for k, p, t, s in defaults] == [
        (decoding.top_k, decoding.top_p, decoding.temperature, decoding.seed)
    ]
