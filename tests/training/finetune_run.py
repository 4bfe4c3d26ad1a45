"""What the fine-tuning tests share: a tokenizer of 120 pieces, a model of four tiny blocks, records of one
small skill."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import paddle
import sentencepiece

from ernie35se.configuration import Ernie35Config
from ernie35se.modeling import Ernie35ForCausalLM
from ernie35se.tokenizer import MODEL_FILE, Ernie35Tokenizer

WORDS = "one two three four five six seven eight nine moon star sun".split()


def write_tokenizer(folder: Path) -> None:
    """A SentencePiece tokenizer of the test's words."""
    draw = random.Random(0)
    sentences = [" ".join(draw.choices(WORDS, k=6)) for _ in range(300)] + ["swap: say <s> </s> , ."] * 20
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        vocab_size=80,
        model_type="bpe",
        character_coverage=1.0,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        minloglevel=2,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MODEL_FILE).write_bytes(model.getvalue())
    Ernie35Tokenizer.from_pretrained(str(folder)).save_pretrained(str(folder))


def write_base(folder: Path, **config) -> Path:
    """A folder with tokenizer and a model of random weights."""
    write_tokenizer(folder)
    settings = dict(
        vocab_size=96,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=3,
        max_position_embeddings=128,
        use_flash_attention=False,
    )
    paddle.seed(3)
    model = Ernie35ForCausalLM(Ernie35Config(**{**settings, **config}))
    model.save_pretrained(str(folder))
    return folder


def write_records(folder: Path, train: int = 12, dev: int = 4) -> Path:
    """`swap: a b` -> `b a`, of several lengths."""
    draw = random.Random(1)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train), ("dev", dev)):
        lines = []
        for _ in range(count):
            words = draw.choices(WORDS[: 4 if split == "train" else 3], k=draw.choice((1, 2, 3)))
            lines.append(json.dumps({"src": "swap: " + " ".join(words), "tgt": " ".join(reversed(words))}))
        (folder / f"{split}.json").write_text("\n".join(lines), encoding="utf-8")
    return folder


def settings(base: Path, data: Path, output: Path, **changes) -> dict:
    """A run of two epochs, six steps, as a settings file would hold it."""
    return {
        "model_name_or_path": str(base),
        "dataset_name_or_path": str(data),
        "output_dir": str(output),
        "src_length": 24,
        "max_length": 48,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 0.01,
        "warmup_steps": 1,
        "logging_steps": 1,
        "evaluation_strategy": "epoch",
        "save_strategy": "epoch",
        "do_train": True,
        "do_eval": True,
        "disable_tqdm": True,
        "report_to": "none",
        "device": "cpu",
        **changes,
    }


def words_of(settings: dict) -> list[str]:
    """The settings as words of a command line."""
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def losses(output: Path) -> list[float]:
    """Of every logged training step of a run."""
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [record["loss"] for record in history if "loss" in record]
