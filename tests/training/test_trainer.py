"""The pretraining loop against independent calculations."""

from __future__ import annotations

import faulthandler
import json
import math
import re
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddlenlp.trainer import TrainerCallback
from tiny_run import VOCAB_SIZE, Listener, RandomText, collate, tiny_arguments, tiny_config, tiny_trainer

from ernie35se.modeling import Ernie35ForCausalLM
from ernie35se.training.metrics import Throughput, perplexity
from ernie35se.training.resumable import HISTORY_LIMIT, _thinned
from ernie35se.training.trainer import PretrainTrainer


@pytest.fixture
def said():
    with Listener() as listener:
        yield listener


@pytest.fixture
def deadline():
    """A hang ends the tests after two minutes, with a traceback of every thread."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


# ---------------------------------------------------------------- the loop against one written by hand


def fresh_model(config, seed=7):
    paddle.seed(seed)
    return Ernie35ForCausalLM(config)


def designed_positions(step, length, table):
    return np.sort(np.random.RandomState(step).permutation(table)[:length])


def losses_by_hand(model, data, steps, length_at, rate_at, accumulation, batch_size, decay, beta2, clip):
    """AdamW in float64 (Loshchilov and Hutter 2019) over the same batches, gradients from Paddle."""
    model.train()
    named = dict(model.named_parameters())
    moments = {name: [np.zeros(value.shape), np.zeros(value.shape)] for name, value in named.items()}
    losses, sample, table = [], 0, model.config.max_position_embeddings
    clipped = 0
    for step in range(steps):
        for _ in range(accumulation):
            text = np.stack([data[(sample + i) % len(data)]["text"] for i in range(batch_size)])
            sample += batch_size
            inputs, labels = text[:, :-1], text[:, 1:]
            length = length_at(step, inputs.shape[1])
            positions = designed_positions(step, length, table)
            loss = model(
                input_ids=paddle.to_tensor(inputs[:, :length]),
                position_ids=paddle.to_tensor(np.tile(positions, (batch_size, 1))),
                labels=paddle.to_tensor(labels[:, :length]),
            )[0]
            losses.append(loss.item())
            (loss / accumulation).backward()
        gradients = {name: value.grad.numpy().astype(np.float64) for name, value in named.items()}
        norm = math.sqrt(sum((gradient**2).sum() for gradient in gradients.values()))
        clipped += norm > clip
        rate = rate_at(step + 1)
        for name, value in named.items():
            gradient = gradients[name] * min(1.0, clip / norm)
            first, second = moments[name]
            first[...] = 0.9 * first + 0.1 * gradient
            second[...] = beta2 * second + (1 - beta2) * gradient**2
            first_hat, second_hat = first / (1 - 0.9 ** (step + 1)), second / (1 - beta2 ** (step + 1))
            old = value.numpy().astype(np.float64)
            if "bias" not in name and "norm" not in name:
                old *= 1 - rate * decay
            value.set_value((old - rate * first_hat / (np.sqrt(second_hat) + 1e-8)).astype(np.float32))
            value.clear_gradient()
    assert 0 < clipped, "the clipping must have something to do"
    return losses


def cosine(step, peak, lowest, warmup, decay):
    if step <= warmup:
        return peak * step / warmup
    if step > decay:
        return lowest
    return lowest + (peak - lowest) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (decay - warmup)))


CASES = {
    # 13 samples for 8 steps x 3 x 2: the data wrap around in the middle of a batch
    "accumulation": dict(
        steps=8, accumulation=3, samples=13, length=11, clip=0.8, config={}, length_at=lambda step, full: full
    ),
    "sequence warm-up": dict(
        steps=6, accumulation=1, samples=20, length=517, clip=0.2,
        config=dict(use_progressive_seq_len=True, max_position_embeddings=640, num_hidden_layers=2),
        length_at=lambda step, full: 512,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_losses_equal_those_of_a_loop_written_by_hand(tmp_path, case):
    data = RandomText(case["samples"], length=case["length"])
    trainer = tiny_trainer(
        tmp_path,
        train=data,
        config=tiny_config(**case["config"]),
        max_steps=case["steps"],
        gradient_accumulation_steps=case["accumulation"],
        learning_rate=2e-2,
        min_learning_rate=1e-3,
        warmup_steps=3,
        lr_scheduler_type="cosine",
        decay_steps=5,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=case["clip"],
    )
    trainer.noise = False
    expected = losses_by_hand(
        fresh_model(tiny_config(**case["config"])),
        data,
        case["steps"],
        case["length_at"],
        rate_at=lambda step: cosine(step, 2e-2, 1e-3, 3, 5),
        accumulation=case["accumulation"],
        batch_size=2,
        decay=0.1,
        beta2=0.95,
        clip=case["clip"],
    )
    trainer.train()
    np.testing.assert_allclose([loss for _, loss in trainer.losses], expected, rtol=2e-5)
    assert np.std(expected) > 0.01
    records = [record["loss"] for record in trainer.state.log_history]
    np.testing.assert_allclose(records, np.reshape(expected, (case["steps"], -1)).mean(1), rtol=2e-5)


def test_positions_are_drawn_once_a_step_and_differ_between_data_ranks(tmp_path):
    seen = []

    class Spy(PretrainTrainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            seen.append(inputs["position_ids"].numpy())
            return super().compute_loss(model, inputs, return_outputs)

    trainer = tiny_trainer(tmp_path, kind=Spy, max_steps=3, gradient_accumulation_steps=2)
    trainer.train()
    for micro_batch, positions in enumerate(seen):
        assert positions.shape == (1, 16) and positions.dtype == np.int64
        np.testing.assert_array_equal(positions[0], designed_positions(micro_batch // 2, 16, 200))

    other = SimpleNamespace(dataset_rank=3)
    trainer.args, trainer._positions = other, None
    np.testing.assert_array_equal(
        trainer._random_positions(5, 16)[0].numpy(), designed_positions(300_005, 16, 200)
    )  # seed = step + 100000 * data rank


def test_without_random_positions_the_model_uses_its_own(tmp_path):
    seen = []

    class Spy(PretrainTrainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            seen.append(set(inputs))
            return super().compute_loss(model, inputs, return_outputs)

    config = tiny_config(enable_random_position_ids=False)
    tiny_trainer(tmp_path, kind=Spy, config=config, max_steps=1).train()
    assert seen == [{"input_ids", "labels"}]


@pytest.mark.parametrize("kind", ["cosine", "linear"])
@pytest.mark.parametrize(
    "warmup_steps, warmup_ratio, decay_steps, max_steps",
    [
        (3, 0.0, None, 9),
        (9, 0.0, None, 9),
        (0, 0.25, None, 9),
        (0, 0.0, 5, 9),
        (2, 0.9, 4, 9),
        (1, 0.0, 1, 3),
    ],
)
def test_learning_rate_at_every_step(tmp_path, kind, warmup_steps, warmup_ratio, decay_steps, max_steps):
    trainer = tiny_trainer(
        tmp_path,
        lr_scheduler_type=kind,
        warmup_steps=warmup_steps,
        warmup_ratio=warmup_ratio,
        decay_steps=decay_steps,
        max_steps=max_steps,
        learning_rate=0.4,
        min_learning_rate=0.1,
    )
    scheduler = trainer.create_scheduler(max_steps)
    warmup, decay = warmup_steps or warmup_ratio * max_steps, decay_steps or max_steps
    for step in range(1, max_steps + 3):
        if step <= warmup:
            expected = 0.4 * step / warmup
        elif step > decay:
            expected = 0.1
        else:
            done = (step - warmup) / (decay - warmup)
            expected = 0.1 + 0.3 * (0.5 * (1 + math.cos(math.pi * done)) if kind == "cosine" else 1 - done)
        assert scheduler.get_lr() == pytest.approx(expected, rel=1e-12), step
        scheduler.step()


# ---------------------------------------------------------------- evaluation


class HalfIgnored(RandomText):
    """Sample i has labels from its i-th token on only, so batches differ in what they count."""

    def __getitem__(self, index):
        return {**super().__getitem__(index), "start": np.int64(2 * index)}


def collate_half_ignored(items):
    batch = collate(items)
    columns = np.arange(batch["labels"].shape[1])
    starts = np.stack([item["start"] for item in items])
    batch["labels"] = np.where(columns >= starts[:, None], batch["labels"], -100)
    return batch


def test_evaluation_is_the_mean_over_tokens(tmp_path):
    data = HalfIgnored(7)
    trainer = tiny_trainer(
        tmp_path, evaluate_on=data, collator=collate_half_ignored, per_device_eval_batch_size=3
    )
    trainer.model.train()
    metrics = trainer.evaluate()
    assert trainer.model.training, "evaluation must leave the mode as it was"
    batch = collate_half_ignored([data[i] for i in range(7)])
    trainer.model.eval()
    with paddle.no_grad():
        logits = trainer.model(input_ids=paddle.to_tensor(batch["input_ids"]), return_dict=True).logits
    logits = logits.numpy().astype(np.float64)
    scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    valid = batch["labels"] != -100
    expected = -scores[valid, batch["labels"][valid]].mean()
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["eval_ppl"] == pytest.approx(math.exp(expected), rel=1e-5)
    assert trainer.predict(data).metrics["test_loss"] == pytest.approx(expected, rel=1e-5)


def test_evaluation_reads_the_same_eval_iters_batches_and_prediction_ten_times_as_many(tmp_path):
    data = RandomText(100)
    trainer = tiny_trainer(
        tmp_path,
        evaluate_on=data,
        eval_iters=2,
        max_steps=4,
        do_eval=True,
        evaluation_strategy="steps",
        eval_steps=2,
    )
    trainer.train()
    assert sorted(data.read) == [0, 0, 1, 1, 2, 2, 3, 3]
    data.read.clear()
    trainer.predict(data)
    assert sorted(data.read) == list(range(40))
    records = [record for record in trainer.state.log_history if "eval_loss" in record]
    assert [record["step"] for record in records] == [2, 4]


def test_evaluation_keeps_no_logits(tmp_path):
    trainer = tiny_trainer(tmp_path, evaluate_on=RandomText(40), eval_iters=20)
    logits, alive = [], []
    plain = trainer.compute_loss

    def compute_loss(model, inputs, return_outputs=False):
        loss, outputs = plain(model, inputs, return_outputs=True)
        logits.append(weakref.ref(outputs[1]))
        alive.append(sum(reference() is not None for reference in logits))
        return loss, outputs

    trainer.compute_loss = compute_loss
    trainer.evaluate()
    assert len(alive) == 20 and max(alive) <= 2


def test_nothing_to_measure_or_to_train_on_is_said(tmp_path):
    trainer = tiny_trainer(tmp_path, train=RandomText(0))
    with pytest.raises(ValueError, match="nothing to train on"):
        trainer.train()
    with pytest.raises(ValueError, match="eval_dataset is empty"):
        trainer.evaluate()
    with pytest.raises(ValueError, match="test_dataset is empty"):
        trainer.predict(RandomText(0))

    def all_ignored(items):
        batch = collate(items)
        return {**batch, "labels": np.full_like(batch["labels"], -100)}

    with pytest.raises(ValueError, match="no token to measure"):
        tiny_trainer(tmp_path, collator=all_ignored).evaluate(RandomText(3))


def test_metrics_by_themselves():
    assert (
        perplexity(0.0) == 1.0 and perplexity(2.0) == pytest.approx(math.e**2) and perplexity(1e6) == math.inf
    )


def test_tokens_per_second_leave_out_what_is_not_training(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("ernie35se.training.metrics.time.perf_counter", lambda: now[0])
    meter = Throughput()
    assert meter.take() is None
    meter.add(100)
    now[0] = 2.0
    meter.pause()
    now[0] = 50.0  # an evaluation
    meter.resume()
    meter.add(100)
    now[0] = 52.0
    assert meter.take() == 50.0
    meter.add(30)
    now[0] = 55.0
    assert meter.take() == 10.0


# ---------------------------------------------------------------- logs


def test_log_lines_keep_their_form_and_add_the_throughput(tmp_path, said):
    tiny_trainer(tmp_path, max_steps=4, logging_steps=2).train()
    lines = [line for line in said().splitlines() if line.startswith("loss: ")]
    assert len(lines) == 2
    form = r"loss: [\d.]+, learning_rate: [\d.e-]+, global_step: (\d+), .*tokens_per_second: [\d.]+"
    assert [int(re.match(form, line).group(1)) for line in lines] == [2, 4]


def test_the_summary_counts_what_this_process_did(tmp_path):
    tiny_trainer(tmp_path, max_steps=4, save_steps=2).train()
    result = tiny_trainer(tmp_path, max_steps=4).train(str(tmp_path / "checkpoint-2"))
    steps = result.metrics["train_steps_per_second"] * result.metrics["train_runtime"]
    samples = result.metrics["train_samples_per_second"] * result.metrics["train_runtime"]
    assert steps == pytest.approx(2, rel=1e-2) and samples == pytest.approx(4, rel=1e-2)


def test_a_very_long_history_is_thinned_but_keeps_evaluations():
    history = [{"step": step, "loss": 1.0} for step in range(HISTORY_LIMIT)]
    assert _thinned(history) is history
    history += [{"step": 1, "eval_loss": 1.0}, {"step": 2, "eval_loss": 1.0}]
    thinned = _thinned(history)
    assert len(thinned) == HISTORY_LIMIT // 2 + 2 and sum("eval_loss" in record for record in thinned) == 2


# ---------------------------------------------------------------- what ends a run


class Broken(RandomText):
    """Fails at its fifth sample."""

    def __init__(self, error):
        super().__init__(100)
        self.error = error

    def __getitem__(self, index):
        if index == 4:
            raise self.error
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "error, kind",
    [
        (ValueError("corpus_ids.npy, sequence 7: id 99 is outside of the vocabulary"), ValueError),
        (KeyError("text"), RuntimeError),
        (StopIteration("no more"), RuntimeError),
    ],
    ids=["ValueError", "KeyError", "StopIteration"],
)
def test_an_error_in_the_dataset_ends_the_run(tmp_path, deadline, workers, error, kind):
    trainer = tiny_trainer(tmp_path, train=Broken(error), dataloader_num_workers=workers)
    with pytest.raises(kind, match=re.escape(str(error.args[0]))) as caught:
        trainer.train()
    assert "samples 4 to 5" in str(caught.value)
    assert [step for step, _ in trainer.losses] == [0, 1], "the batches before it are trained on"


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_the_collate_function_ends_the_run(tmp_path, deadline, workers):
    def broken(items):
        raise TypeError("cannot stack")

    with pytest.raises(RuntimeError, match="TypeError while reading samples 0 to 1: cannot stack"):
        tiny_trainer(tmp_path, collator=broken, dataloader_num_workers=workers).train()
    with pytest.raises(RuntimeError, match="cannot stack"):
        tiny_trainer(tmp_path, collator=broken, dataloader_num_workers=workers).evaluate(RandomText(3))


def test_a_loss_that_is_not_finite_names_its_step(tmp_path):
    class Diverging(PretrainTrainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            loss = super().compute_loss(model, inputs, return_outputs)
            return loss * float("nan") if self.state.global_step == 3 else loss

    with pytest.raises(ValueError, match=r"the loss is nan at step 4 .*checkpoint-2"):
        tiny_trainer(tmp_path, kind=Diverging, save_steps=2).train()


def test_weights_that_are_not_finite_do_not_become_a_checkpoint(tmp_path):
    class Poisoned(TrainerCallback):
        def on_optimizer_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 3:
                model.ernie.norm.bias.grad.set_value(model.ernie.norm.bias.grad * float("inf"))

    trainer = tiny_trainer(tmp_path, save_steps=2)
    trainer.add_callback(Poisoned())
    with pytest.raises(ValueError, match="no longer finite, so no checkpoint was written"):
        trainer.train()
    assert [path.name for path in tmp_path.glob("*checkpoint*")] == ["checkpoint-2"]


@pytest.mark.parametrize(
    "setting, message",
    [
        (dict(max_steps=-1), "max_steps = -1"),
        (dict(use_async_save=True), "asynchronous"),
        (dict(unified_checkpoint=True, unified_checkpoint_config="async_save"), "asynchronous"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(tmp_path, setting, message):
    with pytest.raises(ValueError, match=message):
        tiny_trainer(tmp_path, **setting).train()


def test_datasets_without_a_length_and_shared_loaders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="generator.* has no length"):
        tiny_trainer(tmp_path, train=(item for item in [1]))
    args = tiny_arguments(tmp_path)
    args.distributed_dataloader = True  # PaddleNLP turns it off in a single process
    with pytest.raises(ValueError, match="distributed_dataloader"):
        PretrainTrainer(model=Ernie35ForCausalLM(tiny_config()), args=args)


def test_a_batch_without_arrays_does_not_pass_for_the_end(tmp_path, deadline):
    def sometimes_empty(items):
        sometimes_empty.calls += 1
        return collate(items) if sometimes_empty.calls < 3 else {}

    sometimes_empty.calls = 0
    with pytest.raises(RuntimeError, match="the data ended at step 2 of 6"):
        tiny_trainer(tmp_path, collator=sometimes_empty).train()


# ---------------------------------------------------------------- checkpoints that stay


def test_save_total_limit_holds_in_a_single_process_and_spares_the_best(tmp_path):
    class Worsening(PretrainTrainer):
        def evaluation_loop(self, *args, **kwargs):
            output = super().evaluation_loop(*args, **kwargs)
            output.metrics["eval_loss"] = float(self.state.global_step)  # the first is the best
            return output

    trainer = tiny_trainer(
        tmp_path,
        kind=Worsening,
        evaluate_on=RandomText(4),
        max_steps=8,
        save_steps=2,
        save_total_limit=2,
        eval_steps=2,
        do_eval=True,
        evaluation_strategy="steps",
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )
    trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-8"]
    state = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())
    assert state["best_metric"] == 2.0 and state["best_model_checkpoint"] == str(tmp_path / "checkpoint-2")
    best = paddle.load(str(tmp_path / "checkpoint-2" / "model_state.pdparams"))
    name, parameter = next(iter(trainer.model.state_dict().items()))
    assert np.array_equal(parameter.numpy(), best[name].numpy()), "the best weights are loaded at the end"


def test_a_checkpoint_remembers_where_it_belongs(tmp_path):
    tiny_trainer(tmp_path, max_steps=2, save_steps=2).train()
    assert paddle.load(str(tmp_path / "checkpoint-2" / "training_args.bin")).output_dir == str(tmp_path)


def test_the_final_model_loads_by_itself(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1)
    trainer.train()
    trainer.save_model()
    assert not list(tmp_path.glob(".*"))
    loaded = Ernie35ForCausalLM.from_pretrained(str(tmp_path))
    ids = paddle.to_tensor(RandomText(1)[0]["text"][None])
    trainer.model.eval()
    loaded.eval()
    ours, theirs = trainer.model(ids, return_dict=True).logits, loaded(ids, return_dict=True).logits
    assert np.array_equal(ours.numpy(), theirs.numpy())


# ---------------------------------------------------------------- two data-parallel processes

TWO_PROCESSES = """
import json, sys
import paddle
from tiny_run import RandomText, tiny_config, tiny_trainer
from paddlenlp.trainer import TrainerCallback

