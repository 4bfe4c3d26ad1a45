"""What watches a run: VisualDL, the picture of its curves, the progress bar, the last save."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Dict, List, Optional, Tuple, Union

from paddlenlp.trainer.integrations import VisualDLCallback as PaddleNLPVisualDLCallback
from paddlenlp.trainer.trainer_callback import ProgressCallback as PaddleNLPProgressCallback
from paddlenlp.trainer.trainer_callback import TrainerCallback
from paddlenlp.trainer.trainer_utils import IntervalStrategy
from paddlenlp.utils.log import logger
from tqdm.auto import tqdm

CURVES_FILE = "curves.png"


class VisualDLCallback(PaddleNLPVisualDLCallback):
    """PaddleNLP's, with settings that VisualDL can store: boolean ones are written as "True" and "False"."""

    def _init_summary_writer(self, args, log_dir=None):
        super()._init_summary_writer(args, log_dir)
        write = self.vdl_writer.add_hparams

        # VisualDL takes a bool for an int, which protobuf 7 refuses to store.
        def add_hparams(hparams_dict, metrics_list, **kwargs):
            settings = {
                key: str(value) if isinstance(value, bool) else value for key, value in hparams_dict.items()
            }
            write(settings, metrics_list, **kwargs)

        self.vdl_writer.add_hparams = add_hparams


class ProgressCallback(PaddleNLPProgressCallback):
    """PaddleNLP's starts at zero after a resume (so its rate is wrong) and drops logs outside of training."""

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_local_process_zero:
            self.training_bar = tqdm(
                total=state.max_steps, initial=state.global_step, desc="training", unit="step"
            )
        self.current_step = state.global_step

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_local_process_zero:
            logger.info(", ".join(f"{key}: {value}" for key, value in logs.items()))

    def on_train_end(self, args, state, control, **kwargs):
        if self.training_bar is not None:
            super().on_train_end(args, state, control, **kwargs)


class SaveAtEndCallback(TrainerCallback):
    """Saves after the last step too, so that the same command, run again, finds nothing left to do."""

    def on_step_end(self, args, state, control, **kwargs):
        saves = args.save_strategy == IntervalStrategy.STEPS and args.save_steps > 0
        if control.should_training_stop and saves:
            control.should_save = True


class CurvesCallback(TrainerCallback):
    """Draws `curves.png` into output_dir at each save, at the end of training and after evaluations after it.

    They come from the log history, which travels with the checkpoints, so a resumed run shows all of them.
    """

    def __init__(self):
        self._training = False

    def on_train_begin(self, args, state, control, **kwargs):
        self._training = True

    def on_save(self, args, state, control, model=None, **kwargs):
        self._draw(args, state, model)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        self._training = False
        self._draw(args, state, model)

    def on_evaluate(self, args, state, control, model=None, **kwargs):
        if not self._training:
            self._draw(args, state, model)

    def _draw(self, args, state, model) -> None:
        if not state.is_world_process_zero or not state.log_history:
            return
        title = f"{_describe(model)}: step {state.global_step:,} of {state.max_steps:,}"
        try:
            draw_curves(state.log_history, title, Path(args.output_dir) / CURVES_FILE)
        except Exception as error:  # a picture is not worth a run
            logger.warning(f"{CURVES_FILE} was not drawn: {type(error).__name__}: {error}")


def draw_curves(history: List[Dict[str, float]], title: str, path: Union[str, Path]) -> None:
    """Draw loss (training and evaluation), learning rate and tokens per second over steps into a PNG.

    Args:
        history: records with "step" and some of "loss", "eval_loss", "learning_rate", "tokens_per_second".
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and only needed here
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), layout="constrained")
    FigureCanvasAgg(figure)
    loss_axes, rate_axes, speed_axes = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1))
    figure.suptitle(title)
    losses = series(history, "loss")
    _plot(loss_axes, *losses, "training", color="#9db8d9", linewidth=1)
    _plot(loss_axes, *_smoothed(*losses), "training, smoothed", color="#1f5fa8", linewidth=1.8)
    _plot(loss_axes, *series(history, "eval_loss"), "evaluation", color="#d1495b", marker="o", markersize=4)
    _plot(rate_axes, *series(history, "learning_rate"), "learning rate", color="#3a7d44")
    speeds = series(history, "tokens_per_second")
    _plot(speed_axes, *speeds, "tokens per second", color="#8a5a9e", linewidth=1)
    labels = {loss_axes: "loss (nats per token)", rate_axes: "learning rate", speed_axes: "tokens / s"}
    for axes, label in labels.items():
        axes.set_ylabel(label)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    rate_axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4))
    speed_axes.set_ylim(bottom=0)
    speed_axes.set_xlabel("step")
    figure.align_ylabels()
    if loss_axes.lines:
        loss_axes.legend(frameon=False)
    beside = Path(path).with_name(f".tmp-{Path(path).name}")
    figure.savefig(beside, format="png", dpi=110)
    os.replace(beside, path)


def series(history: List[Dict[str, float]], key: str) -> Tuple[List[int], List[float]]:
    """Steps and values of one quantity."""
    points = [(record["step"], record[key]) for record in history if key in record]
    return [step for step, _ in points], [value for _, value in points]


def _smoothed(steps: List[int], values: List[float]) -> Tuple[List[int], List[float]]:
    """Running mean over a twentieth of the points; nothing where that would be the curve itself."""
    width = len(values) // 20
    if width < 2:
        return [], []
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    means = [(sums[i + 1] - sums[i + 1 - width]) / width for i in range(width - 1, len(values))]
    return steps[width // 2 : width // 2 + len(means)], means  # each mean at the middle of its points


def _plot(axes, steps: List[int], values: List[float], label: str, **style) -> None:
    if steps:
        axes.plot(steps, values, label=label, **style)


def _describe(model: Optional[object]) -> str:
    if model is None:
        return "run"
    count = sum(int(parameter.size) for parameter in model.parameters())
    size = f"{count / 1e9:.2f} G" if count >= 1e9 else f"{count / 1e6:.2f} M" if count >= 1e5 else str(count)
    return f"{type(model).__name__}, {size} parameters"
