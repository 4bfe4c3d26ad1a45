"""VisualDL, curves and the progress bar."""

from __future__ import annotations

import struct
import sys

import pytest
from paddlenlp.trainer import TrainerCallback
from tiny_run import Listener, RandomText, tiny_trainer

from ernie35se.training import callbacks


def png_size(path):
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and content[-8:-4] == b"IEND"
    return struct.unpack(">II", content[16:24])


@pytest.fixture
def drawn(monkeypatch):
    """What is plotted: a list of {label: (steps, values)}, one per picture."""
    pictures = []
    plain_plot, plain_draw = callbacks._plot, callbacks.draw_curves

    def plot(axes, steps, values, label, **style):
        pictures[-1][label] = (list(steps), list(values))
        plain_plot(axes, steps, values, label, **style)

    def draw(history, title, path):
        pictures.append({"title": title})
        plain_draw(history, title, path)

    monkeypatch.setattr(callbacks, "_plot", plot)
    monkeypatch.setattr(callbacks, "draw_curves", draw)
    return pictures


def test_curves_show_the_whole_run_after_a_resume(tmp_path, drawn):
    class Stop(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 5:
                raise KeyboardInterrupt

    settings = dict(
        curves=True,
        evaluate_on=RandomText(4),
        max_steps=6,
        save_steps=4,
        do_eval=True,
        evaluation_strategy="steps",
        eval_steps=2,
    )
    first = tiny_trainer(tmp_path, **settings)
    first.add_callback(Stop())
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert len(drawn) == 1 and drawn[0]["training"][0] == [1, 2, 3, 4]
    (tmp_path / "curves.png").unlink()

    second = tiny_trainer(tmp_path, **settings)
    second.train()
    last = drawn[-1]
    assert last["title"].startswith("Ernie35ForCausalLM, ") and last["title"].endswith("step 6 of 6")
    assert last["training"][0] == [1, 2, 3, 4, 5, 6]
    assert last["training"][1] == [record["loss"] for record in second.state.log_history if "loss" in record]
    assert last["evaluation"][0] == [2, 4, 6]
    assert len(last["learning rate"][0]) == len(last["tokens per second"][0]) == 6
    assert min(png_size(tmp_path / "curves.png")) > 500
    pictures = len(drawn)
    second.evaluate()
    assert len(drawn) == pictures + 1 and drawn[-1]["evaluation"][0] == [2, 4, 6, 6]
    assert not list(tmp_path.glob(".tmp-curves*"))


def test_a_picture_that_cannot_be_drawn_does_not_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with Listener() as said:
        tiny_trainer(tmp_path, curves=True, max_steps=1).train()
    assert "curves.png was not drawn: ModuleNotFoundError" in said()


def test_an_odd_history_is_drawn(tmp_path):
    for number, history in enumerate(([{"step": 1, "loss": 2.0}], [{"step": 1, "eval_loss": float("nan")}])):
        callbacks.draw_curves(history, "title", tmp_path / f"{number}.png")
        png_size(tmp_path / f"{number}.png")


def test_smoothing_is_a_centred_mean():
    steps, values = list(range(1, 101)), [float(step) for step in range(1, 101)]
    smooth_steps, smooth_values = callbacks._smoothed(steps, values)
    assert len(smooth_steps) == len(smooth_values) == 96
    assert smooth_steps == pytest.approx(smooth_values)
    assert callbacks._smoothed([1, 2], [1.0, 2.0]) == ([], [])


def test_visualdl_stores_boolean_settings_and_scalars(tmp_path, monkeypatch):
    import visualdl

    settings, scalars = {}, []
    plain_hparams, plain_scalar = visualdl.LogWriter.add_hparams, visualdl.LogWriter.add_scalar

    def add_hparams(self, hparams_dict, metrics_list, **kwargs):
        settings.update(hparams_dict)
        return plain_hparams(self, hparams_dict, metrics_list, **kwargs)

    def add_scalar(self, tag, value, step, **kwargs):
        scalars.append((tag, step))
        return plain_scalar(self, tag, value, step, **kwargs)

    monkeypatch.setattr(visualdl.LogWriter, "add_hparams", add_hparams)
    monkeypatch.setattr(visualdl.LogWriter, "add_scalar", add_scalar)
    tiny_trainer(
        tmp_path,
        evaluate_on=RandomText(4),
        report_to=["visualdl"],
        logging_dir=str(tmp_path / "vdl"),
        max_steps=2,
        do_eval=True,
        evaluation_strategy="steps",
        eval_steps=2,
    ).train()
    assert settings["bf16"] == "False" and settings["max_steps"] == 2
    assert not [name for name, value in settings.items() if isinstance(value, bool)]
    assert {("train/loss", 1), ("train/loss", 2), ("eval/loss", 2), ("train/tokens_per_second", 2)} <= set(
        scalars
    )
    (record,) = (tmp_path / "vdl").glob("vdlrecords*")
    assert record.stat().st_size > 500


def test_the_progress_bar_can_be_turned_off_and_starts_where_the_run_does(tmp_path, monkeypatch):
    bars = []
    plain = callbacks.tqdm

    def tqdm(*args, **kwargs):
        bars.append(plain(*args, **kwargs))
        return bars[-1]

    monkeypatch.setattr(callbacks, "tqdm", tqdm)
    tiny_trainer(tmp_path, max_steps=3, save_steps=2, disable_tqdm=True).train()
    assert not bars
    with Listener() as said:
        trainer = tiny_trainer(tmp_path, max_steps=5, disable_tqdm=False)
        trainer.train()
        trainer.evaluate(RandomText(4))
    (bar,) = bars
    assert bar.initial == 3 and bar.total == 5 and bar.n == 5
    text = said()
    assert "global_step: 5" in text and "eval_loss: " in text
