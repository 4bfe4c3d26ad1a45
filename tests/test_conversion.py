"""Cutting weights for tensor parallel: against reference values, and back."""

import numpy as np
import paddle
import pytest
from model_helpers import build_model, tiny_config

from ernie35se import conversion
from ernie35se.configuration import Ernie35Config
from ernie35se.modeling import Ernie35ForCausalLM, shared_inputs


@pytest.mark.parametrize("degree", [2, 4])
def test_pieces_agree_with_the_reference(reference, degree):
    values = np.load(reference / "tensor_parallel_split.npz")
    config = Ernie35Config(
        hidden_size=int(values["hidden_size"]),
        intermediate_size=int(values["intermediate_size"]),
        num_attention_heads=int(values["num_heads"]),
    )
    names = {
        "qkv_gate_up_weight": "ernie.layers.1.self_attn_mlp.qkv_gate_up_proj.weight",
        "qkv_gate_up_bias": "ernie.layers.1.self_attn_mlp.qkv_gate_up_proj.bias",
        "o_weight": "ernie.layers.1.self_attn_mlp.o_proj.weight",
    }
    for key, name in names.items():
        pieces = [conversion.split(name, values[key], config, degree, rank) for rank in range(degree)]
        for rank, piece in enumerate(pieces):
            np.testing.assert_array_equal(piece, values[f"tp{degree}_rank{rank}_{key}"], err_msg=name)
        np.testing.assert_array_equal(conversion.merge(name, pieces, config), values[key])


@pytest.mark.parametrize("trimmed, bias, tied", [(True, True, False), (False, True, True), (True, False, True)])
def test_every_weight_splits_and_merges_back(tmp_path, trimmed, bias, tied):
    from safetensors import safe_open

    sizes = dict(hidden_size=24, intermediate_size=36, vocab_size=42, num_attention_heads=6)
    config = tiny_config(parallel_attn_hatf=trimmed, use_bias=bias, tie_word_embeddings=tied, **sizes)
    model = build_model(config)
    model.save_pretrained(str(tmp_path), safe_serialization=True)
    cut_names = conversion.parameter_names(config)
    with safe_open(str(tmp_path / "model.safetensors"), framework="np") as file:
        for name, parameter in model.named_parameters():
            whole = parameter.numpy()
            lazy = [conversion.split(name, file.get_slice(name), config, 3, rank) for rank in range(3)]
            tensors = [conversion.split(name, parameter, config, 3, rank) for rank in range(3)]
            assert (lazy[0].size < whole.size) == (name in cut_names), name
            for a, b in zip(lazy, tensors):
                np.testing.assert_array_equal(a, b.numpy(), err_msg=name)
            np.testing.assert_array_equal(conversion.merge(name, lazy, config), whole, err_msg=name)
            np.testing.assert_array_equal(conversion.merge(name, tensors, config).numpy(), whole, err_msg=name)


def test_a_rank_of_the_fused_block_computes_its_heads_and_columns():
    """The sum over ranks of each rank's share of the fused block's update is the whole update."""
    config = tiny_config(hidden_size=24, intermediate_size=36, num_attention_heads=6)
    model = build_model(config)
    block = model.ernie.layers[1].self_attn_mlp
    shared = shared_inputs(config, batch=2, length=5)
    x = paddle.to_tensor(np.random.default_rng(0).standard_normal((2, 5, 24)).astype("float32"))
    whole = block(x, None, shared)[0] - block.o_proj.bias
    prefix, total = "ernie.layers.1.self_attn_mlp.", 0
    for rank in range(2):
        part = Ernie35ForCausalLM(config).ernie.layers[1].self_attn_mlp
        pieces = {n: conversion.split(prefix + n, p, config, 2, rank) for n, p in block.named_parameters()}
        part.qkv_gate_up_proj = paddle.nn.Linear(24, (72 + 72) // 2)
        part.o_proj = paddle.nn.Linear(30, 24)
        for name, parameter in part.named_parameters():
            parameter.set_value(pieces[name])
        total = total + part(x, None, shared)[0] - part.o_proj.bias
    np.testing.assert_allclose(total.numpy(), whole.numpy(), atol=1e-6)


def test_paddlenlp_hook_uses_the_same_cuts():
    config = tiny_config(hidden_size=24, intermediate_size=36, vocab_size=42, num_attention_heads=6)
    model = build_model(config)
    config.tensor_parallel_degree, config.tensor_parallel_rank = 2, 1
    split = Ernie35ForCausalLM._get_tensor_parallel_mappings(config)
    merge = Ernie35ForCausalLM._get_tensor_parallel_mappings(config, is_split=False)
    state = {name: p.numpy() for name, p in model.named_parameters()}
    assert split.keys() == merge.keys() == set(conversion.parameter_names(config))
    for name, action in split.items():
        second = conversion.split(name, state[name], config, 2, 1)
        np.testing.assert_array_equal(action(state[name]), second)
        first = conversion.split(name, state[name], config, 2, 0)
        np.testing.assert_array_equal(merge[name]([first, second]), state[name])


@pytest.mark.parametrize(
    "name, shape, degree, message",
    [
        ("ernie.layers.1.self_attn_mlp.qkv_gate_up_proj.weight", (24, 112), 5, "tensor_parallel_degree 5 must divide 3 heads"),
        ("lm_head.weight", (24, 37), 3, "tensor_parallel_degree 3 .* 37"),
        ("lm_head.weight", (24, 38), 1, "expects 37 along axis 1"),
        ("ernie.layers.1.attn.c_attn.weight", (2, 2), 1, "not the name of a parameter"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_numbers(name, shape, degree, message):
    with pytest.raises(ValueError, match=message):
        conversion.split(name, np.zeros(shape, dtype="float32"), tiny_config(), degree, 0)
