"""The fine-tuning loop: the pretraining trainer with epochs, adapters, packed rows and metrics of its own.

order       `ShuffledEpochs`: every epoch in an order of its own, which the seed and the epoch's number decide
epochs      end at a step's end; evaluating and saving "per epoch" is done at those steps
positions   the collator counts 0, 1, 2, ... in each sample; a model with `enable_random_position_ids` gets,
            in training, a sorted random draw of the sample's own length (seeded by the step, so packing
            changes nothing), and even spacing in evaluation
adapters    checkpoints hold them alone; resuming and going back to the best one load them alone
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import numpy as np
import paddle
import paddle.nn.functional as F
from paddlenlp.trainer import TrainerCallback
from paddlenlp.trainer.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from paddlenlp.trainer.trainer_utils import EvalLoopOutput, IntervalStrategy
from paddlenlp.utils.log import logger

from .. import peft
from ..configuration import Ernie35Config
from ..data.sft import collate_prompts
from ..positions import interval_position_ids, position_interval, random_position_ids
from .decoding import decode_greedily
from .loader import DataLoader
from .metrics import perplexity
from .text_metrics import text_metrics
from .trainer import SEED_STRIDE, PretrainTrainer

TEMPLATE_FILE = "template.json"


class ShuffledEpochs:
    """Rows in the order of training: epoch after epoch, each shuffled by (seed, epoch).

    An epoch has `epoch_size` rows, a whole number of steps; the first of its order come again at its end to
    fill them.
    """

    def __init__(self, rows: Sequence, epoch_size: int, epochs: float, seed: int):
        self.rows, self.epoch_size, self.seed = rows, epoch_size, seed
        self.length = epoch_size * math.ceil(epochs)
        self._order = (-1, None)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int):
        if not 0 <= number < self.length:
            raise IndexError(number)
        epoch, place = divmod(number, self.epoch_size)
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self.rows)))
        return self.rows[self._order[1][place % len(self.rows)]]


class Generation(NamedTuple):
    """What evaluation with generation needs."""

    prompts: List[List[int]]
    references: List[str]
    decode: Callable[[List[int]], str]
    max_new_tokens: int
    eos_id: int
    pad_id: int


class AdapterCallback(TrainerCallback):
    """Tells the adapters how many optimizer steps are complete."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        peft.after_step(model, state.global_step)


class EarlyStopping(TrainerCallback):
    """Stops after `patience` evaluations without a better metric_for_best_model.

    PaddleNLP's forgets its count when a run is resumed, and compares with the best checkpoint, not the best
    evaluation. Here the evaluations of the log history are counted, which travels with the checkpoints.
    """

    def __init__(self, patience: int):
        self.patience = patience

    def on_evaluate(self, args, state, control, **kwargs):
        if patience_is_over(state.log_history, args, self.patience):
            control.should_training_stop = True


def metric_key(args) -> str:
    """Name of metric_for_best_model in logs."""
    return "eval_" + args.metric_for_best_model.removeprefix("eval_")


def patience_is_over(log_history: Sequence[dict], args, patience: int) -> bool:
    """Whether `patience` evaluations follow the first of the best ones."""
    key = metric_key(args)
    values = [record[key] for record in log_history if key in record]
    if not values:
        return False
    best = max(values) if args.greater_is_better else min(values)
    return len(values) - 1 - values.index(best) >= patience


