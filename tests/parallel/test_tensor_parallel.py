"""Two tensor-parallel ranks, with and without sequence parallel, against one process."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from cases import (  # noqa: E402
    MODELS,
    forward_and_backward,
    merged,
    save_whole_model,
    set_rebuilt_weights,
    small_config,
    train_alone,
    weights_of,
)
from launching import launch_worker  # noqa: E402

from ernie35se.modeling import Ernie35ForCausalLM  # noqa: E402
from ernie35se.training.estimate import Plan, communication_per_step  # noqa: E402

TRAINING = {
    "plain": {},
    "tied_untrimmed": dict(tie_word_embeddings=True, parallel_attn_hatf=False),
    "no_bias_whole_logits": dict(use_bias=False, tensor_parallel_output=False),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tensor")
    save_whole_model(folder / "whole")
    launch_worker("tensor_worker.py", folder)
    return folder


def test_whole_weights_are_cut_while_they_are_loaded(results):
    pieces = ranks_of(results, "loaded")
    whole = weights_of(Ernie35ForCausalLM.from_pretrained(str(results / "whole")))
    got = merged(pieces, small_config())
    assert got.keys() == whole.keys()
    for name, value in got.items():
        np.testing.assert_array_equal(value, whole[name], err_msg=name)
    assert pieces[0]["lm_head.weight"].shape == (24, 23)


def ranks_of(folder: Path, case: str) -> list[dict]:
    return [dict(np.load(folder / f"{case}.{rank}.npz")) for rank in range(2)]


@pytest.mark.parametrize("kind", ["tensor", "sequence"])
@pytest.mark.parametrize("case", MODELS)
def test_logits_loss_and_every_gradient_equal_one_process(results, kind, case):
    config = small_config(**MODELS[case])
    paddle.seed(11)
    model = Ernie35ForCausalLM(config)
    start = {name: value.numpy() for name, value in model.named_parameters()}
    set_rebuilt_weights(model)
    expected = forward_and_backward(model)
    ranks = ranks_of(results, f"{kind}-model-{case}")

    if config.tensor_parallel_output:
        logits = np.concatenate([rank["logits"] for rank in ranks], axis=-1)
    else:
        np.testing.assert_array_equal(ranks[0]["logits"], ranks[1]["logits"])
        logits = ranks[0]["logits"]
    np.testing.assert_allclose(logits, expected["logits"], atol=2e-6)
    for rank in ranks:
        for name in ("loss", "eval_loss", *(key for key in expected if key.startswith("hidden/"))):
            np.testing.assert_allclose(rank[name], expected[name], atol=3e-6, err_msg=name)
    for what, whole in (("gradient", expected), ("start", {f"start/{name}": value for name, value in start.items()})):
        pieces = [{k.partition("/")[2]: v for k, v in rank.items() if k.startswith(what)} for rank in ranks]
        got = merged(pieces, config)
        assert {f"{what}/{name}" for name in got} == {key for key in whole if key.startswith(what)}
        for name, value in got.items():
            if what == "start":
                np.testing.assert_array_equal(value, whole[f"start/{name}"], err_msg=name)
            else:
                assert np.abs(whole[f"gradient/{name}"]).max() > 1e-6, f"{name}: nothing to compare"
                np.testing.assert_allclose(value, whole[f"gradient/{name}"], atol=2e-6, err_msg=name)
            shares = [piece[name].size for piece in pieces]
            replicated = "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias"))
            assert sum(shares) == value.size * (2 if replicated else 1), name
            if replicated:
                np.testing.assert_allclose(pieces[0][name], pieces[1][name], atol=2e-6, err_msg=name)


@pytest.mark.parametrize("kind", ["tensor", "sequence"])
@pytest.mark.parametrize("case", [case for case in MODELS if "whole_logits" not in case])
def test_the_estimate_of_what_is_sent_equals_what_was_counted(results, kind, case):
    config = small_config(**MODELS[case])
    recompute = "full" if config.use_recompute else "none"
    plan = Plan(8, 3, tensor_parallel=2, sequence_parallel=kind == "sequence", recompute=recompute)
    (row,) = communication_per_step(config, plan)
    assert row.part == "tensor"
    for rank in ranks_of(results, f"{kind}-model-{case}"):
        assert rank["moved"] // 2 == row.bytes  # (N - 1) / N of what was moved, N = 2


@pytest.mark.parametrize("kind", ["tensor", "sequence"])
@pytest.mark.parametrize("case", TRAINING)
def test_six_steps_of_training_equal_one_process(results, tmp_path, kind, case):
    """Random positions, warm-up of the sequence length, clipping and gradient accumulation all on."""
    config = small_config(use_progressive_seq_len=True, **TRAINING[case])
    expected, weights = train_alone(tmp_path, config)
    ranks = ranks_of(results, f"{kind}-training-{case}")
    assert len(expected) == 6 and expected[0] - expected[-1] > 0.02
    for rank in ranks:
        np.testing.assert_allclose(rank.pop("losses"), expected, atol=1e-5, rtol=0)
    for name, value in merged(ranks, config).items():
        np.testing.assert_allclose(value, weights[name], atol=2e-4, err_msg=name)
