"""What every method must do: train its own parameters alone, learn, save, load, merge, and bear
recomputation."""

from __future__ import annotations

import dataclasses

import numpy as np
import paddle
import pytest
from model_helpers import build_model, tiny_config

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
from ernie35se.peft.base import AdapterLinear, get_layer

# The linear layers of the tiny model, (in, out): C = 24, F = 20, 4 layers.
HEAD = [(24, 24)] * 4
FUSED = [(24, 3 * 24 + 2 * 20), (20 + 24, 24)]
TAIL = [(24, 20), (24, 20), (20, 24)]
LINEAR = HEAD + 2 * FUSED + TAIL

METHODS = {
    "lora": LoRAConfig(r=4),
    "rslora": LoRAConfig(r=4, rslora=True),
    "lora+": LoRAConfig(r=4, lora_plus_scale=4.0),
    "quick": LoRAConfig(r=4, use_quick_lora=True),
    "dropout": LoRAConfig(r=4, lora_dropout=0.3),
    "pissa": LoRAConfig(r=4, pissa=True),
    "moslora": LoRAConfig(r=4, lora_use_mixer=True),
    "linchain": LoRAConfig(r=4, lora_use_mixer=True, mixer_num=3),
    "mora": LoRAConfig(r=4, use_mora=True),
    "qlora_nf4": LoRAConfig(r=4, weight_quantize_algo="nf4", weight_double_quant=True),
    "qlora_int8": LoRAConfig(r=4, weight_quantize_algo="weight_only_int8", weight_blocksize=10, rslora=True),
    "qlora_fp4": LoRAConfig(r=4, weight_quantize_algo="fp4", lora_use_mixer=True),
    "qlora_int4": LoRAConfig(r=4, weight_quantize_algo="weight_only_int4", weight_double_quant=True, use_mora=True),
    "vera": VeRAConfig(r=8),
    "vera_pissa": VeRAConfig(r=4, pissa_init=True),
    "lokr": LoKrConfig(lokr_dim=2),
    "lokr_both": LoKrConfig(lokr_dim=1, decompose_both=True, lokr_alpha=3),
    "dislora": DisLoRAConfig(r=4, s_tsd=3, dash_flag=2),
    "reft": ReFTConfig(rank=4, position="f2+l1"),
    "reft_tiny": ReFTConfig(rank=4, position="f2+l1", intervention_type="TinyIntervention"),
    "tare": TareConfig(),
    "prefix": PrefixConfig(num_prefix_tokens=5),
    "prefix_projected": PrefixConfig(
        num_prefix_tokens=5, prefix_projection=True, prefix_projection_hidden_size=7
    ),
}
MERGEABLE = [name for name, config in METHODS.items() if peft.METHODS[config.method].merges]
QUANTISED = ("qlora_nf4", "qlora_int8", "qlora_fp4", "qlora_int4")
KEEPS_START = [name for name in METHODS if name not in ("reft", "prefix", "prefix_projected", *QUANTISED)]


def lokr_size(inside, outside, rank, both):
    divisors = {24: (4, 6), 112: (8, 14), 44: (4, 11), 20: (4, 5)}
    (i1, i2), (o1, o2) = divisors[inside], divisors[outside]
    first = (o1 + i1) * rank if both and rank < max(o1, i1) / 2 else o1 * i1
    return first + ((o2 + i2) * rank if rank < max(o2, i2) / 2 else o2 * i2)


