"""What the parallel tests run, both on one process and on ranks: tiny models and short training runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import numpy as np
import paddle
from model_helpers import rebuilt_weight
from paddlenlp.trainer import TrainingArguments

from ernie35se import conversion
from ernie35se.configuration import Ernie35Config
from ernie35se.modeling import Ernie35ForCausalLM
from ernie35se.training.callbacks import CurvesCallback
from ernie35se.training.trainer import PretrainTrainer

VOCAB_SIZE = 46

# What of the model differs from one case to the next: every kind of block, bias, head and loss under tensor parallel.
MODELS = {
    "plain": {},
    "no_bias": dict(use_bias=False),
    "bias_but_not_on_the_head": dict(weight_share_add_bias=False),
    "untrimmed": dict(parallel_attn_hatf=False),
    "tied": dict(tie_word_embeddings=True),
    "whole_logits": dict(tensor_parallel_output=False),
    "tied_whole_logits": dict(tie_word_embeddings=True, tensor_parallel_output=False),
    "recompute": dict(use_recompute=True),
    "recompute_attention": dict(use_recompute_attn=True),
}


def small_config(**changes) -> Ernie35Config:
    """Odd sizes except where two ranks share them."""
    sizes = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=24,
        intermediate_size=18,
        num_hidden_layers=4,
        num_attention_heads=6,
        max_position_embeddings=96,
    )
    return Ernie35Config(**{**sizes, **changes})


# ---- one forward and backward pass ----------------------------------------------------------------------------------


def batch():
    draw = np.random.default_rng(3)
    ids = draw.integers(3, VOCAB_SIZE, (3, 8))
    labels = draw.integers(3, VOCAB_SIZE, (3, 8))
    labels[0, :3] = -100
    positions = np.sort(draw.permutation(96)[:8])[None]
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def set_rebuilt_weights(model, degree: int = 1, rank: int = 0) -> None:
    """This rank's pieces of the weights that anyone can rebuild."""
    for name, parameter in model.named_parameters():
        shape = whole_shape(name, parameter.shape, model.config, degree)
        parameter.set_value(conversion.split(name, rebuilt_weight(name, shape), model.config, degree, rank))


def whole_shape(name, shape, config, degree):
    cut = conversion.layout(name, config)
    shape = list(shape)
    if cut is not None:
        shape[cut.axis] *= degree
    return shape


def train_once(model) -> None:
    """One forward and backward pass in train mode."""
    model.train()
    model(**{name: paddle.to_tensor(value) for name, value in batch().items()})[0].backward()


def forward_and_backward(model) -> dict[str, np.ndarray]:
    """Logits, loss and every gradient in train mode, as arrays."""
    inputs = {name: paddle.to_tensor(value) for name, value in batch().items()}
    model.train()
    loss, logits = model(**inputs, return_logits=True)[:2]
    loss.backward()
    arrays = {f"gradient/{name}": p.grad.numpy() for name, p in model.named_parameters()}
    model.eval()
    with paddle.no_grad():
        evaluated = model(**inputs, output_hidden_states=True, return_dict=True)
    hidden = {f"hidden/{i}": state.numpy() for i, state in enumerate(evaluated.hidden_states)}
    return {"loss": loss.numpy(), "logits": logits.numpy(), "eval_loss": evaluated.loss.numpy(), **hidden, **arrays}


# ---- training -------------------------------------------------------------------------------------------------------


@dataclass
class Arguments(TrainingArguments):
    min_learning_rate: float = 1e-3
    decay_steps: Optional[int] = None


class Text:
    """Samples of 25 random ids; remembers which were read."""

    def __init__(self, size: int = 60):
        self.size, self.read = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        return {"text": np.random.RandomState(index).randint(3, VOCAB_SIZE, 25)}


def collate(items):
    text = np.stack([item["text"] for item in items])
    return {"input_ids": text[:, :-1], "labels": text[:, 1:]}


def arguments(folder, **changes) -> Arguments:
    """Six steps of two micro-batches of two samples (over all data ranks), clipped hard at first."""
    return Arguments(
        **{
            "output_dir": str(folder),
            "max_steps": 6,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "logging_steps": 1,
            "save_steps": 1000,
            "learning_rate": 2e-2,
            "warmup_steps": 2,
            "weight_decay": 0.1,
            "max_grad_norm": 0.3,
            "device": "cpu",
            "disable_tqdm": True,
            "report_to": ["none"],
            "seed": 7,
            **changes,
        }
    )


def length_of_step(step: int, longest: int) -> int:
    """The warm-up of the sequence length, short enough to see in six steps: 8, 8, 16, 16, 24, 24 tokens."""
    return min(longest, 8 * (1 + step // 2))


class ShortWarmUp:
    """Gives a trainer that warm-up."""

    def _sequence_length(self, step: int, longest: int) -> int:
        return length_of_step(step, longest)


def make_trainer(config, args, model_class=Ernie35ForCausalLM, kind=PretrainTrainer, **options) -> PretrainTrainer:
    """A trainer over a new model; the same start whatever the layout."""
    kind = type(kind.__name__, (ShortWarmUp, kind), {})
    paddle.seed(args.seed)
    with paddle.utils.unique_name.guard():
        model = model_class(config)
    trainer = kind(
        model=model, args=args, train_dataset=options.pop("data", None) or Text(), data_collator=collate, **options
    )
    trainer.remove_callback(CurvesCallback)
    return trainer


def losses(trainer) -> np.ndarray:
    return np.array([record["loss"] for record in trainer.state.log_history if "loss" in record])


def train_alone(folder: Path, config, **changes):
    """The run that ranks must reproduce: losses and final weights of one process."""
    trainer = make_trainer(config, arguments(folder, **changes))
    trainer.train()
    return losses(trainer), weights_of(trainer.model)


def weights_of(model) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in model.state_dict().items()}


def save_whole_model(folder: Path) -> None:
    """A folder with the rebuilt weights, as one process saves it."""
    model = Ernie35ForCausalLM(small_config())
    set_rebuilt_weights(model)
    model.save_pretrained(str(folder))


def merged(pieces: list[dict[str, np.ndarray]], config) -> dict[str, np.ndarray]:
    """Whole arrays from every rank's, by state-dict name."""
    return {name: conversion.merge(name, [piece[name] for piece in pieces], config) for name in pieces[0]}
