"""scripts/run_finetune.py: every settings file runs; what a run leaves behind; errors; resume; other
models."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tools"), str(ROOT / "tests" / "training")]

import run_finetune  # noqa: E402
from finetune_run import settings, words_of, write_base, write_records  # noqa: E402

CONFIGS = sorted((ROOT / "configs" / "finetune").glob("*.json"))
METHODS = {
    "sft": {},
    "lora": {"lora": 1, "lora_dropout": 0.1},
    "rslora": {"lora": 1, "rslora": 1},
    "lora_plus": {"lora": 1, "lora_plus_scale": 4},
    "quick_lora": {"lora": 1, "use_quick_lora": 1},
    "pissa": {"lora": 1, "pissa": 1},
    "moslora": {"lora": 1, "lora_use_mixer": 1},
    "linchain": {"lora": 1, "lora_use_mixer": 1, "mixer_num": 3},
    "mora": {"lora": 1, "use_mora": 1},
    "qlora": {"lora": 1, "weight_quantize_algo": "nf4", "weight_double_quant": 1},
    "qlora_int8": {"lora": 1, "weight_quantize_algo": "weight_only_int8"},
    "vera": {"vera": 1},
    "vera_pissa": {"vera": 1, "vera_pissa_init": 1},
    "lokr": {"lokr": 1, "lokr_rank": 2},
    "dislora": {"dislora": 1, "dash_flag": 2},
    "reft": {"reft": 1, "position": "f2+l2"},
    "tare": {"tare": 1},
    "prefix": {"prefix_tuning": 1, "num_prefix_tokens": 5, "prefix_dropout": 0.1},
    "prefix_projection": {"prefix_tuning": 1, "num_prefix_tokens": 5, "prefix_projection": 1},
    "neftune": {"neftune": 1},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Folder with a base model and records."""
    folder = tmp_path_factory.mktemp("finetune")
    write_base(folder / "base")
    write_records(folder / "data")
    return folder


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch, request):
    """Drawing takes longer than these runs; one test looks at the picture."""
    if request.node.originalname != "test_what_a_run_leaves_behind":
        monkeypatch.setattr("ernie35se.training.callbacks.draw_curves", lambda *args: None)


def run(place, output, *more, file=None, **changes):
    words = words_of(settings(place / "base", place / "data", output, **changes))
    return run_finetune.main([*([str(file)] if file else []), *words, *more])


def results(output):
    return json.loads((output / "all_results.json").read_text())


def losses(output):
    return {
        r["step"]: r["loss"]
        for r in json.loads((output / "trainer_state.json").read_text())["log_history"]
        if "loss" in r
    }


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_settings_file_runs(file, place, tmp_path):
    size = (
        {"num_prefix_tokens": 6} if "pt" in file.stem else {"dash_flag": 2} if file.stem == "dislora" else {}
    )
    changes = dict(warmup_steps=1, max_steps=3, gradient_accumulation_steps=1, evaluation_strategy="steps")
    changes.update(eval_steps=2, save_strategy="steps", save_steps=2)
    learning_rate = max(json.loads(file.read_text())["learning_rate"], 3e-3)
    assert run(place, tmp_path, file=file, **{**changes, **size}, learning_rate=learning_rate) == 0
    made = {path.name for path in tmp_path.iterdir()}
    methods = ("lora", "vera", "lokr", "dislora", "reft", "tare", "prefix")
    method = next((name for name in methods if f"{name}_config.json" in made), None)
    assert (method is None) == (file.stem.startswith("sft") or file.stem == "neftune")
    assert ("config.json" in made) == (method is None)
    assert {"template.json", "tokenizer_config.json", "checkpoint-2", "checkpoint-3"} <= made
    assert results(tmp_path)["eval_accuracy"] >= 0 and np.isfinite(results(tmp_path)["eval_loss"])
    assert len(losses(tmp_path)) == 3


@pytest.mark.parametrize("name", METHODS)
def test_resumed_at_an_epochs_end_is_as_if_never_interrupted(name, place, tmp_path):
    changes = {
        **METHODS[name],
        "load_best_model_at_end": 1,
        "metric_for_best_model": "loss",
        "save_total_limit": 1,
    }
    assert run(place, tmp_path / "whole", **changes) == 0
    # The first epoch alone, as a kill after it leaves it: the same run's checkpoint in another folder.
    del changes["save_total_limit"]
    assert run(place, tmp_path / "source", **changes) == 0
    shutil.copytree(tmp_path / "source" / "checkpoint-3", tmp_path / "resumed" / "checkpoint-3")
    assert run(place, tmp_path / "resumed", **changes) == 0
    whole, resumed = losses(tmp_path / "whole"), losses(tmp_path / "resumed")
    assert sorted(whole) == [1, 2, 3, 4, 5, 6] and resumed == whole
    assert results(tmp_path / "resumed")["eval_loss"] == results(tmp_path / "whole")["eval_loss"]
    state = json.loads((tmp_path / "whole" / "trainer_state.json").read_text())
    kept = {path.name for path in (tmp_path / "whole").glob("checkpoint-*")}
    assert kept == {"checkpoint-6", Path(state["best_model_checkpoint"]).name}
    assert results(tmp_path / "whole")["eval_loss"] == pytest.approx(state["best_metric"], rel=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_resumed_in_the_middle_of_an_epoch_is_as_if_never_interrupted(name, place, tmp_path):
    """Epochs end at steps 3 and 6; the checkpoints lie within them."""
    changes = {**METHODS[name], "save_strategy": "steps", "save_steps": 2, "evaluation_strategy": "no", "do_eval": 0}
    assert run(place, tmp_path / "whole", **changes) == 0
    for step in (2, 4):
        folder = tmp_path / f"from {step}"
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", folder / f"checkpoint-{step}")
        assert run(place, folder, **changes) == 0
        assert sorted(losses(folder)) == [1, 2, 3, 4, 5, 6] and losses(folder) == losses(tmp_path / "whole")


def test_recompute_and_merged_evaluation_change_nothing(place, tmp_path):
    for name, more in (("plain", {}), ("recompute", {"recompute": 1}), ("merged", {"merge_weights": 1})):
        assert run(place, tmp_path / name, lora=1, max_steps=3, **more) == 0
    for name in ("recompute", "merged"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "plain"), abs=1e-5)
        assert results(tmp_path / name)["eval_loss"] == pytest.approx(
            results(tmp_path / "plain")["eval_loss"], abs=1e-5
        )


