"""The CPU ops of a decoding step against float64, at odd sizes, with each instruction set."""

import os
import subprocess
import sys

import numpy as np
import paddle
import pytest

from ernie35se.linear import FEW_ROWS, Linear, linear


@pytest.fixture(scope="module")
def ops():
    hint = "not built: pip install ./external_ops/cpu_ops --no-build-isolation"
    module = pytest.importorskip("cpu_ops", reason=hint)
    if module.__spec__.origin is None:  # the folder external_ops/cpu_ops, on the path for other tests' sake
        pytest.skip(hint)
    return module


def normal(rng, *shape):
    return rng.standard_normal(shape).astype("float32")


# Around the 8 rows of a group, the 8 and 64 rows of W that are taken together, and the 512 columns of a piece.
@pytest.mark.parametrize("rows, inner, columns", [(1, 1, 1), (2, 7, 3), (3, 8, 17), (5, 64, 512), (8, 65, 1025), (9, 131, 130),
                                                  (16, 33, 600), (19, 200, 40), (4, 0, 5)])  # fmt: skip
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_skinny_matmul(ops, rows, inner, columns, transposed, with_bias):
    rng = np.random.default_rng(columns)
    x, weight, bias = normal(rng, rows, inner), normal(rng, inner, columns), normal(rng, columns) * with_bias
    given = np.ascontiguousarray(weight.T) if transposed else weight
    out = ops.cpu_skinny_matmul(
        paddle.to_tensor(x), paddle.to_tensor(given), paddle.to_tensor(bias if with_bias else bias[:0]), transposed
    )
    expected = x.astype(np.float64) @ weight + bias
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5, atol=1e-6 * (inner + 1))


def test_skinny_matmul_of_views(ops):
    """Rows at a distance, and more axes than two."""
    rng = np.random.default_rng(0)
    wide, weight = normal(rng, 3, 1, 3 * 21), normal(rng, 21, 34)
    x = paddle.to_tensor(wide).split(3, axis=-1)[1]
    out = ops.cpu_skinny_matmul(x, paddle.to_tensor(weight.T.copy()).t(), paddle.zeros([0]), False)
    assert out.shape == [3, 1, 34]
    np.testing.assert_allclose(out.numpy(), wide[..., 21:42].astype(np.float64) @ weight, rtol=1e-5, atol=1e-5)
    assert ops.cpu_skinny_matmul(x[:0], paddle.to_tensor(weight), paddle.zeros([0]), False).shape == [0, 1, 34]


def test_skinny_matmul_refuses_shapes_that_do_not_match(ops):
    def multiply(x, weight, bias=(0,), transposed=False):
        ops.cpu_skinny_matmul(*map(paddle.zeros, (x, weight, list(bias))), transposed)

    with pytest.raises(ValueError, match=r"x has shape \[2, 3\], weight \[4, 5\]; expected \(..., K\) and \(K, N\)"):
        multiply([2, 3], [4, 5])
    with pytest.raises(ValueError, match=r"expected \(..., K\) and \(N, K\)"):
        multiply([2, 4], [4, 5], transposed=True)
    with pytest.raises(ValueError, match=r"bias has shape \[4\], expected \[5\]"):
        multiply([2, 4], [4, 5], bias=(4,))
    with pytest.raises(ValueError, match="weight has to be a float32 tensor on CPU"):
        ops.cpu_skinny_matmul(paddle.zeros([2, 4]), paddle.zeros([4, 5], "float64"), paddle.zeros([0]), False)


def rotated(x, cos, sin):
    x1, x2 = np.split(x, 2, -1)
    return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


