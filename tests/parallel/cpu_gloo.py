"""Test-only: lets fleet's parallel modes run on CPU processes over gloo (Paddle 3.3.1). Import it before fleet.init.

Paddle ships these modes for GPUs. What is missing on CPU, and what stands in for it here:

    one store of addresses for all groups      one for each group
    collectives "on the calculation stream"    the plain ones, waited for
    reduce_scatter                             all_reduce, of which each rank keeps its share
    c_identity, c_concat, c_split and the      the same mathematics from all_gather and all_reduce
    vocabulary-parallel softmax
    broadcasts of inputs to a CUDA place       none: the ranks of a model-parallel group read the same samples
    device names in sharding stages 2 and 3    "cpu"
    stage 3's smallest weight that is sliced   30 elements rather than a million

Nothing of ernie35se is replaced.
"""

from __future__ import annotations

import functools
import importlib
import os
import socket
import stat
import sys

import paddle
import paddle.distributed as dist
import paddle.distributed.collective as collective
import paddle.distributed.fleet.layers.mpu.mp_ops as mp_ops
import paddle.distributed.fleet.base.topology as topology
import paddle.distributed.parallel as paddle_parallel
from paddle.autograd import PyLayer
from paddle.base import core
from paddle.distributed import parallel_helper

META = "paddle.distributed.fleet.meta_parallel."
SLICED_FROM = 30  # elements of a weight that sharding stage 3 slices; more than a norm's or a small bias's


class Proxy:
    """An object with some attributes replaced."""

    def __init__(self, original, **replaced):
        self.__dict__.update(replaced, _original=original)

    def __getattr__(self, name):
        return getattr(self._original, name)


# ---- counting -------------------------------------------------------------------------------------------------------

# Bytes of floating point numbers moved so far. On a ring of N ranks each sends (N - 1) / N of "collective" (what layers
# exchange) and of "whole" (gradients and weights): an all-reduce counts twice, an all-gather by what comes out, a
# reduce-scatter by what goes in, a reduce or a broadcast, of which every rank is the root of an N-th, once.
moved = {"collective": 0, "whole": 0, "sent": 0}


def count(kind: str, tensor, times: int = 1):
    if tensor.is_floating_point():
        moved[kind] += times * tensor.numel().item() * tensor.element_size()


# ---- collectives ----------------------------------------------------------------------------------------------------


def tcp_bytes_sent() -> int:
    """Bytes that this process has sent by its TCP connections, for what Paddle communicates out of Python's sight.

    Raises:
        OSError: not on Linux, or one before 4.19.
    """
    return sum(map(_bytes_sent, os.listdir("/proc/self/fd")))


def _bytes_sent(descriptor: str) -> int:
    if not os.path.exists(place := f"/proc/self/fd/{descriptor}") or not stat.S_ISSOCK(os.stat(place).st_mode):
        return 0
    with socket.socket(fileno=os.dup(int(descriptor))) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return 0
        report = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
    if len(report) < 208:
        raise OSError("this kernel does not count the bytes that a connection has sent")
    return int.from_bytes(report[200:208], sys.byteorder)  # tcpi_bytes_sent, linux/tcp.h


class Done:
    """The task of a collective that has been waited for."""

    def wait(self):
        return True

    def synchronize(self):
        return None

    def is_completed(self):
        return True


def reduce_scatter(group, out, tensor, op, sync_op=True):
    count("collective", tensor)
    whole = tensor.clone()
    plain_all_reduce(group, whole, op, True).wait()
    share = out.shape[0]
    out.copy_(whole[group.rank() * share : (group.rank() + 1) * share], True)
    return Done()


plain_all_reduce = core.ProcessGroup.all_reduce


def counted(plain, times: int):
    """A collective over whole gradients or weights; a single number (a norm, a loss) is none."""

    def collective(self, tensor, *rest):
        if tensor.numel().item() > 1:
            count("whole", tensor, times)
        return plain(self, tensor, *rest)

    return collective


def patch_collectives():
    group = core.ProcessGroup
    plain_gather, plain_broadcast = group.all_gather, group.broadcast

    def all_gather(self, *arguments):
        if isinstance(arguments[1], paddle.Tensor) and isinstance(arguments[0], paddle.Tensor):
            count("collective", arguments[1])
        return plain_gather(self, *arguments)

    def all_reduce(self, tensor, op):
        count("collective", tensor, 2)
        return plain_all_reduce(self, tensor, op, True).wait()

    def send(self, tensor, target):
        count("sent", tensor)
        return self.send(tensor, target, True).wait()

    group.all_gather = all_gather
    group.all_reduce_on_calc_stream = all_reduce
    group.broadcast_on_calc_stream = lambda self, tensor, source: plain_broadcast(self, tensor, source, True).wait()
    group.all_gather_into_tensor_on_calc_stream = lambda self, out, tensor: self.all_gather_into_tensor(
        out, tensor, True
    ).wait()
    group.send_on_calc_stream = send
    group.recv_on_calc_stream = lambda self, tensor, source: self.recv(tensor, source, True).wait()
    group.reduce_scatter_tensor = reduce_scatter
    group.reduce_scatter_tensor_on_calc_stream = reduce_scatter
    group.all_reduce, group.broadcast = counted(plain_all_reduce, 2), counted(plain_broadcast, 1)
    group.reduce = counted(group.reduce, 1)


