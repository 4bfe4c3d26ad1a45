"""The pretraining loop: PaddleNLP's Trainer, with what is wrong or missing in it replaced.

Where a step's ingredients come from:

    samples     loader.py: one after the other, from wherever an interrupted run stood
    length      `progressive_sequence_length`, where the config has `use_progressive_seq_len`
    positions   `random_position_ids(seed = completed steps + 100000 * data rank)`, where the config has
                `enable_random_position_ids`; once a step, the same for all of its micro-batches
    rate        warm-up, then cosine or linear decay to `min_learning_rate`
    state       resumable.py: a checkpoint is whole or absent, and resuming continues bit for bit

Evaluation passes no positions (the model has its own for that), never truncates, and keeps nothing of a batch
but its loss. Whatever depends on a rank asks for the data rank (`args.dataset_rank`), so that tensor and
pipeline groups agree.
"""

from __future__ import annotations

import itertools
from typing import Any, Dict, Optional

import numpy as np
import paddle
from paddlenlp.trainer.trainer_utils import EvalLoopOutput, has_length
from paddlenlp.transformers.optimization import CosineAnnealingWithWarmupDecay, LinearAnnealingWithWarmupDecay
from paddlenlp.utils.log import logger

from ..positions import progressive_sequence_length, random_position_ids
from .loader import DataLoader, SequentialBatchSampler
from .metrics import perplexity
from .optimizer import decays_slices, with_fused_update
from .resumable import ResumableTrainer, plain

SEED_STRIDE = 100_000  # between the position seeds of neighbouring data ranks
TEST_ITERS_PER_EVAL_ITER = 10  # the test split is measured once, so on more batches than an evaluation
SCHEDULES = {"cosine": CosineAnnealingWithWarmupDecay, "linear": LinearAnnealingWithWarmupDecay}


