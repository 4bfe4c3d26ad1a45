"""The seam: the plain form never looks for the op; the fused one equals it, or says at construction why it cannot be had."""

import sys
import types
from importlib import invalidate_caches
from importlib.util import find_spec

import numpy as np
import paddle
import pytest
from model_helpers import build_model, tiny_config
from paddle import nn

from ernie35se.norm import FusedLayerNorm, layer_norm, usable_op

BUILD_COMMAND = "pip install ./external_ops --no-build-isolation"
needs_op = pytest.mark.skipif(find_spec("fused_ln") is None, reason=f"the op is not built: {BUILD_COMMAND}")


class HidesOp:
    """An import hook before all others: to it, fused_ln is not installed."""

    def find_spec(self, name, path=None, target=None):
        if name == "fused_ln":
            raise ModuleNotFoundError("No module named 'fused_ln'", name="fused_ln")


@pytest.fixture(autouse=True)
def unknown_op():
    """Each test looks for the op anew, and leaves none of its own behind."""
    before = sys.modules.pop("fused_ln", None)
    usable_op.cache_clear()
    yield
    usable_op.cache_clear()
    sys.modules.pop("fused_ln", None)
    if before is not None:
        sys.modules["fused_ln"] = before


@pytest.fixture
def without_op(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [HidesOp(), *sys.meta_path])


@pytest.fixture
def found_first(monkeypatch, tmp_path):
    """A folder that Python searches first, as it does the current one."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    invalidate_caches()
    return tmp_path


def refusal() -> str:
    with pytest.raises(ValueError) as caught:
        layer_norm(tiny_config(fuse_ln=True))
    message = str(caught.value)
    assert BUILD_COMMAND in message and "docs/fused_ln.md" in message and "set fuse_ln to false" in message
    return message


# --------------------------------------------------------------------------------------------- the op is not there


def test_the_plain_form_never_looks_for_the_op(without_op):
    norm = layer_norm(tiny_config(layer_norm_eps=1e-4))
    assert type(norm) is nn.LayerNorm and norm._epsilon == 1e-4 and list(norm.weight.shape) == [24]
    assert "fused_ln" not in sys.modules
    assert usable_op.cache_info().misses == 0


def test_a_missing_op_is_told_at_construction(without_op):
    message = refusal()
    assert "is not installed (No module named 'fused_ln')" in message and sys.executable in message


@pytest.mark.parametrize("content", ["", "def fused_ln(): ...\n"], ids=["empty package", "half of the functions"])
def test_a_shadowing_package_is_told_with_its_path(found_first, content):
    (found_first / "fused_ln").mkdir()
    (found_first / "fused_ln" / "__init__.py").write_text(content)
    message = refusal()
    assert str(found_first / "fused_ln" / "__init__.py") in message and "is not the op: it has no " in message
    assert ("no fused_ln" in message) == (content == "") and "no fused_add_ln" in message


def test_a_shadowing_folder_is_told_with_its_path(monkeypatch, found_first):
    (found_first / "fused_ln").mkdir()
    # A folder without __init__.py yields to an installed module, so the search ends here.
    others = [path for path in sys.path if find_spec_in(path) is None]
    monkeypatch.setattr(sys, "path", others + [str(found_first)])
    assert str(found_first / "fused_ln") in refusal()


def find_spec_in(path):
    from importlib.machinery import PathFinder

    return PathFinder.find_spec("fused_ln", [path])


@pytest.mark.parametrize(
    "content, words",
    [
        ("import a_module_that_is_not_there\n", "ModuleNotFoundError: No module named 'a_module_that_is_not_there'"),
        ("raise OSError('first line\\nlibpaddle.so: undefined symbol')\n", "OSError: libpaddle.so: undefined symbol"),
        ("assert False\n", "AssertionError"),
        ("this is no Python\n", "SyntaxError"),
    ],
    ids=["needs what is missing", "library of another Paddle", "library missing", "no Python"],
)
def test_a_broken_module_is_told_with_its_path_and_error(found_first, content, words):
    (found_first / "fused_ln.py").write_text(content)
    message = refusal()
    assert str(found_first / "fused_ln.py") in message and f"cannot be imported: {words}" in message


def test_a_build_that_does_not_run_on_this_device_is_told(monkeypatch):
    def fails(*_):
        raise RuntimeError("C++ Traceback\nfused_ln: x is on Place(gpu:0), but this build has CPU kernels only.")

    fake = types.ModuleType("fused_ln")
    fake.fused_ln = fake.fused_add_ln = fails
    monkeypatch.setitem(sys.modules, "fused_ln", fake)
    message = refusal()
    assert f"does not run on {paddle.get_device()}" in message and "CPU kernels only" in message


# ------------------------------------------------------------------------------------------------- the op is there


@needs_op
def test_the_fused_layer_is_the_plain_one_in_all_but_speed():
    config = tiny_config(layer_norm_eps=1e-6)
    plain, fused = layer_norm(config), layer_norm(tiny_config(fuse_ln=True, layer_norm_eps=1e-6))
    assert isinstance(fused, FusedLayerNorm)
    assert isinstance(fused, nn.LayerNorm)  # what mixed precision keeps in float32 is chosen by this class
    assert list(fused.state_dict()) == list(plain.state_dict()) == ["weight", "bias"]
    for name, parameter in plain.state_dict().items():
        np.testing.assert_array_equal(fused.state_dict()[name].numpy(), parameter.numpy())

    rng = np.random.default_rng(0)
    plain.set_state_dict({name: paddle.to_tensor(rng.standard_normal(24), dtype="float32") for name in ("weight", "bias")})
    fused.set_state_dict(plain.state_dict())
    array, dy = rng.standard_normal((2, 3, 5, 24)).astype("float32")
    results = []
    for norm in (plain, fused):
        x = paddle.to_tensor(array, stop_gradient=False)
        y = norm(x)
        (y * paddle.to_tensor(dy)).sum().backward()
        results.append([t.numpy() for t in (y, x.grad, norm.weight.grad, norm.bias.grad)])
    for expected, actual in zip(*results):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=2e-6)


@needs_op
@pytest.mark.parametrize("granularity", [None, "full", "core_attn"])
def test_a_model_with_the_op_gives_the_same_loss_and_gradients(granularity):
    results = []
    for fuse_ln in (False, True):
        settings = dict(use_recompute=True, recompute_granularity=granularity) if granularity else {}
        model = build_model(tiny_config(fuse_ln=fuse_ln, **settings))
        model.train()
        ids = paddle.to_tensor(np.random.default_rng(0).integers(0, 37, (2, 11)))
        loss = model(ids, labels=ids)[0]
        loss.backward()
        results.append({name: p.grad.numpy() for name, p in model.named_parameters()} | {"loss": loss.numpy()})
        assert sum(isinstance(layer, FusedLayerNorm) for layer in model.sublayers()) == (5 if fuse_ln else 0)
    assert list(results[0]) == list(results[1])
    for name, expected in results[0].items():
        np.testing.assert_allclose(results[1][name], expected, rtol=1e-5, atol=2e-6, err_msg=name)
