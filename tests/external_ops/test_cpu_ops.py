"""The CPU ops against float64, at odd sizes, with each instruction set; and the seam that finds them."""

import os
import subprocess
import sys

import numpy as np
import paddle
import pytest

from ernie35se import cpu_ops as seam


@pytest.fixture(scope="module")
def ops():
    hint = "not built: pip install ./external_ops/cpu_ops --no-build-isolation"
    module = pytest.importorskip("cpu_ops", reason=hint)
    if module.__spec__.origin is None:  # the folder external_ops/cpu_ops, on the path for other tests' sake
        pytest.skip(hint)
    return module


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("rows, width", [(1, 1), (3, 7), (5, 33), (300, 129)])
def test_silu_mul_of_views(ops, rows, width):
    rng = np.random.default_rng(width)
    whole = (6 * rng.standard_normal((2, rows, 2 * width + 3))).astype("float32")
    upstream = rng.standard_normal((2, rows, width)).astype("float32")
    tensor = paddle.to_tensor(whole, stop_gradient=False)
    gate, up, _ = tensor.split([width, width, 3], axis=-1)
    out = ops.cpu_silu_mul(gate, up)
    (out * paddle.to_tensor(upstream)).sum().backward()
    g, u = whole[..., :width].astype(np.float64), whole[..., width : 2 * width].astype(np.float64)
    s = sigmoid(g)
    np.testing.assert_allclose(out.numpy(), g * s * u, rtol=1e-5, atol=1e-6)
    expected = np.concatenate([upstream * u * s * (1 + g * (1 - s)), upstream * g * s, np.zeros((2, rows, 3))], -1)
    np.testing.assert_allclose(tensor.grad.numpy(), expected, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("rows, width", [(0, 5), (1, 1), (3, 7), (5, 33), (64, 1001)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_cross_entropy_in_place(ops, rows, width, with_bias):
    rng = np.random.default_rng(width)
    scores = (10 * rng.standard_normal((rows, width))).astype("float32")
    bias = rng.standard_normal(width).astype("float32") * with_bias
    labels, share = rng.integers(0, width, rows), rng.random(rows).astype("float32")
    share[1::3] = 0  # ignored
    tensors = [scores, bias if with_bias else bias[:0], labels, share]
    gradient, loss = ops.cpu_cross_entropy_(*map(paddle.to_tensor, tensors))
    wide = scores.astype(np.float64) + bias
    wide -= wide.max(-1, keepdims=True)
    p = np.exp(wide) / np.exp(wide).sum(-1, keepdims=True)
    at = np.arange(rows), labels
    np.testing.assert_allclose(loss.numpy(), -np.log(p[at]) * (share != 0), rtol=2e-6, atol=3e-6)
    expected = p * share[:, None]
    expected[at] -= share
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_label_outside_the_vocabulary_is_refused(ops):
    with pytest.raises(ValueError, match="label 5 of row 0 is not within 0 .. 3"):
        ops.cpu_cross_entropy_(paddle.ones([1, 4]), paddle.zeros([0]), paddle.to_tensor([5]), paddle.ones([1]))


# Sizes around the width of a vector, the 1024 that are summed in float and the pieces of 16384.
@pytest.mark.parametrize("sizes", [(0,), (1,), (7, 0, 33), (1023, 1025, 3), (16384, 16385, 90001, 5)])
def test_squared_norm_of_views(ops, sizes):
    rng = np.random.default_rng(len(sizes))
    wide = [rng.standard_normal((size, 2)).astype("float32") for size in sizes]
    found = ops.cpu_squared_norm([paddle.to_tensor(array)[:, 1] for array in wide])
    expected = sum(np.square(array[:, 1].astype(np.float64)).sum() for array in wide)
    assert found.shape == [1] and found.dtype == paddle.float64
    np.testing.assert_allclose(found.item(), expected, rtol=1e-6)


@pytest.mark.parametrize("sizes", [(1,), (7, 0, 33), (16384, 16385, 90001, 5)])
def test_adamw_in_place(ops, sizes):
    rng = np.random.default_rng(len(sizes))
    drawn = [[rng.standard_normal(size).astype("float32") for size in sizes] for _ in range(4)]
    drawn[2] = [np.square(array) for array in drawn[2]]  # the second moment
    param, moment1, moment2, grad = ([paddle.to_tensor(array) for array in arrays] for arrays in drawn)
    power1, power2 = ([paddle.full([1], base**count) for count in range(1, 1 + len(sizes))] for base in (0.9, 0.99))
    rates, decays, scales = ([base / (1 + index) for index in range(len(sizes))] for base in (0.01, 0.1, 0.7))
    ops.cpu_adamw_(param, moment1, moment2, power1, power2, grad, 0.9, 0.99, 1e-6, rates, decays, scales)
    for i, (p, m, v, g) in enumerate(zip(*([array.astype(np.float64) for array in arrays] for arrays in drawn))):
        g, t = g * scales[i], i + 1
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        p = p - rates[i] * (m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.99**t)) + 1e-6) + decays[i] * p)
        for found, right in ((param[i], p), (moment1[i], m), (moment2[i], v)):
            np.testing.assert_allclose(found.numpy(), right, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose([power1[i].item(), power2[i].item()], [0.9 ** (t + 1), 0.99 ** (t + 1)], rtol=1e-6)


def test_adamw_refuses_tensors_that_do_not_match(ops):
    def step(params, grads, rates):
        states = [[paddle.zeros([4])], [paddle.zeros([4])], [paddle.zeros([1])], [paddle.zeros([1])]]
        ops.cpu_adamw_(params, *states, grads, 0.9, 0.99, 1e-6, rates, [0.0], [1.0])

    with pytest.raises(ValueError, match=r"grads has shape \[3\], expected \[4\]"):
        step([paddle.zeros([4])], [paddle.zeros([3])], [0.1])
    with pytest.raises(ValueError, match="a list has 2 members for 1 params"):
        step([paddle.zeros([4])], [paddle.zeros([4])], [0.1, 0.1])


def attention_in_float64(query, key, value, upstream):
    """Causal attention of the last T of S tokens, and the gradients of query, key and value. (B, T or S, H, D)"""
    q, k, v, dout = (array.astype(np.float64).transpose(0, 2, 1, 3) for array in (query, key, value, upstream))
    rows, columns, scale = q.shape[2], k.shape[2], q.shape[3] ** -0.5
    hidden = np.arange(columns) > np.arange(rows)[:, None] + columns - rows
    scores = np.where(hidden, -np.inf, scale * q @ k.swapaxes(2, 3))
    log_sum = np.log(np.exp(scores).sum(-1))
    p = np.exp(scores - log_sum[..., None])
    dp = dout @ v.swapaxes(2, 3)
    ds = scale * p * (dp - (dp * p).sum(-1, keepdims=True))
    arrays = (p @ v, ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dout)
    return (*(array.transpose(0, 2, 1, 3) for array in arrays), log_sum)


# Below, at and past the blocks of 64 queries and 512 keys; fewer queries than keys; odd head widths.
@pytest.mark.parametrize(
    "batch, queries, keys, heads, width",
    [(1, 1, 1, 1, 1), (2, 5, 5, 3, 7), (1, 64, 64, 2, 16), (2, 65, 130, 1, 33), (1, 3, 600, 2, 8), (1, 577, 577, 1, 12)],
)
def test_causal_attention_of_views(ops, batch, queries, keys, heads, width):
    rng = np.random.default_rng(keys)
    fused = (2 * rng.standard_normal((batch, keys, heads, 3 * width))).astype("float32")
    upstream = rng.standard_normal((batch, queries, heads, width)).astype("float32")
    tensor = paddle.to_tensor(fused, stop_gradient=False)
    query, key, value = tensor.split(3, axis=-1)
    out, log_sum = ops.cpu_causal_attention(query[:, keys - queries :], key, value)
    (out * paddle.to_tensor(upstream)).sum().backward()
    q, k, v = np.split(fused, 3, -1)
    expected, dq, dk, dv, expected_log_sum = attention_in_float64(q[:, keys - queries :], k, v, upstream)
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5, atol=5e-6)
    np.testing.assert_allclose(log_sum.numpy(), expected_log_sum, rtol=1e-6, atol=5e-6)
    dq = np.concatenate([np.zeros((batch, keys - queries, heads, width)), dq], 1)
    np.testing.assert_allclose(tensor.grad.numpy(), np.concatenate([dq, dk, dv], -1), rtol=1e-5, atol=3e-5)