def test_packed_training_equals_unpacked(place, tmp_path):
    """All samples in one step, as rows of their own or packed: the same losses, step after step."""
    common = dict(per_device_train_batch_size=12, gradient_accumulation_steps=1, num_train_epochs=3)
    assert run(place, tmp_path / "alone", **common) == 0
    packed = {**common, "per_device_train_batch_size": 1, "max_length": 300}
    data = tmp_path / "data"
    shutil.copytree(place / "data", data)
    assert (
        run(place, tmp_path / "packed", "--zero_padding", "1", **packed) == 2
    )  # a row of 299 does not fit the table
    write_base(tmp_path / "base", max_position_embeddings=512)
    for output, changes in (
        (tmp_path / "alone", common),
        (tmp_path / "packed", {**packed, "zero_padding": 1}),
    ):
        shutil.rmtree(output, ignore_errors=True)
        words = words_of(settings(tmp_path / "base", data, output, **changes))
        assert run_finetune.main(words) == 0
    assert len(losses(tmp_path / "alone")) == 3
    assert losses(tmp_path / "packed") == pytest.approx(losses(tmp_path / "alone"), abs=2e-5)


@pytest.mark.parametrize("name", METHODS)
def test_the_best_model_is_what_stays_though_it_is_not_the_last(name, place, tmp_path, monkeypatch):
    """The evaluation of the first epoch is made the best one: its weights are saved, measured, and kept as a checkpoint."""
    from ernie35se.training import finetune_arguments

    monkeypatch.setitem(finetune_arguments.METRICS, "loss", True)  # the higher the better
    rate = {"dislora": 0.003, "prefix": 0.1}.get(name, 0.01)
    best = dict(load_best_model_at_end=1, metric_for_best_model="loss", save_total_limit=1, learning_rate=rate)
    assert run(place, tmp_path, **METHODS[name], **best) == 0
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    first, last = (record["eval_loss"] for record in state["log_history"] if "eval_loss" in record)
    assert first > last + 1e-3
    assert results(tmp_path)["eval_loss"] == pytest.approx(first, rel=1e-6)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-6"}
    if METHODS[name] and name != "neftune":
        weights = next(tmp_path.glob("*_model_state.safetensors")).name
        saved, of_first, of_last = (load_file(tmp_path / part / weights) for part in ("", "checkpoint-3", "checkpoint-6"))
        assert all(np.array_equal(value, of_first[key]) for key, value in saved.items())
        assert not all(np.array_equal(value, of_last[key]) for key, value in saved.items())


def test_lora_plus_and_weight_decay_reach_the_runs_optimizer(place, tmp_path):
    """AdamW's first step: every entry moves by its rate, and loses rate x decay of itself. B learns 16 times as fast."""
    from ernie35se.training.finetune_arguments import parse_finetune_arguments

    assert run(place, tmp_path / "first", lora=1, lora_plus_scale=16) == 0
    rate, decay = 1e-3, 0.1
    changes = dict(lora=1, lora_path=tmp_path / "first", learning_rate=rate, lr_decay_ratio=1, weight_decay=decay, max_steps=1)
    words = words_of(settings(place / "base", place / "data", tmp_path / "out", **changes))
    trainer = run_finetune.prepare(*parse_finetune_arguments(words))
    before = {name: p.numpy().astype("float64") for name, p in trainer.model.named_parameters() if not p.stop_gradient}
    trainer.train()
    after = {name: p.numpy() for name, p in trainer.model.named_parameters() if name in before}
    assert {name.rpartition(".")[2] for name in before} == {"lora_A", "lora_B"}
    for name, start in before.items():
        own = rate * (16 if name.endswith("lora_B") else 1)
        step = np.abs(after[name] - start * (1 - own * decay))
        assert np.median(step) == pytest.approx(own, rel=1e-2), name
        assert np.abs(start * own * decay).max() > 10 * abs(np.median(step) - own), name  # the decay is seen in that


@pytest.mark.parametrize("name", ["lora", "pissa", "qlora", "vera", "lokr", "dislora", "reft", "tare", "prefix"])
def test_an_adapter_continues_from_a_saved_one(name, place, tmp_path):
    """It measures what the run that saved it measured, and learns on from there."""
    method = {"pissa": "lora", "qlora": "lora"}.get(name, name)
    changes = {**METHODS[name], f"{method}_path": tmp_path / "first"}
    assert run(place, tmp_path / "first", **METHODS[name]) == 0
    assert run(place, tmp_path / "second", **changes, do_train=False, evaluation_strategy="no") == 0
    first = results(tmp_path / "first")["eval_loss"]
    assert results(tmp_path / "second")["eval_loss"] == pytest.approx(first, rel=1e-6)
    assert run(place, tmp_path / "third", **changes, max_steps=1) == 0
    assert list(losses(tmp_path / "third")) == [1] and results(tmp_path / "third")["eval_loss"] != first


def test_a_named_checkpoint_is_resumed(place, tmp_path, capsys):
    """--resume_from_checkpoint, into another folder too; one that is not whole is refused."""
    changes = dict(lora=1, save_strategy="steps", save_steps=2, evaluation_strategy="no", do_eval=0)
    assert run(place, tmp_path / "whole", **changes) == 0
    named = tmp_path / "whole" / "checkpoint-2"
    assert run(place, tmp_path / "other", **changes, resume_from_checkpoint=named) == 0
    assert losses(tmp_path / "other") == losses(tmp_path / "whole")
    (named / "lora_model_state.safetensors").unlink()
    assert run(place, tmp_path / "other", **changes, resume_from_checkpoint=named) == 2
    assert "is not a whole checkpoint: lora_model_state.safetensors is missing" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["sft", "lora"])
def test_predicting_takes_the_template_and_the_lengths_of_training(method, place, tmp_path):
    """A jinja file is saved as text, so it may be gone; after merging too."""
    import merge_lora_params

    from ernie35se.predictor import Predictor

    template = tmp_path / "frame.jinja"
    template.write_text("swap: {{ prompt }} say")
    assert run(place, tmp_path / "out", **METHODS[method], template=template, max_steps=1) == 0
    template.unlink()
    base = str(place / "base" if method == "lora" else tmp_path / "out")
    tuned = [Predictor.load(base, adapter_path=str(tmp_path / "out") if method == "lora" else None, device="cpu")]
    if method == "lora":
        words = ["--model_name_or_path", base, "--lora_path", str(tmp_path / "out"), "--output_path", str(tmp_path / "merged")]
        merge_lora_params.main(words)
        tuned.append(Predictor.load(str(tmp_path / "merged"), device="cpu"))
    for predictor in tuned:
        assert predictor.encode("one two").ids == [1, *predictor.tokenizer.encode_plain("swap: one two say")]
        assert (predictor.src_length, predictor.tgt_length) == (24, 24)


