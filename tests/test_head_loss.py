"""The loss of the LM head in chunks: values and gradients as those of the plain form, at any cut."""

import numpy as np
import paddle
import pytest

from ernie35se import loss


def reference(hidden, weight, bias, labels, ignored):
    """Loss and gradients in float64; weight (C, V)."""
    hidden, weight, bias = (x.astype(np.float64) for x in (hidden, weight, bias))
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    scores = rows @ weight + bias
    scores -= scores.max(-1, keepdims=True)
    p = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    counts = flat != ignored
    safe, total = np.where(counts, flat, 0), max(counts.sum(), 1)
    value = -(np.log(p[np.arange(len(flat)), safe]) * counts).sum() / total
    d = (p - np.eye(weight.shape[1])[safe]) * counts[:, None] / total
    return value, (d @ weight.T).reshape(hidden.shape), rows.T @ d, d.sum(0)


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("ignored", [-100, 0])
def test_chunks_agree_with_float64(monkeypatch, chunk, tied, with_bias, ignored):
    monkeypatch.setattr(loss, "CHUNK", chunk)
    rng = np.random.default_rng(chunk)
    hidden, weight = rng.standard_normal((3, 5, 7)).astype("float32"), rng.standard_normal((7, 11)).astype("float32")
    bias = rng.standard_normal(11).astype("float32") * with_bias
    labels = rng.integers(1, 11, (3, 5))
    labels[0, :3] = labels[2, 4] = ignored
    tensors = [paddle.to_tensor(a, stop_gradient=False) for a in (hidden, weight.T.copy() if tied else weight, bias)]
    value = loss.head_loss(*tensors[:2], tensors[2] if with_bias else None, paddle.to_tensor(labels), ignored, tied)
    (value * 0.25).backward()  # as a micro-batch of four
    expected, *gradients = reference(hidden, weight, bias, labels, ignored)
    assert float(value) == pytest.approx(expected, rel=1e-6)
    gradients[1] = gradients[1].T if tied else gradients[1]
    for tensor, gradient in list(zip(tensors, gradients))[: 3 if with_bias else 2]:
        np.testing.assert_allclose(tensor.grad.numpy(), 0.25 * gradient, atol=2e-7)


def test_no_label_that_counts_gives_zero_and_a_graph():
    hidden, weight = paddle.ones([1, 3, 2]), paddle.ones([2, 5])
    hidden.stop_gradient = weight.stop_gradient = False
    value = loss.head_loss(hidden, weight, None, paddle.full([1, 3], -100, dtype="int64"))
    value.backward()
    assert float(value) == 0.0 and (hidden.grad.numpy() == 0).all() and (weight.grad.numpy() == 0).all()


def test_frozen_head_gets_no_gradient():
    hidden, weight, bias = paddle.ones([1, 3, 2]), paddle.ones([2, 5]), paddle.zeros([5])
    hidden.stop_gradient = False
    loss.head_loss(hidden, weight, bias, paddle.to_tensor([[1, 2, 3]])).backward()
    assert weight.grad is None and bias.grad is None and hidden.grad is not None


def test_labels_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"labels have shape \[1, 2\]; expected \[1, 3\]"):
        loss.head_loss(paddle.ones([1, 3, 2]), paddle.ones([2, 5]), None, paddle.zeros([1, 2], dtype="int64"))
