"""A Trainer that can be killed at any moment: exact resume, whole checkpoints, logs that survive.

    output_dir/checkpoint-200/
      model, optimizer, scheduler, random states, trainer_state.json      as PaddleNLP writes them
      progress.json                                                       where data and sums stood
      complete.json                                                       names and sizes of all of these

A resumed run computes and logs what the uninterrupted one would have: bit for bit, where the device does.
Why a kill can do no harm is told in checkpoint.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import time
import zlib
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

import numpy as np
import paddle
import paddle.distributed as dist
from paddlenlp.trainer import TrainerCallback
from paddlenlp.trainer.integrations import VisualDLCallback as PaddleNLPVisualDLCallback
from paddlenlp.trainer.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from paddlenlp.trainer.trainer_callback import ProgressCallback as PaddleNLPProgressCallback
from paddlenlp.utils.log import logger

from . import checkpoint as checkpoints
from .callbacks import CurvesCallback, ProgressCallback, SaveAtEndCallback, VisualDLCallback
from .layouts import AnyLayoutTrainer
from .metrics import Throughput

PROGRESS_FILE = "progress.json"
HISTORY_KEYS = ("loss", "learning_rate", "tokens_per_second", "eval_loss", "eval_ppl", "eval_accuracy", "eval_rouge1",
                "eval_rouge2", "eval_rougeL", "eval_bleu4")  # fmt: skip
HISTORY_LIMIT = 20_000
# Settings that change the losses of later steps; a resumed run says which differ from the interrupted one's.
SETTINGS_THAT_MATTER = (
    "max_steps per_device_train_batch_size gradient_accumulation_steps learning_rate min_learning_rate "
    "decay_steps lr_scheduler_type warmup_steps warmup_ratio weight_decay adam_beta1 adam_beta2 adam_epsilon "
    "max_grad_norm seed bf16 fp16 fp16_opt_level amp_master_grad"
).split()


@dataclasses.dataclass
class Progress:
    """What a checkpoint must hold beyond PaddleNLP's files for a resumed run to continue, and log, exactly.

    Attributes:
        step: completed optimizer steps.
        consumed_samples: samples read by all data ranks.
        last_logged_step: step of the last log line.
        loss_sum, seconds: loss summed, and time passed, since that line.
        total_loss: loss summed over the logged steps after `summed_from_step`.
        next_sample: checksum of the sample that comes next; tells whether data or their order have changed.
    """

    step: int = 0
    consumed_samples: int = 0
    last_logged_step: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0
    total_loss: float = 0.0
    summed_from_step: int = 0
    next_sample: Optional[int] = None

    @classmethod
    def of(cls, checkpoint: Path) -> Progress:
        """Read a checkpoint's; one that plain PaddleNLP wrote has only the counts."""
        if (checkpoint / PROGRESS_FILE).is_file():
            return cls(**json.loads((checkpoint / PROGRESS_FILE).read_text(encoding="utf-8")))
        state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        step = state["global_step"]
        return cls(step, state.get("consumed_samples") or 0, last_logged_step=step, summed_from_step=step)


class NotFiniteError(ValueError):
    """A loss or a weight is no longer finite; the message says at which step, and what to try."""


