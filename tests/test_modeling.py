"""The model against the reference values, against numpy, and against its own contract."""

import json
import math

import numpy as np
import paddle
import pytest
from model_helpers import build_model, numpy_logits, rebuilt_weight, tiny_config

from ernie35se import positions
from ernie35se.configuration import Ernie35Config
from ernie35se.modeling import Ernie35ForCausalLM, Ernie35Model

REFERENCE_CASES = [
    "default", "left_padding", "no_bias", "no_head_tail_trim", "progressive_seq_step0", "random_positions_step7"
]  # fmt: skip


def load_case(reference, case):
    values = np.load(reference / f"model_{case}.npz")
    tensor = {k: paddle.to_tensor(values[k]) for k in ("input_ids", "labels", "attention_mask", "position_ids") if k in values}
    return values, Ernie35Config(**json.loads(str(values["config"]))), tensor


@pytest.mark.parametrize("case", REFERENCE_CASES)
def test_evaluation_agrees_with_the_reference(reference, case):
    values, config, inputs = load_case(reference, case)
    model = build_model(config)
    output = model(**inputs, output_hidden_states=True, return_dict=True)
    assert float(output.loss) == pytest.approx(float(values["eval_loss"]), rel=1e-6)
    count = int((inputs["labels"] != config.ignored_index).sum())
    assert float(output.loss) * count == pytest.approx(float(values["eval_loss_sum"]), rel=1e-6)
    real = values["attention_mask"].astype(bool) if "attention_mask" in values else ...
    if "eval_logits" in values:
        np.testing.assert_allclose(output.logits.numpy()[real], values["eval_logits"][real], atol=1e-5)
        assert len(output.hidden_states) == config.num_hidden_layers + 1
        for i, hidden in enumerate(output.hidden_states):
            np.testing.assert_allclose(hidden.numpy()[real], values[f"eval_hidden_{i}"][real], atol=1e-5)


@pytest.mark.parametrize("case", REFERENCE_CASES)
def test_training_loss_and_every_gradient_agree_with_the_reference(reference, case):
    values, config, inputs = load_case(reference, case)
    model = build_model(config)
    model.train()
    step, length = int(values["global_step"]), inputs["input_ids"].shape[1]
    if config.use_progressive_seq_len:
        length = positions.progressive_sequence_length(step, length)
        inputs = {name: tensor[:, :length] for name, tensor in inputs.items()}
    if "position_ids" not in inputs:
        drawn = positions.random_position_ids(length, config.max_position_embeddings, seed=step)
        inputs["position_ids"] = paddle.to_tensor(drawn)
    loss, logits = model(**inputs)
    assert logits is None
    loss.backward()
    assert float(loss) == pytest.approx(float(values["train_loss"]), rel=1e-6)
    expected = {key.split("/", 1)[1]: float(values[key]) for key in values.files if key.startswith("grad_norm/")}
    got = {name: float(parameter.grad.norm()) for name, parameter in model.named_parameters()}
    assert got.keys() == expected.keys()
    for name, norm in expected.items():
        assert got[name] == pytest.approx(norm, rel=3e-5), name


@pytest.mark.parametrize("trimmed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_agree_with_numpy_in_float64(trimmed, bias, tied):
    config = tiny_config(parallel_attn_hatf=trimmed, use_bias=bias, tie_word_embeddings=tied, num_hidden_layers=3)
    model = build_model(config)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 37, (3, 7))
    mask = np.array([[1] * 7, [0, 0, 1, 1, 1, 1, 1], [0] * 6 + [1]])
    allowed = mask[:, None, :].astype(bool) & mask[:, :, None].astype(bool)
    position_ids = positions.masked_position_ids(mask, config.max_position_embeddings, spaced=True)
    weights = {name: p.numpy() for name, p in model.named_parameters()}
    expected = numpy_logits(config, weights, ids, position_ids, allowed)
    (got,) = model(paddle.to_tensor(ids), attention_mask=paddle.to_tensor(mask))
    np.testing.assert_allclose(got.numpy()[mask == 1], expected[mask == 1], atol=2e-6)


