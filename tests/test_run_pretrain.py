"""scripts/run_pretrain.py in process: train, resume, evaluate, describe, refuse."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from ernie35se.data.indexed import TokenFileWriter
from ernie35se.training import build

ROOT = Path(__file__).resolve().parents[1]
MODEL = {
    "model_type": "ernie",
    "architectures": ["Ernie35ForCausalLM"],
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "use_flash_attention": True,
}


def load_script():
    spec = importlib.util.spec_from_file_location("run_pretrain", ROOT / "scripts" / "run_pretrain.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Made-up tokens that count upwards, a model's config and a tokenizer."""
    folder = tmp_path_factory.mktemp("pretrain")
    rng = np.random.default_rng(0)
    with TokenFileWriter(str(folder / "toy"), 60) as writer:
        for length in rng.integers(20, 60, 120):
            writer.add_document((np.arange(length) + rng.integers(50)) % 50 + 3)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    (folder / "tokenizer").mkdir()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["one two three four", "five six seven"] * 20),
        vocab_size=290,
        model_type="bpe",
        model_prefix=str(folder / "tokenizer" / "sentencepiece.bpe"),
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder


def words(place, output, **changes):
    settings = {
        "model_name_or_path": place / "model",
        "input_dir": place / "toy",
        "output_dir": output,
        "split": "70,20,10",
        "max_seq_length": 24,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 6,
        "learning_rate": 0.01,
        "eval_steps": 3,
        "save_steps": 3,
        "logging_steps": 1,
        "eval_iters": 2,
        "device": "cpu",
        "disable_tqdm": 1,
        "report_to": "none",
        **changes,
    }
    return [
        word for name, value in settings.items() if value is not None for word in (f"--{name}", str(value))
    ]


def read(folder, name):
    return json.loads((Path(folder) / name).read_text())


def refusal(capsys, argv):
    """The one message of a refused command."""
    capsys.readouterr()
    assert script.main(argv) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("run_pretrain.py: error: ")
    return message


@pytest.fixture(scope="module")
def trained(place):
    output = place / "trained"
    argv = words(
        place, output, do_train=1, do_eval=1, do_predict=1, tokenizer_name_or_path=place / "tokenizer"
    )
    assert script.main(argv) == 0
    return output