class Stop(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise KeyboardInterrupt

def run():
    config = tiny_config(enable_random_position_ids=False)
    trainer = tiny_trainer(
        sys.argv[1] + "/run", config=config, train=RandomText(11), evaluate_on=RandomText(7), max_steps=5,
        save_steps=1, save_total_limit=2, per_device_train_batch_size=1,
    )
    trainer.noise = False
    return trainer

first = run()
first.add_callback(Stop())
try:
    first.train()
except KeyboardInterrupt:
    pass
second = run()
second.train()
evaluation = second.evaluate()["eval_loss"]
second.save_model()
random = tiny_trainer(sys.argv[1] + "/random", max_steps=1)
random._training_inputs({"input_ids": paddle.zeros([1, 16], "int64")})
rank = paddle.distributed.get_rank()
with open(f"{sys.argv[1]}/rank-{rank}.json", "w") as file:
    json.dump([first.losses, second.losses, evaluation, random._positions[2].tolist()], file)
paddle.distributed.barrier()  # neither leaves while the other still needs it
"""


def test_two_processes_compute_what_one_does(tmp_path, monkeypatch):
    """Data parallel: the mean of both losses is one process's with twice the batch; resume is exact."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "parallel")
    from launching import launch

    here = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})"
    (tmp_path / "script.py").write_text(f"{here}\n{TWO_PROCESSES}")
    status, logs = launch([tmp_path / "script.py", tmp_path], tmp_path / "log")
    assert status == 0, "\n".join(line for line in logs.splitlines() if "DEBUG" not in line)[-6000:]
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]

    single = tiny_trainer(
        tmp_path / "single",
        config=tiny_config(enable_random_position_ids=False),
        train=RandomText(11),
        evaluate_on=RandomText(7),
        max_steps=5,
    )
    single.noise = False
    single.train()
    expected = [loss for _, loss in single.losses]
    first, second = (np.mean([[loss for _, loss in rank[part]] for rank in ranks], axis=0) for part in (0, 1))
    np.testing.assert_allclose(first, expected[:3], rtol=1e-5)
    np.testing.assert_allclose(second, expected[3:], rtol=1e-5)
    assert ranks[0][2] == ranks[1][2]
    for rank in range(2):
        assert ranks[rank][3] == [designed_positions(100_000 * rank, 16, 200).tolist()]
    output_dir = tmp_path / "run"
    assert sorted(path.name for path in output_dir.glob("*checkpoint*")) == ["checkpoint-4", "checkpoint-5"]
    assert (output_dir / "model_state.pdparams").exists() and not list(output_dir.glob(".*"))


def test_results_are_written_whole_and_merged(tmp_path, monkeypatch):
    trainer = tiny_trainer(tmp_path)
    trainer.save_metrics("train", {"train_loss": 1.0})
    trainer.save_metrics("eval", {"eval_loss": 2.0})
    trainer.save_state()
    read = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert read["all_results.json"] == {"train_loss": 1.0, "eval_loss": 2.0}
    assert read["eval_results.json"] == {"eval_loss": 2.0} and read["trainer_state.json"]["global_step"] == 0

    def killed(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", killed)  # killed before the new file takes the name
    with pytest.raises(KeyboardInterrupt):
        trainer.save_metrics("eval", {"eval_loss": 3.0})
    monkeypatch.undo()
    assert json.loads((tmp_path / "eval_results.json").read_text()) == {"eval_loss": 2.0}