def test_settings_that_a_saved_adapter_overrides_are_named(place, tmp_path, monkeypatch):
    from ernie35se.training import finetune_build

    said = []
    monkeypatch.setattr(finetune_build.logger, "warning", said.append)
    assert run(place, tmp_path / "first", lora=1, lora_rank=3, max_steps=1) == 0
    only = dict(lora=1, lora_path=tmp_path / "first", do_train=False, evaluation_strategy="no")
    assert run(place, tmp_path / "second", **only) == 0 and not [line for line in said if "lora_path" in line]
    assert run(place, tmp_path / "third", **only, lora_rank=4, rslora=1) == 0
    words = "lora_path: the saved adapter's settings count, not those of this run: r 4 (saved: 3), lora_alpha 4 (saved: 6), rslora"
    assert [line for line in said if line.startswith(words)]


def test_a_damaged_adapter_is_named(place, tmp_path, capsys):
    assert run(place, tmp_path / "good", lora=1, max_steps=1) == 0
    weights, config = "lora_model_state.safetensors", "lora_config.json"
    for file, content, message in (
        (weights, (tmp_path / "good" / weights).read_bytes()[:500], "cannot be read (SafetensorError"),
        (weights, None, f"has neither {weights} nor"),
        (config, b'{"r":', "cannot be read (JSONDecodeError"),
        (config, b"[1]", "cannot be read (TypeError"),
        (config, b'{"r": "8"}', "r = '8': expected a whole number"),
        (config, b'{"rank": 8}', "rank = 8 is no setting of lora here"),
        (config, b'{"r": 4}', "lora_A has shape [24, 8]; expected [24, 4]"),
    ):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        (tmp_path / "bad" / file).unlink()
        if content is not None:
            (tmp_path / "bad" / file).write_bytes(content)
        assert run(place, tmp_path / "out", lora=1, lora_path=tmp_path / "bad") == 2
        error = capsys.readouterr().err
        assert message in error and f"lora_path = '{tmp_path / 'bad'}'" in error and "Traceback" not in error


def test_pickled_weights_and_adapters_are_named_when_they_are_read(place, tmp_path, monkeypatch):
    """And what a run writes of an adapter is safetensors, a checkpoint's too."""
    from ernie35se import weight_files

    assert run(place, tmp_path / "first", lora=1, max_steps=1, save_strategy="steps", save_steps=1) == 0
    for folder in ("", "checkpoint-1"):
        found = [path.name for path in (tmp_path / "first" / folder).glob("*model_state*")]
        assert found == ["lora_model_state.safetensors"]
    saved = tmp_path / "first" / "lora_model_state.safetensors"
    paddle.save(load_file(saved), str(saved.with_suffix(".pdparams")))
    saved.unlink()
    said = []
    monkeypatch.setattr(weight_files.logger, "warning", said.append)
    only = dict(do_train=False, evaluation_strategy="no")
    assert run(place, tmp_path / "second", lora=1, lora_path=tmp_path / "first", **only) == 0
    named = [line.partition(":")[0] for line in said if "you trust its source" in line]
    assert named == [str(place / "base" / "model_state.pdparams"), str(saved.with_suffix(".pdparams"))]
    assert results(tmp_path / "second")["eval_loss"] == pytest.approx(results(tmp_path / "first")["eval_loss"], rel=1e-6)


def encoded(place, split):
    """The tiny base model, and the samples of a split as the script makes them."""
    from ernie35se.modeling import Ernie35ForCausalLM
    from ernie35se.training import finetune_build
    from ernie35se.training.finetune_arguments import parse_finetune_arguments

    words = words_of(settings(place / "base", place / "data", place / "unused"))
    model_args, data_args, _ = parse_finetune_arguments(words)
    encoder = finetune_build.make_encoder(finetune_build.load_tokenizer(model_args), data_args)
    samples = finetune_build.load_samples(data_args, encoder)[split].samples
    model = Ernie35ForCausalLM.from_pretrained(str(place / "base"))
    model.eval()
    return model, samples


def log_probabilities(model, sample):
    """(T, V) float64 of one sample alone, and its labels."""
    logits = model(input_ids=paddle.to_tensor([sample["input_ids"]]), return_dict=True).logits[0]
    scores = logits.numpy().astype("float64")
    scores -= scores.max(axis=-1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True)), np.array(sample["labels"])


def test_evaluation_by_hand(place, tmp_path):
    """Loss, perplexity and accuracy over all learnt tokens, sample by sample; whatever eval_accumulation_steps says."""
    from ernie35se import peft

    assert run(place, tmp_path / "trained", lora=1) == 0
    only = dict(lora=1, lora_path=tmp_path / "trained", do_train=False, evaluation_strategy="no")
    assert run(place, tmp_path / "plain", **only) == 0
    assert run(place, tmp_path / "accumulated", **only, eval_accumulation_steps=1) == 0
    model, samples = encoded(place, "dev")
    peft.load(model, tmp_path / "trained").eval()
    each, right = [], []
    for sample in samples:
        log_p, labels = log_probabilities(model, sample)
        learnt = np.flatnonzero(labels != -100)
        each += list(-log_p[learnt, labels[learnt]])
        right += list(log_p[learnt].argmax(axis=-1) == labels[learnt])
    expected = {"eval_loss": np.mean(each), "eval_ppl": np.exp(np.mean(each)), "eval_accuracy": np.mean(right)}
    for name in ("plain", "accumulated"):
        found = results(tmp_path / name)
        assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-5)