def test_training_leaves_model_tokenizer_and_results(trained):
    results = read(trained, "all_results.json")
    assert {"train_loss", "eval_loss", "test_loss"} <= set(results)
    assert read(trained, "eval_results.json")["eval_loss"] == results["eval_loss"] < np.log(384) - 1
    assert (trained / "sentencepiece.bpe.model").is_file()
    config = read(trained, "config.json")
    assert config["vocab_size"] == 384  # the tokenizer's 290 pieces, rounded up to a multiple of 128
    assert config["max_position_embeddings"] == 24  # raised to max_seq_length
    assert config["model_type"] == "ernie"
    assert {path.name for path in trained.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-6"}


def test_the_same_command_again_has_nothing_left_to_do(trained, place):
    before = read(trained, "eval_results.json")["eval_loss"]
    model = (trained / "model_state.pdparams").read_bytes()
    argv = words(place, trained, do_train=1, do_eval=1, tokenizer_name_or_path=place / "tokenizer")
    assert script.main(argv) == 0
    assert read(trained, "eval_results.json")["eval_loss"] == before
    assert (trained / "model_state.pdparams").read_bytes() == model


def test_a_run_resumes_from_its_last_checkpoint(trained, place, tmp_path):
    shutil.copytree(trained / "checkpoint-3", tmp_path / "out" / "checkpoint-3")
    argv = words(
        place,
        tmp_path / "out",
        do_train=1,
        do_eval=1,
        do_predict=1,
        tokenizer_name_or_path=place / "tokenizer",
    )
    assert script.main(argv) == 0
    assert (
        read(tmp_path / "out", "eval_results.json")["eval_loss"]
        == read(trained, "eval_results.json")["eval_loss"]
    )


def test_evaluation_alone_measures_the_weights_it_is_given(trained, place, tmp_path):
    argv = words(place, tmp_path / "measured", do_eval=1, model_name_or_path=trained, max_steps=6)
    assert script.main(argv) == 0
    loss = read(tmp_path / "measured", "eval_results.json")["eval_loss"]
    assert loss == pytest.approx(read(trained, "eval_results.json")["eval_loss"], rel=1e-6)
    assert not list((tmp_path / "measured").glob("checkpoint-*"))
    assert not (tmp_path / "measured" / "train_results.json").exists()


def test_continue_training_starts_from_weights(trained, place, tmp_path):
    argv = words(
        place,
        tmp_path / "more",
        do_train=1,
        model_name_or_path=trained,
        continue_training=1,
        max_steps=1,
        learning_rate=2e-5,
    )
    assert script.main(argv) == 0
    assert read(tmp_path / "more", "config.json")["use_progressive_seq_len"] is True
    fresh = np.log(384)
    assert read(tmp_path / "more", "train_results.json")["train_loss"] < fresh - 1


def test_settings_from_a_file_with_a_flag_over_it(place, tmp_path):
    argv = words(place, tmp_path / "out", do_train="true", max_steps=9)
    names, values = [word[2:] for word in argv[::2]], argv[1::2]
    typed = {
        name: json.loads(value) if value.replace(".", "").isdigit() or value == "true" else value
        for name, value in zip(names, values)
    }
    (tmp_path / "settings.json").write_text(json.dumps(typed))
    assert script.main([str(tmp_path / "settings.json"), "--max_steps", "1"]) == 0
    assert read(tmp_path / "out", "trainer_state.json")["global_step"] == 1


def test_dry_run_describes_and_writes_no_output(place, tmp_path, capsys):
    argv = words(place, tmp_path / "out", tokenizer_name_or_path=place / "tokenizer", dry_run=1)
    assert script.main(argv) == 0
    text = capsys.readouterr().out
    for part in (
        "max_seq_length = 24",
        "head block",
        "LM head",
        "optimizer",
        "activations",
        "Tokens per step: 96",
        "FLOPs per step: ",
        "First sample (25 tokens): '",
    ):
        assert part in text, part
    assert not (tmp_path / "out").exists()


def test_dry_run_of_eight_gpus_on_one_cpu(capsys):
    for name in ("3b_stage2", "3b_stage2_throughput"):
        assert (
            script.main([str(ROOT / f"configs/pretrain/{name}.json"), "--dry_run", "--input_dir", "nowhere"])
            == 0
        )
    text = capsys.readouterr().out
    assert (
        "fullest of 8 device(s), bfloat16" in text and "sharding stage2" in text and "3,708,367,104" in text
    )
    assert (
        "Tokens per step: 32,768" in text
        and "Tokens per step: 131,072" in text
        and "First sample: none" in text
    )
    degrees = ["--tensor_parallel_degree", "2", "--pipeline_parallel_degree", "2", "--device", "gpu"]
    assert script.main(["--dry_run", *degrees]) == 0
    assert "fullest of 4 device(s)" in capsys.readouterr().out


def test_refusals_before_anything_is_built(place, tmp_path, capsys, trained):
    def refused(*parts, **changes):
        message = refusal(capsys, words(place, tmp_path / "out", do_train=1, **changes))
        assert all(part in message for part in parts), message

    refused("holds no weights", "--continue_training 0", continue_training=1)
    refused(
        "no weights of it were ever released", continue_training=1, model_name_or_path="baidu/ernie-3.5-se-3b"
    )
    refused(
        "the tokenizer has 290 tokens",
        "vocab_size",
        continue_training=1,
        model_name_or_path=trained_small(place),
        tokenizer_name_or_path=place / "tokenizer",
    )
    refused("no-such", model_name_or_path=place / "no-such")
    refused("no-such", input_dir=place / "no-such")
    refused("no-such", tokenizer_name_or_path=place / "no-such")
    refused("train split", split="0,1,1")
    refused("resume_from_checkpoint", "not a whole checkpoint", resume_from_checkpoint=place / "model")
    refused("tensor_parallel_degree = 2", tensor_parallel_degree=2)
    blocked = tmp_path / "file"
    blocked.write_text("")
    refused("output_dir", "cannot be written", output_dir=blocked / "out")


def trained_small(place):
    """A folder that claims weights for the config's 60 rows."""
    folder = place / "weights"
    if not folder.exists():
        shutil.copytree(place / "model", folder)
        (folder / "model_state.pdparams").write_bytes(b"")
    return folder


@pytest.mark.skipif(importlib.util.find_spec("fused_ln") is not None, reason="the fused op is built here")
def test_the_fused_op_is_asked_for_before_the_data_are_read(place, tmp_path, capsys):
    argv = words(place, tmp_path / "out", do_train=1, use_fused_ln=1, input_dir=place / "no-such")
    message = refusal(capsys, argv)
    assert "fused" in message and "external_ops" in message


def test_a_run_that_diverges_ends_with_one_message(place, tmp_path, capsys):
    message = refusal(capsys, words(place, tmp_path / "out", do_train=1, learning_rate=1e30, min_learning_rate=0))
    assert "no longer finite" in message or "the loss is" in message
    assert "training stops" in message and "lower learning_rate" in message


def test_a_run_does_not_go_on_with_another_model(place, tmp_path, capsys, monkeypatch):
    output = tmp_path / "out"
    assert script.main(words(place, output, do_train=1, max_steps=3)) == 0
    other = tmp_path / "other.json"

    def message(**changes):
        other.write_text(json.dumps({**MODEL, **changes}))
        return refusal(capsys, words(place, output, do_train=1, max_steps=5, model_name_or_path=other))

    layers = MODEL["num_hidden_layers"]
    seen = message(num_hidden_layers=layers + 1)
    assert f"checkpoint-3: holds a model with num_hidden_layers {layers}, the settings ask for {layers + 1}" in seen
    assert "--overwrite_output_dir" in seen
    assert "holds a model with vocab_size 128, the settings ask for 384" in message(vocab_size=300)
    said = []
    monkeypatch.setattr(build.logger, "warning", said.append)
    other.write_text(json.dumps({**MODEL, "enable_random_position_ids": not MODEL.get("enable_random_position_ids", True)}))
    assert script.main(words(place, output, do_train=1, max_steps=4, model_name_or_path=other)) == 0
    assert any("enable_random_position_ids of the model has changed since" in text for text in said)


def test_weights_that_cannot_be_read_or_are_not_all_there_are_refused(place, tmp_path, capsys, trained):
    def message(spoil, **changes):
        shutil.rmtree(tmp_path / "weights", ignore_errors=True)
        shutil.copytree(trained, tmp_path / "weights", ignore=shutil.ignore_patterns("checkpoint-*", "runs"))
        spoil(tmp_path / "weights")
        changes = {"do_train": 1, "continue_training": 1, **changes}
        return refusal(capsys, words(place, tmp_path / "out", model_name_or_path=tmp_path / "weights", **changes))

    def change_config(**changes):
        return lambda folder: (folder / "config.json").write_text(json.dumps({**read(folder, "config.json"), **changes}))

    def cut(folder):
        os.truncate(folder / "model_state.pdparams", 5000)

    for spoiled in (message(cut), message(cut, do_train=0, do_eval=1, continue_training=0, max_steps=None)):
        assert f"{tmp_path}/weights: the weights cannot be loaded" in spoiled and "Copy the folder again" in spoiled
    assert "the weights cannot be loaded" in message(lambda folder: (folder / "model_state.pdparams").write_bytes(b""))
    hidden, layers = MODEL["hidden_size"], MODEL["num_hidden_layers"]
    assert "the weights cannot be loaded" in message(change_config(hidden_size=2 * hidden))
    assert "weights of the model of its config.json are not in its files, such as ernie.layers." in message(
        change_config(num_hidden_layers=layers + 2)
    )


def test_a_folder_of_other_files_is_not_trained_over(place, tmp_path, capsys):
    output = tmp_path / "out"
    output.mkdir()
    (output / "thesis.txt").write_text("years of work")
    argv = words(place, output, do_train=1, max_steps=1)
    message = refusal(capsys, argv)
    assert "thesis.txt" in message and "--overwrite_output_dir" in message
    (output / "thesis.txt").unlink()
    (output / "runs").mkdir()  # what a run leaves that was killed before its first checkpoint
    (output / ".tmp-checkpoint-3").mkdir()
    assert script.main(argv) == 0


def test_ids_beyond_the_vocabulary_are_refused(place, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "vocab_size": 128}))
    with TokenFileWriter(str(tmp_path / "big"), 300) as writer:
        for _ in range(20):
            writer.add_document(np.full(30, 200))
    message = refusal(
        capsys,
        words(place, tmp_path / "out", do_train=1, model_name_or_path=tmp_path, input_dir=tmp_path / "big"),
    )
    assert "id 200" in message and "0..127" in message


def test_as_a_command_a_wrong_flag_is_one_message_and_status_2():
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts/run_pretrain.py"), "--max_stps", "3"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2
    assert "did you mean --max_steps?" in result.stderr and "Traceback" not in result.stderr
