"""Which layers form a pipeline stage. Pure functions of the configuration.

Layers in order: the embedding 0, the blocks 1 .. L, the final LayerNorm L + 1, the LM head L + 2.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Sequence

if TYPE_CHECKING:
    from .configuration import Ernie35Config

TYPICAL_LENGTH = 4096  # tokens, for the attention's share of a block's cost


def layer_costs(config: Ernie35Config) -> list[int]:
    """Multiplications per token of each layer, in order: what `balanced_stages` weighs."""
    hidden, ffn, blocks = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    attention, gated = 4 * hidden**2 + 2 * TYPICAL_LENGTH * hidden, 3 * hidden * ffn
    costs = [attention + gated] * blocks
    if config.parallel_attn_hatf:
        costs[0], costs[-1] = attention, gated
    return [0, *costs, 0, hidden * config.vocab_size]


def balanced_stages(config: Ernie35Config, parts: int) -> list[int]:
    """Where to cut the layers so that the costliest part costs least, and every part has a block.

    Args:
        parts: stages times virtual stages per stage.

    Returns:
        parts + 1 rising numbers; part i holds the layers from the i-th number up to the next.

    Raises:
        ValueError: more parts than blocks.
    """
    return balanced_cuts(layer_costs(config), parts)


def balanced_cuts(costs: Sequence[int], parts: int) -> list[int]:
    """`balanced_stages` from the layers' costs."""
    return list(_balanced_cuts(tuple(costs), parts))


@lru_cache(maxsize=256)
def _balanced_cuts(costs: tuple[int, ...], parts: int) -> tuple[int, ...]:
    blocks = len(costs) - 3
    if parts > blocks:
        raise ValueError(
            f"{parts} pipeline parts (pipeline_parallel_degree x virtual_pp_degree) for num_hidden_layers {blocks}: each "
            "needs a block of its own. Lower one of the degrees."
        )
    edges = [0, *range(2, blocks + 1), len(costs)]  # between two blocks, or at an end: block i is layer i + 1
    until = [sum(costs[:edge]) for edge in edges]
    # best[k][i]: least possible cost of the costliest of k parts that hold what lies before edge i, and the edge before
    best = [{0: (0, 0)}]
    for part in range(1, parts + 1):
        best.append({})
        for i in range(part, len(edges)):
            best[part][i] = min(
                (max(best[part - 1][j][0], until[i] - until[j]), j) for j in range(i) if j in best[part - 1]
            )
    cut, i = [len(edges) - 1], len(edges) - 1
    for part in range(parts, 0, -1):
        i = best[part][i][1]
        cut.append(i)
    return tuple(edges[i] for i in reversed(cut))
