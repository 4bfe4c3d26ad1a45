"""Each method against its definition, written again in numpy, float64."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from model_helpers import build_model, tiny_config
from paddle import nn

from ernie35se import peft
from ernie35se.peft import (
    DisLoRAConfig,
    LoKrConfig,
    LoRAConfig,
    PrefixConfig,
    ReFTConfig,
    TareConfig,
    VeRAConfig,
)
from ernie35se.peft.dislora import DisLoRALinear
from ernie35se.peft.lokr import LoKrLinear, factorise
from ernie35se.peft.lora import LoRALinear, MoRALinear
from ernie35se.peft.neftune import add_noise
from ernie35se.peft.reft import LoreftIntervention, TinyIntervention, edited_tokens, orthonormal
from ernie35se.peft.tare import TareLinear
from ernie35se.peft.vera import VeRALinear

INSIDE, OUTSIDE = 15, 11


def linear(inside=INSIDE, outside=OUTSIDE, seed=0):
    layer = nn.Linear(inside, outside)
    rng = np.random.default_rng(seed)
    layer.weight.set_value(rng.normal(size=(inside, outside)).astype("float32"))
    layer.bias.set_value(rng.normal(size=outside).astype("float32"))
    layer.weight.stop_gradient = layer.bias.stop_gradient = True  # as in a wrapped model
    return layer


def randomised(layer, seed=1):
    """Every trainable parameter random, as after training; returns name -> float64 array of all of the
    adapter's."""
    rng = np.random.default_rng(seed)
    for _, parameter in layer.own_parameters():
        if not parameter.stop_gradient:
            parameter.set_value(rng.normal(size=parameter.shape).astype("float32"))
    return {name: p.numpy().astype("float64") for name, p in layer.own_parameters()}


def check(layer, weight, delta):
    """The layer computes x (weight + delta) + b, and says so of its merged weight."""
    layer.eval()
    x = np.random.default_rng(2).normal(size=(2, 3, layer.in_features)).astype("float32")
    bias = layer.base.bias.numpy().astype("float64")
    np.testing.assert_allclose(
        layer(paddle.to_tensor(x)).numpy(), x @ (weight + delta) + bias, atol=2e-4, rtol=1e-4
    )
    np.testing.assert_allclose(layer.merged_weight().numpy(), weight + delta, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "settings, scale",
    [
        ({}, 2.0),
        ({"lora_alpha": 6}, 2.0),
        ({"rslora": True}, 4 / 3**0.5),
        ({"lora_use_mixer": True}, 2.0),
        ({"lora_use_mixer": True, "mixer_num": 3}, 2.0),
    ],
)
def test_lora_family(settings, scale):
    base = linear()
    layer = LoRALinear("x", base, LoRAConfig(r=3, **settings))
    p = randomised(layer)
    chain = p["lora_A"]
    for mixer in ("lora_AB", "lora_AB_1", "lora_AB_2"):
        chain = chain @ p.get(mixer, np.eye(3))
    check(layer, base.weight.numpy().astype("float64"), scale * chain @ p["lora_B"])


def test_quick_lora_has_the_plain_gradients():
    gradients = []
    for quick in (False, True):
        layer = LoRALinear("x", linear(), LoRAConfig(r=3, use_quick_lora=quick))
        randomised(layer)
        x = paddle.to_tensor(
            np.random.default_rng(2).normal(size=(2, 3, INSIDE)).astype("float32"), stop_gradient=False
        )
        layer.train()
        (layer(x) ** 2).sum().backward()
        gradients.append([x.grad.numpy(), layer.lora_A.grad.numpy(), layer.lora_B.grad.numpy()])
    for plain, quick in zip(*gradients):
        np.testing.assert_allclose(quick, plain, rtol=1e-4, atol=1e-3)


def test_pissa_takes_the_top_triplets_out_of_the_base():
    base = linear()
    weight = base.weight.numpy().astype("float64")
    layer = LoRALinear("x", base, LoRAConfig(r=3, pissa=True))
    layer.change_base(-1)
    u, s, v = np.linalg.svd(weight, full_matrices=False)
    top = (u[:, :3] * s[:3]) @ v[:3]
    np.testing.assert_allclose(base.weight.numpy(), weight - top, atol=1e-5)
    np.testing.assert_allclose(layer.lora_A.numpy() @ layer.lora_B.numpy(), top, atol=1e-5)
    np.testing.assert_allclose((layer.lora_A.numpy() ** 2).sum(0), s[:3], rtol=1e-5)  # S^(1/2) on each side
    p = randomised(layer)
    check(layer, weight - top, p["lora_A"] @ p["lora_B"])