def step_inputs(rng, batch, heads, width, room, own_angles):
    """query, key and value side by side, (B, 1, H, 3D); angles; a cache whose unwritten columns hold NaN."""
    fused = 2 * normal(rng, batch, 1, heads, 3 * width)
    angles = 6 * normal(rng, batch if own_angles else 1, 1, 1, width // 2)
    return fused, angles, normal(rng, batch, heads, room, width), normal(rng, batch, heads, room, width)


# One key and many; room to spare and none; rows that start later; one table for all rows and one each.
@pytest.mark.parametrize(
    "batch, heads, width, room, column, first, own_angles",
    [(1, 1, 2, 1, 0, None, False), (2, 3, 6, 9, 5, None, True), (3, 2, 10, 70, 66, [0, 5, 66], False),
     (2, 5, 64, 130, 129, [17, 0], True), (1, 2, 34, 601, 577, None, False)],
)  # fmt: skip
def test_decode_attention_in_place(ops, batch, heads, width, room, column, first, own_angles):
    rng = np.random.default_rng(room)
    fused, angles, keys, values = step_inputs(rng, batch, heads, width, room, own_angles)
    keys[:, :, column:], values[:, :, column:] = np.nan, np.nan
    for row, start in enumerate(first or []):
        keys[row, :, :start] = values[row, :, :start] = np.nan
    query, key, value = paddle.to_tensor(fused).chunk(3, axis=-1)
    cos, sin = (paddle.to_tensor(f(angles.astype(np.float64)).astype("float32")) for f in (np.cos, np.sin))
    if own_angles:  # as generation keeps them: for all heads, and a view of those of all steps
        cos, sin = (paddle.concat([t, t], axis=1).expand([-1, -1, heads, -1]).contiguous()[:, 1:] for t in (cos, sin))
    key_cache, value_cache = paddle.to_tensor(keys), paddle.to_tensor(values)
    starts = paddle.to_tensor(first or [], dtype="int64")
    context = ops.cpu_decode_attention_(query, key, value, cos, sin, key_cache, value_cache, starts, column)[0]

    q, k, v = (x.transpose(0, 2, 1, 3)[:, :, 0] for x in np.split(fused.astype(np.float64), 3, -1))  # (B, H, D)
    turn = np.cos(angles.astype(np.float64))[:, 0], np.sin(angles.astype(np.float64))[:, 0]  # (B or 1, 1, D/2)
    keys[:, :, column], values[:, :, column] = rotated(k, *turn), v
    expected = np.empty((batch, 1, heads, width))
    for b in range(batch):
        seen = slice(first[b] if first else 0, column + 1)
        scores = np.einsum("hd,hsd->hs", rotated(q, *turn)[b], keys[b, :, seen].astype(np.float64)) / np.sqrt(width)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        expected[b, 0] = np.einsum("hs,hsd->hd", p / p.sum(-1, keepdims=True), values[b, :, seen].astype(np.float64))
    np.testing.assert_allclose(context.numpy(), expected, rtol=2e-5, atol=5e-6)
    np.testing.assert_allclose(key_cache.numpy(), keys, rtol=1e-5, atol=2e-6)  # NaN stays NaN
    np.testing.assert_array_equal(value_cache.numpy(), values)


def test_decode_attention_refuses_what_does_not_match(ops):
    def step(query=(2, 1, 3, 8), key=(2, 1, 3, 8), cos=(1, 1, 1, 4), keys=(2, 3, 9, 8), first=(), column=4):
        tables = paddle.zeros(list(cos)), paddle.zeros([1, 1, 1, 4])
        caches = paddle.zeros(list(keys)), paddle.zeros([2, 3, 9, 8])
        starts = paddle.to_tensor(list(first), dtype="int64")
        new = paddle.zeros(list(query)), paddle.zeros(list(key)), paddle.zeros([2, 1, 3, 8])
        ops.cpu_decode_attention_(*new, *tables, *caches, starts, column)

    step()
    with pytest.raises(ValueError, match=r"query has shape \[2, 2, 3, 8\]; expected \(B, 1, H, D\) with an even D"):
        step(query=(2, 2, 3, 8))
    with pytest.raises(ValueError, match=r"key has shape \[2, 1, 4, 8\], expected \[2, 1, 3, 8\]"):
        step(key=(2, 1, 4, 8))
    with pytest.raises(ValueError, match=r"cos has shape \[3, 1, 1, 4\], expected \[2, 1, 3, 4\] or 1"):
        step(cos=(3, 1, 1, 4))
    with pytest.raises(ValueError, match=r"values has shape \[2, 3, 9, 8\], expected \[2, 3, 10, 8\]"):
        step(keys=(2, 3, 10, 8))
    with pytest.raises(ValueError, match=r"column 9 is not one of keys \[2, 3, 9, 8\]"):
        step(column=9)
    with pytest.raises(ValueError, match="first of row 1 is 5; expected 0 to the column, 4"):
        step(first=(0, 5))
    with pytest.raises(ValueError, match=r"first has shape \[3\], expected \[2\]"):
        step(first=(0, 0, 0))


# Around the pieces of 64 that are looked at together; k from one to all.
@pytest.mark.parametrize("rows, width, k", [(1, 1, 1), (3, 7, 7), (2, 64, 3), (5, 65, 1), (3, 1001, 64), (40, 3000, 2)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_top_k_of_views(ops, rows, width, k, temperature):
    rng = np.random.default_rng(width)
    scores = (8 * normal(rng, rows, 2, width)).round(1)  # there are equal ones
    values, ids, log_sums = ops.cpu_top_k(paddle.to_tensor(scores)[:, 1], k, temperature)
    wide = scores[:, 1].astype(np.float64)
    order = np.argsort(-wide, axis=-1, kind="stable")[:, :k]
    np.testing.assert_array_equal(ids.numpy(), order)
    np.testing.assert_array_equal(values.numpy(), np.take_along_axis(scores[:, 1], order, 1))
    for column, heat in enumerate((1.0, temperature)):
        peak = wide.max(-1) / heat
        expected = peak + np.log(np.exp(wide / heat - peak[:, None]).sum(-1))
        np.testing.assert_allclose(log_sums[:, column].numpy(), expected, rtol=2e-6, atol=2e-6)


def test_top_k_at_its_edges(ops):
    scores = paddle.to_tensor([[-np.inf, 2.0, -np.inf], [-1.0, -1.0, -1.0]], dtype="float32")
    values, ids, log_sums = ops.cpu_top_k(scores, 2, 0.5)
    assert ids.tolist() == [[1, 0], [0, 1]] and values.tolist() == [[2.0, -np.inf], [-1.0, -1.0]]
    np.testing.assert_allclose(log_sums.numpy(), [[2.0, 4.0], [np.log(3) - 1, np.log(3) - 2]], rtol=1e-6)
    assert [out.shape for out in ops.cpu_top_k(scores[:0], 2, 1.0)] == [[0, 2], [0, 2], [0, 2]]
    for k in (0, 4):
        with pytest.raises(ValueError, match=rf"scores has shape \[2, 3\], k is {k}; expected \(B, V\) and 1 to V"):
            ops.cpu_top_k(scores, k, 1.0)
    with pytest.raises(ValueError, match="temperature is 0; expected more than 0"):
        ops.cpu_top_k(scores, 1, 0.0)


def test_the_linear_layer_takes_the_op_for_few_rows_in_eval_mode(ops, monkeypatch):
    rng, seen = np.random.default_rng(0), []
    multiply = ops.cpu_skinny_matmul
    monkeypatch.setattr(ops, "cpu_skinny_matmul", lambda x, *rest: seen.append(x.shape) or multiply(x, *rest))
    layer, x = Linear(6, 9), paddle.to_tensor(normal(rng, 2, FEW_ROWS, 6))
    layer.eval()
    expected = x.numpy().astype(np.float64) @ layer.weight.numpy() + layer.bias.numpy()
    with paddle.no_grad():
        few, many = layer(x[0]), layer(x)
        tied = linear(x[1], layer.weight.t().contiguous(), transposed=True)
    assert seen == [[FEW_ROWS, 6]] * 2
    for found, right in ((few, expected[0]), (many, expected), (tied, expected[1] - layer.bias.numpy())):
        np.testing.assert_allclose(found.numpy(), right, rtol=1e-5, atol=1e-5)
    layer(x[0]).sum().backward()  # what wants gradients gets them
    np.testing.assert_allclose(layer.bias.grad.numpy(), FEW_ROWS)
    layer.train()
    with paddle.no_grad():
        layer(x[0])
    assert len(seen) == 2


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_lesser_instruction_sets_and_more_threads_too(ops, isa):
    chosen = [__file__, "-k", "test_skinny_matmul or in_place or test_top_k", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "CPU_OPS_ISA": isa, "OMP_NUM_THREADS": "3"}
    done = subprocess.run([sys.executable, "-m", "pytest", *chosen], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout
