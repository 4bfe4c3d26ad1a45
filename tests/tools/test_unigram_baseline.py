"""The unigram baseline: its numbers against loops in plain Python."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
from unigram_baseline import main, mean_loss, unigram_model, unigram_probabilities

from ernie35se.data.indexed import TokenFileWriter, open_tokens
from ernie35se.data.pretrain import build_train_valid_test_datasets

VOCABULARY = 50


@pytest.fixture
def corpora(tmp_path):
    """Two prefixes of token files, 40 documents each."""
    random = np.random.default_rng(0)
    for name in ("a", "b"):
        with TokenFileWriter(str(tmp_path / name), VOCABULARY) as writer:
            for length in random.integers(5, 60, 40).tolist():
                writer.add_document(random.integers(0, VOCABULARY - 5, length) // (1 + (name == "b")))
    return [str(tmp_path / "a"), str(tmp_path / "b")]


def smoothed_shares(prefix: str, documents: int) -> list[float]:
    """Add-one shares of the first documents, counted by hand."""
    tokens = open_tokens(prefix)
    counts = Counter(int(token) for i in range(documents) for token in tokens.document(i))
    total = sum(counts.values()) + VOCABULARY
    return [(counts[token] + 1) / total for token in range(VOCABULARY)]


def test_probabilities_and_loss():
    found = unigram_probabilities([np.array([1, 1, 3]), np.array([3, 3])], 5)
    assert found.tolist() == [1 / 10, 3 / 10, 1 / 10, 4 / 10, 1 / 10]
    assert mean_loss(found, np.array([1, 4])) == pytest.approx(-(math.log(0.3) + math.log(0.1)) / 2)


def test_every_training_document_counts_once_whatever_the_epochs(corpora):
    train = build_train_valid_test_datasets(corpora[:1], "80,20,0", [200, 4, 0], 16, 1)[0]
    np.testing.assert_allclose(unigram_model(train, VOCABULARY), smoothed_shares(corpora[0], 32), rtol=1e-12)


def test_a_mixture_is_the_mixture_of_its_models(corpora):
    blend = [3.0, corpora[0], 1.0, corpora[1]]
    train = build_train_valid_test_datasets(blend, "80,20,0", [20, 4, 0], 16, 1)[0]
    a, b = (np.array(smoothed_shares(prefix, 32)) for prefix in corpora)
    np.testing.assert_allclose(unigram_model(train, VOCABULARY), 0.75 * a + 0.25 * b, rtol=1e-12)


def test_the_command_measures_what_the_run_evaluates(corpora, tmp_path, capsys):
    (tmp_path / "model.json").write_text(json.dumps({
        "model_type": "ernie", "vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 128,
    }))  # fmt: skip
    output = tmp_path / "output"
    words = ["--model_name_or_path", str(tmp_path / "model.json"), "--input_dir", corpora[0], "--output_dir", str(output),
             "--split", "80,20,0", "--max_seq_length", "16", "--max_steps", "4", "--eval_steps", "2", "--eval_iters", "3",
             "--per_device_eval_batch_size", "2", "--do_train", "1", "--do_eval", "1", "--device", "cpu"]  # fmt: skip
    assert main(words) == 0
    printed = capsys.readouterr().out
    # 2 x 3 samples an evaluation; evaluations at steps 2 and 4 and at the end: 18 samples are prepared.
    valid = build_train_valid_test_datasets(corpora[:1], "80,20,0", [1, 18, 0], 16, 42)[1]
    labels = [int(token) for i in range(6) for token in valid[i]["text"][1:]]
    expected = -sum(math.log(p) for p in map(smoothed_shares_rounded_up(corpora[0]).__getitem__, labels)) / len(labels)
    assert f"{expected:.3f} nats per token over {len(labels)} held-out tokens" in printed
    assert "trained model" not in printed

    output.mkdir(exist_ok=True)
    (output / "eval_results.json").write_text('{"eval_loss": 1.23456}')
    assert main(words) == 0
    assert "1.235 nats per token over the same tokens" in capsys.readouterr().out


def smoothed_shares_rounded_up(prefix: str) -> list[float]:
    """As `smoothed_shares`, with the vocabulary of a model trained from scratch: the next multiple of 128."""
    tokens = open_tokens(prefix)
    ids = np.concatenate([tokens.document(i) for i in range(32)]).tolist()
    return [(ids.count(token) + 1) / (len(ids) + 128) for token in range(128)]


def test_without_an_evaluation_there_is_nothing_to_compare(corpora, tmp_path):
    with pytest.raises(ValueError, match="do_eval"):
        main(["--model_name_or_path", "ernie/tiny-random-ernie", "--input_dir", corpora[0],
              "--output_dir", str(tmp_path / "o"), "--max_steps", "4", "--do_train", "1", "--device", "cpu"])  # fmt: skip
