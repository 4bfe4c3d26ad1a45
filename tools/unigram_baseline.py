"""The loss of a unigram model over the tokens that a pretraining run is evaluated on: what a model has to beat.

It takes the arguments of scripts/run_pretrain.py. Each token's probability is its share of the training split, with
one added to every count (Laplace), so a token never seen in training has a loss too; a mixture of corpora gives the
mixture of their unigram models. The held-out tokens are the labels of the very batches that the run evaluates, and
where output_dir holds eval_results.json, its loss is printed too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Iterable, Sequence

import numpy as np
from _common import run_tool

EXAMPLE = "  python tools/unigram_baseline.py configs/pretrain/demo_cpu.json"


def unigram_probabilities(ids: Iterable[np.ndarray], vocab_size: int) -> np.ndarray:
    """(vocab_size,) float64 that adds up to 1: the share of each id in all the arrays, one added to every count."""
    counts = np.ones(vocab_size, np.int64)
    for piece in ids:
        counts += np.bincount(piece, minlength=vocab_size)
    return counts / counts.sum()


def mean_loss(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Mean of -log p over the labels, in nats per token."""
    return float(-np.log(probabilities[labels]).mean())


def corpora_of(dataset) -> list[tuple[float, object]]:
    """[(weight, dataset of one corpus)] of a dataset or a mixture."""
    if hasattr(dataset, "weights"):
        return list(zip(dataset.weights, dataset.datasets))
    return [(1.0, dataset)]


def unigram_model(train, vocab_size: int) -> np.ndarray:
    """Unigram probabilities of a training dataset: over whole documents, each once, however many epochs it holds."""
    mixture = np.zeros(vocab_size)
    for weight, corpus in corpora_of(train):
        ids = (corpus.tokens.read(sequence) for sequence in np.unique(corpus.maps.doc_idx).tolist())
        mixture += weight * unigram_probabilities(ids, vocab_size)
    return mixture


def held_out_labels(valid, samples: int) -> np.ndarray:
    """Labels of the first `samples` samples, those that a run evaluates."""
    return np.concatenate([valid[i]["text"][1:] for i in range(min(samples, len(valid)))])


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    if {"-h", "--help"} & set(words):
        print(f"{__doc__}\nexample:\n{EXAMPLE}")
        return 0
    from ernie35se.training import build
    from ernie35se.training.arguments import parse_pretrain_arguments

    settings = build.Settings(*parse_pretrain_arguments(words))
    training = settings.training
    if not (training.do_train and training.do_eval):
        raise ValueError("do_train and do_eval: expected both on, as in the run to compare with")
    tokenizer = build.load_tokenizer(settings.model)
    vocab_size = build.load_config(settings, tokenizer, None).vocab_size
    train, valid, _ = build.build_datasets(settings, vocab_size)
    labels = held_out_labels(valid, training.eval_iters * training.per_device_eval_batch_size)
    loss = mean_loss(unigram_model(train, vocab_size), labels)
    print(f"Unigram model:          {loss:.3f} nats per token over {labels.size} held-out tokens")
    results = Path(training.output_dir, "eval_results.json")
    if results.is_file():
        model_loss = json.loads(results.read_text(encoding="utf-8"))["eval_loss"]
        print(f"The trained model:      {model_loss:.3f} nats per token over the same tokens ({results})")
    return 0


if __name__ == "__main__":
    run_tool(main)
