"""Attention cores agree under every mask; the loss agrees with numpy."""

import numpy as np
import paddle
import pytest
from model_helpers import build_model, tiny_config

from ernie35se import attention
from ernie35se.loss import causal_lm_loss

CORES = {
    "eager": attention.eager_attention,
    "flash": attention.flash_attention,
    "blockwise": attention.blockwise_attention,  # the CPU op where it is built and there is no mask
}


def numpy_attention(query, key, value, allowed):
    """(B, T, H, D), (B, S, H, D) twice, (B, T, S) booleans; float64. Rows that may look nowhere are zero."""
    query, key, value = (x.astype(np.float64) for x in (query, key, value))
    scores = np.einsum("bthd,bshd->bhts", query, key) / np.sqrt(query.shape[-1])
    weights = np.where(allowed[:, None], np.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    return np.einsum("bhts,bshd->bthd", weights, value)


def masks(batch, queries, keys, rng):
    """Each kind of attention_mask the model takes, with the same thing written as (B, T, S) booleans."""
    causal = np.tril(np.ones((batch, queries, keys), dtype=bool), keys - queries)
    yield "none", None, causal
    padded = np.ones((batch, keys), dtype=np.int64)
    for row in range(batch):
        padded[row, : rng.integers(0, keys - queries + 1) + row % 2] = 0
    yield "padding", padded, causal & padded[:, None].astype(bool)
    packed = rng.random((batch, queries, keys)) < 0.6
    yield "packed", packed, causal & packed
    yield "packed, four axes", packed[:, None].astype(np.int64), causal & packed


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("batch, queries, keys, heads, size", [(2, 7, 7, 3, 6), (3, 1, 9, 1, 2), (1, 4, 11, 2, 8), (2, 1, 1, 2, 4)])
def test_cores_agree_with_numpy_under_every_mask(core, batch, queries, keys, heads, size):
    rng = np.random.default_rng(queries)
    query = rng.standard_normal((batch, queries, heads, size)).astype("float32")
    key, value = (rng.standard_normal((batch, keys, heads, size)).astype("float32") for _ in range(2))
    for kind, given, allowed in masks(batch, queries, keys, rng):
        mask = None if given is None else paddle.to_tensor(given)
        prepared = attention.prepare_mask(CORES[core], mask, queries, keys)
        context, weights = CORES[core](*map(paddle.to_tensor, (query, key, value)), prepared)
        expected = numpy_attention(query, key, value, allowed)
        looks = allowed.any(-1)  # the others hold anything finite
        np.testing.assert_allclose(context.numpy()[looks], expected[looks], atol=2e-6, err_msg=kind)
        assert np.isfinite(context.numpy()).all() and weights is None, kind


@pytest.mark.parametrize("block", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("batch, queries, keys, heads, size", [(2, 6, 6, 3, 4), (1, 5, 9, 2, 6), (3, 6, 7, 1, 2)])
def test_blocks_of_any_size_give_the_plain_form_s_context_and_gradients(block, batch, queries, keys, heads, size, monkeypatch):
    monkeypatch.setenv("ERNIE35SE_CPU_OPS", "0")
    monkeypatch.setattr(attention, "BLOCK", block)
    rng = np.random.default_rng(block)
    arrays = [rng.standard_normal((batch, length, heads, size)).astype("float32") for length in (queries, keys, keys, queries)]
    for kind, given, allowed in masks(batch, queries, keys, rng):
        looks = allowed.any(-1)[:, :, None, None]  # nothing depends on the others
        found = {}
        for name in ("eager", "blockwise"):
            query, key, value = inputs = [paddle.to_tensor(a, stop_gradient=False) for a in arrays[:3]]
            mask = attention.prepare_mask(CORES[name], None if given is None else paddle.to_tensor(given), queries, keys)
            context, _ = CORES[name](query, key, value, mask)
            context.backward(paddle.to_tensor(arrays[3] * looks))
            found[name] = [context.numpy() * looks, *(x.grad.numpy() for x in inputs)]
        for plain, blocks in zip(found["eager"], found["blockwise"]):
            np.testing.assert_allclose(blocks, plain, atol=2e-6, err_msg=kind)


@pytest.mark.parametrize("frozen", [[0], [1], [2], [0, 1], [1, 2], [0, 1, 2]])
def test_blocks_with_inputs_that_take_no_gradient(frozen, monkeypatch):
    monkeypatch.setenv("ERNIE35SE_CPU_OPS", "0")
    monkeypatch.setattr(attention, "BLOCK", 3)
    found = {}
    for name in ("eager", "blockwise"):
        paddle.seed(1)
        inputs = [paddle.randn([2, 7, 2, 4]) for _ in range(3)]
        for number, x in enumerate(inputs):
            x.stop_gradient = number in frozen
        context, _ = CORES[name](*inputs, attention.prepare_mask(CORES[name], None, 7, 7))
        assert context.stop_gradient == (len(frozen) == 3)
        if not context.stop_gradient:
            (context * context).sum().backward()
        found[name] = [None if x.grad is None else x.grad.numpy() for x in inputs]
    for plain, blocks in zip(found["eager"], found["blockwise"]):
        assert (plain is None) == (blocks is None)
        if plain is not None:
            np.testing.assert_allclose(blocks, plain, atol=2e-6)


def test_training_in_blocks_keeps_no_matrix_of_probabilities(monkeypatch):
    monkeypatch.setenv("ERNIE35SE_CPU_OPS", "0")
    from paddle.base import core

    def kept(attend):  # bytes that the graph holds after the forward pass
        inputs = [paddle.to_tensor(np.ones((1, 1024, 2, 4), "float32"), stop_gradient=False) for _ in range(3)]
        before = core.host_memory_stat_current_value("Allocated", 0)
        context, _ = attend(*inputs)
        return core.host_memory_stat_current_value("Allocated", 0) - before

    matrix = 2 * 1024 * 1024 * 4
    assert kept(attention.eager_attention) > matrix > 8 * kept(attention.blockwise_attention)


@pytest.mark.parametrize("padded", [True, False])
def test_gradients_of_the_cores_agree(padded):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, 5, 3, 4)).astype("float32") for _ in range(4)]
    mask = paddle.to_tensor([[0, 0, 1, 1, 1], [1] * 5]) if padded else None
    gradients = {}
    for name, core in CORES.items():
        inputs = [paddle.to_tensor(a, stop_gradient=False) for a in arrays[:3]]
        context, _ = core(*inputs, attention.prepare_mask(core, mask, 5, 5))
        upstream = arrays[3].copy()
        if padded:
            upstream[0, :2] = 0  # nothing depends on padding
        (context * paddle.to_tensor(upstream)).sum().backward()
        gradients[name] = [x.grad.numpy() for x in inputs]
    for name in ("flash", "blockwise"):
        for eager, found in zip(gradients["eager"], gradients[name]):
            np.testing.assert_allclose(found, eager, atol=2e-6, err_msg=name)


