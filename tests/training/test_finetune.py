"""The parts of the fine-tuning loop against independent forms."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from model_helpers import build_model, tiny_config  # noqa: E402

from ernie35se.data.sft import IGNORED, collate, collate_prompts, join  # noqa: E402
from ernie35se.positions import random_position_ids  # noqa: E402
from ernie35se.training.decoding import decode_greedily  # noqa: E402
from ernie35se.training.finetune import ShuffledEpochs, place_samples, smoothed_loss  # noqa: E402
from ernie35se.training.text_metrics import text_metrics, tokens_of  # noqa: E402


def test_every_epoch_has_every_row_in_an_order_of_its_own():
    rows = list("abcdefg")
    data = ShuffledEpochs(rows, epoch_size=8, epochs=2.5, seed=1)
    assert len(data) == 24
    epochs = [[data[i] for i in range(start, start + 8)] for start in (0, 8, 16)]
    for epoch in epochs:
        assert sorted(epoch[:7]) == rows and epoch[7] == epoch[0]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = ShuffledEpochs(rows, 8, 2.5, seed=1)
    assert [again[i] for i in (23, 3, 9)] == [data[i] for i in (23, 3, 9)]
    assert [ShuffledEpochs(rows, 8, 1, seed=2)[i] for i in range(8)] != epochs[0]
    with pytest.raises(IndexError):
        data[24]


def test_samples_get_positions_by_their_own_length():
    ordinals = np.array([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 0]])
    placed = place_samples(ordinals, lambda length: 100 * length + np.arange(length))
    assert placed.tolist() == [[300, 301, 302, 200, 201, 100], [400, 401, 402, 403, 100, 100]]


def row(*lengths, seed=0):
    draw = np.random.RandomState(seed)
    return [
        {
            "input_ids": draw.randint(3, 37, n).tolist(),
            "labels": [IGNORED, *draw.randint(3, 37, n - 1).tolist()],
            "lengths": [n],
        }
        for n in lengths
    ]


@pytest.mark.parametrize("spaced", [True, False])
def test_packed_rows_have_the_loss_and_gradients_of_the_samples(spaced):
    model = build_model(tiny_config(enable_random_position_ids=spaced))
    model.train()
    samples, seen = row(5, 3, 7), []
    for rows in (samples, [join(samples)], [join(samples[:1]), join(samples[1:])]):
        batch = collate(rows, pad_id=0)
        if spaced:
            batch["position_ids"] = place_samples(
                batch["position_ids"], lambda n: random_position_ids(n, 256, seed=4)
            )
        loss = model(**{key: paddle.to_tensor(value) for key, value in batch.items()}, return_dict=True).loss
        loss.backward()
        seen.append((loss.item(), {name: p.grad.numpy() for name, p in model.named_parameters()}))
        model.clear_gradients()
    for loss, gradients in seen[1:]:
        assert loss == pytest.approx(seen[0][0], abs=1e-6)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient, seen[0][1][name], atol=1e-6, err_msg=name)


def test_label_smoothing():
    draw = np.random.default_rng(0)
    logits, labels = draw.normal(size=(2, 3, 5)), np.array([[1, IGNORED, 4], [IGNORED, 0, 2]])
    expected = []
    for place in np.argwhere(labels != IGNORED):
        scores = logits[tuple(place)]
        log_p = scores - np.log(np.exp(scores).sum())
        target = np.full(5, 0.1 / 5)
        target[labels[tuple(place)]] += 0.9
        expected.append(-(target * log_p).sum())
    seen = smoothed_loss(paddle.to_tensor(logits), paddle.to_tensor(labels), 0.1)
    assert seen.item() == pytest.approx(np.mean(expected), rel=1e-6)


# ------------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("spaced", [True, False])
def test_greedy_decoding_equals_one_row_at_a_time_without_cache(spaced):
    model = build_model(tiny_config(enable_random_position_ids=spaced))
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
    batch = decode_greedily(model, collate_prompts(prompts, 0), max_new_tokens=6, eos_id=2)
    for prompt, new in zip(prompts, batch):
        ids, step = list(prompt), 8 if spaced else 1
        for _ in range(6):
            positions = paddle.arange(1, len(ids) + 1) * step - 1
            logits = model(input_ids=paddle.to_tensor([ids]), position_ids=positions, return_dict=True).logits
            best = int(logits[0, -1].argmax())
            if best == 2:
                break
            ids.append(best)
        assert new == ids[len(prompt) :]


def test_decoding_stops_at_eos():
    model = build_model(tiny_config())
    free = decode_greedily(model, collate_prompts([[5, 6]], 0), 5, eos_id=-1)[0]
    assert len(free) == 5
    stop = free[2]
    assert decode_greedily(model, collate_prompts([[5, 6]], 0), 5, eos_id=stop)[0] == free[: free.index(stop)]


# -------------------------------------------------------------------------------------------------- metrics


def test_tokens():
    assert tokens_of("The cat's 3rd day.") == ["the", "cat", "'", "s", "3rd", "day", "."]
    assert tokens_of("今天ok 好") == ["今", "天", "ok", "好"]


def test_metrics_know_order_and_take_empty_texts():
    same = text_metrics(["a b c d"], ["a b c d"])
    assert all(value == pytest.approx(1) for value in same.values()) and set(same) == {
        "rouge1",
        "rouge2",
        "rougeL",
        "bleu4",
    }
    reversed_ = text_metrics(["d c b a"], ["a b c d"])
    assert reversed_["rouge1"] == 1 and reversed_["rouge2"] == 0 and reversed_["rougeL"] == 0.25
    assert set(text_metrics([""], ["a b"]).values()) == {0.0}
    chinese = text_metrics(["今天好"], ["今天很好"])
    assert chinese["rouge1"] == pytest.approx(2 * (3 / 3) * (3 / 4) / (3 / 3 + 3 / 4))
    half = text_metrics(["a b x y", "q"], ["a b c d", "r"])
    assert half["rouge1"] == 0.25 and half["rougeL"] == 0.25 and half["rouge2"] == pytest.approx(1 / 6)
    with pytest.raises(ValueError, match="0 predictions"):
        text_metrics([], [])