class ResumableTrainer(AnyLayoutTrainer):
    """PaddleNLP's Trainer with exact resume, whole-or-absent checkpoints and a log history.

    A subclass provides `get_train_dataloader`, which starts at `self.start` (a `Progress`).

    Raises:
        ValueError: a setting that cannot be honoured.
    """

    def __init__(self, model=None, args=None, callbacks: Optional[List[TrainerCallback]] = None, **kwargs):
        if args.use_async_save or "async_save" in args.unified_checkpoint_config:
            raise ValueError(
                "asynchronous saving is not supported: a checkpoint is whole when training goes on."
            )
        super().__init__(model=model, args=args, callbacks=callbacks, **kwargs)
        if self.pop_callback(PaddleNLPVisualDLCallback):
            self.add_callback(VisualDLCallback())
        if self.pop_callback(PaddleNLPProgressCallback):
            self.add_callback(ProgressCallback())
        self.add_callback(SaveAtEndCallback())
        self.add_callback(CurvesCallback())
        self.start = Progress()  # where this process took over
        self._carry: Optional[Progress] = None  # sums to add at the first step after a resume
        self._loss_sum = None  # the loop's own running sum
        self._throughput = Throughput()

    # ---------------------------------------------------------------- start and resume

    def train(self, resume_from_checkpoint: Union[str, bool, None] = None, ignore_keys_for_eval=None):
        """Train up to args.max_steps, from a checkpoint or from scratch; says which.

        PaddleNLP's takes half a checkpoint for whole, restarts without a word, and does not notice changes.

        Args:
            resume_from_checkpoint: a checkpoint; True for the last whole one in output_dir, if any; False for
                none. None goes by args: `resume_from_checkpoint`, else `not overwrite_output_dir`.

        Returns:
            PaddleNLP's TrainOutput.

        Raises:
            ValueError: the named checkpoint is not whole.
            NotFiniteError: a loss or weight is no longer finite.
        """
        max_steps = self.args.max_steps
        if max_steps < 1:
            raise ValueError(f"max_steps = {max_steps}: pretraining needs a number of steps, 1 or more.")
        folder = self._find_checkpoint(resume_from_checkpoint)
        max_steps = self.args.max_steps  # fewer, where the checkpoint says that the run has ended
        self.start = Progress.of(folder) if folder else Progress()
        self._carry = self.start if folder else None
        self._make_way()
        if folder is None:
            logger.info(f"Trains from scratch: {max_steps:,} steps.")
        elif self.start.step >= max_steps:
            logger.info(
                f"Nothing left to do: {folder} has completed {self.start.step:,} steps, max_steps is "
                f"{max_steps:,}. Raise max_steps to train on."
            )
        else:
            logger.info(f"Resumes from {folder} (step {self.start.step:,} of {max_steps:,}).")
            self._say_what_changed(folder)
        # The optimizer finds its state by generated names; these must not depend on what came before.
        with paddle.utils.unique_name.guard():
            output = super().train(str(folder) if folder else None, ignore_keys_for_eval)
        if self.state.global_step < max_steps and not self.control.should_training_stop:
            raise RuntimeError(
                f"the data ended at step {self.state.global_step:,} of {max_steps:,}: data_collator returned "
                "a batch without arrays, which Paddle takes for the end."
            )
        return output._replace(training_loss=output.metrics["train_loss"])

    def _find_checkpoint(self, wanted: Optional[Union[str, bool]]) -> Optional[Path]:
        args = self.args
        if args.local_process_index == 0:
            for sentence in checkpoints.clean_leftovers(args.output_dir):
                logger.warning(f"{args.output_dir}: {sentence}.")
        self._barrier()
        if wanted is None:
            wanted = args.resume_from_checkpoint or not args.overwrite_output_dir
        if wanted is True:
            folder, passed_over = checkpoints.last_checkpoint(args.output_dir)
            for sentence in passed_over:
                logger.warning(f"{sentence}. It is passed over.")
            return folder
        if not wanted:
            return None
        missing = checkpoints.what_is_missing(wanted)
        if missing:
            found = ", ".join(path.name for path in checkpoints.checkpoints(args.output_dir)) or "none"
            raise ValueError(
                f"resume_from_checkpoint = {str(wanted)!r} is not a whole checkpoint: {missing}. Checkpoints "
                f"in {args.output_dir}: {found}. Name one, or none to take the last whole one."
            )
        return Path(wanted)

    def _make_way(self) -> None:
        """Without this, checkpoints of another run would later be taken for the latest ones of this run."""
        self._barrier()  # every process has found its checkpoint
        if self.args.local_process_index == 0:
            for folder in checkpoints.set_aside(self.args.output_dir, after_step=self.start.step):
                logger.warning(
                    f"{folder.name} is later than the step this run starts from: moved to {folder}."
                )
        self._barrier()

    def _say_what_changed(self, folder: Path) -> None:
        try:
            before = paddle.load(str(folder / TRAINING_ARGS_NAME))
        except Exception as error:  # only for the comparison: a run does not need the file
            logger.debug(f"{folder / TRAINING_ARGS_NAME} cannot be read ({error}).")
            before = None
        for name in SETTINGS_THAT_MATTER:
            old, new = getattr(before, name, None), getattr(self.args, name, None)
            if before is not None and old != new:
                logger.warning(f"{name} has changed since {folder.name}: {plain(old)} -> {plain(new)}.")
        if self.start.next_sample not in (None, self._checksum_of_sample(self.start.consumed_samples)):
            logger.warning(
                f"The training data or their order have changed since {folder.name}: sample "
                f"{self.start.consumed_samples:,} is another one now (input_dir, split, max_seq_length, seed "
                "and max_steps decide the order). Some samples may come twice or never."
            )

    def _checksum_of_sample(self, number: int) -> Optional[int]:
        if not isinstance(item := self.train_dataset[number % len(self.train_dataset)], dict):
            return None
        arrays = [np.ascontiguousarray(value) for _, value in sorted(item.items())]
        return zlib.crc32(b"".join(array.tobytes() for array in arrays))

    def _load_optimizer_and_scheduler(self, checkpoint):
        """PaddleNLP's first step after a resume has the old run's rate, even if the schedule has changed."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        self.lr_scheduler.last_lr = self.lr_scheduler.get_lr()
        state = getattr(self.optimizer, "_accumulators_holder", {})
        trainable = [parameter.name for parameter in self.model.parameters() if not parameter.stop_gradient]
        if self.args.world_size == 1 and not any(key.startswith(f"{trainable[0]}_") for key in state):
            raise ValueError(
                f"the optimizer state in {checkpoint} belongs to parameters of other names than "
                f"{trainable[0]!r}: this process has built other models before. Start a new process, or "
                "build the model within paddle.utils.unique_name.guard()."
            )

    # ---------------------------------------------------------------- a step

    def training_step(self, model, inputs: Dict[str, Any], *args, **kwargs) -> paddle.Tensor:
        """PaddleNLP's, with the tokens counted, and an interrupted run's sum added to the first loss."""
        self._throughput.add(inputs["input_ids"].size * self.args.dataset_world_size)
        loss = super().training_step(model, inputs, *args, **kwargs)
        return loss if self._carry is None else self._carried_over() + loss

    def _carried_over(self) -> paddle.Tensor:
        """The interrupted run's sums since its last log line: the next shows what it would have shown."""
        carry, self._carry = self._carry, None
        self._globalstep_last_logged = carry.last_logged_step
        self._globalstep_last_start_time -= carry.seconds
        self._total_loss_scalar = carry.total_loss
        self._skip_global_steps = carry.summed_from_step
        return paddle.to_tensor(carry.loss_sum, dtype="float32")

    def _check_loss_valid(self, loss: paddle.Tensor) -> None:
        """PaddleNLP's message names neither step nor way out. (With fp16 the scaler skips such steps.)"""
        value = loss.item()
        if not math.isfinite(value) and not self.args.fp16:
            raise NotFiniteError(self._not_finite(f"the loss is {value}"))

    def _not_finite(self, what: str) -> str:
        last, _ = checkpoints.last_checkpoint(self.args.output_dir)
        return (
            f"{what} at step {self.state.global_step + 1:,} (learning rate {self._get_learning_rate():.3g}); "
            f"training stops. Last whole checkpoint: {last or 'none'}. Look at the data of this step, or "
            "resume with a lower learning_rate, a longer warm-up or a smaller max_grad_norm."
        )

    # ---------------------------------------------------------------- logs

    def _maybe_log_save_evaluate(self, tr_loss, *args, **kwargs):
        """The clock of tokens per second stands still meanwhile; a checkpoint needs the running sum."""
        self._throughput.pause()
        self._loss_sum = tr_loss
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
        self._throughput.resume()

    def log(self, logs: Dict[str, float], **kwargs) -> None:
        """PaddleNLP's empties the log history, and counts a resumed run as if it had done it all."""
        rate = self._throughput.take() if "loss" in logs else None
        if rate is not None:
            logs["tokens_per_second"] = round(rate, 1)
        if "train_runtime" in logs:
            self._correct_summary(logs)
        history = self.state.log_history
        super().log(logs, **kwargs)
        if record := {key: logs[key] for key in HISTORY_KEYS if key in logs}:
            history.append({"step": self.state.global_step, **record})
        self.state.log_history = _thinned(history)

    def _correct_summary(self, logs: Dict[str, float]) -> None:
        steps = self.state.global_step - self.start.step
        samples = self._consumed_samples() - self.start.consumed_samples
        logs["train_samples_per_second"] = round(samples / logs["train_runtime"], 4)
        logs["train_steps_per_second"] = round(steps / logs["train_runtime"], 4)
        if steps <= 0 and self.start.last_logged_step > self.start.summed_from_step:
            logged_steps = self.start.last_logged_step - self.start.summed_from_step
            logs["train_loss"] = self.start.total_loss / logged_steps

    # ---------------------------------------------------------------- checkpoints

    def _save_checkpoint(self, model, metrics=None) -> None:
        """PaddleNLP writes in place, so that a kill leaves half a checkpoint under a whole one's name."""
        self._check_weights()
        name = f"checkpoint-{self.state.global_step}"
        final = Path(self.args.output_dir) / name
        self._note_best(metrics, final)
        self.state.consumed_samples = self._consumed_samples()
        staging = checkpoints.staging_folder(final)
        with self._staged(staging):
            with self._output_dir_being(staging):
                super()._save_checkpoint(model, metrics=None)
            progress = self._progress()
            if self.args.should_save:
                # Once more, now with the real output_dir.
                paddle.save(self.args, str(staging / name / TRAINING_ARGS_NAME))
                text = json.dumps(dataclasses.asdict(progress), indent=1) + "\n"
                (staging / name / PROGRESS_FILE).write_text(text, encoding="utf-8")
            self._once_per_disk(lambda: _publish_checkpoint(staging, final))
        logger.info(f"Saved {final}.")
        if self.args.local_process_index == 0:
            keep = (final, self.state.best_model_checkpoint)
            for folder in checkpoints.rotate(self.args.output_dir, self.args.save_total_limit, keep):
                logger.info(f"Deleted {folder} (save_total_limit is {self.args.save_total_limit}).")

    def _rotate_checkpoints(self, use_mtime=False, output_dir=None) -> None:
        """Not yet: PaddleNLP asks before the new checkpoint is whole, and never in a single process."""

    def save_model(self, output_dir: Optional[str] = None, merge_tensor_parallel: bool = False) -> None:
        """PaddleNLP overwrites the files in place; here each arrives whole, by a rename."""
        final = Path(output_dir or self.args.output_dir)
        if final.parent.name.startswith(checkpoints.TEMPORARY):  # part of a checkpoint, renamed as a whole
            return super().save_model(str(final), merge_tensor_parallel)
        staging = final / f"{checkpoints.TEMPORARY}model"
        with self._staged(staging):
            super().save_model(str(staging), merge_tensor_parallel)
            self._once_per_disk(lambda: _publish_model(staging, final))

    def save_metrics(self, split: str, metrics: Dict[str, float], combined: bool = True) -> None:
        """PaddleNLP's writes in place: a kill leaves half a file, and half an all_results.json stops the next run."""
        if not self.is_world_process_zero():
            return
        folder = Path(self.args.output_dir)
        _write_json(folder / f"{split}_results.json", metrics)
        if combined:
            path = folder / "all_results.json"
            earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            _write_json(path, {**earlier, **metrics})

    def save_state(self) -> None:
        """PaddleNLP's writes in place."""
        if self.is_world_process_zero():
            beside = Path(self.args.output_dir) / f"{checkpoints.TEMPORARY}{TRAINER_STATE_NAME}"
            self.state.save_to_json(str(beside))
            beside.replace(beside.with_name(TRAINER_STATE_NAME))

    def _progress(self) -> Progress:
        return Progress(
            step=self.state.global_step,
            consumed_samples=self.state.consumed_samples,
            loss_sum=self._nested_gather(self._loss_sum).mean().item(),
            last_logged_step=self._globalstep_last_logged,
            seconds=time.time() - self._globalstep_last_start_time,
            total_loss=self._total_loss_scalar,
            summed_from_step=self._skip_global_steps,
            next_sample=self._checksum_of_sample(self.state.consumed_samples),
        )

    def _note_best(self, metrics: Optional[Dict[str, float]], folder: Path) -> None:
        """Remember the best checkpoint by its final name (PaddleNLP's would remember the temporary one)."""
        wanted = self.args.metric_for_best_model
        if metrics is None or wanted is None:
            return
        value = metrics[wanted if wanted.startswith("eval_") else f"eval_{wanted}"]
        best = self.state.best_metric
        if best is None or (value > best if self.args.greater_is_better else value < best):
            self.state.best_metric, self.state.best_model_checkpoint = value, str(folder)

    def _check_weights(self) -> None:
        """A finite loss can have a gradient that is not; its weights must not become the last checkpoint."""
        for name, parameter in self.model.named_parameters():
            here = parameter._is_initialized() and not parameter.stop_gradient
            if here and not bool(paddle.isfinite(parameter).all()):
                what = f"{name} is no longer finite, so no checkpoint was written,"
                raise NotFiniteError(self._not_finite(what))

    def _consumed_samples(self) -> int:
        args = self.args
        per_batch = args.per_device_train_batch_size * args.dataset_world_size
        batches = (self.state.global_step - self.start.step) * args.gradient_accumulation_steps
        return self.start.consumed_samples + batches * per_batch

    @contextlib.contextmanager
    def _output_dir_being(self, folder: Path):
        args = self.args
        kept = args.output_dir, args.output_signal_dir
        args.output_dir = args.output_signal_dir = str(folder)
        try:
            yield
        finally:
            args.output_dir, args.output_signal_dir = kept

    @contextlib.contextmanager
    def _staged(self, folder: Path):
        """An empty folder to write into; gone if the writing fails."""
        if self.args.local_process_index == 0 and folder.exists():
            shutil.rmtree(folder)
        self._barrier()
        with checkpoints.removed_on_error(folder):
            yield

    def _once_per_disk(self, act) -> None:
        """After all have written: one process acts, then one of each node, which may have its own disk."""
        self._barrier()
        if self.is_world_process_zero():
            act()
        self._barrier()
        if self.is_local_process_zero() and not self.is_world_process_zero():
            act()
        self._barrier()

    def _barrier(self) -> None:
        if self.args.world_size > 1:
            dist.barrier()