def test_label_smoothing_in_training_and_not_in_evaluation(place, tmp_path):
    """The first step's loss is the base model's, smoothed; all 12 records are in it, at positions 0, 1, 2, ..."""
    write_base(tmp_path / "base", enable_random_position_ids=False)
    shutil.copytree(place / "data", tmp_path / "data")
    place = tmp_path
    step = dict(lora=1, label_smoothing=0.2, max_steps=1, per_device_train_batch_size=12, gradient_accumulation_steps=1)
    assert run(place, tmp_path / "on", **step, learning_rate=1e-12) == 0
    model, samples = encoded(place, "train")
    each = []
    for sample in samples:
        log_p, labels = log_probabilities(model, sample)
        for row, label in zip(log_p, labels):
            if label != -100:
                target = np.full(len(row), 0.2 / len(row))
                target[label] += 0.8
                each.append(-(target * row).sum())
    assert losses(tmp_path / "on")[1] == pytest.approx(np.mean(each), rel=1e-5)
    only = dict(do_train=False, evaluation_strategy="no")
    assert run(place, tmp_path / "untrained", **only) == 0
    assert results(tmp_path / "on")["eval_loss"] == pytest.approx(results(tmp_path / "untrained")["eval_loss"], rel=1e-5)


def test_less_perplexity_is_better(place, tmp_path):
    more = dict(metric_for_best_model="ppl", load_best_model_at_end=1, learning_rate=0.01)
    assert run(place, tmp_path, lora=1, **more) == 0
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    measured = [record["eval_ppl"] for record in state["log_history"] if "eval_ppl" in record]
    assert state["best_metric"] == min(measured) < max(measured)


def test_generation_and_early_stopping(place, tmp_path):
    more = dict(
        eval_with_do_generation=1,
        early_stopping_patience=1,
        learning_rate=1e-9,
        num_train_epochs=6,
        tgt_length=6,
    )
    more.update(metric_for_best_model="accuracy", greater_is_better=1, load_best_model_at_end=1)
    assert run(place, tmp_path, lora=1, **more) == 0
    assert max(losses(tmp_path)) == 6  # the accuracy does not move, so the second evaluation ends the run
    found = results(tmp_path)
    assert {"eval_rouge1", "eval_rouge2", "eval_rougeL", "eval_bleu4", "eval_ppl"} <= set(found)
    texts = [json.loads(line) for line in (tmp_path / "generated-3.jsonl").read_text().splitlines()]
    assert len(texts) == 4 and set(texts[0]) == {"prompt", "generated", "reference"}
    assert texts[0]["prompt"].startswith("swap:")


def test_early_stopping_counts_on_after_a_resume(place, tmp_path):
    """Stops two evaluations after the first, as if it had not been interrupted between them."""
    more = dict(lora=1, early_stopping_patience=2, learning_rate=1e-9, num_train_epochs=6)
    more.update(metric_for_best_model="accuracy", greater_is_better=1)
    assert run(place, tmp_path / "whole", **more) == 0
    assert max(losses(tmp_path / "whole")) == 9
    shutil.copytree(tmp_path / "whole" / "checkpoint-6", tmp_path / "resumed" / "checkpoint-6")
    assert run(place, tmp_path / "resumed", **more) == 0
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")
    trained = results(tmp_path / "whole")
    assert run(place, tmp_path / "whole", **more) == 0  # it has ended, and stays as it is
    assert max(losses(tmp_path / "whole")) == 9
    assert results(tmp_path / "whole")["train_runtime"] == trained["train_runtime"]


def test_a_finished_run_keeps_its_results_and_another_method_is_refused(place, tmp_path, capsys):
    assert run(place, tmp_path, lora=1, max_steps=2) == 0
    trained = results(tmp_path)
    assert run(place, tmp_path, lora=1, max_steps=2) == 0
    assert results(tmp_path)["train_runtime"] == trained["train_runtime"]
    capsys.readouterr()
    for changes, message in (
        ({"lora": 1, "lora_rank": 4}, "was made with r 8, the settings say 4"),
        ({"vera": 1}, "was made by lora, the settings ask for vera"),
        ({}, "was made by lora, the settings ask for SFT"),
    ):
        assert run(place, tmp_path, max_steps=3, **changes) == 2
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error


def test_a_run_that_diverges_ends_with_one_message(place, tmp_path, capsys, monkeypatch):
    from ernie35se.training.finetune import FinetuneTrainer

    real = FinetuneTrainer.compute_loss

    def diverging(self, *args, **kwargs):
        loss = real(self, *args, **kwargs)
        return loss * float("nan") if self.state.global_step == 2 else loss

    monkeypatch.setattr(FinetuneTrainer, "compute_loss", diverging)
    assert run(place, tmp_path, lora=1, evaluation_strategy="no", do_eval=0) == 2
    error = capsys.readouterr().err
    assert "the loss is nan at step 3" in error and "Traceback" not in error


@pytest.mark.parametrize(
    "warmup, ratio, expected", [(6, 0.0, [2, 3, 4, 5, 6, 0]), (1, 0.5, [5.5, 5, 4.5, 4, 3.5, 3])]
)
def test_schedule(place, tmp_path, warmup, ratio, expected):
    """A log line shows the rate of the step to come: the first step has 1/6 of the peak, and the peak,
    here."""
    assert run(place, tmp_path, lora=1, warmup_steps=warmup, lr_decay_ratio=ratio, learning_rate=6e-3) == 0
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    rates = [record["learning_rate"] * 1e3 for record in state["log_history"] if "learning_rate" in record]
    assert rates == pytest.approx(expected, abs=1e-4)


def test_what_a_run_leaves_behind(place, tmp_path, capsys):
    assert run(place, tmp_path, lora=1, label_smoothing=0.1, max_steps=2) == 0
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert (tmp_path / "checkpoint-2").is_dir()
    template = json.loads((tmp_path / "template.json").read_text())
    assert template["template"] == "plain" and template["src_length"] == 24 and template["max_length"] == 48
    assert json.loads((tmp_path / "lora_config.json").read_text())["base_model_name_or_path"] == str(
        place / "base"
    )
    assert any("lora_A" in name for name in load_file(tmp_path / "lora_model_state.safetensors"))
    out = capsys.readouterr().out
    assert "train: 12 kept, 12 records" in out and "--- sample 1" in out and "</s>]]" in out