class FinetuneTrainer(PretrainTrainer):
    """Fine-tunes a causal language model, all of it or the adapters in it.

    Args:
        args: FinetuneArguments, or TrainingArguments that may have `label_smoothing`, `merge_weights`,
            `lr_decay_ratio`, `early_stopping_patience`.
        train_dataset, eval_dataset: rows as `data.sft` makes them.
        data_collator: rows -> arrays, as `data.sft.collate`.
        generation: prompts to generate from when evaluating, or None.
        template: {"template": name, "source": jinja, ...}, written beside every model and adapter.
    """

    def __init__(self, model=None, args=None, train_dataset=None, generation=None, template=None, **kwargs):
        self.steps_per_epoch = None
        if getattr(model, "no_sync", contextlib.nullcontext) is None:  # OPT answers None for what it has not
            model.no_sync = contextlib.nullcontext
        if train_dataset is not None and len(train_dataset):
            train_dataset = self._plan_epochs(args, train_dataset)
        super().__init__(model=model, args=args, train_dataset=train_dataset, **kwargs)
        self.generation, self.template = generation, template
        self.add_callback(AdapterCallback())
        if patience := getattr(args, "early_stopping_patience", 0):
            self.add_callback(EarlyStopping(patience))

    def _plan_epochs(self, args, rows) -> ShuffledEpochs:
        """Set max_steps, and the steps at which an epoch's evaluation and checkpoint are due."""
        per_step = (
            args.per_device_train_batch_size * args.gradient_accumulation_steps * args.dataset_world_size
        )
        self.steps_per_epoch = math.ceil(len(rows) / per_step)
        if args.max_steps < 1:
            args.max_steps = math.ceil(self.steps_per_epoch * args.num_train_epochs)
        # Lowest right after the last step: a last step at a rate of zero would change nothing.
        args.decay_steps = args.max_steps + 1
        args.min_learning_rate = getattr(args, "lr_decay_ratio", 0.0) * args.learning_rate
        for kind in ("evaluation", "save", "logging"):
            if getattr(args, f"{kind}_strategy") == IntervalStrategy.EPOCH:
                setattr(args, f"{kind}_strategy", IntervalStrategy.STEPS)
                setattr(args, {"evaluation": "eval_steps"}.get(kind, f"{kind}_steps"), self.steps_per_epoch)
        epochs = args.max_steps / self.steps_per_epoch
        return ShuffledEpochs(rows, self.steps_per_epoch * per_step, epochs, args.seed)

    # ---------------------------------------------------------------- a step

    def _training_inputs(self, inputs: Dict[str, Any]) -> Dict[str, Any]:
        seed = self.state.global_step + SEED_STRIDE * self.args.dataset_rank
        table = getattr(self.model.config, "max_position_embeddings", None)
        return self._with_positions(inputs, lambda length: random_position_ids(length, table, seed))

    def _measuring_inputs(self, inputs: Dict[str, Any]) -> Dict[str, Any]:
        table = getattr(self.model.config, "max_position_embeddings", None)
        return self._with_positions(
            inputs, lambda length: interval_position_ids(length, position_interval(length, table))
        )

    def _with_positions(self, inputs, positions_of) -> Dict[str, Any]:
        if not getattr(self.model.config, "enable_random_position_ids", False):
            return inputs
        placed = place_samples(np.asarray(inputs["position_ids"]), positions_of)
        return {**inputs, "position_ids": paddle.to_tensor(placed)}

    def compute_loss(self, model, inputs, return_outputs=False):
        """In training with label smoothing, and with what the adapters add (DisLoRA)."""
        loss, outputs = self._loss(model, inputs, getattr(self.args, "label_smoothing", 0.0) if model.training else 0.0)
        extra = peft.extra_loss(model) if model.training else None
        loss = loss if extra is None else loss + extra
        return (loss, outputs) if return_outputs else loss

    def _loss(self, model, inputs, smoothing: float = 0.0):
        """Loss and outputs. Ernie35 computes its own, in chunks; a smoothed one is computed here, and so is that of other
        models: some would shift the labels once more, or take another number for what is not learnt."""
        if not smoothing and isinstance(self.model.config, Ernie35Config):
            outputs = model(**inputs, return_dict=True)
            return outputs.loss, outputs
        labels = inputs["labels"]
        peft.tell_labels(self.model, labels)
        takes = inspect.signature(self.model.forward).parameters  # some take no position_ids: theirs count 0, 1, 2, ... too
        outputs = model(**{key: value for key, value in inputs.items() if key in takes and key != "labels"}, return_dict=True)
        return smoothed_loss(outputs.logits, labels, smoothing), outputs

    # ---------------------------------------------------------------- evaluation

    def get_eval_dataloader(self, eval_dataset=None) -> DataLoader:
        """All of the rows, in order."""
        return self._measuring_dataloader(
            self.eval_dataset if eval_dataset is None else eval_dataset, "eval_dataset", None
        )

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval",
        max_eval_iters=-1,
    ) -> EvalLoopOutput:  # fmt: skip
        """Running sums over all learnt tokens, and generation where asked for; keeps no batch's logits.

        Returns:
            Metrics `<prefix>_loss` (nats per token), `_ppl`, `_accuracy` (share of tokens predicted), and
            with generation `_rouge1`, `_rouge2`, `_rougeL`, `_bleu4`.
        """
        model = self.model
        was_training = model.training
        model.eval()
        logger.info(f"***** Running {description}: {len(dataloader)} batches *****")
        self.callback_handler.eval_dataloader = dataloader
        merged = (
            peft.merged(model) if getattr(self.args, "merge_weights", False) else contextlib.nullcontext()
        )
        sums = np.zeros(3)  # loss, correct, tokens
        with merged, paddle.no_grad():
            for inputs in dataloader:
                sums += self._measure(model, inputs)
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            metrics = self._generation_metrics(model) if self.generation else {}
        if was_training:
            model.train()
        loss, correct, tokens = self._nested_gather(paddle.to_tensor(sums).unsqueeze(0)).sum(axis=0).tolist()
        if tokens == 0:
            raise ValueError(f"{description} found no token to measure: no label is learnt.")
        metrics = {
            "loss": loss / tokens,
            "ppl": perplexity(loss / tokens),
            "accuracy": correct / tokens,
            **metrics,
        }
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(None, None, metrics=metrics, num_samples=len(dataloader.dataset))

    def _measure(self, model, inputs) -> np.ndarray:
        """Sum of losses, tokens predicted rightly, tokens."""
        inputs = self._prepare_inputs(self._measuring_inputs(inputs))
        with self.autocast_smart_context_manager():
            loss, output = self._loss(model, inputs)
        learnt = inputs["labels"] != -100
        tokens = learnt.sum().item()
        right = ((output.logits.argmax(axis=-1) == inputs["labels"]) & learnt).sum().item()
        return np.array([loss.item() * tokens if tokens else 0.0, right, tokens], dtype="float64")

    def _generation_metrics(self, model) -> Dict[str, float]:
        """Scores of greedy answers; the texts go to generated-<step>.jsonl in output_dir. Every process does
        them all."""
        task, size = self.generation, self.args.per_device_eval_batch_size
        texts: List[str] = []
        for start in range(0, len(task.prompts), size):
            batch = collate_prompts(task.prompts[start : start + size], task.pad_id)
            texts += [
                task.decode(ids) for ids in decode_greedily(model, batch, task.max_new_tokens, task.eos_id)
            ]
        if self.is_world_process_zero():
            path = Path(self.args.output_dir) / f"generated-{self.state.global_step}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = (
                json.dumps(
                    {"prompt": task.decode(ids), "generated": text, "reference": reference},
                    ensure_ascii=False,
                )
                for ids, text, reference in zip(task.prompts, texts, task.references)
            )
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return text_metrics(texts, task.references)

    # ---------------------------------------------------------------- checkpoints

    def _find_checkpoint(self, wanted):
        """A run that early stopping has ended is complete: started again, it has nothing left to do."""
        folder, args = super()._find_checkpoint(wanted), self.args
        patience = getattr(args, "early_stopping_patience", 0)
        if folder is None or not patience:
            return folder
        state = json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        if patience_is_over(state["log_history"], args, patience):
            logger.info(f"{folder} was the end: {patience} evaluations without a better {metric_key(args)}.")
            args.max_steps = state["global_step"]
        return folder

    def save_model(self, output_dir=None, merge_tensor_parallel=False):
        """Adapters are whole in any case. Those of another method, which an earlier run left in output_dir, go: together
        with the new ones the folder would say nothing."""
        wrapped = peft.is_wrapped(self.model)
        super().save_model(output_dir, merge_tensor_parallel and not wrapped)
        if output_dir in (None, self.args.output_dir):
            method = self.model.adapter_config.method if wrapped else None
            self._once_per_disk(lambda: peft.remove_others(self.args.output_dir, method))

    def _save(self, output_dir=None, state_dict=None, merge_tensor_parallel=False):
        """PaddleNLP knows its own adapters only; of a wrapped model it would write all of the weights."""
        folder = Path(output_dir or self.args.output_dir)
        if not peft.is_wrapped(self.model):
            super()._save(output_dir, state_dict, merge_tensor_parallel)
        else:
            state = peft.whole_state(self.model)  # all tensor-parallel ranks together
            if self.args.should_save:
                if self.tokenizer is not None:
                    self.tokenizer.save_pretrained(str(folder))
                peft.save(self.model, folder, state)
                paddle.save(self.args, str(folder / TRAINING_ARGS_NAME))
        if self.args.should_save and self.template is not None:
            text = json.dumps(self.template, indent=2, ensure_ascii=False) + "\n"
            (folder / TEMPLATE_FILE).write_text(text, encoding="utf-8")

    def _load_from_checkpoint(self, resume_from_checkpoint=None):
        """PaddleNLP's would look for all of the weights."""
        if not peft.is_wrapped(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint)
        elif resume_from_checkpoint:
            peft.load_state(self.model, resume_from_checkpoint)

    def _inner_training_loop(self, args, *rest, **named):
        """PaddleNLP goes back to the best model for two of its own adapters only."""
        if not peft.is_wrapped(self.model):
            return super()._inner_training_loop(args, *rest, **named)
        wanted, args.load_best_model_at_end = args.load_best_model_at_end, False
        try:
            output = super()._inner_training_loop(args, *rest, **named)
        finally:
            args.load_best_model_at_end = wanted
        if wanted and self.state.best_model_checkpoint is not None:
            logger.info(
                f"Goes back to the best: {self.state.best_model_checkpoint} ({self.state.best_metric})."
            )
            peft.load_state(self.model, self.state.best_model_checkpoint)
        return output