def test_gradients_agree_with_finite_differences_of_the_float64_network():
    """A directional derivative of the whole loss, in a random direction of all parameters."""
    config = tiny_config(num_hidden_layers=3)
    model = build_model(config)
    model.train()
    rng = np.random.default_rng(3)
    ids, labels = rng.integers(0, 37, (2, 5)), rng.integers(0, 37, (2, 5))
    labels[0, :2] = -100
    drawn = positions.random_position_ids(5, config.max_position_embeddings, seed=9)
    loss, _ = model(paddle.to_tensor(ids), position_ids=paddle.to_tensor(drawn), labels=paddle.to_tensor(labels))
    loss.backward()
    weights = {name: p.numpy().astype(np.float64) for name, p in model.named_parameters()}
    direction = {name: rng.standard_normal(value.shape) for name, value in weights.items()}
    slope = sum((p.grad.numpy() * direction[name]).sum() for name, p in model.named_parameters())

    def numpy_loss(step):
        moved = {name: value + step * direction[name] for name, value in weights.items()}
        causal = np.tril(np.ones((2, 5, 5), dtype=bool))
        logits = numpy_logits(config, moved, ids, np.stack([drawn, drawn]), causal)
        logits -= logits.max(-1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        picked = np.take_along_axis(log_p, np.maximum(labels, 0)[..., None], -1)[..., 0]
        return -picked[labels != -100].mean()

    assert float(loss) == pytest.approx(numpy_loss(0.0), rel=1e-6)
    assert slope == pytest.approx((numpy_loss(1e-5) - numpy_loss(-1e-5)) / 2e-5, rel=1e-4)


@pytest.mark.parametrize("spaced", [True, False])
def test_a_left_padded_batch_equals_single_rows(spaced):
    model = build_model(tiny_config(enable_random_position_ids=spaced))
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, 37, n) for n in (9, 4, 1)]
    ids = np.stack([np.concatenate([np.zeros(9 - len(row), dtype=np.int64), row]) for row in rows])
    mask = np.stack([[0] * (9 - len(row)) + [1] * len(row) for row in rows])
    (batch,) = model(paddle.to_tensor(ids), attention_mask=paddle.to_tensor(mask))
    assert np.isfinite(batch.numpy()).all()
    for i, row in enumerate(rows):
        (single,) = model(paddle.to_tensor(row[None]))
        np.testing.assert_allclose(batch.numpy()[i, 9 - len(row) :], single.numpy()[0], atol=2e-6)


def test_padding_gets_no_gradient_and_gives_none():
    model = build_model(tiny_config())
    ids = paddle.to_tensor(np.random.default_rng(0).integers(3, 37, (1, 6)))
    embeds = model.ernie.embed_tokens(ids).detach()
    embeds.stop_gradient = False
    mask = paddle.to_tensor([[0, 0, 1, 1, 1, 1]])
    labels = paddle.to_tensor([[-100, -100, 3, 4, 5, 6]])
    model(inputs_embeds=embeds, attention_mask=mask, labels=labels)[0].backward()
    gradient = embeds.grad.numpy()[0]
    assert np.abs(gradient[:2]).max() < 1e-20  # Paddle's exp ends at about 1e-28
    assert (np.abs(gradient[2:]).max(-1) > 1e-6).all()


@pytest.mark.parametrize("trimmed", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_cached_tokens_give_the_logits_of_a_full_forward(trimmed, padded):
    model = build_model(tiny_config(parallel_attn_hatf=trimmed))
    ids = paddle.to_tensor(np.random.default_rng(0).integers(3, 37, (2, 8)))
    mask = paddle.to_tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8]) if padded else None
    where = paddle.to_tensor(positions.interval_position_ids(8, 5)[None].repeat(2, 0))
    (full,) = model(ids, position_ids=where, attention_mask=mask)
    past, got = None, []
    for start, stop in ((0, 5), (5, 6), (6, 8)):
        output = model(
            ids[:, start:stop],
            position_ids=where[:, start:stop],
            attention_mask=None if mask is None else mask[:, :stop],
            past_key_values=past,
            use_cache=True,
            return_dict=True,
        )
        past = output.past_key_values
        got.append(output.logits)
    got = paddle.concat(got, axis=1).numpy()
    real = ... if mask is None else mask.numpy().astype(bool)
    np.testing.assert_allclose(got[real], full.numpy()[real], atol=2e-6)
    assert past[0][0].shape == [2, 8, 3, 8] and len(past) == 4
    assert past[-1] == () if trimmed else len(past[-1]) == 2


