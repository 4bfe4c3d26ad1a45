"""The estimate of fine-tuning's --dry_run against models with adapters that are built, trained and measured."""

from __future__ import annotations

import copy
import gc

import paddle
import pytest
from paddle.base import core
from paddlenlp.transformers import Qwen2Config, Qwen2ForCausalLM

from ernie35se import auto, cpu_ops, peft  # noqa: F401
from ernie35se.attention import score_rows
from ernie35se.configuration import Ernie35Config
from ernie35se.modeling import Ernie35ForCausalLM
from ernie35se.peft import (
    DisLoRAConfig,
    LoKrConfig,
    LoRAConfig,
    PrefixConfig,
    ReFTConfig,
    TareConfig,
    VeRAConfig,
)
from ernie35se.peft.quant import ALGORITHMS, QuantisedLinear, stored_bytes
from ernie35se.training import estimate
from ernie35se.training.estimate import Plan
from ernie35se.training.finetune_estimate import count, flops_per_step, is_known, memory_per_device, report

TOLERANCE = 0.15  # promised, as in test_estimate.py

METHODS = {
    "sft": None,
    "lora": LoRAConfig(),
    "dropout": LoRAConfig(lora_dropout=0.1),
    "quick": LoRAConfig(use_quick_lora=True),
    "pissa": LoRAConfig(pissa=True),
    "linchain": LoRAConfig(lora_use_mixer=True, mixer_num=3),
    "mora": LoRAConfig(use_mora=True),
    "qlora": LoRAConfig(weight_quantize_algo="nf4"),
    "qlora_int8": LoRAConfig(weight_quantize_algo="weight_only_int8", weight_blocksize=10, weight_double_quant=True),
    "vera": VeRAConfig(),
    "lokr": LoKrConfig(),
    "dislora": DisLoRAConfig(),
    "reft": ReFTConfig(),
    "tare": TareConfig(),
    "prefix": PrefixConfig(num_prefix_tokens=32),
    "prefix_projected": PrefixConfig(num_prefix_tokens=32, prefix_projection=True),
}


def shape(hidden, ffn, layers, heads, vocab, **more):
    return dict(
        hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads,
        vocab_size=vocab, max_position_embeddings=1024, use_flash_attention=False, **more,
    )  # fmt: skip


QWEN = dict(num_key_value_heads=2, architectures=["Qwen2ForCausalLM"])
# (config, micro-batch, length)
CASES = {
    "weights": (Ernie35Config(**shape(256, 704, 4, 4, 64)), 1, 16),
    "activations": (Ernie35Config(**shape(128, 352, 6, 4, 64)), 4, 96),
    "scores": (Ernie35Config(**shape(64, 128, 4, 8, 64)), 1, 511),
    "recompute": (Ernie35Config(**shape(128, 352, 6, 4, 64, use_recompute=True)), 4, 96),
    "head": (Ernie35Config(**shape(64, 128, 4, 4, 4096)), 1, 16),
    "tied head": (Ernie35Config(**shape(64, 128, 4, 4, 4096, tie_word_embeddings=True)), 1, 16),
    "head in chunks": (Ernie35Config(**shape(64, 128, 3, 2, 2048)), 3, 500),
    "Qwen2": (Qwen2Config(**shape(128, 352, 4, 4, 512, **QWEN)), 2, 128),
}


def built(config):
    return (Ernie35ForCausalLM if isinstance(config, Ernie35Config) else Qwen2ForCausalLM)(config)


def allocated():
    return core.host_memory_stat_current_value("Allocated", 0)


def measured_peak(config, adapter, rows, length):
    """Most bytes that Paddle had allocated in the second step of AdamW with clipping, above those before."""
    gc.collect()
    before = allocated()
    model = built(config)
    if adapter is not None:
        peft.wrap(model, adapter)
    model.train()
    trained = [weight for weight in model.parameters() if not weight.stop_gradient]
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=trained, grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0))
    gc.collect()
    for _ in range(2):
        core.host_memory_stat_reset_peak_value("Allocated", 0)
        ids, labels = (paddle.randint(0, config.vocab_size, [rows, length]) for _ in range(2))
        loss = model(input_ids=ids, labels=labels)
        loss = loss[0] if isinstance(loss, tuple) else loss
        extra = peft.extra_loss(model)
        loss = loss if extra is None else loss + extra
        loss.backward()
        del loss, extra
        optimizer.step()
        optimizer.clear_grad()
        peak = core.host_memory_stat_peak_value("Allocated", 0) - before
    return peak


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES)
def test_memory_is_what_is_measured(case, method):
    config, rows, length = CASES[case]
    score = score_rows(config, length) if isinstance(config, Ernie35Config) else None
    how = dict(recompute=getattr(config, "recompute_scope", "none"), loss_in_place=cpu_ops.usable() is not None)
    plan = Plan(length, rows, score_rows=score, **how)
    counts = count(config, copy.copy(METHODS[method]), rows, length)
    estimated = estimate.total_bytes(memory_per_device(config, plan, counts))
    measured = measured_peak(config, copy.copy(METHODS[method]), rows, length)
    assert abs(estimated / measured - 1) < TOLERANCE, f"estimated {estimated:,}, measured {measured:,}"