def mora_by_hand(matrix, inside, outside):
    """(in, out): one unit vector at a time, by the definition."""
    size = len(matrix)
    groups = -(-inside // size)
    rows = []
    for unit in np.eye(inside):
        filled = [unit[i % inside] for i in range(groups * size)]
        out = []
        for group in range(groups):
            part = filled[group * size : (group + 1) * size]
            half = size // 2
            turned = []
            for i in range(size):
                angle = group * 10000.0 ** (-2 * (i % half) / size)
                other = -part[i + half] if i < half else part[i - half]
                turned.append(part[i] * np.cos(angle) + other * np.sin(angle))
            out += list(np.array(turned) @ matrix)
        rows.append([out[i % len(out)] for i in range(outside)])
    return np.array(rows)


@pytest.mark.parametrize(
    "inside, outside, rank", [(15, 11, 1), (11, 15, 1), (30, 6, 1), (6, 30, 1), (3, 40, 2), (8, 8, 4)]
)
def test_mora(inside, outside, rank):
    base = linear(inside, outside)
    layer = MoRALinear("x", base, LoRAConfig(r=rank, use_mora=True))
    p = randomised(layer)
    size = int(((inside + outside) * rank) ** 0.5 + 0.5) // 2 * 2
    assert p["lora_A"].shape == (size, size)
    check(layer, base.weight.numpy().astype("float64"), mora_by_hand(p["lora_A"], inside, outside))


def test_mora_equals_paddlenlps_forward():
    from paddlenlp.peft.lora.lora_layers import LoRALinear as Theirs

    theirs = Theirs(INSIDE, OUTSIDE, r=2, use_mora=True)
    ours = MoRALinear("x", linear(), LoRAConfig(r=2, use_mora=True))
    matrix = paddle.randn(ours.lora_A.shape)
    ours.lora_A.set_value(matrix)
    theirs.lora_A.set_value(matrix)
    x = paddle.randn([3, INSIDE])
    np.testing.assert_allclose(ours.update(x).numpy(), theirs._apply_mora(x).numpy(), atol=1e-4)


def test_vera():
    base = linear()
    layer = VeRALinear("x", base, VeRAConfig(r=4, seed=5))
    assert np.allclose(layer.vera_d.numpy(), 0.1) and not layer.vera_b.numpy().any()
    p = randomised(layer)
    assert set(p) == {"vera_d", "vera_b"}
    a, b = (getattr(layer, f"vera_{side}").numpy().astype("float64") for side in "AB")
    delta = (np.diag(p["vera_b"]) @ b.T @ np.diag(p["vera_d"]) @ a.T).T
    check(layer, base.weight.numpy().astype("float64"), delta)


def test_vera_slices_the_same_matrices_for_every_size():
    small, large = (VeRALinear("x", linear(*size), VeRAConfig(r=4)) for size in ((15, 11), (40, 30)))
    other = VeRALinear("y", linear(), VeRAConfig(r=4, seed=43))
    a, b = (layer.vera_A.numpy() for layer in (small, large))
    np.testing.assert_allclose(
        a * 15**0.5, b[:15] * 40**0.5, rtol=1e-5
    )  # but for the scale that keeps the variance
    np.testing.assert_array_equal(small.vera_B.numpy(), large.vera_B.numpy()[:, :11])
    assert not np.array_equal(small.vera_A.numpy(), other.vera_A.numpy())


@pytest.mark.parametrize(
    "settings", [{}, {"decompose_both": True}, {"factor": 3}, {"lokr_dim": 1}, {"lokr_alpha": 5.0}]
)
@pytest.mark.parametrize("inside, outside", [(30, 22), (60, 77), (12, 7)])
def test_lokr(settings, inside, outside):
    config = LoKrConfig(**{"lokr_dim": 2, **settings})
    base = linear(inside, outside)
    layer = LoKrLinear("x", base, config)
    p = randomised(layer)
    w1 = p["lokr_w1"] if "lokr_w1" in p else p["lokr_w1_a"] @ p["lokr_w1_b"]
    w2 = p["lokr_w2"] if "lokr_w2" in p else p["lokr_w2_a"] @ p["lokr_w2_b"]
    scale = settings.get("lokr_alpha", config.lokr_dim) / config.lokr_dim
    check(layer, base.weight.numpy().astype("float64"), scale * np.kron(w1, w2).T)


@pytest.mark.parametrize(
    "size, factor, expected", [(112, -1, (8, 14)), (127, -1, (1, 127)), (128, 4, (4, 32)), (250, 4, (2, 125))]
)
def test_factorise(size, factor, expected):
    assert factorise(size, factor) == expected


def dislora_layer(**settings):
    base = linear()
    layer = DisLoRALinear("x", base, DisLoRAConfig(**{"r": 4, "s_tsd": 2, "dash_flag": 3, **settings}))
    weight = base.weight.numpy().astype("float64")
    layer.change_base(-1)
    return layer, weight


@pytest.mark.parametrize("small", [True, False])
def test_dislora(small):
    layer, weight = dislora_layer(prefer_small_sigma=small)
    u, s, v = np.linalg.svd(weight.T, full_matrices=False)  # the (out, in) matrix
    chosen = slice(-4, None) if small else slice(0, 4)
    part = 12 / 4 * (u[:, chosen] * s[chosen]) @ v[chosen]
    np.testing.assert_allclose(layer.base.weight.numpy(), weight - part.T, atol=1e-5)
    np.testing.assert_allclose(layer.merged_weight().numpy(), weight, atol=1e-5)
    assert layer.extra_loss().item() == pytest.approx(0, abs=1e-8)

    p = randomised(layer)
    left, right = p["dislora_U"], p["dislora_V"]
    ortho = ((left.T @ left - np.eye(4)) ** 2).sum() + ((right @ right.T - np.eye(4)) ** 2).sum()
    assert layer.extra_loss().item() == pytest.approx(ortho, rel=1e-5)

    change = 3 * (left * p["dislora_S"]) @ right - part
    rates = [abs(u[:, i] @ change @ v[i]) / (abs(s[i]) + 1e-6) for i in range(len(s))]
    layer.after_step(2)
    assert not layer.dislora_U_tsd.numpy().any()
    layer.after_step(3)
    best = sorted(range(len(s)), key=lambda i: rates[i] if small else -rates[i])[:2]
    joined = sum(3 * scale * np.outer(u[:, i], v[i]) for scale, i in zip(p["dislora_S_tsd"], best))
    assert layer.dislora_U_tsd.stop_gradient and not layer.dislora_S_tsd.stop_gradient
    check(layer, weight - part.T, (change + part + joined).T)


def test_tare():
    layer = TareLinear("x", linear(), TareConfig(tare_n=5, tare_k=3))
    x = np.random.default_rng(2).normal(size=(2, 3, INSIDE)).astype("float32")
    h = x.astype("float64") @ layer.base.weight.numpy() + layer.base.bias.numpy()
    np.testing.assert_allclose(layer(paddle.to_tensor(x)).numpy(), h, atol=1e-4)
    p = randomised(layer)
    expected = np.zeros_like(h)
    for place in np.ndindex(2, 3):
        scores = h[place] @ p["tare_gate"]
        best = np.argsort(-scores)[:3]
        weights = np.exp(scores[best] - scores[best].max())
        for weight, editor in zip(weights / weights.sum(), best):
            expected[place] += weight * (h[place] * p["tare_a"][editor] + p["tare_b"][editor])
    np.testing.assert_allclose(layer(paddle.to_tensor(x)).numpy(), expected, atol=1e-3)


def test_tare_sits_behind_the_ffn_outputs():
    model = peft.wrap(build_model(tiny_config()), TareConfig())
    places = [name for name, layer in model.named_sublayers() if isinstance(layer, TareLinear)]
    assert places == [f"ernie.layers.{i}.self_attn_mlp.o_proj" for i in (1, 2)] + [
        "ernie.layers.3.mlp.down_proj"
    ]


# ------------------------------------------------------------------------------------------------------ ReFT


def test_orthonormal():
    raw = paddle.to_tensor(np.random.default_rng(0).normal(size=(9, 4)).astype("float32"))
    q, r = np.linalg.qr(raw.numpy().astype("float64"))
    made = orthonormal(raw).numpy()
    np.testing.assert_allclose(made, q * np.sign(np.diag(r)), atol=1e-5)
    np.testing.assert_allclose(made.T @ made, np.eye(4), atol=1e-6)


def test_edited_tokens_by_hand():
    prompt = paddle.to_tensor(
        [[0, 1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]]
    ).astype("bool")
    assert edited_tokens(prompt, 2, 1).astype("int").tolist() == [
        [0, 1, 1, 0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 0, 0],
    ]


@pytest.mark.parametrize("kind", ["LoreftIntervention", "TinyIntervention"])
def test_reft_edits_the_chosen_tokens_of_the_chosen_blocks(kind):
    config = ReFTConfig(layers="1", position="f1+l1", rank=3, intervention_type=kind, act_fn="relu")
    plain, model = (build_model(tiny_config()) for _ in range(2))
    peft.wrap(model, config)
    p = randomised(model.reft["1"])
    ids = paddle.to_tensor(np.random.RandomState(0).randint(3, 37, (1, 6)))
    labels = paddle.to_tensor(
        [[-100, -100, -100, 5, 6, 7]]
    )  # the first learnt label belongs to token 3: prompt is 0..3

    def states(one, **more):
        seen = []
        handle = one.ernie.layers[1].register_forward_post_hook(
            lambda layer, i, o: seen.append(o[0].numpy()[0])
        )
        one(input_ids=ids, **more)
        handle.remove()
        return seen[0].astype("float64")

    h, edited = states(plain), states(model, labels=labels)
    for t in range(6):
        if t not in (0, 3):
            np.testing.assert_allclose(edited[t], h[t], atol=1e-6)
        elif kind == "LoreftIntervention":
            q = np.linalg.qr(p["rotate"])[0]
            q = q * np.sign(np.diag(np.linalg.qr(p["rotate"])[1]))
            source = np.maximum(h[t] @ p["source"] + p["source_bias"], 0)
            np.testing.assert_allclose(edited[t], h[t] + q @ (source - q.T @ h[t]), atol=1e-4)
        else:
            added = p["param_b"] * (p["param_B"].T @ (p["param_a"] * (p["param_A"].T @ h[t])))
            np.testing.assert_allclose(edited[t], h[t] + added, atol=1e-4)
    assert abs(states(model)[5] - h[5]).max() > 1e-2  # without labels all of it is prompt


def test_reft_switches():
    """Without bias there is none; each activation by numpy; dropout acts on what is added, in training alone."""
    h = np.random.default_rng(0).normal(size=(2, 3, 8)).astype("float32")
    by_hand = {"linear": lambda x: x, "relu": lambda x: np.maximum(x, 0), "silu": lambda x: x / (1 + np.exp(-x)), "tanh": np.tanh}
    for name, act in by_hand.items():
        layer = LoreftIntervention("x", 8, ReFTConfig(rank=3, act_fn=name, add_bias=False), "float32")
        p = randomised(layer)
        assert set(p) == {"rotate", "source"}
        rotation = layer.rotation().numpy().astype("float64")
        expected = h + (act(h @ p["source"]) - h @ rotation) @ rotation.T
        np.testing.assert_allclose(layer(paddle.to_tensor(h)).numpy(), expected, atol=1e-5)
    for kind in (LoreftIntervention, TinyIntervention):
        layer = kind("x", 8, ReFTConfig(rank=3, dropout=0.5), "float32")
        randomised(layer)
        layer.eval()
        added = layer(paddle.to_tensor(h)).numpy() - h
        layer.train()
        dropped = layer(paddle.to_tensor(h)).numpy() - h
        gone = np.abs(dropped) < 1e-6
        assert 0.25 < gone.mean() < 0.75
        np.testing.assert_allclose(dropped[~gone], 2 * added[~gone], atol=1e-4)


# ---------------------------------------------------------------------------------------------------- prefix


@pytest.mark.parametrize("spaced", [True, False])
@pytest.mark.parametrize("projection", [True, False])
def test_prefix_equals_a_cache_that_takes_no_positions(spaced, projection):
    """The model's own cache, filled with the prefix by hand, under left padding."""
    config = tiny_config(enable_random_position_ids=spaced)
    model, plain = (
        peft.wrap(build_model(config), PrefixConfig(num_prefix_tokens=4, prefix_projection=projection)),
        None,
    )
    plain = build_model(config)
    randomised(model.prefix_encoder)
    ids = np.random.RandomState(0).randint(3, 37, (2, 6))
    mask = np.ones((2, 6), dtype="int64")
    mask[1, :2] = 0
    cache = [tuple(model.prefix_encoder(layer, 2)) for layer in range(3)] + [()]
    step = 8 if spaced else 1
    positions = np.maximum(np.cumsum(mask, axis=1) * step - 1, 0)
    expected = plain(
        input_ids=paddle.to_tensor(ids),
        attention_mask=paddle.to_tensor(np.concatenate([np.ones((2, 4), dtype="int64"), mask], axis=1)),
        position_ids=paddle.to_tensor(positions),
        past_key_values=cache,
        return_dict=True,
    ).logits.numpy()
    seen = model(
        input_ids=paddle.to_tensor(ids), attention_mask=paddle.to_tensor(mask), return_dict=True
    ).logits.numpy()
    np.testing.assert_allclose(seen[0], expected[0], atol=1e-5)
    np.testing.assert_allclose(seen[1, 2:], expected[1, 2:], atol=1e-5)
    alone = model(input_ids=paddle.to_tensor(ids[1:, 2:]), return_dict=True).logits.numpy()
    np.testing.assert_allclose(seen[1, 2:], alone[0], atol=1e-5)


def test_prefix_with_a_cache_equals_full_recomputation():
    model = peft.wrap(build_model(tiny_config()), PrefixConfig(num_prefix_tokens=4))
    randomised(model.prefix_encoder)
    ids = paddle.to_tensor(np.random.RandomState(0).randint(3, 37, (2, 6)))
    positions = paddle.arange(6).unsqueeze(0) * 8 + 7
    whole = model(input_ids=ids, position_ids=positions, return_dict=True).logits.numpy()
    first = model(input_ids=ids[:, :4], position_ids=positions[:, :4], use_cache=True, return_dict=True)
    assert first.past_key_values[0][0].shape == [2, 4, 3, 8] and first.past_key_values[-1] == ()
    cache, seen = first.past_key_values, [first.logits.numpy()]
    for t in (4, 5):
        more = model(
            input_ids=ids[:, t : t + 1],
            position_ids=positions[:, t : t + 1],
            use_cache=True,
            past_key_values=cache,
            return_dict=True,
        )
        cache, seen = more.past_key_values, [*seen, more.logits.numpy()]
    np.testing.assert_allclose(np.concatenate(seen, axis=1), whole, atol=1e-5)


# --------------------------------------------------------------------------------------------------- NEFTune


def test_neftune():
    model = build_model(tiny_config())
    handle = add_noise(model, alpha=6.0)
    seen = []
    model.ernie.layers[0].register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0].numpy()))
    ids = paddle.to_tensor(np.random.RandomState(0).randint(3, 37, (2, 50)))
    mask = np.ones((2, 50), dtype="int64")
    mask[1, 25:] = 0
    plain = model.ernie.embed_tokens.weight.numpy()[ids.numpy()]
    model.eval()
    model(input_ids=ids, attention_mask=paddle.to_tensor(mask))
    np.testing.assert_array_equal(seen.pop(), plain)
    model.train()
    model(input_ids=ids, attention_mask=paddle.to_tensor(mask))
    noise = seen.pop() - plain
    for row, length in ((0, 50), (1, 25)):
        bound = 6.0 / (length * 24) ** 0.5
        assert 0.99 * bound < np.abs(noise[row]).max() <= bound * 1.0001
        assert noise[row].std() == pytest.approx(bound / 3**0.5, rel=0.05)
    handle.remove()
    model(input_ids=ids)
    np.testing.assert_array_equal(seen.pop(), plain)