def test_flash_falls_back_where_there_is_no_gpu_and_the_model_still_masks():
    ids, mask = paddle.to_tensor([[0, 0, 5, 6], [3, 4, 5, 6]]), paddle.to_tensor([[0, 0, 1, 1], [1] * 4])
    logits = [build_model(tiny_config(use_flash_attention=on))(ids, attention_mask=mask)[0] for on in (False, True)]
    np.testing.assert_allclose(logits[0].numpy(), logits[1].numpy(), atol=1e-6)
    assert attention.choose_core(tiny_config(use_flash_attention=True)) is not attention.flash_attention


def test_the_core_of_a_cpu_goes_block_by_block(monkeypatch):
    config = tiny_config()
    assert attention.choose_core(config) is attention.blockwise_attention
    assert attention.choose_core(config, need_weights=True) is attention.eager_attention
    assert attention.prepare_mask(attention.blockwise_attention, None, 5, 5) is None
    for ops, length, rows in ((None, 256, None), (None, 257, 256), (object(), 256, 0)):
        monkeypatch.setattr(attention.cpu_ops, "usable", lambda *_: ops)
        assert attention.score_rows(config, length) == rows and attention.score_rows(config, length, "float16") is None


def test_flash_refuses_to_return_probabilities():
    x = paddle.zeros([1, 2, 1, 2])
    with pytest.raises(ValueError, match="output_attentions"):
        attention.flash_attention(x, x, x, need_weights=True)


@pytest.mark.parametrize("ignored", [-100, 0])
def test_loss_is_the_mean_over_the_labels_that_count(ignored):
    rng = np.random.default_rng(0)
    logits = (20 * rng.standard_normal((3, 5, 11))).astype("float32")
    labels = rng.integers(1, 11, (3, 5))
    labels[0, :3] = labels[2, 4] = ignored
    tensor = paddle.to_tensor(logits, stop_gradient=False)
    loss = causal_lm_loss(tensor, paddle.to_tensor(labels), ignored)
    loss.backward()
    wide = logits.astype(np.float64)
    log_p = wide - wide.max(-1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
    counts = labels != ignored
    safe = np.where(counts, labels, 0)
    assert float(loss) == pytest.approx(-np.take_along_axis(log_p, safe[..., None], -1)[..., 0][counts].mean(), rel=1e-6)
    expected = (np.exp(log_p) - np.eye(11)[safe]) * counts[..., None] / counts.sum()
    np.testing.assert_allclose(tensor.grad.numpy(), expected, atol=1e-7)


def test_loss_without_labels_is_zero_and_has_a_graph():
    logits = paddle.ones([1, 3, 4])
    logits.stop_gradient = False
    loss = causal_lm_loss(logits, paddle.full([1, 3], -100, dtype="int64"))
    loss.backward()
    assert float(loss) == 0.0 and (logits.grad.numpy() == 0).all() and loss.dtype == paddle.float32


def test_loss_of_half_precision_logits_is_float32():
    loss = causal_lm_loss(paddle.zeros([1, 2, 8], dtype="float32").astype("bfloat16"), paddle.to_tensor([[1, 2]]))
    assert loss.dtype == paddle.float32 and float(loss) == pytest.approx(np.log(8), rel=1e-6)