def test_a_cache_without_positions_is_refused_where_their_spacing_is_unknown():
    model = build_model(tiny_config())
    ids = paddle.to_tensor([[3, 4, 5]])
    past = model(ids, use_cache=True, return_dict=True).past_key_values
    with pytest.raises(ValueError, match="position_ids"):
        model(ids, past_key_values=past)
    plain = build_model(tiny_config(enable_random_position_ids=False))
    past = plain(ids, use_cache=True, return_dict=True).past_key_values
    (continued,) = plain(ids, past_key_values=past)
    (whole,) = plain(paddle.concat([ids, ids], axis=1))
    np.testing.assert_allclose(continued.numpy(), whole.numpy()[:, 3:], atol=2e-6)


def test_packed_samples_do_not_see_each_other():
    model = build_model(tiny_config())
    a, b = [5, 6, 7], [8, 9, 10, 11]
    block = np.zeros((1, 7, 7), dtype=bool)
    block[0, :3, :3] = block[0, 3:, 3:] = True
    where = paddle.to_tensor([[0, 1, 2, 0, 1, 2, 3]])
    for mask in (block, block[:, None]):
        (packed,) = model(paddle.to_tensor([a + b]), position_ids=where, attention_mask=paddle.to_tensor(mask))
        for ids, columns in ((a, slice(0, 3)), (b, slice(3, 7))):
            (single,) = model(paddle.to_tensor([ids]), position_ids=where[:, columns])
            np.testing.assert_allclose(packed.numpy()[:, columns], single.numpy(), atol=2e-6)


@pytest.mark.parametrize("trimmed", [True, False])
def test_attentions_are_probabilities_and_absent_in_the_tail(trimmed):
    model = build_model(tiny_config(parallel_attn_hatf=trimmed))
    output = model(paddle.to_tensor([[3, 4, 5, 6]]), output_attentions=True, return_dict=True)
    assert len(output.attentions) == 4 and (output.attentions[-1] is None) == trimmed
    for weights in output.attentions[: 3 if trimmed else 4]:
        assert weights.shape == [1, 3, 4, 4]
        np.testing.assert_allclose(weights.numpy().sum(-1), 1.0, atol=1e-6)
        assert np.triu(weights.numpy(), 1).max() < 1e-20  # Paddle's exp ends at about 1e-28


@pytest.mark.parametrize("settings", [dict(use_recompute=True), dict(use_recompute_attn=True),
                                      dict(use_recompute=True, recompute_granularity="core_attn")])  # fmt: skip
def test_recompute_changes_no_gradient(settings):
    ids = paddle.to_tensor(np.random.default_rng(0).integers(3, 37, (2, 6)))
    gradients = []
    for options in ({}, settings):
        model = build_model(tiny_config(**options))
        model.train()
        model(ids, labels=ids)[0].backward()
        gradients.append({name: p.grad.numpy() for name, p in model.named_parameters()})
    for name, expected in gradients[0].items():
        np.testing.assert_allclose(gradients[1][name], expected, atol=1e-6, err_msg=name)


def test_recompute_reaches_the_blocks_below_a_frozen_embedding():
    model = build_model(tiny_config(use_recompute=True))
    model.train()
    model.ernie.embed_tokens.weight.stop_gradient = True
    ids = paddle.to_tensor([[3, 4, 5, 6]])
    model(ids, labels=ids)[0].backward()
    assert float(model.ernie.layers[0].self_attn.q_proj.weight.grad.norm()) > 0