def test_a_look_at_data_and_settings(place, tmp_path, capsys):
    assert run(place, tmp_path / "out", preview_data=3) == 0
    out = capsys.readouterr().out
    assert out.count("--- sample") == 3 and "--- lengths in tokens" in out
    assert run(place, tmp_path / "out", lora=1, dry_run=1) == 0
    out = capsys.readouterr().out
    assert "lora_rank = 8" in out and "12 rows, 3 optimizer steps" in out
    assert "LoRA: 4,224 of 16,904 parameters train (24.99%)." in out
    rows = "activations", "working space", "gradients", "optimizer", "weights", "FLOPs per step", "Tokens per step"
    assert all(f"\n  {row}" in out or f"\n{row}" in out for row in rows)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_reads_no_weights(place, tmp_path, capsys):
    """A folder with the model's config and tokenizer is enough, whatever the method."""
    for file in (place / "base").iterdir():
        if not file.name.startswith("model_state"):
            (tmp_path / "bare").mkdir(exist_ok=True)
            shutil.copy(file, tmp_path / "bare")
    for name, changes in METHODS.items():
        changes = {**changes, "dry_run": 1, "model_name_or_path": tmp_path / "bare"}
        assert run(place, tmp_path / "out", **changes) == 0
        assert ("all weights: 12,680 of 12,680" in capsys.readouterr().out) == (name in ("sft", "neftune"))
    only_there = {"lora": 1, "lora_path": tmp_path / "nowhere", "dry_run": 1}
    assert run(place, tmp_path / "out", **only_there) == 2
    assert "nowhere': no such folder; expected one with lora_config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"lora": 1, "vera": 1}, "lora and vera are on"),
        ({"lora_rnk": 4}, "did you mean --lora_rank?"),
        ({"lora": 1, "lora_target_modules": "q_proj"}, "'q_proj' matches no linear layer"),
        ({"lora": 1, "lora_path": "nowhere"}, "nowhere"),
        ({"dataset_name_or_path": "nowhere"}, "no such folder or file"),
        ({"model_name_or_path": "ernie/tiny-random-ernie"}, "no weights of it were ever released"),
        ({"model_name_or_path": "nowhere/at/all"}, "there is no such folder, and nothing of that name"),
        ({"tokenizer_name_or_path": __file__}, "is a file; expected a tokenizer's folder, with sentencepiece.bpe.model"),
        ({"tokenizer_name_or_path": str(ROOT / "configs")}, "holds finetune, model, pretrain, qwen; expected a tokenizer"),
        ({"optim": "foo"}, "command line: optim = 'foo': expected one of adamw, adamw_mini, "),
        ({"optim": "adamw_mimi"}, "did you mean adamw_mini?"),
        ({"evaluation_strategy": "epochs"}, "evaluation_strategy = 'epochs': expected one of no, steps, epoch; did you mean epoch?"),
        ({"metric_for_best_model": "accurcy"}, "did you mean accuracy?"),
        ({"metric_for_best_model": "rougeL"}, "eval_with_do_generation"),
        ({"metric_for_best_model": "ppl", "greater_is_better": 1}, "less of ppl is better"),
        ({"template": "nothing"}, "neither a file nor one of"),
        ({"truncation_strategy": "raise", "src_length": 2}, "src_length is 2"),
        ({"reft": 1, "zero_padding": 1}, "packed rows have several"),
        ({"flash_mask": 1}, "GPU only"),
        ({"max_length": 200}, "the model has 128 positions"),
        ({"lora": 1, "tensor_parallel_degree": 2}, "this is a single process"),
        ({"prefix_tuning": 1, "pipeline_parallel_degree": 2}, "Prefix) is made for it"),
        ({"dataset_name_or_path": " "}, "expected a folder or file of records"),
        ({"merge_weights": 1}, "nothing that could be merged"),
        ({"merge_weights": 1, "lora": 1, "weight_quantize_algo": "nf4"}, "it needs full-precision weights"),
        ({"evaluation_strategy": "no", "load_best_model_at_end": 1}, "needs evaluations"),
        ({"save_strategy": "steps", "load_best_model_at_end": 1}, "save_strategy = 'steps': load_best_model_at_end goes back"),
        ({"continue_training": 1}, "a setting of pretraining"),
        ({"lora": 1, "sharding_parallel_config": "enable_stage1_overlap"}, "sharding_parallel_config = "),
        ({"lora": 1, "sharding_stage1_overlap": 1}, "sharding_stage1_overlap = True: stage1_overlap expects a gradient"),
    ],
)
def test_mistakes_end_with_status_2_and_one_message(changes, message, place, tmp_path, capsys):
    assert run(place, tmp_path / "out", **changes) == 2
    error = capsys.readouterr().err
    assert "run_finetune.py: error: " in error and message in error and "Traceback" not in error


def test_weights_that_do_not_belong_to_the_config_are_refused(place, tmp_path, capsys):
    def refused(*words):
        assert run(place, tmp_path / "out", lora=1, model_name_or_path=tmp_path / "base") == 2
        error = capsys.readouterr().err
        assert all(word in error for word in (str(tmp_path / "base"), *words)) and "Traceback" not in error

    def base(**changes):
        shutil.rmtree(tmp_path / "base", ignore_errors=True)
        shutil.copytree(place / "base", tmp_path / "base")
        file = tmp_path / "base" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
        return tmp_path / "base"

    weights = base() / "model_state.pdparams"
    weights.unlink()
    refused("the folder holds config.json", "expected weights, model_state*.pdparams")
    weights.write_bytes((place / "base" / weights.name).read_bytes()[:3000])
    refused("the weights cannot be loaded", "Copy the folder again")
    base(num_hidden_layers=4)
    refused("14 weights of the model of config.json are not in its files", "would start at random")
    base(hidden_size=48)
    refused("receives a shape [96, 24], but the expected shape is [96, 48]")
    (base() / "config.json").write_text('{"model_type": "ernie"')
    refused("cannot be read", "config.json")
    (base() / "config.json").unlink()
    refused("the folder holds", "expected a model's folder, with config.json and weights")


@pytest.mark.parametrize("name, message", [
    ("sft", "holds a model with hidden_size 24, the settings ask for 48"),
    ("lora", "lora_A has shape [24, 8]; expected [48, 8] for this model"),
])  # fmt: skip
def test_a_base_of_another_size_is_not_resumed(name, message, place, tmp_path, capsys):
    """Also under the same path, where only the checkpoint tells."""
    shutil.copytree(place / "base", tmp_path / "base")
    changes = {**METHODS[name], "model_name_or_path": tmp_path / "base", "evaluation_strategy": "no", "do_eval": 0}
    assert run(place, tmp_path / "out", **changes, max_steps=2) == 0
    write_base(tmp_path / "base", hidden_size=48)
    kept = losses(tmp_path / "out")
    assert run(place, tmp_path / "out", **changes, max_steps=3) == 2
    error = capsys.readouterr().err
    assert message in error and "checkpoint-2" in error and "--overwrite_output_dir" in error and "Traceback" not in error
    assert losses(tmp_path / "out") == kept


