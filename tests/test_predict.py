"""scripts/predict.py: what it writes, how it goes on after an interruption, what it refuses."""

import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import paddle
import pytest
from paddlenlp.utils.log import logger
from predict_helpers import write_checkpoint

from ernie35se import peft
from ernie35se.prediction import AnswerFile, PredictArguments
from ernie35se.predictor import Decoding, Predictor

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("predict", ROOT / "scripts" / "predict.py")
predict = importlib.util.module_from_spec(spec)
spec.loader.exec_module(predict)

SOURCES = ["moon", "swap three moon", "the \u6708 rises", "a </s> b", "jumps over", "lazy dog", "three"]
LENGTHS = ["--src_length", "20", "--tgt_length", "10", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("predict_script") / "base")


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"src": source}) + "\n" for source in SOURCES))
    return path


def run(folder, tmp_path, *words):
    return predict.main(
        [
            "--model_name_or_path",
            str(folder),
            "--predict_file",
            str(tmp_path / "out.json"),
            *LENGTHS,
            *map(str, words),
        ]
    )


def answers(tmp_path):
    lines = (tmp_path / "out.json").read_text(encoding="utf-8").split("\n")
    assert lines.pop() == ""
    return [json.loads(line) for line in lines]


def test_lines_come_in_order_and_equal_the_predictors(folder, tmp_path, data):
    assert run(folder, tmp_path, "--data_file", data, "--batch_size", 3) == 0
    got = answers(tmp_path)
    assert [list(answer) for answer in got] == [["src", "output"]] * 7 and [
        answer["src"] for answer in got
    ] == SOURCES
    predictor = Predictor.load(str(folder), device="cpu", src_length=20, tgt_length=10)
    assert [answer["output"] for answer in got] == predictor.predict(SOURCES, Decoding(), 3)


def test_examples_are_answered_and_shown(folder, tmp_path, capsys):
    assert run(folder, tmp_path, "--decode_strategy", "beam_search", "--num_beams", 2) == 0
    printed = capsys.readouterr().out
    for answer in answers(tmp_path):
        assert answer["src"] in predict.EXAMPLES and answer["output"] in printed


@pytest.mark.parametrize(
    "kept, tail",
    [(0, b""), (3, b""), (4, b'{"src": "jumps ov'), (6, b'{"src": "three", "output": ""}'), (7, b"")],
)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_rerun_with_resume_ends_like_a_run_in_one_go(folder, tmp_path, data, kept, tail, batch_size):
    words = ["--data_file", data, "--batch_size", batch_size]
    assert run(folder, tmp_path, *words) == 0
    whole = (tmp_path / "out.json").read_bytes()
    (tmp_path / "out.json").write_bytes(b"".join(whole.splitlines(keepends=True)[:kept]) + tail)
    assert run(folder, tmp_path, *words, "--resume") == 0
    assert (tmp_path / "out.json").read_bytes() == whole