class PretrainTrainer(ResumableTrainer):
    """Pretrains a causal language model.

    Args:
        model: its config has `enable_random_position_ids`, `use_progressive_seq_len` and
            `max_position_embeddings`.
        args: TrainingArguments that may also have `eval_iters`, `min_learning_rate` and `decay_steps`.
        train_dataset, eval_dataset: map-style; their order is the order of training.
        data_collator: list of items -> {"input_ids": (B, T), "labels": (B, T)}.

    The rest is as in PaddleNLP's Trainer.

    Raises:
        ValueError: a setting that this trainer cannot honour.
    """

    def __init__(self, model=None, args=None, train_dataset=None, **kwargs):
        if getattr(args, "distributed_dataloader", False):
            raise ValueError("distributed_dataloader is not supported: every process reads its own samples.")
        if train_dataset is not None and not has_length(train_dataset):
            kind = type(train_dataset).__name__
            raise ValueError(f"train_dataset ({kind}) has no length; a map-style dataset is needed.")
        super().__init__(model=model, args=args, train_dataset=train_dataset, **kwargs)
        self._positions = None  # (step, length, tensor)
        self._stage_length = None  # of the tensors that pipeline stages exchange

    # ---------------------------------------------------------------- data

    def get_train_dataloader(self) -> DataLoader:
        """PaddleNLP's shuffles (with the global random state), loads what it skips, and hangs on an error."""
        args = self.args
        if self.train_dataset is None or len(self.train_dataset) == 0:
            raise ValueError("there is nothing to train on: train_dataset is empty. Look at data and split.")
        sampler = SequentialBatchSampler(
            num_items=len(self.train_dataset),
            batch_size=args.per_device_train_batch_size,
            num_batches=args.max_steps * args.gradient_accumulation_steps,
            num_replicas=args.dataset_world_size,
            rank=args.dataset_rank,
            first_batch=self.start.step * args.gradient_accumulation_steps,
            first_sample=self.start.consumed_samples,
        )
        return DataLoader(self.train_dataset, sampler, self.data_collator, args.dataloader_num_workers)

    def get_eval_dataloader(self, eval_dataset=None) -> DataLoader:
        """The first `eval_iters` batches, the same ones each time, so that evaluations can be compared."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        return self._measuring_dataloader(dataset, "eval_dataset", getattr(self.args, "eval_iters", None))

    def get_test_dataloader(self, test_dataset) -> DataLoader:
        """The first 10 * `eval_iters` batches."""
        eval_iters = getattr(self.args, "eval_iters", None)
        return self._measuring_dataloader(
            test_dataset, "test_dataset", eval_iters and eval_iters * TEST_ITERS_PER_EVAL_ITER
        )

    def _measuring_dataloader(self, dataset, name: str, num_batches: Optional[int]) -> DataLoader:
        args = self.args
        if dataset is None or len(dataset) == 0:
            raise ValueError(f"there is nothing to measure: {name} is empty. Look at data and split.")
        if num_batches and num_batches > 0:
            wanted = num_batches * args.per_device_eval_batch_size * args.dataset_world_size
            dataset = paddle.io.Subset(dataset, range(min(wanted, len(dataset))))
        if args.pipeline_parallel_degree > 1:  # stages take whole batches only
            batch = args.per_device_eval_batch_size * args.dataset_world_size
            left_over = len(dataset) % batch
            if left_over == len(dataset):
                raise ValueError(
                    f"{name} has {len(dataset)} samples; pipeline stages measure whole batches of {batch} only "
                    "(per_device_train_batch_size x gradient_accumulation_steps x data ranks)."
                )
            if left_over:
                logger.warning(f"{name}: the last {left_over} samples fill no batch of {batch}; not measured.")
            dataset = paddle.io.Subset(dataset, range(len(dataset) - left_over))
        sampler = self._get_eval_sampler(dataset)
        return DataLoader(dataset, sampler, self.data_collator, args.dataloader_num_workers)

    # ---------------------------------------------------------------- a step

    def create_optimizer(self, lr_scheduler=None):
        """PaddleNLP's, with clipping and update in one op where that can be, and decay under every kind of sharding."""
        self.optimizer = decays_slices(with_fused_update(super().create_optimizer(lr_scheduler)))
        return self.optimizer

    def training_step(self, model, inputs: Dict[str, Any], *args, **kwargs) -> paddle.Tensor:
        """PaddleNLP's knows neither positions nor warm-up of the sequence length."""
        inputs = self._training_inputs(inputs)
        if self.args.pipeline_parallel_degree > 1:
            self._tell_stages_of_length(model, inputs["input_ids"].shape[1])
        return super().training_step(model, inputs, *args, **kwargs)

    def _tell_stages_of_length(self, model, length: int) -> None:
        """Stages remember the shapes that they exchange, and would wait for ever for tensors of the old."""
        if length != self._stage_length:
            model._p2p_helper.clear_meta_cache()
        self._stage_length = length

    def _training_inputs(self, inputs: Dict[str, Any]) -> Dict[str, Any]:
        """Cut (B, T) tensors to this step's length; add positions (1, T) where the model wants random."""
        config, step = self.model.config, self.state.global_step
        inputs = dict(inputs)
        if getattr(config, "use_progressive_seq_len", False):
            length = self._sequence_length(step, inputs["input_ids"].shape[1])
            inputs = {key: value[:, :length] for key, value in inputs.items()}
        if getattr(config, "enable_random_position_ids", False):
            inputs["position_ids"] = self._random_positions(step, inputs["input_ids"].shape[1])
        return inputs

    def _sequence_length(self, step: int, longest: int) -> int:
        return progressive_sequence_length(step, longest)

    def _random_positions(self, step: int, length: int) -> paddle.Tensor:
        if self._positions is None or self._positions[:2] != (step, length):
            seed = step + SEED_STRIDE * self.args.dataset_rank
            drawn = random_position_ids(length, self.model.config.max_position_embeddings, seed)
            self._positions = (step, length, paddle.to_tensor(drawn).unsqueeze(0))
        return self._positions[2]

    def create_scheduler(self, num_training_steps: int):
        """PaddleNLP's decays to zero at max_steps, whatever `min_learning_rate` and `decay_steps` say."""
        args = self.args
        warmup = args.warmup_steps if args.warmup_steps > 0 else args.warmup_ratio * num_training_steps
        kind = plain(args.lr_scheduler_type)
        if kind not in SCHEDULES or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps)
        self.lr_scheduler = SCHEDULES[kind](
            max_lr=args.learning_rate,
            min_lr=getattr(args, "min_learning_rate", 0.0) or 0.0,
            warmup_step=warmup,
            decay_step=getattr(args, "decay_steps", None) or num_training_steps,
            last_epoch=0,  # the first step already moves: step n of the run has the rate of n, not of n - 1
        )
        return self.lr_scheduler

    # ---------------------------------------------------------------- evaluation

    def evaluation_loop(
        self,
        dataloader,
        description,
        prediction_loss_only=None,
        ignore_keys=None,
        metric_key_prefix="eval",
        max_eval_iters=-1,
    ) -> EvalLoopOutput:
        """PaddleNLP's averages over samples and keeps all losses; here over tokens, as two running sums.

        Returns:
            Metrics `<prefix>_loss` (nats per token) and `<prefix>_ppl`.
        """
        model = self._model_to_evaluate()
        was_training = model.training
        model.eval()
        logger.info(f"***** Running {description}: {len(dataloader)} batches *****")
        self.callback_handler.eval_dataloader = dataloader
        ignored = getattr(self.model.config, "ignored_index", -100)
        sums = np.zeros(2)  # loss, tokens
        for inputs in itertools.islice(dataloader, max_eval_iters if max_eval_iters > 0 else None):
            tokens = int((inputs["labels"] != ignored).sum())
            loss, _, _ = self.prediction_step(model, inputs, True, ignore_keys)
            sums += (loss.item() * tokens, tokens)
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        if was_training:
            model.train()
        # Ranks of a tensor or pipeline group add the same numbers, every data rank equally often.
        loss_sum, tokens = self._nested_gather(paddle.to_tensor(sums).unsqueeze(0)).sum(axis=0).tolist()
        if tokens == 0:
            raise ValueError(f"{description} found no token to measure: all labels are {ignored}.")
        mean = loss_sum / tokens
        metrics = {f"{metric_key_prefix}_loss": mean, f"{metric_key_prefix}_ppl": perplexity(mean)}
        return EvalLoopOutput(None, None, metrics=metrics, num_samples=len(dataloader.dataset))

    def _model_to_evaluate(self):
        return self.model_wrapped if self.args.pipeline_parallel_degree > 1 else self.model
