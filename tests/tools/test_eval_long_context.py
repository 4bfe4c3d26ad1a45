"""eval_long_context.py beside numpy in float64, and the script that trains the two models it compares."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import eval_long_context  # noqa: E402
import make_demo_corpus  # noqa: E402
from predict_helpers import write_checkpoint  # noqa: E402

from ernie35se.data.indexed import TokenFileWriter  # noqa: E402
from ernie35se.modeling import Ernie35ForCausalLM  # noqa: E402

POSITIONS = {  # of 256, by scheme and length
    ("interval", 16): np.arange(1, 17) * 8 - 1,
    ("interval", 64): np.arange(1, 65) * 4 - 1,  # 8 would end at 511
    ("plain", 16): np.arange(16),
    ("plain", 64): np.arange(64),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("long") / "base")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """(prefix, the second of its two documents, which the split 50,50,0 holds out)."""
    prefix = tmp_path_factory.mktemp("long_corpus") / "corpus"
    documents = np.random.default_rng(0).integers(3, 320, (2, 300))
    with TokenFileWriter(str(prefix), 320) as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix), documents[1]


def numpy_losses(folder, row, length, scheme):
    """Of each token but the first, by one window at a time."""
    model = Ernie35ForCausalLM.from_pretrained(str(folder))
    model.eval()
    losses = []
    for start in range(0, len(row) - 1, length):
        ids, where = paddle.to_tensor(row[None, start : start + length]), paddle.to_tensor(POSITIONS[scheme, length])
        (scores,) = model(ids, position_ids=where)
        wide = scores.numpy()[0].astype(np.float64)
        log_p = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
        losses += [-log_p[t, row[start + t + 1]] for t in range(length)]
    return losses


def test_perplexity_at_several_lengths(folder, corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(eval_long_context, "TOKENS_AT_A_TIME", 40)  # two windows of 16, one of 64
    plain = write_checkpoint(tmp_path / "plain", enable_random_position_ids=False, max_position_embeddings=32)
    words = [str(folder), str(plain), "--input_prefix", corpus[0], "--split", "50,50,0", "--train_length", "16",
             "--multiples", "1", "2", "4", "--windows", "2", "--output_dir", str(tmp_path / "out")]  # fmt: skip
    assert eval_long_context.main(words) == 0
    printed = capsys.readouterr().out
    assert "plain: has 32 positions; longer windows are left out" in printed
    assert printed.count("| base | interval |") == printed.count("| plain | plain |") == 2
    curves = json.loads((tmp_path / "out" / "long_context.json").read_text())["curves"]
    assert [(c["name"], c["trained"], c["scheme"], list(c["all"]), list(c["last"])) for c in curves] == [
        ("base", "random", "interval", *[["16", "32", "64"]] * 2), ("base", "random", "plain", *[["16", "32", "64"]] * 2),
        ("plain", "plain", "interval", *[["16", "32"]] * 2), ("plain", "plain", "plain", *[["16", "32"]] * 2),
    ]  # fmt: skip
    assert (tmp_path / "out" / "long_context.png").read_bytes().startswith(b"\x89PNG")

    rows = eval_long_context.held_out_tokens(corpus[0], "50,50,0", [16, 32, 64], 2)
    for curve in curves[:2]:
        for length in (16, 64):
            losses = np.array([numpy_losses(folder, row, length, curve["scheme"]) for row in rows])
            assert losses.shape == (2, 64)
            assert curve["all"][str(length)] == pytest.approx(np.exp(losses.mean()), rel=1e-4)
            # 4 tokens of each row, those before its end, however many are read before them
            assert curve["last"][str(length)] == pytest.approx(np.exp(losses[:, 60:].mean()), rel=1e-4)


def test_held_out_windows_never_repeat_a_token(corpus):
    prefix, document = corpus
    stream = document.tolist()
    for windows in (2, 4, 1000):
        rows = eval_long_context.held_out_tokens(prefix, "50,50,0", [16, 64], windows)
        starts = [next(at for at in range(0, 300, 64) if stream[at : at + 65] == row) for row in rows.tolist()]
        assert len(set(starts)) == len(starts) == min(windows, 4)  # 4 x 64 + 1 of 300 tokens
    with pytest.raises(ValueError, match="do not divide into windows of 32"):
        eval_long_context.held_out_tokens(prefix, "50,50,0", [16, 32, 48], 2)
    with pytest.raises(ValueError, match="1 documents hold 300 tokens; expected at least 301"):
        eval_long_context.held_out_tokens(prefix, "50,50,0", [300], 2)
    with pytest.raises(ValueError, match="holds no documents"):
        eval_long_context.held_out_tokens(prefix, "100,0,0", [16], 2)


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The repository by links, with a .venv that is installed already: the Python that runs this test."""
    for name in ("configs", "ernie35se", "scripts", "tools", "setup.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    executable(tmp_path / ".venv" / "bin" / "python", f'#!/bin/bash\nexec {shlex.quote(sys.executable)} "$@"\n')
    wanted = f"# .[cpu,test] at {tmp_path}\n{(ROOT / 'setup.py').read_text()}"
    (tmp_path / ".venv" / "installed").write_text(wanted)
    return tmp_path


def long_context(checkout: Path, *flags: str) -> str:
    settings = {"ERNIE35SE_LONG_CONTEXT_DIR": str(checkout / "out"), "ERNIE35SE_FUSED_LN": "0", "ERNIE35SE_CPU_OPS": "0"}
    done = subprocess.run(["bash", str(checkout / "scripts" / "long_context.sh"), *flags], cwd=checkout, text=True,
                          env={**os.environ, **settings}, capture_output=True, timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_script_trains_both_models_and_compares_them(checkout):
    """With two steps each on a tenth of the text; a second run trains nothing and measures the same."""
    corpus = str(checkout / "out" / "corpus.jsonl")
    assert make_demo_corpus.main(["--output_path", corpus, "--max_docs", "50"]) == 0
    flags = ["--max_steps", "2", "--eval_steps", "2", "--save_steps", "2", "--eval_iters", "1", "--warmup_steps", "1"]
    first = long_context(checkout, *flags)
    out = checkout / "out"
    configs = [json.loads((out / name / "config.json").read_text()) for name in ("random", "plain")]
    assert [config.pop("enable_random_position_ids") for config in configs] == [True, False]
    assert configs[0] == configs[1]
    curves = json.loads((out / "long_context.json").read_text())["curves"]
    assert [(curve["name"], list(curve["all"])) for curve in curves] == [
        (name, ["64", "128", "256", "512"]) for name in ("random", "random", "plain", "plain")
    ]
    assert (out / "long_context.png").is_file()
    shutil.rmtree(out / "random" / "runs")
    again = long_context(checkout, *flags)
    assert again.count(": reusing ") == 5 and not (out / "random" / "runs").exists()
    tables = [re.findall(r"^\|.*\|$", printed, re.MULTILINE) for printed in (first, again)]
    assert tables[0] == tables[1] and len(tables[0]) == 12


def test_the_page_shows_what_was_measured():
    """docs/prediction.md holds the tables of docs/long_context.json, which the script wrote beside the picture."""
    measured = json.loads((ROOT / "docs" / "long_context.json").read_text())
    page = (ROOT / "docs" / "prediction.md").read_text(encoding="utf-8")
    lengths = [measured["train_length"] * multiple for multiple in (1, 2, 4, 8)]
    for measure in eval_long_context.MEASURES:
        assert "\n".join(eval_long_context.table(measured["curves"], lengths, measure)) in page
    as_trained = {curve["name"]: curve["last"] for curve in measured["curves"]
                  if (curve["trained"] == "random") == (curve["scheme"] == "interval")}  # fmt: skip
    assert as_trained["random"]["512"] < as_trained["plain"]["512"] / 2
    shown = f"at perplexity {as_trained['plain']['512']:.1f} instead of {as_trained['plain']['64']:.1f}"
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert shown in readme and "](docs/long_context.png)" in readme
