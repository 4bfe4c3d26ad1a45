"""The op inside Paddle against float64: values, gradients, shapes, layouts, and what it refuses."""

import numpy as np
import paddle
import pytest
from kernels import reference_backward, reference_forward
from paddle.distributed.fleet.utils import recompute

SHAPES = [(1, 1), (1, 2), (7,), (5, 1), (3, 5, 7), (2, 3, 2, 17), (9, 771), (130, 96), (37, 3072), (2, 8199)]
EPSILON = 1e-5


def tensor(array, dtype="float32"):
    made = paddle.to_tensor(array).astype(dtype)
    made.stop_gradient = False
    return made


def float64(tensor_):
    return tensor_.astype("float32").numpy().astype(np.float64)


def assert_near(actual, expected, what, size=1.0, tolerance=3e-6):
    """Off by at most `tolerance` times the largest expected value, or times `size` where that is more; and, in bfloat16,
    by its rounding besides: half a unit in the last of 8 bits.

    For dx, `size` is the largest invvar: dx is invvar times a difference of terms near 1, which cancel in short rows.
    """
    rounding = {paddle.float32: 0.0, paddle.bfloat16: 2**-8}[actual.dtype]
    actual, expected = float64(actual), np.asarray(expected)
    assert actual.shape == expected.shape, what
    allowed = rounding * np.abs(expected) + tolerance * max(size, np.abs(expected).max(initial=0.0))
    excess = (np.abs(actual - expected) - allowed).max(initial=0.0)
    assert excess <= 0, f"{what}: off by {excess:.1e} more than allowed"


def random_inputs(shape, dtype, param_dtype, offset=0.0):
    rng = np.random.default_rng(sum(shape))
    x, residual, dy, dsum = (rng.standard_normal(shape) + offset * (k == 0) for k in range(4))
    scale, bias = rng.standard_normal((2, shape[-1])) + [[1.0], [0.0]]
    tensors = [tensor(a, dtype) for a in (x, residual)] + [tensor(a, param_dtype) for a in (scale, bias)]
    return *tensors, paddle.to_tensor(dy).astype(dtype), paddle.to_tensor(dsum).astype(dtype)


PRECISIONS = [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]


@pytest.mark.parametrize("dtype, param_dtype", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fused_ln_agrees_with_float64(op, shape, dtype, param_dtype):
    x, _, scale, bias, dy, _ = random_inputs(shape, dtype, param_dtype)
    y, mean, invvar = op.fused_ln(x, scale, bias, EPSILON)
    expected, expected_mean, expected_invvar = reference_forward(float64(x), float64(scale), float64(bias), EPSILON)
    assert y.dtype == x.dtype and mean.dtype == invvar.dtype == paddle.float32
    assert_near(y, expected, "y")
    assert_near(mean, expected_mean.reshape(-1), "mean")
    assert_near(invvar, expected_invvar.reshape(-1), "invvar")

    y.backward(dy)
    dx, dscale, dbias = reference_backward(float64(x), float64(scale), EPSILON, float64(dy))
    assert [t.grad.dtype for t in (x, scale, bias)] == [x.dtype, scale.dtype, bias.dtype]
    assert_near(x.grad, dx, "dx", expected_invvar.max())
    assert_near(scale.grad, dscale, "dscale")
    assert_near(bias.grad, dbias, "dbias")


@pytest.mark.parametrize("dtype, param_dtype", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fused_add_ln_agrees_with_float64(op, shape, dtype, param_dtype):
    x, residual, scale, bias, dy, dsum = random_inputs(shape, dtype, param_dtype)
    y, total, mean, invvar = op.fused_add_ln(x, residual, scale, bias, EPSILON)
    assert_near(total, float64(x) + float64(residual), "sum")
    # What is normalised is the sum as it was stored, so that backward, which has nothing else, agrees with forward.
    expected, expected_mean, expected_invvar = reference_forward(float64(total), float64(scale), float64(bias), EPSILON)
    assert_near(y, expected, "y")
    assert_near(mean, expected_mean.reshape(-1), "mean")
    assert_near(invvar, expected_invvar.reshape(-1), "invvar")

    paddle.autograd.backward([y, total], [dy, dsum])
    dx, dscale, dbias = reference_backward(float64(total), float64(scale), EPSILON, float64(dy))
    assert_near(x.grad, dx + float64(dsum), "dx", expected_invvar.max())
    np.testing.assert_array_equal(float64(residual.grad), float64(x.grad))
    assert_near(scale.grad, dscale, "dscale")
    assert_near(bias.grad, dbias, "dbias")


def test_the_reference_agrees_with_finite_differences():
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, 3, 5))
    scale, bias, dmean, dinvvar = rng.standard_normal(5), rng.standard_normal(5), rng.standard_normal(3), rng.standard_normal(3)

    def loss(x, scale, bias):
        y, mean, invvar = reference_forward(x, scale, bias, EPSILON)
        return (y * dy).sum() + (mean * dmean).sum() + (invvar * dinvvar).sum()

    gradients = reference_backward(x, scale, EPSILON, dy, dmean, dinvvar)
    for which, (values, gradient) in enumerate(zip((x, scale, bias), gradients)):
        for place in np.ndindex(values.shape):
            moved = [[x.copy(), scale.copy(), bias.copy()] for _ in range(2)]
            moved[0][which][place] += 1e-6
            moved[1][which][place] -= 1e-6
            slope = (loss(*moved[0]) - loss(*moved[1])) / 2e-6
            assert abs(slope - gradient[place]) < 1e-7


