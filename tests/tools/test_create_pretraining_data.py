"""Token files from text: the ids are SentencePiece's own in every format; mistakes are told."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import create_pretraining_data
import numpy as np
import pytest
import sentencepiece
import zstandard
from create_pretraining_data import main

EOS, BOS = 2, 1


@pytest.fixture(scope="module")
def processor(tokenizer_dir):
    return sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_dir / "sentencepiece.bpe.model"))


def convert(tokenizer_dir, inputs, prefix, *flags) -> int:
    return main(
        [
            "--input_path",
            *map(str, inputs),
            "--tokenizer_name_or_path",
            str(tokenizer_dir),
            "--output_prefix",
            str(prefix),
            "--workers",
            "1",
            *map(str, flags),
        ]
    )


def stored(prefix) -> list[list[int]]:
    """Documents as numpy alone reads them."""
    ids, idx = np.load(f"{prefix}_ids.npy"), np.load(f"{prefix}_idx.npz")
    assert idx["docs"].tolist() == list(range(len(idx["lens"]) + 1))
    return [part.tolist() for part in np.split(ids, np.cumsum(idx["lens"])[:-1])]


@pytest.mark.parametrize(
    "flags, before, after",
    [
        ([], [], [EOS]),
        (["--append_eos", "false"], [], []),
        (["--append_eos", "--prepend_bos"], [BOS], [EOS]),
        (["--append_eos", "0", "--prepend_bos", "true"], [BOS], []),
    ],
)
def test_ids_are_those_of_sentencepiece(
    tmp_path, tokenizer_dir, processor, write_jsonl, tricky, capsys, flags, before, after
):
    source = write_jsonl(tmp_path / "a.jsonl", tricky)
    assert convert(tokenizer_dir, [source], tmp_path / "out/a", *flags) == 0
    expected = [before + processor.encode(text) + after for text in tricky]
    assert stored(tmp_path / "out/a") == expected
    assert np.load(tmp_path / "out/a_ids.npy").dtype == np.uint16
    said = capsys.readouterr().out
    assert f"append_eos {bool(after)}, prepend_bos {bool(before)}" in said
    assert f"{len(tricky)} documents, {sum(map(len, expected))} tokens, uint16; verified" in said


def test_special_pieces_in_the_text_stay_text(tmp_path, tokenizer_dir, write_jsonl):
    convert(tokenizer_dir, [write_jsonl(tmp_path / "a.jsonl", ["<s> x </s> <unk>"])], tmp_path / "a")
    (ids,) = stored(tmp_path / "a")
    assert ids[-1] == EOS and not {0, BOS, EOS} & set(ids[:-1])


def test_formats_folders_and_workers_give_equal_files(tmp_path, tokenizer_dir, write_jsonl, texts, tool):
    halves = tmp_path / "folder" / "deep"
    halves.mkdir(parents=True)
    whole = write_jsonl(tmp_path / "whole.jsonl", texts)
    half = len(texts) // 2
    write_jsonl(tmp_path / "folder" / "a.jsonl", texts[:half])
    (halves / "b.json").write_text(json.dumps([{"text": text} for text in texts[half:]]))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(whole.read_bytes()))
    (tmp_path / "d.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(whole.read_bytes()))
    convert(tokenizer_dir, [whole], tmp_path / "whole")
    for number, source in enumerate(["folder", "c.jsonl.gz", "d.jsonl.zst"]):
        convert(tokenizer_dir, [tmp_path / source], tmp_path / f"out{number}")
    done = tool(
        "create_pretraining_data",
        "--input_path",
        whole,
        "--workers",
        3,
        "--output_prefix",
        tmp_path / "out3",
        "--tokenizer_name_or_path",
        tokenizer_dir / "sentencepiece.bpe.model",
    )
    assert done.returncode == 0 and done.stderr == ""
    for number in range(4):
        for ending in ("_ids.npy", "_idx.npz"):
            one, other = np.load(f"{tmp_path}/whole{ending}"), np.load(f"{tmp_path}/out{number}{ending}")
            if ending == "_ids.npy":
                assert np.array_equal(one, other)
            else:
                assert np.array_equal(one["lens"], other["lens"]) and np.array_equal(
                    one["docs"], other["docs"]
                )


def test_order_holds_when_late_batches_finish_first():
    def slow_at_first(batch):
        time.sleep(0.05 if batch[0] < 4 else 0)
        return batch

    made = list(
        create_pretraining_data.encode_in_order(slow_at_first, ([number] for number in range(30)), workers=4)
    )
    assert made == [[number] for number in range(30)]


def test_few_batches_wait_at_a_time():
    taken = 0

    def source():
        nonlocal taken
        for taken in range(1, 101):
            yield [taken]

    for done in create_pretraining_data.encode_in_order(lambda batch: batch, source(), workers=2):
        assert taken - done[0] <= 4


def test_an_error_in_the_source_or_the_encoder_comes_out():
    def broken(batch):
        raise ValueError("encoder")

    with pytest.raises(ValueError, match="encoder"):
        list(create_pretraining_data.encode_in_order(broken, iter([[1]]), workers=2))
    with pytest.raises(ZeroDivisionError):
        list(
            create_pretraining_data.encode_in_order(
                lambda batch: batch, ([1 // number] for number in (1, 0)), workers=2
            )
        )


class Large:
    """A tokenizer that seems to have 70,000 pieces."""

    def __init__(self, processor):
        self.encode, self.eos_id, self.bos_id = processor.encode, processor.eos_id, processor.bos_id

    def vocab_size(self):
        return 70_000


def test_a_large_vocabulary_is_stored_as_int32(tmp_path, tokenizer_dir, processor, write_jsonl, monkeypatch):
    monkeypatch.setattr(create_pretraining_data, "load_tokenizer", lambda name: (Large(processor), name))
    convert(tokenizer_dir, [write_jsonl(tmp_path / "a.jsonl", ["some words"])], tmp_path / "a")
    assert np.load(tmp_path / "a_ids.npy").dtype == np.int32
    assert stored(tmp_path / "a") == [processor.encode("some words") + [EOS]]


def test_a_tokenizer_without_eos_is_told(tmp_path, write_jsonl, texts):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_prefix=str(tmp_path / "m"),
        eos_id=-1,
        vocab_size=300,
        model_type="bpe",
        minloglevel=2,
    )
    source = write_jsonl(tmp_path / "a.jsonl", ["words"])
    with pytest.raises(ValueError, match="--append_eos true: the tokenizer has no such piece"):
        convert(tmp_path / "m.model", [source], tmp_path / "a")
    assert convert(tmp_path / "m.model", [source], tmp_path / "a", "--append_eos", "false") == 0


# --- what is skipped ----------------------------------------------------------------------------------------


def test_skipped_records_are_counted_by_reason(tmp_path, tokenizer_dir, capsys):
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "good"}\n{"text": ""}\n{"body": "x"}\n\n{"text": 1}\nnot json\n{"text": "\xff"}\n'
        b'{"body": "y"}\n'
    )
    assert convert(tokenizer_dir, [tmp_path / "a.jsonl"], tmp_path / "a") == 0
    said = capsys.readouterr().out
    for line in (
        "skipped: 7",
        "2 x missing key",
        "1 x empty document",
        "1 x not a string",
        "1 x bad JSON",
        "1 x invalid UTF-8",
        "1 x blank line",
        "a.jsonl:3: no key 'text'; keys seen: body",
        "a.jsonl:6:",
    ):
        assert line in said
    assert len(stored(tmp_path / "a")) == 1
    with pytest.raises(ValueError, match="a.jsonl:3: missing key"):
        convert(tokenizer_dir, [tmp_path / "a.jsonl"], tmp_path / "b", "--strict")
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "a_ids.npy", "a_idx.npz"]


def test_a_document_without_tokens_is_counted(tmp_path, tokenizer_dir, write_jsonl, capsys):
    space = "\u2581"  # SentencePiece's own: nothing is left of it
    source = write_jsonl(tmp_path / "a.jsonl", [space, "words"])
    convert(tokenizer_dir, [source], tmp_path / "a", "--prepend_bos")
    assert "1 x no tokens" in capsys.readouterr().out and len(stored(tmp_path / "a")) == 1


# --- users' mistakes ----------------------------------------------------------------------------------------


def mistakes(folder: Path, tokenizer_dir: Path) -> dict[str, tuple[list, str]]:
    """{name: (arguments, what the message must hold)}"""
    good, wrong_key, empty = folder / "good.jsonl", folder / "key.jsonl", folder / "empty.jsonl"
    good.write_text('{"text": "words"}\n')
    wrong_key.write_text('{"content": "words", "id": 1}\n')
    empty.write_text("")
    cut = folder / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(good.read_bytes() * 50)[:-9])
    (folder / "nothing").mkdir()
    (folder / "nothing" / "other.csv").write_text("x")
    (folder / "bad.model").write_bytes(b"not a model")
    out = folder / "out/a"

    def arguments(source=good, tokenizer=tokenizer_dir, prefix=out):
        return ["--input_path", source, "--tokenizer_name_or_path", tokenizer, "--output_prefix", prefix]

    return {
        "missing input": (arguments(folder / "gone.jsonl"), "gone.jsonl: no such file or folder"),
        "folder without text": (arguments(folder / "nothing"), "it holds: other.csv"),
        "unknown kind": (arguments(folder / "bad.model"), "unknown kind of file"),
        "wrong key": (arguments(wrong_key), "key.jsonl:1: no key 'text'; keys seen: content, id"),
        "empty file": (arguments(empty), "no document found in"),
        "truncated gz": (arguments(cut), "cut.jsonl.gz: cannot be read past line"),
        "tokenizer missing": (arguments(tokenizer=folder / "none"), "none: no such file"),
        "tokenizer folder without model": (
            arguments(tokenizer=folder / "nothing"),
            "the folder holds: other.csv",
        ),
        "not a tokenizer": (arguments(tokenizer=folder / "bad.model"), "not a SentencePiece model"),
        "output is a folder": (arguments(prefix=folder / "nothing"), "expected a prefix"),
        "output below a file": (arguments(prefix=good / "a"), "good.jsonl"),
    }


@pytest.mark.parametrize(
    "name",
    [
        "missing input",
        "folder without text",
        "unknown kind",
        "wrong key",
        "empty file",
        "truncated gz",
        "tokenizer missing",
        "tokenizer folder without model",
        "not a tokenizer",
        "output is a folder",
        "output below a file",
    ],
)
def test_mistakes_are_told_and_leave_nothing(tmp_path, tokenizer_dir, name):
    arguments, message = mistakes(tmp_path, tokenizer_dir)[name]
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError) as caught:
        main(list(map(str, arguments)))
    assert message in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_exit_status_2_and_one_message(tmp_path, tokenizer_dir, tool):
    for name in ("wrong key", "not a tokenizer"):
        folder = tmp_path / name
        folder.mkdir()
        arguments, message = mistakes(folder, tokenizer_dir)[name]
        done = tool("create_pretraining_data", *arguments)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
        assert done.stderr.startswith("create_pretraining_data.py: error: ")
    done = tool(
        "create_pretraining_data", "--input", "x", "--output_prefix", "y", "--tokenizer_name_or_path", "z"
    )
    assert done.returncode == 2 and "--input_path" in done.stderr  # abbreviations are refused
    done = tool("create_pretraining_data", *arguments, "--append_eos", "maybe")
    assert done.returncode == 2 and "'maybe' is neither true nor false" in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_permissions(tmp_path, tokenizer_dir, write_jsonl):
    source = write_jsonl(tmp_path / "a.jsonl", ["words"])
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(ValueError, match="closed"):
        convert(tokenizer_dir, [source], tmp_path / "closed" / "a")
    source.chmod(0)
    with pytest.raises(ValueError, match="no permission to read"):
        convert(tokenizer_dir, [source], tmp_path / "a")


def test_older_output_is_replaced_whole_or_kept(tmp_path, tokenizer_dir, write_jsonl, capsys):
    convert(tokenizer_dir, [write_jsonl(tmp_path / "a.jsonl", ["first"])], tmp_path / "o")
    first = stored(tmp_path / "o")
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"body": 1}\n')
    with pytest.raises(ValueError):
        convert(tokenizer_dir, [tmp_path / "bad.jsonl"], tmp_path / "o", "--strict")
    assert stored(tmp_path / "o") == first
    assert "older files" not in capsys.readouterr().out
    convert(tokenizer_dir, [write_jsonl(tmp_path / "b.jsonl", ["second", "third"])], tmp_path / "o")
    assert len(stored(tmp_path / "o")) == 2 and "the older files were replaced" in capsys.readouterr().out


def test_what_the_disk_changes_is_noticed(tmp_path, tokenizer_dir, write_jsonl, monkeypatch):
    leave = create_pretraining_data.TokenFileWriter.__exit__

    def leave_and_damage(writer, *error):
        leave(writer, *error)
        with open(f"{writer.prefix}_ids.npy", "r+b") as stream:
            stream.seek(-2, os.SEEK_END)
            stream.write(b"\7\0")

    monkeypatch.setattr(create_pretraining_data.TokenFileWriter, "__exit__", leave_and_damage)
    with pytest.raises(ValueError, match="checksum"):
        convert(tokenizer_dir, [write_jsonl(tmp_path / "a.jsonl", ["words"])], tmp_path / "a")


# --- large inputs -------------------------------------------------------------------------------------------


def large_corpus(path: Path, megabytes: int, texts: list[str]) -> Path:
    block = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    path.write_text(block * (megabytes * 1_000_000 // len(block) + 1))
    return path


def command(tokenizer_dir, source, prefix) -> list[str]:
    return [
        sys.executable,
        create_pretraining_data.__file__,
        "--input_path",
        str(source),
        "--workers",
        "1",
        "--output_prefix",
        str(prefix),
        "--tokenizer_name_or_path",
        str(tokenizer_dir),
    ]


# A process starts with the peak of the one that forked it, so a small one starts the tool and reports.
MEASURE = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(status, usage.ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3))
"""