def place_samples(ordinals: np.ndarray, positions_of: Callable[[int], np.ndarray]) -> np.ndarray:
    """(B, T) ordinals that start again at 0 with each sample -> positions, those of a sample by its
    length."""
    placed = np.empty_like(ordinals)
    known: Dict[int, np.ndarray] = {}
    for row, counts in enumerate(ordinals):
        starts = np.flatnonzero(counts == 0)
        for start, end in zip(starts, [*starts[1:], len(counts)]):
            length = int(end - start)
            if length not in known:
                known[length] = positions_of(length)
            placed[row, start:end] = known[length]
    return placed


def smoothed_loss(logits: paddle.Tensor, labels: paddle.Tensor, smoothing: float) -> paddle.Tensor:
    """(1 - e) times the cross entropy plus e times the mean of -log p over the vocabulary, averaged over
    learnt labels (Szegedy et al. 2016, section 7)."""
    learnt = (labels != -100).astype("float32")
    targets = labels.clip(min=0).unsqueeze(-1)
    if not smoothing:
        each = F.cross_entropy(logits.astype("float32"), targets, reduction="none").squeeze(-1)
    else:
        log_p = F.log_softmax(logits.astype("float32"), axis=-1)  # (B, T, V)
        hit = paddle.take_along_axis(log_p, targets, axis=-1).squeeze(-1)
        each = -(1 - smoothing) * hit - smoothing * log_p.mean(axis=-1)
    return (each * learnt).sum() / learnt.sum().clip(min=1)


def describe_template(template, limits) -> Optional[dict]:
    """What predict.py needs to build prompts as training did."""
    return {
        "template": template.name,
        "source": template.source,
        "src_length": limits.src_length,
        "tgt_length": limits.tgt_length,
        "max_length": limits.max_length,
    }