def test_a_large_mean_does_not_spoil_the_variance(op):
    x, _, scale, bias, _, _ = random_inputs((5, 768), "float32", "float32", offset=4096.0)
    y, _, invvar = op.fused_ln(x, scale, bias, EPSILON)
    expected, _, expected_invvar = reference_forward(float64(x), float64(scale), float64(bias), EPSILON)
    # float32 holds a mean near 4096 to 2.4e-4; that moves y alike, but a one-pass variance would be off by whole units.
    assert_near(y, expected, "y", tolerance=1e-3)
    assert_near(invvar, expected_invvar, "invvar")


def test_equal_values_and_non_finite_values(op):
    scale, bias = tensor(np.full(6, 2.0)), tensor(np.arange(6.0))
    y, mean, _ = op.fused_ln(tensor(np.full((2, 6), 3.0)), scale, bias, EPSILON)
    np.testing.assert_array_equal(y.numpy(), np.tile(np.arange(6.0), (2, 1)))
    x = np.zeros((3, 6))
    x[0, 2], x[1, 4] = np.nan, np.inf
    for dtype in ("float32", "bfloat16"):
        y = float64(op.fused_ln(tensor(x, dtype), scale, bias, EPSILON)[0])
        assert np.isnan(y[0]).all() and not np.isfinite(y[1]).any() and np.isfinite(y[2]).all()


@pytest.mark.parametrize("name", ["fused_ln", "fused_add_ln"])
def test_non_contiguous_inputs_and_gradients(op, name):
    rng = np.random.default_rng(1)
    base, other, dy = (rng.standard_normal((7, 5, 3)) for _ in range(3))
    wide = rng.standard_normal((14, 2))
    gradients = {}
    for layout in ("strided", "contiguous"):
        leaves = [tensor(a) for a in (base, other, wide)]
        x, residual = (leaf.transpose([2, 1, 0]) for leaf in leaves[:2])  # (3, 5, 7)
        scale, bias = leaves[2][::2, 0], leaves[2][::2, 1]
        inputs = [x, residual, scale, bias] if name == "fused_add_ln" else [x, scale, bias]
        if layout == "contiguous":
            inputs = [t.contiguous() for t in inputs]
        else:
            assert not any(t.is_contiguous() for t in inputs)
        y = getattr(op, name)(*inputs, EPSILON)[0]
        (y.transpose([2, 0, 1]) * tensor(dy.transpose([0, 2, 1]))).sum().backward()
        gradients[layout] = [y.numpy()] + [leaf.grad.numpy() for leaf in leaves if leaf.grad is not None]
    for strided, contiguous in zip(*gradients.values()):
        np.testing.assert_array_equal(strided, contiguous)
    expected, _, _ = reference_forward(
        base.transpose(2, 1, 0) + (other.transpose(2, 1, 0) if name == "fused_add_ln" else 0), wide[::2, 0], wide[::2, 1], EPSILON
    )
    np.testing.assert_allclose(gradients["strided"][0], expected, atol=3e-6)