def test_a_killed_run_is_continued(folder, tmp_path):
    """SIGKILL at some moment of writing; nothing is lost or doubled."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"src": f"moon {n}"}) + "\n" for n in range(200)))
    words = ["--data_file", data, "--batch_size", 2]
    command = [sys.executable, str(ROOT / "scripts" / "predict.py"), "--model_name_or_path", str(folder), *LENGTHS,
               "--predict_file", str(tmp_path / "out.json"), *map(str, words)]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 120
    while time.time() < deadline and process.poll() is None:
        if (tmp_path / "out.json").exists() and (tmp_path / "out.json").read_bytes().count(b"\n") > 5:
            break
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    written = (tmp_path / "out.json").read_bytes()
    assert 5 < written.count(b"\n") < 200
    assert run(folder, tmp_path, *words, "--resume") == 0
    assert [answer["src"] for answer in answers(tmp_path)] == [f"moon {n}" for n in range(200)]
    assert (tmp_path / "out.json").read_bytes().startswith(written[: written.rfind(b"\n") + 1])


def test_a_file_of_other_answers_is_not_continued(tmp_path):
    path = tmp_path / "out.json"
    for content, message in (
        ('{"src": "b", "output": ""}\n', "answers 'b', but prompt 1 is 'a'"),
        ('{"src": "a", "output": ""}\n' * 2, "prompt 2 is missing"),
        ("{}\n", "no answer that predict.py wrote"),
        ("broken\n", "no answer that predict.py wrote"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            AnswerFile(str(path), ["a"], resume=True)
        assert path.read_text() == content
    with AnswerFile(str(path), ["a", "\ud800"], resume=False) as file:
        file.put(1, "second")
        assert path.read_text() == ""
        file.put(0, "first\n")
        assert file.lines() == [("a", "first\n"), ("\ud800", "second")]
    assert AnswerFile(str(path), ["a", "\ud800"], resume=True).done == 2


def test_streaming_prints_and_writes_the_same_text(folder, tmp_path, data, capsys):
    assert run(folder, tmp_path, "--data_file", data) == 0
    whole = answers(tmp_path)
    capsys.readouterr()
    assert run(folder, tmp_path, "--data_file", data, "--stream") == 0
    assert answers(tmp_path) == whole
    assert capsys.readouterr().out == "".join(f"{a['src']} ...\n{a['output']}\n\n" for a in whole)


def test_interactive_answers_lines_of_the_standard_input(folder, tmp_path, monkeypatch, capsys):
    predictor = Predictor.load(str(folder), device="cpu", src_length=20, tgt_length=10)
    monkeypatch.setattr(sys, "stdin", io.StringIO("moon\nlazy dog\n"))
    assert run(folder, tmp_path, "--interactive") == 0
    assert (
        capsys.readouterr().out
        == "".join(f"> {predictor.predict([p])[0]}\n" for p in ("moon", "lazy dog")) + "> "
    )
    assert not (tmp_path / "out.json").exists()
    monkeypatch.setattr(sys, "stdin", io.StringIO("moon\n\nnot this"))
    assert run(folder, tmp_path, "--interactive", "--decode_strategy", "beam_search") == 0
    beams = Decoding(decode_strategy="beam_search")
    assert capsys.readouterr().out == f"> {predictor.predict(['moon'], beams)[0]}\n> "


def test_a_checkpoint_in_one_piece_is_written(folder, tmp_path):
    assert run(folder, tmp_path, "--merge_tensor_parallel_path", tmp_path / "single") == 0
    first = answers(tmp_path)
    assert run(tmp_path / "single", tmp_path) == 0
    assert answers(tmp_path) == first


def test_there_is_a_flag_for_every_adapter(folder, tmp_path, capsys):
    assert set(PredictArguments.adapter_flags()) < set(PredictArguments.__dataclass_fields__)
    model = Predictor.load(str(folder), device="cpu", src_length=9, tgt_length=9).model
    peft.save(peft.wrap(model, peft.LoRAConfig(r=2)), tmp_path / "lora")
    assert run(folder, tmp_path, "--lora_path", tmp_path / "lora") == 0
    for words, message in (
        (["--vera_path", tmp_path / "lora"], "it holds lora adapters; pass it as --lora_path"),
        (["--vera_path", folder], "it holds no adapters"),
        (["--vera_path", "a", "--lora_path", "b"], "one adapter at a time"),
    ):
        assert run(folder, tmp_path, *words) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        (["--top_n", "3"], "unknown flag '--top_n'; did you mean --top_"),
        (["--top_p", "1.5"], "top_p = 1.5: expected a number in (0, 1]"),
        (["--batch_size", "0"], "batch_size = 0"),
        (["--tgt_length", "-3"], "tgt_length = -3"),
        (["--model_n", "x"], "unknown flag '--model_n'"),
        (["--model_name_or_path", "nowhere"], "'nowhere': no such folder"),
        (["--data_file", "nowhere.json"], "nowhere.json: cannot be read"),
        (["--predict_file", "no/such/folder/out.json"], "predict_file = "),
        (["--stream", "--decode_strategy", "beam_search"], "stream = True: beam search"),
        (["--interactive", "--resume"], "leave out --resume"),
        (["--src_length", "300"], "310 tokens, but the model has 256 positions"),
        (["--template", "nice"], "template 'nice'"),
        (["moon"], "belongs to no flag"),
    ],
)
def test_mistakes_end_with_status_2_and_one_message(folder, tmp_path, capsys, words, message):
    (tmp_path / "out.json").write_text("kept\n")
    assert run(folder, tmp_path, *words) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("predict.py: error:")]
    assert len(error) == 1 and message in error[0]
    assert (tmp_path / "out.json").read_text() == "kept\n"


def test_progress_and_the_prompts_that_were_cut_are_shown(folder, tmp_path, data, capsys, monkeypatch):
    said = []
    monkeypatch.setattr(logger, "warning", lambda text, *_: said.append(text))
    with data.open("a") as file:
        file.write(json.dumps({"src": "moon " * 30}) + "\n")
    for words in ([], ["--stream"]):
        said.clear()
        assert run(folder, tmp_path, "--data_file", data, *words) == 0
        (cut,) = [text for text in said if "longer than src_length 20 and cut" in text]
        assert "tokens)" in cut and (words or f"{data}:8 (" in cut)
        assert bool(words) or "8/8" in capsys.readouterr().err


def test_the_promised_flags_are_taken_together(folder, tmp_path, data):
    words = """--top_k 3 --top_p 0.8 --temperature 0.95 --repetition_penalty 1.2 --decode_strategy sampling --num_beams 4
        --seed 5 --batch_size 2 --dtype float32 --resume"""
    words = [*words.split(), "--tokenizer_name_or_path", folder, "--data_file", data]
    assert run(folder, tmp_path, *words, "--merge_tensor_parallel_path", tmp_path / "single") == 0
    loaded = Predictor.load(str(folder), device="cpu", src_length=20, tgt_length=10)
    decoding = Decoding(repetition_penalty=1.2, seed=5)
    assert [answer["output"] for answer in answers(tmp_path)] == loaded.predict(SOURCES, decoding, 2)
    assert loaded.predict(SOURCES, Decoding(seed=5), 2) != loaded.predict(SOURCES, decoding, 2)


def test_empty_data_is_refused(folder, tmp_path, capsys):
    (tmp_path / "none.jsonl").write_text("\n")
    assert run(folder, tmp_path, "--data_file", tmp_path / "none.jsonl") == 2
    assert "holds no records" in capsys.readouterr().err


# ---- several processes; what they answer is tested in parallel/test_predict_tensor_parallel.py -----------------------

CANNOT_BE_CUT = {
    "VeRA": (peft.VeRAConfig(), "merge them into the model (tools/merge_vera_params.py), or predict with one process"),
    "LoKr": (peft.LoKrConfig(), "tools/merge_lokr_params.py"),
    "DisLoRA": (peft.DisLoRAConfig(), "tools/merge_dislora_params.py"),
    "MoRA": (peft.LoRAConfig(use_mora=True), "tools/merge_lora_params.py"),
    "QLoRA": (peft.LoRAConfig(weight_quantize_algo="nf4"), "tools/merge_lora_params.py"),
    "ReFT": (peft.ReFTConfig(), "reft); predict with one process"),
    "TARE": (peft.TareConfig(), "tare); predict with one process"),
    "Prefix": (peft.PrefixConfig(), "prefix); predict with one process"),
}


@pytest.fixture
def job(monkeypatch):
    """Makes this process one of so many of a job; it may refuse, not read a weight."""

    def of(processes: int):
        monkeypatch.setattr(paddle.distributed, "get_world_size", lambda: processes)

    def weights_are_read(*_):
        raise AssertionError("no refusal before the weights are read")

    monkeypatch.setattr("ernie35se.predictor.load_model", weights_are_read)
    return of


@pytest.mark.parametrize(
    "processes, words, message",
    [
        (1, ["--tensor_parallel_degree", "2"], "degree = 2: expected the number of processes of this job, 1; scripts/launch"),
        (4, ["--tensor_parallel_degree", "2"], "degree = 2: expected the number of processes of this job, 4"),
        (2, [], "tensor_parallel_degree is not set (and so 1): expected the number of processes of this job, 2"),
        (1, ["--tensor_parallel_degree", "0"], "tensor_parallel_degree = 0"),
        (2, ["--tensor_parallel_degree", "2", "--stream"], "stream = True: needs a terminal, which the 2 processes"),
        (2, ["--tensor_parallel_degree", "2", "--interactive"], "interactive = True: needs a terminal"),
        (2, ["--tensor_parallel_degree", "2", "--device", "gpu:1"], "'gpu:1': each of the 2 processes has its own GPU"),
        (2, ["--tensor_parallel_degree", "2"], "does not divide num_attention_heads 3 (remainder 1)"),
        (3, ["--tensor_parallel_degree", "3"], "does not divide intermediate_size 20 (remainder 2)"),
    ],
)
def test_processes_that_cannot_share_the_model_are_refused(folder, tmp_path, capsys, job, processes, words, message):
    job(processes)
    assert run(folder, tmp_path, *words) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("predict.py: error:")]
    assert message in error
    assert not (tmp_path / "out.json").exists()


def test_a_vocabulary_that_processes_cannot_share_is_refused(folder, tmp_path, capsys, job):
    shutil.copytree(folder, tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    config.update(vocab_size=321, num_attention_heads=4)
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config))
    job(2)
    assert run(tmp_path / "odd", tmp_path, "--tensor_parallel_degree", 2) == 2
    assert "does not divide vocab_size 321 (remainder 1)" in capsys.readouterr().err


@pytest.mark.parametrize("name", CANNOT_BE_CUT)
def test_adapters_that_processes_cannot_share_are_refused_by_name(folder, tmp_path, capsys, job, name):
    """With what to do instead: merging, where the method can be merged."""
    config, remedy = CANNOT_BE_CUT[name]
    base, adapter = tmp_path / "base", tmp_path / config.method
    shutil.copytree(folder, base)
    sizes = json.loads((folder / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**sizes, "num_attention_heads": 4}))
    adapter.mkdir()
    config.save(adapter)
    job(2)
    assert run(base, tmp_path, "--tensor_parallel_degree", 2, f"--{config.method}_path", adapter) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("predict.py: error:")]
    assert f"tensor_parallel_degree = 2: {name} is not made for tensor parallel" in error and remedy in error
    tool = re.search(r"tools/merge_\w+[.]py", error)
    assert tool is None or (ROOT / tool.group()).is_file()


def test_of_several_processes_only_the_first_touches_the_file(tmp_path):
    """The others count along, so that all batches are the same."""
    path = tmp_path / "out.json"
    path.write_text("kept\n")
    with AnswerFile(str(path), ["a", "b"], resume=False, writes=False) as answers:
        answers.put(1, "second")
        assert answers.done == 0
        answers.put(0, "first")
        assert answers.done == 2
    assert path.read_text() == "kept\n"
