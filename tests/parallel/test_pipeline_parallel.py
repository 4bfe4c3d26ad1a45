"""Two pipeline stages against one process; which layers a stage holds, with virtual stages too; names of parameters."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from cases import (  # noqa: E402
    arguments,
    length_of_step,
    make_trainer,
    save_whole_model,
    small_config,
    train_alone,
    weights_of,
)
from launching import launch_worker  # noqa: E402
from pipeline_cases import TRAINING, VIRTUAL  # noqa: E402

from ernie35se.configuration import Ernie35Config  # noqa: E402
from ernie35se.modeling import Ernie35ForCausalLM  # noqa: E402
from ernie35se.modeling_pipe import Ernie35ForCausalLMPipe  # noqa: E402
from ernie35se.stages import balanced_stages, layer_costs  # noqa: E402
from ernie35se.training.estimate import Plan, communication_per_step  # noqa: E402


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    save_whole_model(folder / "whole")
    shutil.copytree(folder / "whole", folder / "lacking")
    (file,) = (folder / "lacking").glob("model_state*")
    state = paddle.load(str(file))
    del state["ernie.layers.3.mlp.down_proj.weight"], state["lm_head.bias"]
    paddle.save(state, str(file))
    launch_worker("pipeline_worker.py", folder)
    return folder


def test_a_stage_takes_its_part_of_whole_weights(results):
    whole = weights_of(Ernie35ForCausalLM.from_pretrained(str(results / "whole")))
    first, last = stages_of(results, "loaded")
    assert first.keys() | last.keys() == whole.keys() and not first.keys() & last.keys()
    for name, value in {**first, **last}.items():
        np.testing.assert_array_equal(value, whole[name], err_msg=name)


def test_weights_that_a_stage_lacks_are_named(results):
    assert not (results / "lacking.0.txt").exists()  # the first stage has all of its own
    reason = (results / "lacking.1.txt").read_text()
    assert "2 weights of the model of its config.json are not in its files" in reason
    assert "such as ernie.layers.3.mlp.down_proj.weight" in reason


def stages_of(folder: Path, case: str) -> list[dict]:
    return [dict(np.load(folder / f"{case}.{rank}.npz")) for rank in range(2)]


@pytest.mark.parametrize("case", TRAINING)
def test_six_steps_of_training_equal_one_process(results, tmp_path, case):
    """Random positions, warm-up of the sequence length, clipping and four micro-batches a step, all on."""
    config = small_config(use_progressive_seq_len=True, **TRAINING[case])
    start = weights_of(make_trainer(config, arguments(tmp_path)).model)
    expected, weights = train_alone(tmp_path, config)
    seen = set()
    for stage in stages_of(results, case):
        np.testing.assert_allclose(stage.pop("losses"), expected, atol=1e-5, rtol=0)
        assert stage.pop("sent") == sum(sent_in_step(config, step) for step in range(6))
        for name, value in stage.items():
            if name.startswith("start/"):
                np.testing.assert_array_equal(value, start[name[6:]], err_msg=name)
            else:
                np.testing.assert_allclose(value, weights[name], atol=2e-4, err_msg=name)
                seen.add(name)
    assert seen == set(weights)


def sent_in_step(config, step: int) -> int:
    plan = Plan(length_of_step(step, 24), micro_batch=2, accumulation=2, pipeline_parallel=2)
    return next(row.bytes for row in communication_per_step(config, plan) if row.part == "pipeline")


@pytest.mark.parametrize("case", VIRTUAL)
def test_virtual_stages_hold_their_layers_under_the_models_names(results, case):
    config = small_config(**{**VIRTUAL[case], "virtual_pp_degree": 1})
    paddle.seed(7)
    whole = weights_of(Ernie35ForCausalLM(config))
    parts = 2 * VIRTUAL[case]["virtual_pp_degree"]
    cuts = balanced_stages(config, parts)
    layer_of = {name: layer_number(name, config) for name in whole}
    stages = stages_of(results, f"virtual-{case}")
    for rank, stage in enumerate(stages):
        report = json.loads((results / f"stages.{rank}.json").read_text())[case]
        assert report["cuts"] == cuts and report["names"] == sorted(stage)
        held = {layer for part in range(rank, parts, 2) for layer in range(cuts[part], cuts[part + 1])}
        expected = {name for name, layer in layer_of.items() if layer in held}
        if config.tie_word_embeddings and rank == 1:
            expected.add("ernie.embed_tokens.weight")  # the copy beside the LM head
        assert set(stage) == expected
        for name, value in stage.items():
            np.testing.assert_array_equal(value, whole[name], err_msg=name)
    assert set(stages[0]) | set(stages[1]) == set(whole)


def layer_number(name: str, config) -> int:
    """Place of a parameter's layer in the pipeline: embedding 0, blocks from 1, norm, LM head."""
    if name.startswith("ernie.layers."):
        return 1 + int(name.split(".")[2])
    return {"ernie.embed_tokens": 0, "ernie.norm": config.num_hidden_layers + 1}.get(
        name.rpartition(".")[0], config.num_hidden_layers + 2
    )


def brute_force(costs: list[int], parts: int) -> int:
    """Cost of the costliest part, of all ways to cut with a block in every part."""
    blocks = len(costs) - 3
    return min(
        max(sum(costs[a:b]) for a, b in zip((0, *cut), (*cut, len(costs))))
        for cut in itertools.combinations(range(2, blocks + 1), parts - 1)
    )


@pytest.mark.parametrize("trimmed", [True, False])
@pytest.mark.parametrize("layers, parts", [(4, 2), (4, 4), (7, 3), (8, 4), (9, 4), (10, 2)])
def test_stages_are_balanced_as_well_as_any(trimmed, layers, parts):
    config = small_config(num_hidden_layers=layers, parallel_attn_hatf=trimmed, vocab_size=500)
    costs, cuts = layer_costs(config), balanced_stages(config, parts)
    assert cuts[0] == 0 and cuts[-1] == len(costs) == layers + 3 and len(cuts) == parts + 1
    blocks = [sum(1 <= layer <= layers for layer in range(a, b)) for a, b in zip(cuts, cuts[1:])]
    assert min(blocks) >= 1
    assert max(sum(costs[a:b]) for a, b in zip(cuts, cuts[1:])) == brute_force(costs, parts)


def test_the_3b_models_light_blocks_share_a_stage_with_embedding_and_head():
    config = Ernie35Config.from_pretrained("baidu/ernie-3.5-se-3b")
    for stages in (2, 4, 8):
        cuts = balanced_stages(config, stages)
        costs = layer_costs(config)
        shares = [sum(costs[a:b]) for a, b in zip(cuts, cuts[1:])]
        assert max(shares) - min(shares) <= max(costs), (stages, shares)
        blocks = [sum(1 <= layer <= 32 for layer in range(a, b)) for a, b in zip(cuts, cuts[1:])]
        assert blocks[0] >= blocks[1] or stages == 2


def test_more_stages_than_blocks_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match="5 pipeline parts .* num_hidden_layers 4"):
        balanced_stages(small_config(), 5)


def test_a_single_process_is_told_how_to_start_stages():
    with pytest.raises(ValueError, match="paddle.distributed.launch"):
        Ernie35ForCausalLMPipe(small_config())