@pytest.mark.parametrize("shape", [(0, 7), (3, 0, 7)], ids=str)
def test_zero_rows(op, shape):
    x, residual, scale, bias, dy, _ = random_inputs(shape, "float32", "float32")
    y, total, mean, invvar = op.fused_add_ln(x, residual, scale, bias, EPSILON)
    z, z_mean, _ = op.fused_ln(x, scale, bias, EPSILON)
    assert list(y.shape) == list(total.shape) == list(z.shape) == list(shape)
    assert list(mean.shape) == list(invvar.shape) == list(z_mean.shape) == [0]
    (y.sum() + total.sum() + z.sum()).backward()
    assert list(x.grad.shape) == list(shape)
    np.testing.assert_array_equal(scale.grad.numpy(), np.zeros(7))
    np.testing.assert_array_equal(bias.grad.numpy(), np.zeros(7))


@pytest.mark.parametrize("used", [["y"], ["sum"], ["mean"], ["invvar"], ["sum", "mean"], ["y", "invvar"], ["mean", "invvar"]], ids="+".join)
def test_gradients_flow_from_whichever_outputs_are_used(op, used):
    x, residual, scale, bias, dy, dsum = random_inputs((3, 5, 7), "float32", "float32")
    rng = np.random.default_rng(2)
    rows = {name: rng.standard_normal(15).astype("float32") for name in ("mean", "invvar")}
    weights = {"y": dy, "sum": dsum, **{name: paddle.to_tensor(array) for name, array in rows.items()}}
    outputs = dict(zip(("y", "sum", "mean", "invvar"), op.fused_add_ln(x, residual, scale, bias, EPSILON)))
    sum((outputs[name] * weights[name]).sum() for name in used).backward()

    given = {name: float64(weights[name]) if name in used else np.zeros(weights[name].shape) for name in weights}
    dx, dscale, dbias = reference_backward(
        float64(x) + float64(residual), float64(scale), EPSILON, given["y"],
        given["mean"].reshape(3, 5), given["invvar"].reshape(3, 5),
    )  # fmt: skip
    assert_near(x.grad, dx + given["sum"], "dx")
    assert_near(residual.grad, dx + given["sum"], "dresidual")
    assert_near(scale.grad, dscale, "dscale")
    assert_near(bias.grad, dbias, "dbias")

    if "sum" not in used:  # the same of fused_ln
        leaves = [tensor(float64(t)) for t in (x + residual, scale, bias)]
        outputs = dict(zip(("y", "mean", "invvar"), op.fused_ln(*leaves, EPSILON)))
        sum((outputs[name] * weights[name]).sum() for name in used).backward()
        for leaf, expected in zip(leaves, (dx, dscale, dbias)):
            assert_near(leaf.grad, expected, "fused_ln")


def test_repeated_backward_accumulates(op):
    x, residual, scale, bias, dy, _ = random_inputs((3, 5, 7), "float32", "float32")
    leaves = (x, residual, scale, bias)
    y, total, _, _ = op.fused_add_ln(*leaves, EPSILON)
    loss = (y * dy).sum() + total.sum()
    loss.backward(retain_graph=True)
    once = [leaf.grad.numpy() for leaf in leaves]
    loss.backward()
    for leaf, first in zip(leaves, once):
        np.testing.assert_array_equal(leaf.grad.numpy(), 2 * first)
    # Accumulating into one gradient leaves the other alone: x's and the residual's are two tensors.
    paddle.sum(3 * x).backward()
    np.testing.assert_array_equal(residual.grad.numpy(), 2 * once[1])
    np.testing.assert_allclose(x.grad.numpy(), 2 * once[0] + 3, atol=1e-6)
    y = op.fused_ln(*leaves[:1], *leaves[2:], EPSILON)[0]
    y.backward(dy)
    with pytest.raises(ValueError, match="retain_graph"):
        y.backward(dy)


def test_one_tensor_in_two_places(op):
    rng = np.random.default_rng(3)
    x, scale, bias = tensor(rng.standard_normal((4, 9))), tensor(rng.standard_normal(9)), tensor(rng.standard_normal(9))
    dy = rng.standard_normal((4, 9)).astype("float32")
    hidden = op.fused_ln(x, scale, bias, EPSILON)[0]
    y, total, _, _ = op.fused_add_ln(hidden, hidden, scale, bias, EPSILON)  # x + x, and scale and bias shared
    ((y + total) * paddle.to_tensor(dy)).sum().backward()

    first, _, _ = reference_forward(x.numpy(), scale.numpy(), bias.numpy(), EPSILON)
    dsum, dscale, dbias = reference_backward(2 * first, scale.numpy(), EPSILON, dy)
    dx, dscale_1, dbias_1 = reference_backward(x.numpy(), scale.numpy(), EPSILON, 2 * (dsum + dy))
    assert_near(x.grad, dx, "dx")
    assert_near(scale.grad, dscale + dscale_1, "dscale")
    assert_near(bias.grad, dbias + dbias_1, "dbias")


