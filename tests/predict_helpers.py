"""A small checkpoint with a tokenizer, whose answers depend on everything before and run through all of the
vocabulary."""

from __future__ import annotations

from pathlib import Path

import sentencepiece
from model_helpers import build_model, tiny_config

from ernie35se.tokenizer import MODEL_FILE, Ernie35Tokenizer

TEXT = [
    "swap three moon",
    "moon three",
    "the moon rises over three hills",
    "a quick brown fox jumps over the lazy dog",
] * 3
VOCABULARY = 320  # 256 bytes among them


def write_checkpoint(folder: Path, **settings) -> Path:
    """Weights, configuration and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / MODEL_FILE, "wb") as stream:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT), model_writer=stream, vocab_size=VOCABULARY, model_type="bpe",
            byte_fallback=True, minloglevel=2,
        )  # fmt: skip
    Ernie35Tokenizer.from_pretrained(str(folder)).save_pretrained(str(folder))
    model = build_model(tiny_config(vocab_size=VOCABULARY, **settings))
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.set_value(parameter * 4.0)
    model.save_pretrained(str(folder))
    return folder