def patch_groups():
    """Paddle leaves the addresses of every group's members under the same names in the store that all ranks share, so
    that groups which do not hold the same ranks find each other's."""
    plain, kept = collective._new_process_group_impl, []

    def new_group(backend, store, rank, ranks, name, **others):
        port = f"port of the store of {name}"
        if rank == 0:
            store.set(port, str(free_port()))
        kept.append(core.TCPStore("127.0.0.1", int(store.get(port)), rank == 0, ranks, 120))
        return plain(backend, kept[-1], rank, ranks, name, **others)

    collective._new_process_group_impl = new_group


def forget_layout() -> None:
    """Let the next fleet.init make the groups of another layout, over the same processes."""
    if dist.is_initialized():
        dist.init_parallel_env = lambda *_: None
        parallel_helper._is_parallel_ctx_initialized = lambda: False
    topology._HYBRID_PARALLEL_GROUP = dist.fleet.fleet._hcg = None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---- operators of tensor parallel -----------------------------------------------------------------------------------


class Concat(PyLayer):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.width = group, x.shape[-1]
        pieces = []
        dist.all_gather(pieces, x.contiguous(), group=group)
        return paddle.concat(pieces, axis=-1)

    @staticmethod
    def backward(ctx, gradient):
        rank = ctx.group.rank
        return gradient[..., rank * ctx.width : (rank + 1) * ctx.width].contiguous()


class CrossEntropy(PyLayer):
    """-log softmax over all ranks' columns (Shoeybi et al. 2019, section 3)."""

    @staticmethod
    def forward(ctx, logits, label, group, ignored, rank):
        width = logits.shape[-1]
        largest = logits.max(axis=-1, keepdim=True)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        exponentials = (logits - largest).exp()
        total = exponentials.sum(axis=-1, keepdim=True)
        dist.all_reduce(total, group=group)
        column = label - rank * width
        here = (column >= 0) & (column < width)
        column = paddle.where(here, column, paddle.zeros_like(column))
        score = paddle.take_along_axis(logits, column, axis=-1) * here.astype(logits.dtype)
        dist.all_reduce(score, group=group)
        counts = (label != ignored).astype(logits.dtype)
        softmax = exponentials / total
        target = paddle.nn.functional.one_hot(column.squeeze(-1), width) * here.astype(logits.dtype)
        ctx.save_for_backward((softmax - target) * counts)
        return softmax, (total.log() + largest - score) * counts

    @staticmethod
    def backward(ctx, _, gradient):
        (slope,) = ctx.saved_tensor()
        return slope * gradient


def patch_operators():
    mp_ops._C_ops = Proxy(
        mp_ops._C_ops,
        c_identity=lambda x, ring, *rest: x.clone(),
        c_concat=lambda x, rank, ranks, ring, *rest: Concat.apply(x, collective._get_group_map()[ring]),
        c_split=lambda x, rank, ranks, ring, *rest: paddle.split(x, ranks, axis=-1)[rank].clone(),
        c_softmax_with_cross_entropy=lambda x, label, ignored, ring, rank, ranks: CrossEntropy.apply(
            x, label, collective._get_group_map()[ring], ignored, rank
        ),
    )


# ---- places and devices ---------------------------------------------------------------------------------------------


def patch_places():
    for name in ("tensor_parallel", "pipeline_parallel", "segment_parallel", "sharding_parallel"):
        module = importlib.import_module(META + name)
        if hasattr(module, "broadcast_input_data"):
            module.broadcast_input_data = lambda hcg, *inputs, **named: (inputs, named)
    paddle_parallel.ParallelEnv._device_id = 0


def moved_to_cpu(tensor, convert_dtype=False):
    """Paddle's empties its argument after `.cpu()`, which on CPU is the same memory."""
    copy = paddle.cast(tensor, "float32") if convert_dtype else tensor.clone()
    tensor._clear_data()
    return copy


def slice_weights_of(elements: int) -> None:
    """Stage 3 leaves weights of up to 2^20 elements whole, which all weights of the tests' models are."""
    import paddle.distributed.sharding as distributed_sharding
    from paddle.distributed.sharding.group_sharded import group_sharded_parallel

    distributed_sharding.group_sharded_parallel = functools.partial(group_sharded_parallel, segment_size=elements)


def patch_sharding():
    import paddle.distributed.sharding.group_sharded as entry

    slice_weights_of(SLICED_FROM)
    entry.paddle = Proxy(paddle, device=Proxy(paddle.device, get_all_custom_device_type=lambda: ["cpu"]))
    places = dict(
        get_device=lambda: "cpu:0",
        set_device=lambda name: paddle.set_device("cpu" if name.startswith("cpu") else name),
    )
    stand_in = Proxy(paddle, device=Proxy(paddle.device, **places), **places)
    for name in ("optimizer_stage2", "stage2", "stage3", "storage", "utils"):
        module = importlib.import_module(f"{META}sharding.group_sharded_{name}")
        module.paddle = stand_in
        if hasattr(module, "core"):
            module.core = Proxy(module.core, is_compiled_with_cuda=lambda: True)
        if hasattr(module, "cvt_to_device"):
            module.cvt_to_device = lambda x, device_id, blocking=True: x
        if hasattr(module, "alignment"):
            module.alignment["cpu"] = 4  # bytes rather than 4096, which would be most of what small models send
        if hasattr(module, "_device2cpu"):
            module._device2cpu = moved_to_cpu
    storage = importlib.import_module(META + "sharding.group_sharded_storage").ParamStorage
    plain = storage.add_rank_params
    storage.add_rank_params = lambda self, parameters, alignment, convert_gpu=True: plain(
        self, parameters, alignment, False
    )


patch_collectives()
patch_groups()
patch_operators()
patch_places()
patch_sharding()