def test_recompute_and_frozen_parameters(op):
    gradients = {}
    for way in ("plain", "recompute", "frozen"):
        x, residual, scale, bias, dy, _ = random_inputs((3, 5, 7), "float32", "float32")
        scale.stop_gradient = bias.stop_gradient = way == "frozen"

        def block(x, residual):
            y, total, _, _ = op.fused_add_ln(x * x, residual, scale, bias, EPSILON)
            return y * total

        out = recompute(block, x, residual) if way == "recompute" else block(x, residual)
        (out * dy).sum().backward()
        gradients[way] = [None if t.grad is None else t.grad.numpy() for t in (x, residual, scale, bias)]
    for plain, again, frozen in zip(*gradients.values()):
        np.testing.assert_array_equal(plain, again)
        assert frozen is None or (frozen == plain).all()
    assert gradients["frozen"][2] is None and gradients["frozen"][0] is not None


def test_first_derivatives_inside_a_graph_and_no_second_ones(op):
    x, _, scale, bias, dy, _ = random_inputs((4, 7), "float32", "float32")
    y = op.fused_ln(x, scale, bias, EPSILON)[0]
    (dx,) = paddle.grad((y * dy).sum(), x, create_graph=True)
    expected, _, _ = reference_backward(float64(x), float64(scale), EPSILON, float64(dy))
    assert_near(dx, expected, "dx")
    with pytest.raises(ValueError, match="no second derivative"):
        (dx**2).sum().backward()


def test_runs_in_a_static_function(op):
    x, _, scale, bias, dy, _ = random_inputs((3, 7), "float32", "float32")

    @paddle.jit.to_static(full_graph=True)
    def normalise(x):
        return op.fused_ln(x, scale, bias, EPSILON)[0] * 2

    y = normalise(x)
    y.backward(dy)
    expected, _, expected_invvar = reference_forward(float64(x), float64(scale), float64(bias), EPSILON)
    assert_near(y, 2 * expected, "y")
    dx, dscale, dbias = reference_backward(float64(x), float64(scale), EPSILON, 2 * float64(dy))
    for leaf, gradient in zip((x, scale, bias), (dx, dscale, dbias)):
        assert_near(leaf.grad, gradient, "gradient", expected_invvar.max())


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(x=paddle.zeros([3, 7], dtype="float64")), r"x is float64 .*expected float32 or bfloat16"),
        (dict(x=paddle.zeros([3, 7], dtype="float16")), r"x is float16 on Place\(cpu\)"),
        (dict(x=paddle.zeros([3, 7], dtype="int64")), r"x is int64"),
        (dict(x=paddle.zeros([])), r"x has shape \[\]"),
        (dict(x=paddle.zeros([3, 0])), r"x has shape \[3, 0\]"),
        (dict(scale=paddle.zeros([6])), r"scale has shape \[6\], expected \[7\]"),
        (dict(bias=paddle.zeros([7, 1])), r"bias has shape \[7, 1\], expected \[7\]"),
        (dict(scale=paddle.zeros([7], dtype="bfloat16")), r"scale is bfloat16, expected float32 or x's float32"),
        (dict(bias=paddle.zeros([7], dtype="float64")), r"bias is float64"),
        (dict(x=paddle.zeros([3, 7], dtype="bfloat16"), bias=paddle.zeros([7], dtype="bfloat16")), r"scale is float32, but bias is bfloat16"),
        (dict(epsilon=-1e-5), r"epsilon is -1e-05"),
        (dict(epsilon=float("nan")), r"epsilon is nan"),
        (dict(residual=paddle.zeros([7])), r"residual is float32\[7\] .* but x is float32\[3, 7\]"),
        (dict(residual=paddle.zeros([3, 7], dtype="bfloat16")), r"residual is bfloat16"),
    ],
)  # fmt: skip
def test_errors_say_what_is_wrong(op, change, message):
    given = dict(x=paddle.zeros([3, 7]), scale=paddle.ones([7]), bias=paddle.zeros([7]), epsilon=EPSILON)
    if "residual" in change:
        with pytest.raises(ValueError, match=message):
            op.fused_add_ln(**{"residual": paddle.zeros([3, 7]), **given, **change})
    else:
        with pytest.raises(ValueError, match=message):
            op.fused_ln(**{**given, **change})
