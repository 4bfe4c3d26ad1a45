"""Our model in the forms that are compared, and what the trainer would drive it with."""

from __future__ import annotations

import importlib.util
from collections import defaultdict

import paddle
from paddle import nn

from ernie35se import cpu_ops, modeling
from ernie35se.attention import eager_attention
from ernie35se.configuration import Ernie35Config
from ernie35se.training.optimizer import with_fused_update


def build(fields: dict, plain: bool, blocks: str) -> modeling.Ernie35ForCausalLM:
    """The model in train mode, with the fused LayerNorm where it is installed.

    plain: the form without ops: Paddle's LayerNorm, attention with its whole (T, T) matrix.
    blocks: "parallel" or "serial" puts fused blocks, or head and tail blocks in turn, in place of the config's own: as
        many weights and FLOPs, one block after the other.
    """
    has_fused_ln = importlib.util.find_spec("fused_ln") is not None
    model = modeling.Ernie35ForCausalLM(Ernie35Config(**{**fields, "fuse_ln": has_fused_ln and not plain}))
    if plain:
        modeling.choose_core = lambda *_, **__: eager_attention  # in this process: it runs this side alone
    if blocks:
        model.ernie.layers = nn.LayerList(block_stack(model.config, blocks))
    model.train()
    return model


def block_stack(config: Ernie35Config, blocks: str) -> list[nn.Layer]:
    """num_hidden_layers fused blocks, or as many pairs of an attention block and an FFN block."""
    kinds = {"parallel": [modeling.FusedBlock], "serial": [modeling.HeadBlock, modeling.TailBlock]}[blocks]
    return [kind(config) for _ in range(config.num_hidden_layers) for kind in kinds]


def optimizer(model: nn.Layer, plain: bool):
    """AdamW with clipping of the global norm; in one op where that can be, unless `plain`."""
    adamw = paddle.optimizer.AdamW(1e-4, parameters=model.parameters(), grad_clip=nn.ClipGradByGlobalNorm(1.0))
    return adamw if plain else with_fused_update(adamw)


def ops_in_use(model: nn.Layer) -> dict[str, bool]:
    """Which compiled ops this process computes with."""
    return {"fused_ln": bool(model.config.fuse_ln), "cpu_ops": cpu_ops.usable(*model.parameters()) is not None}


class GivenState(nn.Layer):
    """Stands where the trunk stands and hands its input on as the final hidden state."""

    def __init__(self, trunk: nn.Layer):
        super().__init__()
        self.embed_tokens = trunk.embed_tokens

    def forward(self, inputs_embeds=None, **_):
        return modeling.BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


def replace_trunk(model: modeling.Ernie35ForCausalLM) -> None:
    """Leave the model its LM head and loss only."""
    model.ernie = GivenState(model.ernie)


def profile(run, steps: int) -> list[list]:
    """[[operator, calls a step, milliseconds a step], ...] by Paddle's profiler, the slowest first."""
    from paddle.profiler import Profiler, ProfilerTarget, TracerEventType

    with Profiler(targets=[ProfilerTarget.CPU], on_trace_ready=lambda _: None) as profiler:  # else it writes files
        for _ in range(steps):
            run()
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    nodes = [node for thread in profiler.profiler_result.get_data().values() for node in children(thread)]
    for node in nodes:
        if node.type == TracerEventType.Operator:
            totals[node.name][0] += 1
            totals[node.name][1] += (node.end_ns - node.start_ns) / 1e6
    rows = [[name, calls / steps, milliseconds / steps] for name, (calls, milliseconds) in totals.items()]
    return sorted(rows, key=lambda row: -row[2])


def children(node):
    """A node of the profiler's tree and everything below it."""
    yield node
    for child in node.children_node:
        yield from children(child)
