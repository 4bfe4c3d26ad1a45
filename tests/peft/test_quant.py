"""Weights in 4 and 8 bits: values, sizes, gradients."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from model_helpers import build_model, tiny_config
from paddle import nn

from ernie35se import peft
from ernie35se.peft import LoRAConfig
from ernie35se.peft.quant import ALGORITHMS, CODES, QuantisedLinear


def linear(inside=13, outside=7, deviation=1.0):
    layer = nn.Linear(inside, outside)
    layer.weight.set_value(np.random.default_rng(0).normal(0, deviation, (inside, outside)).astype("float32"))
    return layer


def by_hand(weight, algorithm, block):
    """Each value by a search over all codes, block after block."""
    flat = weight.ravel().astype("float64")
    out = np.empty_like(flat)
    for start in range(0, len(flat), block):
        part = flat[start : start + block]
        scale = np.abs(part).max()
        for i, value in enumerate(part):
            out[start + i] = scale * min(
                CODES[algorithm].astype("float64"), key=lambda code: abs(code * scale - value)
            )
    return out.reshape(weight.shape)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("block", [64, 10, 2])
def test_every_value_gets_its_nearest_code(algorithm, block):
    base = linear()
    weight = QuantisedLinear(base, algorithm, block).weight.numpy()
    np.testing.assert_allclose(weight, by_hand(base.weight.numpy(), algorithm, block), atol=1e-6)


def test_codes():
    known = [
        -1.0,
        -0.6961928,
        -0.52507305,
        -0.39491749,
        -0.28444138,
        -0.18477343,
        -0.09105004,
        0.0,
    ]  # QLoRA, appendix E
    known += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
    np.testing.assert_allclose(CODES["nf4"], known, atol=1e-6)
    assert [len(CODES[algorithm]) for algorithm in ALGORITHMS] == [16, 15, 255, 15]
    assert all((np.diff(codes) > 0).all() and codes[0] == -1 and codes[-1] == 1 for codes in CODES.values())


@pytest.mark.parametrize(
    "algorithm, bits, most",
    [("nf4", 4, 0.11), ("fp4", 4, 0.15), ("weight_only_int4", 4, 0.13), ("weight_only_int8", 8, 0.01)],
)
def test_size_and_error(algorithm, bits, most):
    base = linear(256, 64)
    plain = QuantisedLinear(base, algorithm, 64)
    double = QuantisedLinear(base, algorithm, 64, double=True)
    blocks = 256 * 64 // 64
    assert plain.stored_bytes() == 256 * 64 * bits // 8 + 4 * blocks
    assert double.stored_bytes() == 256 * 64 * bits // 8 + blocks + 4 * (blocks // 256)
    error = np.abs(plain.weight.numpy() - base.weight.numpy())
    assert np.sqrt((error**2).mean()) < most
    np.testing.assert_allclose(double._scales().numpy(), plain.scales.numpy(), rtol=1e-2)
    assert not any(p.shape == [256, 64] for p in plain.parameters())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradient_goes_through_the_dequantised_weight(algorithm):
    layer = QuantisedLinear(linear(), algorithm, 6, double=True)
    x = paddle.to_tensor(
        np.random.default_rng(1).normal(size=(2, 3, 13)).astype("float32"), stop_gradient=False
    )
    out = layer(x)
    weight, bias = layer.weight.numpy(), layer.bias.numpy()
    np.testing.assert_allclose(out.numpy(), x.numpy() @ weight + bias, atol=1e-5)
    (out**2).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), 2 * out.numpy() @ weight.T, rtol=1e-4, atol=1e-4)
    made = layer.to_linear()
    np.testing.assert_allclose(made(x).numpy(), out.numpy(), atol=1e-5)


def test_a_block_of_zeros_stays_zero():
    layer = linear()
    layer.weight.set_value(paddle.zeros_like(layer.weight))
    assert not QuantisedLinear(layer, "nf4", 8, double=True).weight.numpy().any()


def test_no_linear_layer_of_the_blocks_stays_whole():
    model = peft.wrap(
        build_model(tiny_config()), LoRAConfig(weight_quantize_algo="nf4", target_modules=r".*\.q_proj")
    )
    assert not any(isinstance(layer, nn.Linear) for layer in model.sublayers())
    merged = peft.merge(model)
    assert isinstance(merged.ernie.layers[0].self_attn.q_proj, nn.Linear)