def _publish_checkpoint(staging: Path, final: Path) -> None:
    if (staging / final.name).is_dir():  # else another node has published it on a disk that they share
        checkpoints.publish(staging / final.name, final)
        staging.rmdir()


def _publish_model(staging: Path, final: Path) -> None:
    if not staging.is_dir():
        return
    names = {path.name for path in checkpoints.move_files(staging, final, last=("config.json",))}
    for pattern in ("model_state*.pdparams*", "model*.safetensors*"):
        for stale in final.glob(pattern):
            if stale.name not in names:  # loading would prefer one format and might take an old run's weights
                stale.unlink()
                logger.warning(f"Removed {stale}: weights of an earlier run in another format.")


def _thinned(history: List[Dict[str, float]]) -> List[Dict[str, float]]:
    """Drop every other training record of a very long history: small checkpoints, the same curves."""
    if len(history) <= HISTORY_LIMIT:
        return history
    return [record for number, record in enumerate(history) if number % 2 or "loss" not in record]


def plain(value: Any) -> Any:
    """An enumeration's value; anything else as it is."""
    return getattr(value, "value", value)


def _write_json(path: Path, content: Dict[str, Any]) -> None:
    beside = path.with_name(f"{checkpoints.TEMPORARY}{path.name}")
    beside.write_text(json.dumps(content, indent=4, sort_keys=True) + "\n", encoding="utf-8")
    beside.replace(path)