@pytest.mark.parametrize("method", METHODS)
def test_counts_are_those_of_the_model_that_is_built(method):
    for case in ("activations", "Qwen2"):
        config, adapter = CASES[case][0], METHODS[method]
        model, counts = built(config), count(config, copy.copy(adapter))
        if adapter is not None:
            peft.wrap(model, copy.copy(adapter))
        quantised = [layer for layer in model.sublayers() if isinstance(layer, QuantisedLinear)]
        sizes = [layer.shape[0] * layer.shape[1] for layer in quantised]
        assert counts.trained == sum(weight.size for weight in model.parameters() if not weight.stop_gradient)
        assert counts.trained + counts.frozen == sum(weight.size for weight in model.parameters())
        assert (counts.quantised, counts.largest) == (sum(sizes), max(sizes, default=0))
        assert counts.quantised_bytes == sum(layer.stored_bytes() for layer in quantised)
        if not quantised:
            assert counts.sentence() == peft.trainable_share(model)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("inside, outside, block", [(13, 7, 64), (256, 64, 64), (130, 70, 2), (33, 9, 10)])
def test_bytes_of_a_quantised_weight(algorithm, double, inside, outside, block):
    layer = QuantisedLinear(paddle.nn.Linear(inside, outside), algorithm, block, double)
    assert stored_bytes(inside * outside, algorithm, block, double) == layer.stored_bytes()


@pytest.mark.parametrize("method", ["lora", "dropout", "pissa", "linchain", "mora", "vera", "lokr", "dislora", "tare"])
def test_what_an_adapter_keeps_is_what_is_measured(method):
    """Floats that one adapted linear layer keeps beyond the plain one, to the last."""
    adapter = METHODS[method]
    rows, length = 2, 512  # sizes at which every allocation is a multiple of the allocator's 64 bytes
    for inside, outside in ((128, 128), (128, 512), (512, 128), (96, 480)):
        base = paddle.nn.Linear(inside, outside)
        for weight in base.parameters():
            weight.stop_gradient = True
        layer = peft.METHODS[adapter.method].layer("x", base, copy.copy(adapter))
        x = paddle.randn([rows, length, inside])
        x.stop_gradient = False
        x = x * 1.0

        def kept(forward):
            before, out = allocated(), forward(x)
            return allocated() - before - 4 * out.size

        kept(base), kept(layer)  # what a first call makes once
        assert kept(layer) - kept(base) == 4 * layer.kept_floats(rows, length)


def test_flops():
    """One fused block of C = 8, F = 6 between head and tail, by hand."""
    config = Ernie35Config(**shape(8, 6, 3, 2, 32))
    matrices = 4 * 8 * 8 + 8 * (3 * 8 + 2 * 6) + (6 + 8) * 8 + 3 * 8 * 6 + 8 * 32  # and the LM head
    attention = 3 * 2 * 4 * 5 * 8  # forward and backward, two layers, T = 5
    plan = Plan(5, 2, accumulation=3)
    whole = flops_per_step(config, plan, count(config, None))
    assert whole == 30 * (6 * matrices + attention)
    counts = count(config, LoRAConfig(r=2))
    assert flops_per_step(config, plan, counts) == 30 * (4 * matrices + attention + 6 * counts.trained)


def test_no_weight_is_made_for_the_counts():
    """ERNIE-3.5-SE's 3.7 billion weights are 15 GB in float32."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts = count(Ernie35Config.from_pretrained("baidu/ernie-3.5-se-3b"), LoRAConfig())
    assert counts.frozen == 3_708_367_104 and counts.trained == 10_788_864
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000  # KiB


def test_models_whose_activations_are_not_known_are_said():
    from paddlenlp.transformers import GPTConfig

    config = GPTConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    assert not is_known(config) and is_known(CASES["Qwen2"][0])
    text = report(config, Plan(8), count(CASES["weights"][0], LoRAConfig()))
    assert "LoRA: " in text and "not for GPTConfig" in text
