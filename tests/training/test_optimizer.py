"""AdamW with the op against Paddle's own and against float64, and each continuing from the other's state."""

import numpy as np
import paddle
import pytest
from paddle.nn import ClipGradByGlobalNorm, ClipGradByNorm

from ernie35se.training.optimizer import AdamW, with_fused_update

Plain = paddle.optimizer.AdamW
SHAPES = [(17, 33), (1,), (129,), (3, 5, 7), (40000,)]  # the last is cut into pieces
STEPS = 6
BETAS, EPSILON, DECAY = (0.9, 0.98), 1e-6, 0.1


@pytest.fixture
def ops():
    hint = "not built: pip install ./external_ops/cpu_ops --no-build-isolation"
    module = pytest.importorskip("cpu_ops", reason=hint)
    if module.__spec__.origin is None:  # the folder external_ops/cpu_ops, on the path for other tests' sake
        pytest.skip(hint)
    return module


@pytest.fixture
def op_steps(ops, monkeypatch):
    """A list that grows by one at every step that the op takes."""
    steps, update = [], ops.cpu_adamw_
    monkeypatch.setattr(ops, "cpu_adamw_", lambda *args: (steps.append(1), update(*args)))
    return steps


def start_values():
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype("float32") for shape in SHAPES]


def gradients(step):
    """One a parameter; of the second, none in every other step."""
    rng = np.random.default_rng(100 + step)
    grads = [(0.02 * rng.standard_normal(shape)).astype("float32") for shape in SHAPES]
    return [None if index == 1 and step % 2 else grad for index, grad in enumerate(grads)]


def parameters(dtype="float32"):
    with paddle.utils.unique_name.guard():
        made = [paddle.create_parameter(list(shape), dtype) for shape in SHAPES]
    for param, value in zip(made, start_values()):
        param.set_value(paddle.to_tensor(value).astype(dtype))
    return made


def make(kind, params, rate=0.01, **kwargs):
    beta1, beta2 = BETAS
    return kind(rate, beta1, beta2, EPSILON, parameters=params, weight_decay=DECAY, **kwargs)


@paddle.utils.unique_name.guard()  # the state is named at the first step
def train(optimizer, params, steps=range(STEPS)):
    schedule = optimizer._learning_rate
    for step in steps:
        for param, grad in zip(params, gradients(step)):
            param.grad = None if grad is None else paddle.to_tensor(grad).astype(param.dtype)
        optimizer.step()
        if isinstance(schedule, paddle.optimizer.lr.LRScheduler):
            schedule.step()
        optimizer.clear_grad()


def values(params, optimizer):
    """{name: array} of parameters and state."""
    state = {name: value.numpy() for name, value in optimizer.state_dict().items() if isinstance(value, paddle.Tensor)}
    return {**{param.name: param.numpy() for param in params}, **state}


def trained(kind, dtype="float32", **kwargs):
    params = parameters(dtype)
    optimizer = make(kind, params, **kwargs)
    train(optimizer, params)
    return values(params, optimizer)


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype
        np.testing.assert_allclose(value, right[name], rtol=2e-6, atol=2e-7 * np.abs(value).max(), err_msg=name)


def in_float64(limit=None, decays=lambda index: True, rate=lambda step: 0.01):
    """[(parameter, moment1, moment2)] after training, by the formulas of the article."""
    state = [[value.astype(np.float64), 0.0, 0.0, 0] for value in start_values()]
    beta1, beta2 = BETAS
    for step in range(STEPS):
        grads = [None if grad is None else grad.astype(np.float64) for grad in gradients(step)]
        norm = np.sqrt(sum(np.square(grad).sum() for grad in grads if grad is not None))
        factor = 1 if limit is None else min(1, limit / norm)
        for index in range(len(SHAPES)):
            if grads[index] is None:
                continue
            value, first, second, count = state[index]
            grad, count = grads[index] * factor, count + 1
            first, second = beta1 * first + (1 - beta1) * grad, beta2 * second + (1 - beta2) * grad**2
            unbiased = first / (1 - beta1**count) / (np.sqrt(second / (1 - beta2**count)) + EPSILON)
            value = value - rate(step) * (unbiased + DECAY * decays(index) * value)
            state[index] = [value, first, second, count]
    return [entry[:3] for entry in state]


def case(name):
    """Keyword arguments of the optimizer and of in_float64."""
    return {
        "plain": lambda: ({}, {}),
        "clipped": lambda: ({"grad_clip": ClipGradByGlobalNorm(0.5)}, {"limit": 0.5}),
        "limit not reached": lambda: ({"grad_clip": ClipGradByGlobalNorm(1e3)}, {"limit": 1e3}),
        "some decay": lambda: (
            {"apply_decay_param_fun": lambda name: name.startswith(("create_parameter_0.", "create_parameter_4."))},
            {"decays": lambda index: index in (0, 4)},
        ),
        "schedule": lambda: (
            {"rate": paddle.optimizer.lr.LambdaDecay(0.02, lambda step: 1 / (1 + step))},
            {"rate": lambda step: 0.02 / (1 + step)},
        ),
    }[name]()