@pytest.mark.skipif(not hasattr(os, "wait4"), reason="needs wait4")
def test_memory_does_not_grow_with_the_input(tmp_path, tokenizer_dir, texts):
    def peak(megabytes: int) -> float:
        """Peak memory of the run in MB. Its text alone has `megabytes`, its ids as int32 more than that."""
        source = large_corpus(tmp_path / "a.jsonl", megabytes, texts)
        run = [sys.executable, "-c", MEASURE, *command(tokenizer_dir, source, tmp_path / "a")]
        status, used = subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
        assert status == "0"
        return float(used)

    small, large = peak(5), peak(17)
    assert large - small < 8


@pytest.mark.parametrize(
    "number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_a_stopped_run_leaves_nothing_under_the_final_name(tmp_path, tokenizer_dir, texts, number, status):
    source = large_corpus(tmp_path / "a.jsonl", 30, texts)
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(tokenizer_dir, source, out / "a"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background ignore it
    )  # fmt: skip
    try:
        while not out.exists() or not os.listdir(out):
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(0.2)
        process.send_signal(number)
        errors = process.communicate(timeout=120)[1]
    finally:
        process.kill()
    assert process.returncode == status and b"Traceback" not in errors
    assert not (out / "a_ids.npy").exists() and not (out / "a_idx.npz").exists()
    if number != signal.SIGKILL:
        assert not out.exists()