def test_causal_attention_of_no_rows(ops):
    out, log_sum = ops.cpu_causal_attention(*[paddle.zeros([0, 4, 2, 8])] * 3)
    assert out.shape == [0, 4, 2, 8] and log_sum.shape == [0, 2, 4]


def test_causal_attention_refuses_shapes_that_do_not_match(ops):
    def attend(*shapes):
        ops.cpu_causal_attention(*map(paddle.zeros, shapes))

    with pytest.raises(ValueError, match=r"query has shape \[1, 5, 2, 8\], key \[1, 4, 2, 8\]; .*with T up to S"):
        attend([1, 5, 2, 8], [1, 4, 2, 8], [1, 4, 2, 8])
    with pytest.raises(ValueError, match=r"key has shape \[1, 4, 3, 8\], expected \[1, 4, 2, 8\]"):
        attend([1, 4, 2, 8], [1, 4, 3, 8], [1, 4, 3, 8])
    with pytest.raises(ValueError, match=r"value has shape \[1, 4, 2, 9\]"):
        attend([1, 4, 2, 8], [1, 4, 2, 8], [1, 4, 2, 9])
    with pytest.raises(ValueError, match="query has to be a float32 tensor on CPU"):
        ops.cpu_causal_attention(*[paddle.zeros([1, 4, 2, 8], "float64")] * 3)


