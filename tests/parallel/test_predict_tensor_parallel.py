"""Prediction on two tensor-parallel ranks gives the single process's answers. Run as a script, it is one rank's part of
the job: every case, one after the other."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent)]

from launching import environment, launch, run_group  # noqa: E402
from predict_helpers import write_checkpoint  # noqa: E402

from ernie35se import peft, weight_files  # noqa: E402
from ernie35se.configuration import Ernie35Config  # noqa: E402
from ernie35se.modeling import Ernie35ForCausalLM  # noqa: E402

spec = importlib.util.spec_from_file_location("predict", ROOT / "scripts" / "predict.py")
predict = importlib.util.module_from_spec(spec)
spec.loader.exec_module(predict)

SOURCES = ["moon", "swap three moon", "the \u6708 rises over", "a </s> b", "jumps over the lazy dog", "lazy dog", "two"]
GREEDY = ["--decode_strategy", "greedy_search"]
BATCH = ["--batch_size", "2"]  # rows differ in length: padded on the left

# name -> (model, flags); {folder} is the test's
CASES = {
    "plain": ("base", GREEDY),
    "batch": ("base", GREEDY + BATCH),
    "sampling": ("base", ["--seed", "5", "--repetition_penalty", "1.2"] + BATCH),
    "beams": ("base", ["--decode_strategy", "beam_search", "--num_beams", "3"] + BATCH),
    "tied": ("tied", GREEDY + BATCH),
    "untrimmed": ("untrimmed", GREEDY + BATCH),
    "resumed": ("base", GREEDY + BATCH + ["--resume"]),
    "lora": ("base", GREEDY + BATCH + ["--lora_path", "{folder}/lora"]),
    "pieces": ("pieces", GREEDY + BATCH),
    "merged": ("pieces", GREEDY + BATCH + ["--merge_tensor_parallel_path", "{folder}/merged"]),
}


def words_of(folder: Path, case: str, output: str) -> list[str]:
    """The command line of a case, which writes <folder>/<output>/<case>.json."""
    model, flags = CASES[case]
    words = ["--model_name_or_path", f"{folder}/{model}", "--data_file", f"{folder}/data.jsonl", "--predict_file",
             f"{folder}/{output}/{case}.json", "--src_length", "20", "--tgt_length", "12", "--device", "cpu"]  # fmt: skip
    return words + [flag.format(folder=folder) for flag in flags]


def answers(path: Path) -> list[str]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["src"] for line in lines] == SOURCES
    return [line["output"] for line in lines]


def write_lora(base: Path, folder: Path) -> None:
    """Adapters that change the answers."""
    draw = np.random.default_rng(0)
    model = peft.wrap(Ernie35ForCausalLM.from_pretrained(str(base)), peft.LoRAConfig(r=3))
    for name, parameter in peft.adapter_state(model).items():
        if name.endswith("lora_B"):
            parameter.set_value(draw.normal(0, 0.3, parameter.shape).astype("float32"))
    peft.save(model, folder)


def write_pieces(base: Path, folder: Path) -> None:
    """The base model as two tensor-parallel ranks save it."""
    folder.mkdir()
    config = Ernie35Config.from_pretrained(str(base))
    weight_files.split_folder(weight_files.Folder(base), folder, config, 2)
    weight_files.copy_beside(base, folder, {"tensor_parallel_degree": 2})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Models, prompts, and the single process's answers in alone/."""
    folder = tmp_path_factory.mktemp("predict_tensor_parallel")
    base = write_checkpoint(folder / "base", num_attention_heads=4)
    write_checkpoint(folder / "tied", num_attention_heads=4, tie_word_embeddings=True)
    write_checkpoint(folder / "untrimmed", num_attention_heads=4, parallel_attn_hatf=False, use_bias=False)
    write_lora(base, folder / "lora")
    write_pieces(base, folder / "pieces")
    (folder / "data.jsonl").write_text("".join(json.dumps({"src": source}) + "\n" for source in SOURCES))
    for output in ("alone", "two"):
        (folder / output).mkdir()
    for case in CASES:
        assert predict.main(words_of(folder, case, "alone")) == 0
    shutil.rmtree(folder / "merged")
    begun = (folder / "alone" / "resumed.json").read_bytes().splitlines(keepends=True)[:4]
    (folder / "two" / "resumed.json").write_bytes(b"".join(begun) + b'{"src": "a')  # as a kill leaves it
    return folder


@pytest.fixture(scope="module")
def launched(folder) -> Path:
    """The same answers by two processes, in two/: one job runs every case."""
    status, logs = launch([__file__, folder], folder / "log")
    assert status == 0, logs[-6000:]
    return folder


def test_the_cases_tell_answers_apart(folder):
    alone = {case: answers(folder / "alone" / f"{case}.json") for case in CASES}
    assert len(set(alone["plain"])) == len(SOURCES)
    assert alone["plain"] == alone["batch"] == alone["resumed"] == alone["pieces"] == alone["merged"]
    others = [alone[case] for case in ("plain", "sampling", "beams", "tied", "untrimmed", "lora")]
    assert all(left != right for n, left in enumerate(others) for right in others[:n])


@pytest.mark.slow  # a launch
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_answer_as_one_process(case, launched):
    assert answers(launched / "two" / f"{case}.json") == answers(launched / "alone" / f"{case}.json")


@pytest.mark.slow  # a launch
def test_the_launch_script_writes_the_file_that_one_process_writes(folder, tmp_path):
    """Byte for byte, so no rank but one wrote to it; that one alone shows progress."""
    status, logs = run_script(folder, tmp_path, *GREEDY, *BATCH, "--src_length", "20", "--tgt_length", "12")
    assert status == 0, logs
    assert (tmp_path / "answers.json").read_bytes() == (folder / "alone" / "batch.json").read_bytes()
    assert ["prompt/s" in log for log in logs] == [True, False]
    assert {path.name for path in tmp_path.iterdir()} == {"answers.json", "log", "out"}


def run_script(folder: Path, place: Path, *flags: str) -> tuple[int, list[str]]:
    """Exit status and every rank's log of predict_tp.sh on two CPU processes; the answers are place/answers.json."""
    settings = {"DEVICE": "cpu", "NPROC": "2", "MODEL": f"{folder}/base", "DATA": f"{folder}/data.jsonl",
                "OUTPUT": "answers.json", "LOG_DIR": "log", "PYTHON": sys.executable}  # fmt: skip
    command = ["bash", str(ROOT / "scripts" / "launch" / "predict_tp.sh"), *flags]
    status = run_group(command, place / "out", 180, cwd=place, env={**environment(), **settings})
    return status, [path.read_text(errors="replace") for path in sorted((place / "log").glob("workerlog.*"))]


def main(folder: Path) -> int:
    """One rank's part of the job."""
    return max(predict.main([*words_of(folder, case, "two"), "--tensor_parallel_degree", "2"]) for case in CASES)


if __name__ == "__main__":
    import cpu_gloo  # noqa: F401  before the group is joined

    sys.exit(main(Path(sys.argv[1])))