@pytest.mark.parametrize("overwrite", [0, 1])
def test_no_run_writes_over_what_it_starts_from(overwrite, place, tmp_path, capsys):
    shutil.copytree(place / "base", tmp_path / "base")
    assert run(place, tmp_path / "lora", lora=1, max_steps=1) == 0

    def content(folder):
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    before = content(tmp_path / "base")
    (tmp_path / "link").symlink_to(tmp_path / "base")
    for output in (tmp_path / "base", tmp_path / "link", f"{tmp_path}/lora/../base/"):
        for method in ("sft", "lora"):
            changes = {**METHODS[method], "model_name_or_path": tmp_path / "base", "overwrite_output_dir": overwrite}
            assert run(place, output, **changes) == 2
            assert "is the folder of model_name_or_path, which the run would write over" in capsys.readouterr().err
    assert content(tmp_path / "base") == before
    adapter = content(tmp_path / "lora")
    assert run(place, tmp_path / "lora", lora=1, lora_path=tmp_path / "lora", overwrite_output_dir=overwrite) == 2
    assert "is the folder of lora_path" in capsys.readouterr().err and content(tmp_path / "lora") == adapter
    only = dict(lora=1, lora_path=tmp_path / "lora", do_train=False, evaluation_strategy="no")
    assert run(place, tmp_path / "lora", **only) == 0  # evaluating writes results alone


def test_a_run_over_another_methods_leaves_one(place, tmp_path):
    """lora, vera, SFT and prefix into one folder: after each it holds that one's, and is taken as such."""
    from ernie35se import peft

    for name in ("lora", "vera", "sft", "prefix"):
        assert run(place, tmp_path, **METHODS[name], max_steps=1, overwrite_output_dir=1) == 0
        method = None if name == "sft" else name
        assert peft.saved_method(tmp_path) == method
        others = {path.name for path in tmp_path.glob("*_model_state*")} - {f"{method}_model_state.safetensors"}
        assert not others and bool(list(tmp_path.glob("model*"))) == (name == "sft")


def test_adapters_are_not_resumed_on_other_weights(place, tmp_path, capsys):
    """The base of the same path and sizes was trained anew meanwhile."""
    from ernie35se.modeling import Ernie35ForCausalLM

    shutil.copytree(place / "base", tmp_path / "base")
    changes = {"lora": 1, "model_name_or_path": tmp_path / "base", "evaluation_strategy": "no", "do_eval": 0}
    assert run(place, tmp_path / "out", **changes, max_steps=2) == 0
    model = Ernie35ForCausalLM.from_pretrained(str(tmp_path / "base"))
    for parameter in model.parameters():
        parameter.set_value(parameter * 1.01)
    model.save_pretrained(str(tmp_path / "base"))
    assert run(place, tmp_path / "out", **changes, max_steps=3) == 2
    error = capsys.readouterr().err
    assert "checkpoint-2: the adapter was trained on other weights than these (9 of 9" in error and "Traceback" not in error
    assert "--overwrite_output_dir" in error and sorted(losses(tmp_path / "out")) == [1, 2]


def test_a_qwen_of_another_size_is_not_resumed(qwen, place, tmp_path, capsys):
    changes = dict(src_length=60, max_length=120, evaluation_strategy="no", do_eval=0)
    words = words_of(settings(qwen, place / "data", tmp_path / "out", **changes))
    assert run_finetune.main([*words, "--max_steps", "2"]) == 0
    shutil.copytree(qwen, tmp_path / "qwen")
    file = tmp_path / "qwen" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_hidden_layers": 1}))
    assert run_finetune.main([*words, "--max_steps", "3", "--model_name_or_path", str(tmp_path / "qwen")]) == 2
    assert "holds a model with num_hidden_layers 2, model_name_or_path has 1" in capsys.readouterr().err


def test_no_dev_split_is_refused_before_training(place, tmp_path, capsys):
    write_records(tmp_path / "data")
    (tmp_path / "data" / "dev.json").unlink()
    changes = dict(load_best_model_at_end=1, metric_for_best_model="accuracy")
    assert (
        run_finetune.main(words_of(settings(place / "base", tmp_path / "data", tmp_path / "out", **changes)))
        == 2
    )
    assert "there is nothing to evaluate on" in capsys.readouterr().err
    (tmp_path / "data" / "dev.json").write_text("")
    assert (
        run_finetune.main(words_of(settings(place / "base", tmp_path / "data", tmp_path / "out", **changes)))
        == 2
    )
    assert "nothing is left of the dev split" in capsys.readouterr().err


def test_a_preview_names_the_records_it_shows_and_what_was_left_out(place, tmp_path, capsys):
    write_records(tmp_path / "data", train=1)
    lines = [{"src": "swap: " + "one " * 40, "tgt": "one"}, {"src": "swap: a", "tgt": ""}, {"src": "swap: sun", "tgt": "moon"}]
    file = tmp_path / "data" / "train.json"
    file.write_text("\n".join(map(json.dumps, lines)))

    def preview(**changes):
        return run(place, tmp_path / "out", dataset_name_or_path=tmp_path / "data", preview_data=1, **changes)

    assert preview(truncation_strategy="drop") == 0
    out = capsys.readouterr().out
    assert "train: 1 dropped, 1 kept, 2 records, 1 skipped, empty response; " in out
    assert f"--- sample 1 ({file}:3); learnt: [[ ]]\n<s>swap: sun[[moon </s>]]" in out and "--- lengths in tokens" in out
    file.write_text(json.dumps(lines[0]))
    assert preview(truncation_strategy="drop") == 2
    assert "the train split (1 dropped, 1 records). Raise src_length" in capsys.readouterr().err
    file.write_text(json.dumps(lines[1]))
    assert preview() == 2 and "(1 skipped, empty response). Look at its records" in capsys.readouterr().err
    file.write_text("[]")
    assert preview() == 2 and "nothing is left of the train split (it has no records)" in capsys.readouterr().err


