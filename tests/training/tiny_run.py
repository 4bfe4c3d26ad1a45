"""A pretraining run of a second's length for the tests; as a script, one that can be killed while it saves.

python tiny_run.py OUTPUT_DIR SECONDS_PER_FILE      trains 6 steps, saves after each, slowly
"""

from __future__ import annotations

import logging
import random
import sys
import time
from dataclasses import dataclass
from typing import Optional

import numpy as np
import paddle
from paddlenlp.trainer import TrainingArguments
from paddlenlp.utils.log import logger

from ernie35se.configuration import Ernie35Config
from ernie35se.modeling import Ernie35ForCausalLM
from ernie35se.training import checkpoint
from ernie35se.training.callbacks import CurvesCallback
from ernie35se.training.trainer import PretrainTrainer

VOCAB_SIZE = 64


@dataclass
class TinyArguments(TrainingArguments):
    eval_iters: int = 10
    min_learning_rate: float = 1e-5
    decay_steps: Optional[int] = None


class RandomText:
    """`size` samples of `length` + 1 random ids; remembers which were read."""

    def __init__(self, size: int, length: int = 16, seed: int = 0):
        self.size, self.length, self.seed = size, length, seed
        self.read = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if not 0 <= index < self.size:
            raise IndexError(index)
        self.read.append(index)
        draw = np.random.RandomState(1000 * self.seed + index)
        return {"text": draw.randint(3, VOCAB_SIZE, self.length + 1).astype(np.int64)}


def collate(items):
    text = np.stack([item["text"] for item in items])
    return {"input_ids": text[:, :-1], "labels": text[:, 1:]}


def tiny_config(**changes) -> Ernie35Config:
    return Ernie35Config(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 200,
            "use_flash_attention": False,
            "enable_random_position_ids": True,
            **changes,
        }
    )


def tiny_arguments(output_dir, **changes) -> TinyArguments:
    return TinyArguments(
        **{
            "output_dir": str(output_dir),
            "max_steps": 6,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "logging_steps": 1,
            "save_strategy": "steps" if "save_steps" in changes else "no",
            "learning_rate": 1e-2,
            "warmup_steps": 2,
            "device": "cpu",
            "disable_tqdm": True,
            "report_to": ["none"],
            "seed": 7,
            **changes,
        }
    )


class NoisyTrainer(PretrainTrainer):
    """Keeps each micro-batch's loss, made to depend on all random states that a checkpoint restores."""

    noise = True

    def compute_loss(self, model, inputs, return_outputs=False):
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs)
        loss = super().compute_loss(model, inputs)
        if self.noise:
            loss = loss * (1 + 0.1 * paddle.rand([]) + 0.1 * np.random.rand() + 0.1 * random.random())
        self.__dict__.setdefault("losses", []).append((self.state.global_step, loss.item()))
        return loss


def tiny_trainer(
    output_dir,
    train=None,
    config=None,
    collator=collate,
    kind=NoisyTrainer,
    curves=False,
    evaluate_on=None,
    **arguments,
) -> PretrainTrainer:
    """A trainer over a model that is the same each time, as in a new process (parameter names included)."""
    args = tiny_arguments(output_dir, **arguments)
    paddle.seed(args.seed)
    with paddle.utils.unique_name.guard():
        model = Ernie35ForCausalLM(config or tiny_config())
    trainer = kind(
        model=model,
        args=args,
        train_dataset=RandomText(100) if train is None else train,
        eval_dataset=evaluate_on,
        data_collator=collator,
    )
    if not curves:
        trainer.remove_callback(CurvesCallback)  # matplotlib takes longer than the run
    return trainer


class Listener(logging.Handler):
    """Within `with`, hears what is logged; calling it gives the text since the last call."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __call__(self) -> str:
        text, self.lines = "\n".join(self.lines), []
        return text

    def __enter__(self):
        logger.logger.addHandler(self)
        return self

    def __exit__(self, *_):
        logger.logger.removeHandler(self)


def killable_run(output_dir, **arguments) -> PretrainTrainer:
    return tiny_trainer(output_dir, max_steps=6, save_steps=1, save_total_limit=2, **arguments)


if __name__ == "__main__":
    pause = float(sys.argv[2])
    plain_flush, plain_rmtree = checkpoint._flush, checkpoint.shutil.rmtree

    def slow_flush(path):
        time.sleep(pause)
        plain_flush(path)

    def slow_rmtree(path, **kwargs):
        for file in sorted(path.rglob("*")):
            if file.is_file():
                file.unlink()
                time.sleep(pause)
        plain_rmtree(path, **kwargs)

    checkpoint._flush, checkpoint.shutil.rmtree = slow_flush, slow_rmtree
    killable_run(sys.argv[1]).train()