HAND_COUNTS = {
    **dict.fromkeys(
        ("lora", "rslora", "lora+", "quick", "dropout", "pissa", *QUANTISED),
        sum((i + o) * 4 for i, o in LINEAR),
    ),
    **dict.fromkeys(("moslora", "qlora_fp4"), sum((i + o) * 4 + 16 for i, o in LINEAR)),
    "linchain": sum((i + o) * 4 + 3 * 16 for i, o in LINEAR),
    **dict.fromkeys(("mora", "qlora_int4"), sum((int(((i + o) * 4) ** 0.5 + 0.5) // 2 * 2) ** 2 for i, o in LINEAR)),
    "vera": sum(8 + o for _, o in LINEAR),
    "vera_pissa": sum(4 + o + 4 * o for _, o in LINEAR),
    "lokr": sum(lokr_size(i, o, 2, False) for i, o in LINEAR),
    "lokr_both": sum(lokr_size(i, o, 1, True) for i, o in LINEAR),
    "dislora": sum((i + o) * 4 + 4 + 3 for i, o in LINEAR),
    "reft": 4 * (24 * 4 + 24 * 4 + 4),
    "reft_tiny": 4 * (24 * 4 * 2 + 4 + 24),
    "tare": 3 * (24 * 8 * 3),
    "prefix": 3 * 5 * 2 * 24,
    "prefix_projected": 5 * 24 + 24 * 7 + 7 + 3 * (7 * 48 + 48),
}


def copy_of(config):
    return dataclasses.replace(config)


def batch(seed=0):
    """Two rows, the second right-padded; the labels of the first 3 tokens are masked."""
    ids = np.random.RandomState(seed).randint(3, 37, (2, 8))
    labels = np.roll(ids, -1, axis=1)
    labels[:, :3] = labels[:, -1:] = -100
    labels[1, 5:] = -100
    mask = np.ones((2, 8), dtype="int64")
    mask[1, 6:] = 0
    return {
        name: paddle.to_tensor(value)
        for name, value in (("input_ids", ids), ("labels", labels), ("attention_mask", mask))
    }


def logits_of(model, inputs=None):
    model.eval()
    inputs = inputs or {key: value for key, value in batch(1).items() if key != "labels"}
    with paddle.no_grad():
        return model(**inputs, return_dict=True).logits.numpy()


def real(logits):
    return np.concatenate([logits[0], logits[1, :6]])


def optimizer_of(model, rate=1e-2):
    trained = [p for p in model.parameters() if not p.stop_gradient]
    # Adam's usual 1e-8 makes full steps of gradients that are zero but for rounding, which TARE's choice of editors shows.
    return paddle.optimizer.AdamW(rate, parameters=trained, weight_decay=0.0, epsilon=1e-6)


def train(model, steps, first_step=0, optimizer=None):
    optimizer = optimizer or optimizer_of(model)
    losses = []
    for step in range(first_step, first_step + steps):
        model.train()
        paddle.seed(100 + step)
        loss = model(**batch(), return_dict=True).loss
        losses.append(loss.item())
        extra = peft.extra_loss(model)
        (loss if extra is None else loss + extra).backward()
        optimizer.step()
        optimizer.clear_grad()
        peft.after_step(model, step + 1)
    return losses


@pytest.fixture(scope="module")
def trained():
    """name -> (model after a few steps, its logits, losses, every weight before, logits of the base)."""
    made = {}

    def get(name):
        if name not in made:
            model = build_model(tiny_config())
            base = logits_of(model)
            before = {key: value.numpy() for key, value in model.state_dict().items()}
            model = peft.wrap(model, copy_of(METHODS[name]))
            start = logits_of(model)
            losses = train(model, 5)
            made[name] = model, logits_of(model), losses, before, base, start
        return made[name]

    return get


@pytest.mark.parametrize("name", METHODS)
def test_only_its_parameters_train(name):
    model = peft.wrap(build_model(tiny_config()), copy_of(METHODS[name]))
    own = peft.adapter_state(model)
    trains = {key: p for key, p in model.named_parameters() if not p.stop_gradient}
    assert set(trains) <= set(own)
    assert sum(p.size for p in trains.values()) == HAND_COUNTS[name]
    assert f"{HAND_COUNTS[name]:,} of" in peft.trainable_share(model)


@pytest.mark.parametrize("name", METHODS)
def test_learns_and_leaves_the_frozen_alone(name, trained):
    model, logits, losses, before, base, start = trained(name)
    assert losses[-1] < losses[0] - 0.01
    if name in KEEPS_START:
        np.testing.assert_allclose(real(start), real(base), atol=2e-6)
    names = {key.replace(".base.", "."): p for key, p in model.named_parameters()}
    moved_at_start = peft.METHODS[METHODS[name].method].merges
    changed = {key for key in before if key in names and not np.array_equal(before[key], names[key].numpy())}
    if not moved_at_start or name not in ("pissa", "vera_pissa", "dislora"):
        assert changed == set()


@pytest.mark.parametrize("name", METHODS)
def test_saved_and_loaded_gives_the_same_logits(name, trained, tmp_path):
    model, logits, *_ = trained(name)
    peft.save(model, tmp_path)
    method = METHODS[name].method
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        f"{method}_config.json",
        f"{method}_model_state.safetensors",
    ]
    loaded = peft.load(build_model(tiny_config()), tmp_path)
    np.testing.assert_allclose(logits_of(loaded), logits, atol=1e-6)
    assert {k for k, p in loaded.named_parameters() if not p.stop_gradient} == {
        k for k, p in model.named_parameters() if not p.stop_gradient
    }
    assert dataclasses.asdict(loaded.adapter_config) == dataclasses.asdict(METHODS[name])


@pytest.mark.parametrize("name", METHODS)
def test_training_goes_on_from_saved_adapters_as_if_never_saved(name, tmp_path):
    def fresh():
        return peft.wrap(build_model(tiny_config()), copy_of(METHODS[name]))

    # The optimizer finds its state by generated names, so each stretch starts their count anew, as a process
    # does.
    with paddle.utils.unique_name.guard():
        whole = train(fresh(), 4)
    with paddle.utils.unique_name.guard():
        model = fresh()
        optimizer = optimizer_of(model)
        first = train(model, 2, optimizer=optimizer)
        peft.save(model, tmp_path)
        moments = {k: v.clone() if hasattr(v, "clone") else v for k, v in optimizer.state_dict().items()}
    with paddle.utils.unique_name.guard():
        model = fresh()
        for parameter in model.parameters():
            if not parameter.stop_gradient:  # what they hold before loading must not matter
                parameter.set_value(parameter + 0.1)
        peft.load_state(model, tmp_path)
        optimizer = optimizer_of(model)
        optimizer.set_state_dict(moments)
        assert first + train(model, 2, 2, optimizer) == pytest.approx(whole, abs=2e-6)


@pytest.mark.parametrize("name", MERGEABLE)
def test_merged_weights_give_the_adapters_logits(name, trained, tmp_path):
    model, logits, _, _, base, _ = trained(name)
    if name in QUANTISED:
        with pytest.raises(ValueError, match="quantised"), peft.merged(model):
            pass
    else:
        with peft.merged(model):
            np.testing.assert_allclose(real(logits_of(model)), real(logits), atol=1e-5)
    np.testing.assert_array_equal(logits_of(model), logits)
    peft.save(model, tmp_path)
    plain = peft.merge(peft.load(build_model(tiny_config()), tmp_path))
    assert not any(isinstance(layer, AdapterLinear) for layer in plain.sublayers()) and not peft.is_wrapped(
        plain
    )
    assert set(plain.state_dict()) == set(build_model(tiny_config()).state_dict())
    assert not any(parameter.stop_gradient for parameter in plain.parameters())
    np.testing.assert_allclose(real(logits_of(plain)), real(logits), atol=1e-5)
    assert np.abs(real(logits) - real(base)).max() > 1e-3


def test_merging_in_train_mode_bakes_no_dropout_in(trained):
    model, logits, *_ = trained("dropout")
    model.train()
    with peft.merged(model):
        np.testing.assert_allclose(real(logits_of(model)), real(logits), atol=1e-5)


@pytest.mark.parametrize("name", sorted(set(METHODS) - set(MERGEABLE)))
def test_what_cannot_merge_says_so(name, trained):
    model = trained(name)[0]
    with pytest.raises(ValueError, match=f"{METHODS[name].name()} cannot be merged"):
        peft.merge(model)


@pytest.mark.parametrize(
    "name, granularity",
    [*((name, "full") for name in METHODS), *((name, "core_attn") for name in ("lora", "reft", "prefix"))],
)
def test_recompute_changes_no_loss(name, granularity, trained):
    config = tiny_config(use_recompute=True, recompute_granularity=granularity)
    losses = train(peft.wrap(build_model(config), copy_of(METHODS[name])), 5)
    assert losses == pytest.approx(trained(name)[2], abs=2e-6)


@pytest.mark.parametrize("noise", [False, True])
def test_recompute_changes_no_loss_of_all_weights_and_with_neftune(noise):
    losses = []
    for recompute in (False, True):
        model = build_model(tiny_config(use_recompute=recompute))
        if noise:
            peft.add_noise(model, 5.0)
        losses.append(train(model, 4))
    assert losses[1] == pytest.approx(losses[0], abs=2e-6) and losses[0][-1] < losses[0][0] - 0.01


@pytest.mark.parametrize("name", METHODS)
def test_parallel_models_are_refused_by_name(name):
    model = build_model(tiny_config())
    assert METHODS[name].splits == (METHODS[name].method == "lora" and METHODS[name].name() not in ("MoRA", "QLoRA"))
    if not METHODS[name].splits:  # the others are run in tests/parallel
        model.config.tensor_parallel_degree = 2
        with pytest.raises(ValueError, match=f"{METHODS[name].name()} is not made for tensor parallel"):
            peft.wrap(model, copy_of(METHODS[name]))
    model.config.tensor_parallel_degree, model.config.pipeline_parallel_degree = 1, 2
    with pytest.raises(
        NotImplementedError, match=f"{METHODS[name].name()} is not made for pipeline parallel"
    ):
        peft.wrap(model, copy_of(METHODS[name]))


@pytest.mark.parametrize("name", ["lora", "vera", "lokr", "dislora", "reft", "tare", "prefix"])
def test_adapters_start_alike_whatever_the_global_seed(name):
    states = []
    for seed in (1, 2):
        paddle.seed(seed)
        np.random.seed(seed)
        model = peft.wrap(build_model(tiny_config()), copy_of(METHODS[name]))
        states.append({key: value.numpy() for key, value in peft.adapter_state(model).items()})
    assert all(np.array_equal(states[0][key], states[1][key]) for key in states[0])
    assert len({value.tobytes() for key, value in states[0].items() if "lora_A" in key}) == (
        11 if name == "lora" else 0
    )


# ------------------------------------------------------------------------------------------------- targets


@pytest.mark.parametrize(
    "targets, message",
    [
        ("q_proj", r"'q_proj' matches no linear layer.*write '\.\*\\\.q_proj'"),
        ([r".*q_proj", r".*\.attn"], r"'\.\*\\\\\.attn' matches no linear layer"),
        ([r".*o_proj", r".*self_attn\..*"], "both match 'ernie.layers.0.self_attn.o_proj'"),
        ("(", "no regular expression"),
    ],
)
def test_bad_targets_are_errors(targets, message):
    with pytest.raises(ValueError, match=message):
        peft.wrap(build_model(tiny_config()), LoRAConfig(target_modules=targets))


def test_a_refused_adapter_freezes_nothing():
    model = build_model(tiny_config())
    with pytest.raises(ValueError, match="matches no linear layer"):
        peft.wrap(model, LoRAConfig(target_modules="q_proj"))
    assert not any(parameter.stop_gradient for parameter in model.parameters()) and not peft.is_wrapped(model)


def test_blocks_are_not_the_experts_in_them():
    from paddle import nn

    from ernie35se.peft.base import blocks_of

    class Block(nn.Layer):
        def __init__(self):
            super().__init__()
            self.experts = nn.LayerList([nn.Linear(2, 2) for _ in range(5)])

    model = nn.Sequential()
    model.layers = nn.LayerList([Block() for _ in range(3)])
    model.heads = nn.LayerList([nn.Linear(2, 2) for _ in range(2)])
    assert blocks_of(model) == list(model.layers)
    with pytest.raises(ValueError, match="holds no list of blocks"):
        blocks_of(nn.Linear(2, 2))


def test_targets_choose_layers():
    model = peft.wrap(
        build_model(tiny_config()), LoRAConfig(target_modules=[r".*\.(q_proj|v_proj)", r".*down_proj"])
    )
    wrapped = [name for name, layer in model.named_sublayers() if isinstance(layer, AdapterLinear)]
    assert wrapped == [
        "ernie.layers.0.self_attn.q_proj",
        "ernie.layers.0.self_attn.v_proj",
        "ernie.layers.3.mlp.down_proj",
    ]


def test_a_model_takes_one_adapter():
    model = peft.wrap(build_model(tiny_config()), LoRAConfig())
    with pytest.raises(ValueError, match="already has LoRA adapters"):
        peft.wrap(model, LoRAConfig())


# ------------------------------------------------------------------------------------------ files and
# settings


def test_files_that_do_not_fit_are_refused(tmp_path, trained):
    peft.save(trained("lora")[0], tmp_path)
    with pytest.raises(ValueError, match="lora_A has shape .*expected"):
        peft.load(build_model(tiny_config(hidden_size=48)), tmp_path)
    with pytest.raises(ValueError, match="LoRA adapter lacks 'ernie.layers.2.mlp.down_proj.lora_A'"):
        peft.load(build_model(tiny_config(num_hidden_layers=3)), tmp_path)
    (tmp_path / "vera_config.json").write_text("{}")
    with pytest.raises(ValueError, match="adapters of lora and vera"):
        peft.load(build_model(tiny_config()), tmp_path)
    with pytest.raises(ValueError, match="holds no adapter; expected one of lora_config.json"):
        peft.load(build_model(tiny_config()), tmp_path / "absent")


def test_reads_what_paddlenlp_wrote(tmp_path):
    from paddlenlp.peft import LoRAConfig as TheirConfig
    from paddlenlp.peft import LoRAModel

    theirs = LoRAModel(
        build_model(tiny_config()),
        TheirConfig(r=4, lora_alpha=8, rslora=True, target_modules=[r".*\.(q_proj|v_proj)"]),
    )
    for parameter in theirs.parameters():
        if not parameter.stop_gradient:
            parameter.set_value(paddle.randn(parameter.shape) * 0.1)
    theirs.save_pretrained(str(tmp_path))
    theirs.eval()
    assert (tmp_path / "lora_model_state.pdparams").is_file()
    ours = peft.load(build_model(tiny_config()), tmp_path)
    np.testing.assert_allclose(logits_of(ours), logits_of(theirs), atol=1e-5)


@pytest.mark.parametrize(
    "config, settings, message",
    [
        (LoRAConfig, {"r": 0}, "r = 0"),
        (LoRAConfig, {"pissa": True, "use_mora": True}, "pissa and use_mora exclude each other"),
        (LoRAConfig, {"rslora": True, "pissa": True}, "pissa has no scale"),
        (LoRAConfig, {"mixer_num": 2}, "needs lora_use_mixer"),
        (LoRAConfig, {"lora_dropout": 1.0}, "lora_dropout = 1.0"),
        (LoRAConfig, {"lora_alpha": 0}, "lora_alpha = 0: expected a finite number above 0"),
        (LoRAConfig, {"lora_alpha": -2.0}, "lora_alpha = -2.0"),
        (LoRAConfig, {"lora_alpha": float("nan")}, "lora_alpha = nan"),
        (LoRAConfig, {"lora_alpha": "16"}, "lora_alpha = '16'"),
        (LoRAConfig, {"lora_plus_scale": float("inf")}, "lora_plus_scale = inf"),
        (VeRAConfig, {"vera_alpha": 0}, "vera_alpha = 0"),
        (VeRAConfig, {"vera_dropout": 1}, "vera_dropout = 1: expected a finite number at least 0 and below 1"),
        (LoKrConfig, {"lokr_alpha": -1.0}, "lokr_alpha = -1.0"),
        (DisLoRAConfig, {"dislora_alpha": 0}, "dislora_alpha = 0"),
        (DisLoRAConfig, {"dislora_dropout": -0.1}, "dislora_dropout = -0.1"),
        (DisLoRAConfig, {"ortho_lambda": float("nan")}, "ortho_lambda = nan: expected a finite number at least 0"),
        (ReFTConfig, {"dropout": 1.0}, "dropout = 1.0"),
        (PrefixConfig, {"prefix_dropout": float("nan")}, "prefix_dropout = nan"),
        (LoRAConfig, {"use_mora": True, "lora_plus_scale": 2.0}, "no matrix B"),
        (LoRAConfig, {"weight_quantize_algo": "int3"}, "expected one of nf4, fp4"),
        (LoRAConfig, {"weight_quantize_algo": "nf4", "weight_blocksize": 63}, "weight_blocksize = 63"),
        (LoRAConfig, {"weight_quantize_algo": "nf4", "pissa": True}, "pissa needs the weights themselves"),
        (LoRAConfig, {"weight_double_quant": True}, "needs weight_quantize_algo"),
        (VeRAConfig, {"pissa_init": True, "vera_alpha": 3}, "vera_alpha = r = 8"),
        (LoKrConfig, {"lokr_dim": 1.5}, "lokr_dim = 1.5"),
        (DisLoRAConfig, {"s_tsd": 9}, "at most the rank, 8"),
        (ReFTConfig, {"position": "x7"}, "position = 'x7'"),
        (ReFTConfig, {"position": "f0"}, "position = 'f0'"),
        (ReFTConfig, {"intervention_type": "NoIntervention"}, "LoreftIntervention or TinyIntervention"),
        (TareConfig, {"tare_k": 9}, "at most tare_n, 8"),
        (PrefixConfig, {"num_prefix_tokens": 0}, "num_prefix_tokens = 0"),
    ],
)
def test_bad_settings_are_refused(config, settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)


def test_default_settings():
    assert (LoRAConfig().lora_alpha, LoRAConfig().scaling) == (16, 2.0)
    assert LoRAConfig(r=64, rslora=True).scaling == pytest.approx(4 / 8)
    assert LoRAConfig(r=4, pissa=True).scaling == 1.0
    assert LoKrConfig().scaling == 1.0 and DisLoRAConfig().scaling == 1.5
    with pytest.raises(ValueError, match="rank 25, but the weight"):
        peft.wrap(build_model(tiny_config()), LoRAConfig(r=25, pissa=True))
    with pytest.raises(ValueError, match="reft: rank = 25: hidden states have 24 dimensions"):
        peft.wrap(build_model(tiny_config()), ReFTConfig(rank=25))
    peft.wrap(build_model(tiny_config()), ReFTConfig(rank=25, intervention_type="TinyIntervention"))


def test_lora_plus_reaches_the_optimizer():
    model = peft.wrap(build_model(tiny_config()), LoRAConfig(r=4, lora_plus_scale=4.0))
    layer = get_layer(model, "ernie.layers.0.self_attn.q_proj")
    before_a, before_b = layer.lora_A.numpy(), layer.lora_B.numpy()
    layer.lora_B.set_value(layer.lora_B + 0.1)
    optimizer = optimizer_of(model, rate=1e-3)
    model(**batch(), return_dict=True).loss.backward()
    optimizer.step()  # Adam's first step is the learning rate in every entry that has a gradient
    moved_a = np.abs(layer.lora_A.numpy() - before_a)
    moved_b = np.abs(layer.lora_B.numpy() - before_b - 0.1)
    assert np.median(moved_a) == pytest.approx(1e-3, rel=1e-2) and np.median(moved_b) == pytest.approx(
        4e-3, rel=1e-2
    )
