"""Every layer that tensor parallel cuts, and recomputation, behind one seam. The only importer of fleet.

The model asks for a column-parallel or row-parallel linear layer and never for the parallel degree; with N ranks in a
tensor-parallel group each layer here holds its N-th (Shoeybi et al. 2019, section 3):

    column_linear     N-th of the output columns     in: whole    out: this rank's columns
    row_linear        N-th of the input rows         in: its rows out: whole, summed over the ranks; bias added once
    vocab_embedding   N-th of the vocabulary         out: whole, summed
    vocab_parameter   N-th of the LM head's columns

With sequence parallel (Korthikanti et al. 2022, section 4.2) what lies between a row and a column layer is cut too: the
state of shape (B, T, C) becomes (B T / N, C), its rows shared out in order. A column layer gathers them, a row layer sums
and scatters. LayerNorms and the biases of row layers then see a part of the tokens on each rank, and the trainer sums
their gradients (`mark_partial_gradients`).
"""

from __future__ import annotations

import contextlib
import time

import paddle
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.layers.mpu import mp_ops
from paddle.distributed.fleet.utils import recompute as _fleet_recompute
from paddle.distributed.fleet.utils import sequence_parallel_utils as sequence_ops

from . import conversion
from .configuration import Ernie35Config
from .linear import Linear

# ---- degrees --------------------------------------------------------------------------------------------------------


def tensor_degree(config: Ernie35Config) -> int:
    """Ranks N that share each layer; 1 without tensor parallel."""
    return max(int(config.tensor_parallel_degree or 1), 1)


def tensor_rank(config: Ernie35Config) -> int:
    """This process's place in its tensor-parallel group, 0 .. N-1."""
    return fleet.get_hybrid_communicate_group().get_model_parallel_rank() if tensor_degree(config) > 1 else 0


def check_supported(config: Ernie35Config, pipeline: bool = False) -> None:
    """Raise a ValueError where this process cannot hold its part of the model that the configuration describes.

    Args:
        pipeline: whether the model is built as pipeline stages.
    """
    for field in () if pipeline else ("pipeline_parallel_degree", "virtual_pp_degree"):
        if getattr(config, field, 1) > 1:
            raise ValueError(
                f"{field} is {getattr(config, field)}, but this model runs in one piece; pipeline stages are "
                "modeling_pipe.Ernie35ForCausalLMPipe."
            )
    degree = tensor_degree(config)
    conversion.check_divides(config, degree)
    if config.sequence_parallel and degree == 1:
        raise ValueError(
            "sequence_parallel is on, but tensor_parallel_degree is 1; it shares the sequence among the ranks of a "
            "tensor-parallel group. Set tensor_parallel_degree to 2 or more, or sequence_parallel to false."
        )
    group = _hybrid_group()
    ranks = group.get_model_parallel_world_size() if group else 1
    if ranks != degree:
        raise ValueError(
            f"tensor_parallel_degree is {degree}, but this process belongs to a tensor-parallel group of {ranks}. Start "
            f"{degree} processes with python -m paddle.distributed.launch and --tensor_parallel_degree {degree}, or load "
            "the model with tensor_parallel_degree=1."
        )
    if degree > 1 and config.tensor_parallel_rank != group.get_model_parallel_rank():
        raise ValueError(
            f"tensor_parallel_rank is {config.tensor_parallel_rank}, but this process is rank "
            f"{group.get_model_parallel_rank()} of its tensor-parallel group; PaddleNLP would cut its weights for another. "
            "Set the config's tensor_parallel_rank from TrainingArguments.tensor_parallel_rank."
        )


def _hybrid_group():
    """Fleet's description of the groups; None before fleet.init."""
    return getattr(fleet.fleet, "_hcg", None)


def join_data_parallel_group(ranks: int) -> None:
    """Give fleet its description of the groups where a run has data ranks only; PaddleNLP's unified checkpoint asks it."""
    if _hybrid_group() is None:
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {"dp_degree": ranks}
        fleet.init(is_collective=True, strategy=strategy)


# ---- layers ---------------------------------------------------------------------------------------------------------


def column_linear(config: Ernie35Config, in_features: int, out_features: int) -> nn.Layer:
    """Linear layer whose output columns tensor parallel splits: weight (in_features, out_features / N)."""
    if tensor_degree(config) == 1:
        return _linear(config, in_features, out_features)
    kind = sequence_ops.ColumnSequenceParallelLinear if config.sequence_parallel else fleet.meta_parallel.ColumnParallelLinear
    return kind(
        in_features, out_features, has_bias=config.use_bias, gather_output=False, fuse_matmul_bias=_fuses(config)
    )


