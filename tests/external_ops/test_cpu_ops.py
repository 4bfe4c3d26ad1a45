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


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_lesser_instruction_sets_too(ops, isa):
    chosen = [__file__, "-k", "silu_mul_of_views or in_place", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *chosen], env={**os.environ, "CPU_OPS_ISA": isa}, capture_output=True, text=True
    )
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout


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
