"""Checkpoints made under one layout and resumed under another, in both forms."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from cases import batch, weights_of  # noqa: E402
from launching import launch_worker  # noqa: E402
from layout_cases import FORMS, REFUSED, RESUMES, resume, save_at_step_3, trainer_of  # noqa: E402

from ernie35se.modeling import Ernie35ForCausalLM  # noqa: E402


pytestmark = pytest.mark.slow  # several launches


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    for form in FORMS:
        save_at_step_3(folder / f"one-{form}", form, "one")
    for layouts in (["tensor"], ["pipeline"], ["data"], ["stage1", "stage2", "stage3"]):
        launch_worker("layout_worker.py", folder, *layouts)
        (folder / "log").rename(folder / f"log-{layouts[0]}")
    return folder


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict[str, np.ndarray]:
    """Losses of steps 4 to 6 of one process that was never interrupted."""
    result = {}
    for form in FORMS:
        trainer = trainer_of(tmp_path_factory.mktemp(form), form, "one", decay_steps=6)
        trainer.train()
        result[form] = np.array([record["loss"] for record in trainer.state.log_history if "loss" in record])[3:]
        assert len(result[form]) == 3
    return result


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout, maker", [(l, m) for l, makers in RESUMES.items() for m in makers])
def test_resumed_under_this_or_another_layout_the_losses_go_on_as_before(folder, expected, form, layout, maker):
    if layout == "one":
        got = [resume(folder, maker, form, "one")]
    else:
        got = [np.load(folder / f"{layout}-from-{maker}-{form}.{rank}.npz")["losses"] for rank in range(2)]
    for losses in got:
        np.testing.assert_allclose(losses, expected[form], atol=1e-5, rtol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout, maker", [(l, m) for l, makers in REFUSED.items() for m in makers])
def test_stage3_with_another_layout_is_refused_by_name(folder, form, layout, maker):
    if layout == "one":
        with pytest.raises(ValueError) as refusal:
            resume(folder, maker, form, "one")
        reasons = [str(refusal.value)]
    else:
        reasons = [(folder / f"{layout}-from-{maker}-{form}.{rank}.txt").read_text() for rank in range(2)]
    whose = "The checkpoint's" if maker == "stage3" else "This run's"
    for reason in reasons:
        assert f"{maker}-{form}/checkpoint-3 cannot be resumed" in reason
        assert f"{whose} optimizer is in slices (stage3)" in reason and "--continue_training" in reason


def test_a_checkpoint_of_plain_paddlenlp_loses_no_shard(folder, expected, tmp_path):
    """In one process PaddleNLP reads the first file of several and leaves the rest as it was."""
    plain = tmp_path / "tensor-unified" / "checkpoint-3"
    shutil.copytree(folder / "tensor-unified" / "checkpoint-3", plain)
    for name in ("complete.json", "layout.json"):
        (plain / name).unlink()
    assert len(list(plain.glob("model-*.safetensors"))) == 2
    np.testing.assert_allclose(resume(tmp_path, "tensor", "unified", "one"), expected["unified"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_piece_is_an_error(folder, form, tmp_path):
    broken = tmp_path / f"tensor-{form}" / "checkpoint-3"
    shutil.copytree(folder / f"tensor-{form}" / "checkpoint-3", broken)
    (broken / "complete.json").unlink()
    victim = sorted(broken.glob("model*tp01*" if form == "classic" else "model-00002*"))[0]
    victim.unlink()
    with pytest.raises(ValueError, match=f"{victim.name} is missing"):
        resume(tmp_path, "tensor", form, "one")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["tensor", "pipeline", "data", "stage1", "stage2", "stage3"])
def test_the_merged_model_is_one_process_s(folder, form, layout):
    reference = trainer_of(folder / "unused", form, "one").model
    place = folder / f"{layout}-{form}-merged"
    assert not list(place.glob("*tp0*")) and not list(place.glob("*pp0*"))
    merged = Ernie35ForCausalLM.from_pretrained(str(place))
    alone = Ernie35ForCausalLM.from_pretrained(str(folder / f"one-{form}" / "checkpoint-3"))
    assert weights_of(merged).keys() == weights_of(reference).keys()
    for name, value in weights_of(alone).items():
        np.testing.assert_allclose(weights_of(merged)[name], value, atol=2e-4, err_msg=name)
    ids = paddle.to_tensor(batch()["input_ids"])
    merged.eval(), alone.eval()
    np.testing.assert_allclose(merged(ids)[0].numpy(), alone(ids)[0].numpy(), atol=1e-3)