def run_this_file(pattern, **environment):
    """The tests whose names match, in a process of their own; the options are read when the module first needs them."""
    chosen = [__file__, "-k", pattern, "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-m", "pytest", *chosen], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout


def test_attention_without_mkl(ops):
    run_this_file("test_causal_attention_of_views", CPU_OPS_NO_BLAS="1")


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_lesser_instruction_sets_and_more_threads_too(ops, isa):
    run_this_file("of_views or in_place", CPU_OPS_ISA=isa, OMP_NUM_THREADS="3")


@pytest.fixture
def fresh_seam(monkeypatch):
    seam._healthy_module.cache_clear()
    monkeypatch.delitem(sys.modules, "cpu_ops", raising=False)
    yield seam
    seam._healthy_module.cache_clear()


def test_a_shadowing_module_is_warned_of_once_with_its_path(fresh_seam, monkeypatch, tmp_path):
    (tmp_path / "cpu_ops.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    said = []
    monkeypatch.setattr(fresh_seam.logger, "warning", said.append)
    assert fresh_seam.usable(paddle.ones([1])) is None and fresh_seam.usable(paddle.ones([1])) is None
    assert len(said) == 1 and str(tmp_path / "cpu_ops.py") in said[0] and "pip install ./external_ops/cpu_ops" in said[0]
    sys.modules.pop("cpu_ops", None)


def test_the_switch_and_other_dtypes_take_the_plain_way(ops, fresh_seam, monkeypatch):
    assert fresh_seam.usable(paddle.ones([1])) is not None
    assert fresh_seam.usable(paddle.ones([1], dtype="float64")) is None
    monkeypatch.setenv("ERNIE35SE_CPU_OPS", "0")
    assert fresh_seam.usable(paddle.ones([1])) is None