def test_logits_in_train_mode_come_on_request_only():
    model = build_model(tiny_config())
    ids = paddle.to_tensor([[3, 4, 5]])
    assert model(ids, labels=ids)[1].shape == [1, 3, 37]
    model.train()
    assert model(ids, labels=ids)[1] is None
    assert model(ids, labels=ids, return_logits=True)[1].shape == [1, 3, 37]
    assert model(ids)[0].shape == [1, 3, 37]


def test_initial_values_follow_the_table():
    paddle.seed(0)
    config = tiny_config(hidden_size=96, intermediate_size=160, vocab_size=500, num_hidden_layers=6)
    model = Ernie35ForCausalLM(config)
    deviation = math.sqrt(0.3333 / 96)
    for name, parameter in model.named_parameters():
        value = parameter.numpy()
        if name.endswith("bias"):
            assert (value == 0).all(), name
        elif "norm" in name:
            assert (value == 1).all(), name
        else:
            scaled = name.endswith(("o_proj.weight", "down_proj.weight"))
            expected = deviation / math.sqrt(12) if scaled else deviation
            assert value.std() == pytest.approx(expected, rel=0.05), name
            assert abs(value.mean()) < 5 * expected / math.sqrt(value.size), name
    assert config.initializer_range == 0.02


def test_a_trunk_alone_is_initialised_too():
    model = Ernie35Model(tiny_config(hidden_size=96, num_attention_heads=4))
    assert model.layers[1].self_attn_mlp.o_proj.weight.numpy().std() == pytest.approx(
        math.sqrt(0.3333 / 96 / 8), rel=0.05
    )


def test_more_tokens_than_positions_are_refused():
    model = build_model(tiny_config(max_position_embeddings=4))
    for spaced in (True, False):
        model.config.enable_random_position_ids = spaced
        with pytest.raises(ValueError, match="5 tokens .* 4"):
            model(paddle.to_tensor([[1, 2, 3, 4, 5]]))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(attention_mask=paddle.ones([1, 5], dtype="int64")), "attention_mask has shape"),
        (dict(attention_mask=paddle.ones([1, 3, 3, 3], dtype="int64")), "attention_mask has shape"),
        (dict(attention_mask=paddle.zeros([1, 1, 3, 3])), "Additive masks"),
        (dict(position_ids=paddle.to_tensor([0, 1])), "position_ids have shape"),
        (dict(labels=paddle.to_tensor([[1, 2]])), "labels have shape"),
        (dict(inputs_embeds=paddle.zeros([1, 3, 24])), "either input_ids or inputs_embeds"),
    ],
)
def test_inputs_of_the_wrong_shape_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_model(tiny_config())(paddle.to_tensor([[1, 2, 3]]), **arguments)


def test_rope_angles_are_exact_at_far_positions():
    """In bfloat16 positions 15962 and 15968 would be one; the tables are float32 whatever the model's precision."""
    from ernie35se.rope import rope_tables

    far = np.array([[255, 257, 15962, 15968, 32767]])
    cos, sin = rope_tables(paddle.to_tensor(far), 8)
    angle = far[..., None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    assert cos.dtype == paddle.float32 and cos.shape == [1, 5, 1, 4]
    np.testing.assert_allclose(cos.numpy()[:, :, 0], np.cos(angle), atol=2e-3)
    np.testing.assert_allclose(sin.numpy()[:, :, 0], np.sin(angle), atol=2e-3)


def test_parameters_are_those_of_checkpoints_in_the_wild():
    names = [name for name, _ in Ernie35ForCausalLM(tiny_config(tie_word_embeddings=True)).named_parameters()]
    assert "lm_head.weight" not in names and "lm_head.bias" in names
    names = [name for name, _ in Ernie35ForCausalLM(tiny_config(use_bias=False)).named_parameters()]
    assert "lm_head.weight" in names and not any(n.endswith("bias") and "norm" not in n for n in names)
    assert rebuilt_weight("lm_head.bias", [3]).dtype == np.float32