def row_linear(config: Ernie35Config, in_features: int, out_features: int) -> nn.Layer:
    """Linear layer whose input rows tensor parallel splits: weight (in_features / N, out_features)."""
    if tensor_degree(config) == 1:
        return _linear(config, in_features, out_features)
    kind = sequence_ops.RowSequenceParallelLinear if config.sequence_parallel else fleet.meta_parallel.RowParallelLinear
    return kind(
        in_features, out_features, has_bias=config.use_bias, input_is_parallel=True, fuse_matmul_bias=_fuses(config)
    )


_COLUMNS = (fleet.meta_parallel.ColumnParallelLinear,)
_ROWS = (fleet.meta_parallel.RowParallelLinear,)
CUT_LINEAR = _COLUMNS + _ROWS


class LowRankSeam:
    """What an update x A B of a linear layer needs so that A and B are cut as the layer's weight is.

    Of a column layer A is whole and B cut, of a row layer A is cut and B whole:

        columns   x A      | backwards the ranks' gradients are summed |   B / N
        rows      x A / N  | forwards the ranks' parts are summed      |   B

    so what travels has r columns only, and the whole matrix has the same gradient on every rank.

    Args:
        base: the linear layer; of one that is not cut nothing changes.
    """

    def __init__(self, base: nn.Layer):
        self.columns, self.rows = isinstance(base, _COLUMNS), isinstance(base, _ROWS)

    @property
    def cut(self) -> bool:
        """Whether tensor parallel cuts the layer."""
        return self.columns or self.rows

    def after_first(self, x: paddle.Tensor) -> paddle.Tensor:
        """Between A and what follows."""
        if not self.rows:
            return x
        return mp_ops._mp_allreduce(x, group=_tensor_group(), use_calc_stream=True, use_model_parallel=True)

    def before_last(self, x: paddle.Tensor) -> paddle.Tensor:
        """Between what comes before and B."""
        return mp_ops._c_identity(x, group=_tensor_group()) if self.columns else x

    def dropout_state(self):
        """Within it dropout draws alike on all ranks, or apart where each holds other columns of x."""
        if not self.rows:
            return contextlib.nullcontext()
        return fleet.meta_parallel.get_rng_state_tracker().rng_state("local_seed")


def mark_cut(parameter: paddle.Tensor, axis: int) -> None:
    """Tell clipping that every rank holds another piece of this parameter, along this axis."""
    parameter.is_distributed, parameter.split_axis = True, axis


def all_pieces(config: Ernie35Config, piece: paddle.Tensor) -> list[paddle.Tensor]:
    """Every tensor-parallel rank's piece, in rank order, on every rank."""
    if tensor_degree(config) == 1:
        return [piece]
    pieces: list[paddle.Tensor] = []
    paddle.distributed.all_gather(pieces, piece.contiguous(), group=_tensor_group())
    return pieces


def vocab_embedding(config: Ernie35Config) -> nn.Layer:
    """Embedding whose rows tensor parallel splits by vocabulary: weight (V / N, C)."""
    if tensor_degree(config) == 1:
        return nn.Embedding(config.vocab_size, config.hidden_size)
    return fleet.meta_parallel.VocabParallelEmbedding(config.vocab_size, config.hidden_size)


def vocab_parameter(layer: nn.Layer, config: Ernie35Config, is_bias: bool = False) -> paddle.Tensor:
    """The LM head's weight (C, V / N), or bias (V / N), made as a parameter of `layer`."""
    degree = tensor_degree(config)
    columns = config.vocab_size // degree
    parameter = layer.create_parameter([columns] if is_bias else [config.hidden_size, columns], is_bias=is_bias)
    parameter.is_distributed = degree > 1  # tells clipping and saving that every rank holds another piece
    if degree > 1:
        parameter.split_axis = 0 if is_bias else 1
    return parameter


def enter_vocab(config: Ernie35Config, x: paddle.Tensor) -> paddle.Tensor:
    """The LM head's input: as it is forwards; backwards the ranks' gradients, each from its columns, are summed."""
    if tensor_degree(config) == 1:
        return x
    return mp_ops._c_identity(x, group=_tensor_group())


def leave_vocab(config: Ernie35Config, logits: paddle.Tensor) -> paddle.Tensor:
    """Logits (B, T, V / N): kept so with `tensor_parallel_output`, else gathered to (B, T, V) on every rank."""
    if tensor_degree(config) == 1 or config.tensor_parallel_output:
        return logits
    return mp_ops._c_concat(logits, group=_tensor_group())