def test_packing_and_its_padding_are_said(place, tmp_path, monkeypatch, capsys):
    """12 samples of 5 to 9 tokens; with generation, which is never packed, that is said too."""
    from ernie35se.training import finetune_build

    said = []
    monkeypatch.setattr(finetune_build.logger, "info", said.append)
    _, samples = encoded(place, "train")
    lengths = [len(sample["input_ids"]) for sample in samples]
    more = dict(zero_padding=1, eval_with_do_generation=1, tgt_length=4, max_steps=1)
    assert run(place, tmp_path, lora=1, **more) == 0
    line = next(line for line in said if line.startswith("train: 12 samples packed into"))
    rows, before, after = re.search(r"into (\d+) rows of up to 48 tokens; padding ([\d.]+)% -> ([\d.]+)%", line).groups()
    assert float(before) == pytest.approx(100 * (1 - sum(lengths) / (12 * max(lengths))), abs=0.05)
    assert sum(lengths) <= int(rows) * 48 and float(after) <= 100 * (1 - sum(lengths) / (int(rows) * 48)) + 0.05
    assert "Evaluation with generation is never packed" in capsys.readouterr().out
    assert len((tmp_path / "generated-1.jsonl").read_text().splitlines()) == 4


def test_training_alone_needs_no_dev_split(place, tmp_path):
    file = tmp_path / "records.jsonl"
    shutil.copy(place / "data" / "train.json", file)
    changes = dict(dataset_name_or_path=file, lora=1, do_eval=0, evaluation_strategy="no")
    assert run(place, tmp_path / "out", **changes) == 0
    assert len(losses(tmp_path / "out")) == 6 and "eval_loss" not in results(tmp_path / "out")


def test_data_of_a_hub(place, tmp_path, capsys, monkeypatch):
    import datasets.load

    records = [{"context": "one two", "question": "moon sun", "answers": {"text": ["two"]}}] * 4
    empty = {**records[0], "answers": {"text": []}}
    asked = []

    def load(name, part):
        asked.append((name, part))
        return {"train": [*records, empty], "validation": records}

    monkeypatch.setattr(datasets.load, "load_dataset", load)
    words = words_of(settings(place / "base", "", tmp_path / "out", task_name="squad", preview_data=1))
    del words[words.index("--dataset_name_or_path") : words.index("--dataset_name_or_path") + 2]
    assert run_finetune.main(words) == 0 and asked == [("squad", None)]
    out = capsys.readouterr().out
    assert run_finetune.main([*words, "--data_name", "qa"]) == 0 and asked.pop() == ("qa", "squad")
    assert "train: 4 kept, 4 records, 1 skipped, no answer" in out and "dev: 4 kept" in out
    assert "ontext: one two[[" in out and "uestion: moon sun </s>]]" in out

    def fail(name, part):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets.load, "load_dataset", fail)
    assert run_finetune.main(words) == 2
    said = "task_name = 'squad': cannot be loaded (ConnectionError: no route). Without a network, download"
    assert said in capsys.readouterr().err


def test_the_hubs_datasets_are_read_by_its_own_library(place, tmp_path, capsys, monkeypatch):
    """Offline: a folder is read by the real thing, and squad is looked for on the hub, not in PaddleNLP's stale script."""
    import datasets.config

    import paddlenlp.datasets  # noqa: F401  puts its own function at datasets.load_dataset

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    shutil.copytree(place / "data", tmp_path / "data")
    (tmp_path / "data" / "dev.json").rename(tmp_path / "data" / "validation.json")

    def preview(name):
        words = words_of(settings(place / "base", "", tmp_path / "out", task_name=name, preview_data=1))
        del words[words.index("--dataset_name_or_path") : words.index("--dataset_name_or_path") + 2]
        return run_finetune.main(words)

    assert preview(tmp_path / "data") == 0
    out = capsys.readouterr().out
    assert "train: 12 kept, 12 records" in out and "dev: 4 kept, 4 records" in out
    assert preview("squad") == 2
    error = capsys.readouterr().err
    assert "task_name = 'squad': cannot be loaded (" in error and "Module" not in error
    assert "Without a network, download its records elsewhere and give their folder as --dataset_name_or_path." in error