CASES = ["plain", "clipped", "limit not reached", "some decay", "schedule"]


@pytest.mark.parametrize("name", CASES)
def test_as_paddles_and_as_in_float64(op_steps, name):
    ours, plain = trained(AdamW, **case(name)[0]), trained(Plain, **case(name)[0])
    assert len(op_steps) == STEPS
    assert_same(ours, plain)
    params = parameters()
    for param, expected in zip(params, in_float64(**case(name)[1])):
        found = [ours[param.name], ours[f"{param.name}_moment1_0"], ours[f"{param.name}_moment2_0"]]
        for array, right in zip(found, expected):
            np.testing.assert_allclose(array, right, rtol=3e-5, atol=3e-6 * np.abs(right).max())


@pytest.mark.parametrize("order", [(AdamW, Plain), (Plain, AdamW)])
def test_each_continues_from_the_others_state(op_steps, tmp_path, order):
    whole = trained(Plain, grad_clip=ClipGradByGlobalNorm(0.5))
    params = parameters()
    first = make(order[0], params, grad_clip=ClipGradByGlobalNorm(0.5))
    train(first, params, range(3))
    paddle.save(first.state_dict(), str(tmp_path / "optimizer.pdopt"))
    second = make(order[1], params, grad_clip=ClipGradByGlobalNorm(0.5))
    second.set_state_dict(paddle.load(str(tmp_path / "optimizer.pdopt")))
    train(second, params, range(3, STEPS))
    assert len(op_steps) == 3
    assert_same(values(params, second), whole)


def test_a_parameters_own_rate_and_need_clip(op_steps):
    def run(kind):
        params = parameters()
        params[0].optimize_attr["learning_rate"] = 0.3
        params[2].need_clip = False
        optimizer = make(kind, params, grad_clip=ClipGradByGlobalNorm(0.5))
        train(optimizer, params)
        return values(params, optimizer)

    assert_same(run(AdamW), run(Plain))
    assert len(op_steps) == STEPS


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_gradient_spreads_as_in_paddle(op_steps, bad):
    def run(kind):
        params = parameters()
        optimizer = make(kind, params, grad_clip=ClipGradByGlobalNorm(0.5))
        params[0].grad, params[2].grad = paddle.full(SHAPES[0], 0.1), paddle.full(SHAPES[2], 0.1)
        params[0].grad[0, 0] = bad
        optimizer.step()
        return [np.isnan(param.numpy()) for param in params]

    for ours, plain in zip(run(AdamW), run(Plain)):
        np.testing.assert_array_equal(ours, plain)
    assert op_steps


def test_gradients_are_left_as_they_are(op_steps):
    params = parameters()
    params[0].grad = paddle.ones(SHAPES[0])
    make(AdamW, params, grad_clip=ClipGradByGlobalNorm(0.5)).step()
    assert op_steps and bool((params[0].grad == 1).all())


def grouped(kind):
    params = parameters()
    groups = [{"params": params[:2], "weight_decay": 0.0}, {"params": params[2:], "learning_rate": 0.5}]
    optimizer = make(kind, groups)
    train(optimizer, params)
    return values(params, optimizer)


@pytest.mark.parametrize(
    "run",
    [
        grouped,
        lambda kind: trained(kind, dtype="float64"),
        lambda kind: trained(kind, grad_clip=ClipGradByNorm(0.5)),
        lambda kind: trained(kind, amsgrad=True),
        lambda kind: trained(kind, multi_precision=True),
    ],
    ids=["groups", "float64", "other clip", "amsgrad", "master weights"],
)
def test_what_the_op_cannot_do_is_paddles(op_steps, run):
    ours, plain = run(AdamW), run(Plain)
    assert not op_steps
    for name, value in ours.items():
        np.testing.assert_array_equal(value, plain[name])


def test_many_processes_and_a_gradient_scaler_take_paddles(op_steps, monkeypatch):
    params = parameters()
    optimizer = make(AdamW, params)
    optimizer._set_auxiliary_var("found_inf", paddle.to_tensor([False]))
    train(optimizer, params)
    monkeypatch.setattr(paddle.distributed, "get_world_size", lambda: 2)
    train(make(AdamW, params), params)
    assert not op_steps


def test_without_the_op_it_is_paddles(monkeypatch):
    monkeypatch.setenv("ERNIE35SE_CPU_OPS", "0")
    ours, plain = (trained(kind, grad_clip=ClipGradByGlobalNorm(0.5)) for kind in (AdamW, Plain))
    assert ours.keys() == plain.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, plain[name])


def test_only_paddles_own_adamw_is_given_the_op():
    params = parameters()
    plain, other = make(Plain, params), paddle.optimizer.Adam(parameters=params)
    assert type(with_fused_update(plain)) is AdamW and with_fused_update(plain) is plain
    assert type(with_fused_update(other)) is paddle.optimizer.Adam and with_fused_update(None) is None