def vocab_cross_entropy(logits: paddle.Tensor, labels: paddle.Tensor, ignored_index: int) -> paddle.Tensor:
    """Loss of each token (B, T, 1), from this rank's columns (B, T, V / N) alone; 0 where ignored."""
    return mp_ops._c_softmax_with_cross_entropy(logits, labels, group=_tensor_group(), ignore_index=ignored_index)


def _tensor_group():
    return fleet.get_hybrid_communicate_group().get_model_parallel_group()


def _fuses(config: Ernie35Config) -> bool:
    return bool(config.fuse_linear and paddle.is_compiled_with_cuda())


def _linear(config: Ernie35Config, in_features: int, out_features: int) -> nn.Layer:
    bias_attr = None if config.use_bias else False
    if _fuses(config):
        from paddle.incubate.nn import FusedLinear  # exists in GPU builds only

        return FusedLinear(in_features, out_features, bias_attr=bias_attr)
    return Linear(in_features, out_features, bias_attr=bias_attr)


# ---- sequence parallel ----------------------------------------------------------------------------------------------


def scatter_sequence(config: Ernie35Config, x: paddle.Tensor) -> paddle.Tensor:
    """This rank's share of the state: (B, T, C) -> (B T / N, C). Unchanged without sequence parallel.

    Raises:
        ValueError: N does not divide the number of tokens.
    """
    if not config.sequence_parallel:
        return x
    batch, length, degree = x.shape[0], x.shape[1], tensor_degree(config)
    if batch * length % degree:
        raise ValueError(
            f"sequence_parallel shares {batch} x {length} tokens among tensor_parallel_degree {degree} ranks, which "
            "does not divide them. Choose another max_seq_length or batch size, or turn sequence_parallel off."
        )
    return sequence_ops.ScatterOp.apply(x.flatten(0, 1))


def gather_sequence(config: Ernie35Config, x: paddle.Tensor, batch: int) -> paddle.Tensor:
    """The whole state again: (B T / N, C) -> (B, T, C). Unchanged without sequence parallel."""
    if not config.sequence_parallel:
        return x
    whole = sequence_ops.GatherOp.apply(x)  # (B T, C)
    return whole.reshape([batch, -1, whole.shape[-1]])


def mark_partial_gradients(config: Ernie35Config, layer: nn.Layer) -> None:
    """Mark the parameters under `layer` whose gradient comes from this rank's tokens only; the trainer sums those.

    They are the LayerNorms'. (Row layers mark their biases themselves.)
    """
    if not config.sequence_parallel:
        return
    for name, parameter in layer.named_parameters():
        if name.split(".")[-2].endswith("norm"):
            sequence_ops.mark_as_sequence_parallel_parameter(parameter)


# ---- random numbers and recomputation ------------------------------------------------------------------------------


@contextlib.contextmanager
def random_state(seed: int):
    """Draw from the state of `seed` inside, and go on with the present state afterwards."""
    kept = paddle.get_rng_state()
    paddle.seed(seed)
    try:
        yield
    finally:
        paddle.set_rng_state(kept)


def recompute(function, *args):
    """Call `function`, keep only its inputs, and compute it again in the backward pass (Chen et al. 2016).

    Paddle's form wants tensors in and one tensor out; whatever else the function needs, it closes over.
    """
    return _fleet_recompute(function, *args)


# ---- pipeline -------------------------------------------------------------------------------------------------------

PipelineLayer = fleet.meta_parallel.PipelineLayer
LayerDesc = fleet.meta_parallel.LayerDesc
SharedLayerDesc = fleet.meta_parallel.SharedLayerDesc


def pipeline_degree() -> int:
    """Stages of the pipeline that this process belongs to; 1 outside one."""
    group = _hybrid_group()
    return group.get_pipe_parallel_world_size() if group else 1


def topology():
    """Fleet's map from ranks to places in the grid of parallel degrees.

    Raises:
        ValueError: this process belongs to no grid.
    """
    group = _hybrid_group()
    if group is None:
        raise ValueError(
            "pipeline stages need processes started with python -m paddle.distributed.launch and "
            "--pipeline_parallel_degree of 2 or more; in a single process use Ernie35ForCausalLM."
        )
    return group.topology()


def leave_together() -> None:
    """The end of a job of several processes: all wait for each other, and rank 0, which serves the others'
    connections, leaves last. (A process whose connections break while it ends may abort, its work done.)"""
    if paddle.distributed.get_world_size() > 1:
        paddle.distributed.barrier()
        if paddle.distributed.get_rank() == 0:
            time.sleep(1)