# ----------------------------------------------------------------------------------------------- other models


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A tiny random Qwen2 with a byte-level BPE tokenizer of a few merges."""
    from paddlenlp.transformers import Qwen2Config, Qwen2ForCausalLM
    from paddlenlp.transformers.qwen2.tokenizer import bytes_to_unicode

    folder = tmp_path_factory.mktemp("qwen")
    letters = list(bytes_to_unicode().values())
    merges = ["s w", "sw a", "swa p", "o n", "on e", "t w", "tw o", "Ġ t", "Ġ o"]
    vocabulary = {
        token: i for i, token in enumerate([*letters, *(merge.replace(" ", "") for merge in merges)])
    }
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    tokens = {
        str(len(vocabulary) + i): token
        for i, token in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    }
    added = {
        number: {
            "content": token,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
            "special": True,
        }
        for number, token in tokens.items()
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "Qwen2Tokenizer",
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "added_tokens_decoder": added,
            }
        )
    )
    paddle.seed(0)
    config = Qwen2Config(
        vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize(
    "file", sorted((ROOT / "configs" / "qwen").glob("*.json")), ids=lambda file: file.stem
)
def test_every_qwen_file_runs(file, qwen, place, tmp_path):
    content = json.loads(file.read_text())
    small = file.stem.endswith("0p5b")
    assert content["model_name_or_path"] == ("Qwen/Qwen2.5-0.5B-Instruct" if small else "Qwen/Qwen2-7B")
    changes = dict(
        src_length=60, max_length=120, max_steps=3, gradient_accumulation_steps=1, learning_rate=1e-2
    )
    if "prefix_tuning" in content:
        changes["num_prefix_tokens"] = 7
    words = words_of(settings(qwen, place / "data", tmp_path, **changes))
    assert run_finetune.main([str(file), *words, "--template", "chatml"]) == 0
    assert len(losses(tmp_path)) == 3 and np.isfinite(results(tmp_path)["eval_loss"])


@pytest.mark.parametrize("name", ["lora", "qlora", "vera", "lokr", "dislora", "reft", "tare", "prefix"])
def test_every_method_learns_on_qwen_and_loads_again(name, qwen, place, tmp_path):
    from paddlenlp.transformers import AutoModelForCausalLM

    from ernie35se import peft

    rate = (
        2e-3 if name == "dislora" else 1e-2
    )  # its logged loss holds the orthogonality's, which grows at first
    changes = dict(
        src_length=60,
        max_length=120,
        learning_rate=rate,
        eval_with_do_generation=1,
        tgt_length=5,
        **METHODS[name],
    )
    assert run_finetune.main(words_of(settings(qwen, place / "data", tmp_path, **changes))) == 0
    found = losses(tmp_path)
    assert min(found.values()) < found[1] - 0.02
    model = peft.load(AutoModelForCausalLM.from_pretrained(str(qwen)), tmp_path)
    model.eval()
    ids = paddle.to_tensor([[83, 84, 85, 86]])
    logits = model(input_ids=ids, return_dict=True).logits
    cached = model(input_ids=ids[:, :3], use_cache=True, return_dict=True).past_key_values
    positions = paddle.to_tensor([[3]])
    last = model(
        input_ids=ids[:, 3:], past_key_values=cached, use_cache=True, position_ids=positions, return_dict=True
    ).logits
    if (
        name != "reft"
    ):  # which edits the prompt's last token, and token 3 is none when it comes after the prompt
        np.testing.assert_allclose(last[:, -1].numpy(), logits[:, -1].numpy(), atol=1e-5)


def test_what_qwens_users_write_is_text(qwen, place, tmp_path, capsys):
    """Its special tokens, spelt by a user or in an answer, are characters; those of the template are tokens. An empty prompt
    without a BOS trains and generates."""
    from ernie35se.data.records import Conversation
    from ernie35se.training import finetune_build
    from ernie35se.training.finetune_arguments import parse_finetune_arguments

    words = words_of(settings(qwen, place / "data", tmp_path, src_length=60, max_length=120, template="chatml"))
    model_args, data_args, _ = parse_finetune_arguments(words)
    tokenizer = finetune_build.load_tokenizer(model_args)
    encode = finetune_build.make_encoder(tokenizer, data_args)
    start, end, stop = (tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("im_start", "im_end", "endoftext"))
    written = "<|im_start|> two <|im_end|> <|endoftext|>"
    made = encode(Conversation(((written, written),), None, "here:1"))
    tokens = [*made["input_ids"], made["labels"][-1]]
    assert [tokens.count(token) for token in (start, end, stop)] == [2, 2, 0] and made["labels"][-1] == end
    assert tokenizer.decode(tokens).count("<|endoftext|>") == 2 and tokenizer.decode(tokens).count("<|im_end|>") == 4

    for split in ("train", "dev"):
        (tmp_path / f"{split}.json").write_text('{"src": "", "tgt": "one two"}\n' * 4)
    changes = dict(src_length=60, max_length=120, max_steps=1, eval_with_do_generation=1, tgt_length=5, lora=1)
    assert run_finetune.main(words_of(settings(qwen, tmp_path, tmp_path / "out", **changes))) == 0
    assert len((tmp_path / "out" / "generated-1.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("name", ["lora", "prefix"])
def test_recompute_on_qwen_changes_no_loss(name, qwen, place, tmp_path):
    for output, recompute in (("off", 0), ("on", 1)):
        changes = dict(src_length=60, max_length=120, max_steps=3, recompute=recompute, **METHODS[name])
        assert run_finetune.main(words_of(settings(qwen, place / "data", tmp_path / output, **changes))) == 0
    assert losses(tmp_path / "on") == pytest.approx(losses(tmp_path / "off"), abs=1e-5)


SIZES = dict(vocab_size=96, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128)
OTHERS = {
    "Llama": {**SIZES, "num_key_value_heads": 2},
    "Gemma": {**SIZES, "num_key_value_heads": 2, "head_dim": 6},
    "Mistral": {**SIZES, "num_key_value_heads": 2},
    "GPT": {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "OPT": {**SIZES, "word_embed_proj_dim": 24, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "Bloom": {"vocab_size": 96, "hidden_size": 24, "n_layer": 2, "n_head": 4},
    "CodeGen": {"vocab_size": 96, "n_embd": 24, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 128, "n_ctx": 128},
}


@pytest.mark.parametrize("name", OTHERS)
def test_models_that_paddlenlp_has(name, place, tmp_path, capsys):
    """Their losses are ours, whatever their own do with labels (GPT's refuses -100, CodeGen's shifts once more); methods learn;
    what one cannot do is refused."""
    import paddlenlp.transformers as theirs
    from finetune_run import write_tokenizer

    write_tokenizer(tmp_path / "model")
    paddle.seed(0)
    model = getattr(theirs, f"{name}ForCausalLM")(getattr(theirs, f"{name}Config")(**OTHERS[name]))
    for weight in model.parameters():  # Bloom starts all of them at zero
        if weight.ndim == 2 and not weight.any():
            weight.set_value(paddle.randn(weight.shape) * 0.1)
    model.save_pretrained(str(tmp_path / "model"))

    def run_it(output, **changes):
        words = words_of(settings(tmp_path / "model", place / "data", tmp_path / output, **changes))
        return run_finetune.main(words)

    _, samples = encoded(place, "dev")
    model.eval()
    each = []
    for sample in samples:
        log_p, labels = log_probabilities(model, sample)
        each += [-row[label] for row, label in zip(log_p, labels) if label != -100]
    only = dict(do_train=False, evaluation_strategy="no")
    assert run_it("plain", **only) == 0
    assert results(tmp_path / "plain")["eval_loss"] == pytest.approx(np.mean(each), rel=1e-5)
    for method in ("sft", "lora", "qlora", "reft", "tare"):
        assert run_it(method, **METHODS[method], num_train_epochs=4, per_device_train_batch_size=12, gradient_accumulation_steps=1) == 0
        found = losses(tmp_path / method)
        assert found[4] < found[1] - 0.005, method
    capsys.readouterr()
    status = run_it("prefix", **METHODS["prefix"], max_steps=1)
    assert status == (0 if name in ("Llama", "Gemma") else 2)
    error = capsys.readouterr().err
    assert ("error: prefix: " in error and "choose another method" in error and "Traceback" not in error) == (status == 2)
    status = run_it("packed", zero_padding=1, max_steps=1)
    assert (status == 2) == ("Set zero_padding false" in capsys.readouterr().err) == (name in ("OPT", "CodeGen"))
    status = run_it("generated", eval_with_do_generation=1, tgt_length=3, **only)
    assert (status == 2) == ("eval_with_do_generation" in capsys.readouterr().err) == (name in ("OPT", "CodeGen", "Bloom"))


def test_label_smoothing_leaves_reft_at_the_prompt(place, tmp_path):
    """As good as none: the first step's loss is that without, though the model computes its scores without labels."""
    for output, smoothing in (("off", 0), ("on", 1e-7)):
        changes = {**METHODS["reft"], "label_smoothing": smoothing, "max_steps": 2, "evaluation_strategy": "no", "do_eval": 0}
        assert run(place, tmp_path / output, **changes) == 0
    assert losses(tmp_path / "on") == pytest.approx(losses(tmp_path / "off"), abs=1e-5)
