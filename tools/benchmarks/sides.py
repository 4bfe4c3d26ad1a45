"""What runs in a worker: one class a side. A side's methods take and return what JSON can hold; times are seconds.

Nothing heavy is imported before the side is made: each needs another framework, and PyTorch beside Paddle would bring a
second OpenMP into the process.
"""

from __future__ import annotations

import ctypes
import gc
import json
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from benchmarks.measure import ROOT, timed

TOY = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}


def make(name: str, settings: dict):
    """The side of that name. Raises KeyError for none."""
    return {
        "ours": OurSide,
        "pytorch": TorchSide,
        "paddle floor": PaddleFloor,
        "pytorch floor": TorchFloor,
        "head": HeadSide,
        "sentencepiece": SentencePieceSide,
        "paddlenlp tokenizer": PaddleNLPTokenizerSide,
        "index": IndexSide,
        "loader": LoaderSide,
    }[name](**settings)


# ------------------------------------------------------------------------------------------------------ memory


class PeakMemory:
    """The resident set's peak above what was there at the start; 0 bytes where the system does not tell."""

    def __init__(self):
        gc.collect()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)  # what the allocator holds back would hide that much of the peak
        self.start = resident("VmRSS")

    def of(self, run) -> tuple[float, int]:
        """(seconds, bytes) of one call."""
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
        except OSError:
            pass  # then it is the largest so far
        seconds = timed(run)
        return seconds, max(0, resident("VmHWM") - self.start)


def resident(field: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (peak) of this process, 0 where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


# ------------------------------------------------------------------------------------------------ the networks


def model_fields(overrides: dict) -> dict:
    """The tiny model's settings (configs/model/tiny.json, the same as ernie/tiny-random-ernie) with changes."""
    fields = json.loads((ROOT / "configs" / "model" / "tiny.json").read_text(encoding="utf-8"))
    return {**fields, **overrides}


def token_ids(vocab_size: int, batch: int, length: int) -> np.ndarray:
    """The same (B, T) ids for every side."""
    return np.random.default_rng(7).integers(3, vocab_size, (batch, length))


class NetworkSide:
    """What the two frameworks' sides share: requests, timing, memory."""

    def __init__(self, batch: int, length: int, config: dict):
        self.fields = model_fields(config)
        self.resize(batch, length)

    def resize(self, batch: int, length: int) -> dict:
        """Other sizes for the requests that follow."""
        self.set_inputs(token_ids(self.fields["vocab_size"], batch, length))
        return {}

    def step(self) -> dict:
        """A whole training step: forward, backward, clipping, AdamW."""
        first = timed(self.forward_backward)
        second = timed(self.update)
        return {"seconds": first + second, "forward and backward": first, "optimizer": second}

    def gradient_step(self) -> dict:
        """Forward and backward, and the peak of memory above weights: activations and gradients."""
        if not hasattr(self, "peak"):
            self.warm_up()
            self.peak = PeakMemory()
        seconds, peak = self.peak.of(self.forward_backward)
        self.drop_gradients()
        return {"seconds": seconds, "bytes": peak}

    def warm_up(self) -> None:
        """Let the libraries take what they keep (threads, buffers), with an input that needs nothing itself."""
        ids = self.ids
        self.set_inputs(token_ids(self.fields["vocab_size"], 1, 8))
        self.forward_backward()
        self.drop_gradients()
        self.set_inputs(ids)


class OurSide(NetworkSide):
    """Our model as the trainer runs it; `plain`: as its parts are written down, without ops, with the logits kept."""

    def __init__(self, batch: int = 2, length: int = 256, config: dict | None = None, plain: bool = False, blocks: str = ""):
        from ernie35se.runtime import tune_cpu

        tune_cpu("cpu")
        import paddle

        self.paddle, self.plain = paddle, plain
        paddle.set_device("cpu")
        paddle.seed(3)
        super().__init__(batch, length, config or {})
        from benchmarks import networks

        self.model = networks.build(self.fields, plain, blocks)
        self.optimizer = networks.optimizer(self.model, plain)

    def describe(self) -> dict:
        """What the process runs on: parameters, and which of the compiled ops are in use."""
        from benchmarks import networks

        return {"parameters": sum(int(p.size) for p in self.model.parameters()), "ops": networks.ops_in_use(self.model)}

    def set_inputs(self, ids) -> None:
        self.ids = self.paddle.to_tensor(ids)

    def forward_backward(self) -> float:
        loss = self.model(self.ids, labels=self.ids, return_logits=self.plain or None)[0]
        loss.backward()
        return loss.item()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.clear_grad()

    def drop_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.clear_gradient(set_to_zero=False)

    def export(self, path: str) -> dict:
        """Write weights and gradients as .npy files under the folder `path`; returns the loss."""
        loss = self.forward_backward()
        named = [(name, p) for name, p in self.model.named_parameters()]
        np.savez(path + "/weights.npz", **{name: p.numpy() for name, p in named})
        np.savez(path + "/ours.npz", **{name: p.grad.numpy() for name, p in named})
        self.drop_gradients()
        return {"loss": loss}

    def profile(self, steps: int, shown: int) -> dict:
        """The operators that take longest over some steps: [[name, calls a step, ms a step], ...]."""
        from benchmarks import networks

        self.step()
        return {"operators": networks.profile(self.step, steps)[:shown]}


class TorchSide(NetworkSide):
    """The network of torch_network.py with torch.optim.AdamW."""

    def __init__(self, batch: int = 2, length: int = 256, config: dict | None = None, fused: bool = False):
        import torch

        self.torch = torch
        torch.set_num_threads(cores())
        torch.manual_seed(3)
        super().__init__(batch, length, config or {})
        from benchmarks import torch_network

        self.network = torch_network.Network(SimpleNamespace(**self.fields))
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-4, fused=fused)

    def set_inputs(self, ids) -> None:
        from ernie35se.positions import interval_position_ids, position_interval

        self.ids = self.torch.as_tensor(ids)
        length = self.ids.shape[1]
        positions = interval_position_ids(length, position_interval(length, self.fields["max_position_embeddings"]))
        self.positions = self.torch.as_tensor(positions)

    def forward_backward(self) -> float:
        loss = self.network(self.ids, self.ids, self.positions)
        loss.backward()
        return loss.item()

    def update(self) -> None:
        self.torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def drop_gradients(self) -> None:
        self.network.zero_grad(set_to_none=True)

    def compare(self, path: str, loss: float) -> dict:
        """How far loss and gradients are from those of OurSide.export, from the same weights.

        A weight's gradients differ by max |a - b| / max |a|; the worst weight is told.
        """
        from benchmarks import torch_network

        with np.load(path + "/weights.npz") as weights:
            torch_network.load(self.network, weights)
        mine = self.forward_backward()
        worst = {}
        found = torch_network.gradients(self.network)
        with np.load(path + "/ours.npz") as ours:
            for name, gradient in found.items():
                expected = ours[name]
                scale = max(float(np.abs(expected).max()), 1e-12)
                worst[name] = float(np.abs(gradient - expected).max()) / scale
        # A key's bias shifts all scores of a row alike and has no gradient but rounding: it is no measure.
        worst = {name: value for name, value in worst.items() if not name.endswith("k_proj.bias")}
        name = max(worst, key=worst.get)
        self.drop_gradients()
        return {"loss": abs(mine - loss) / abs(loss), "gradient": worst[name], "weight": name}


def cores() -> int:
    from ernie35se.runtime import cpu_cores

    return cpu_cores()


# ---------------------------------------------------------------------------------------------------- the floor


class PaddleFloor:
    """Matrix products and copies as Paddle does them, with the CPU settings of runtime.py."""

    def __init__(self):
        from ernie35se.runtime import tune_cpu

        tune_cpu("cpu")
        import paddle

        paddle.set_device("cpu")
        self.random, self.multiply = lambda shape: paddle.rand(shape), paddle.matmul
        self.copy = lambda source, target: paddle.assign(source, target)

    def matmul(self, shape: list[int], repeats: int) -> dict:
        """FLOP/s of (m, k) x (k, n), the best of `repeats` as a peak should be."""
        m, k, n = shape
        a, b = self.random([m, k]), self.random([k, n])
        self.multiply(a, b)
        return {"flops": 2 * m * k * n / min(timed(lambda: self.multiply(a, b)) for _ in range(repeats))}

    def bandwidth(self, megabytes: int, repeats: int) -> dict:
        """Bytes/s read and written by a copy of an array far larger than the caches."""
        source, target = self.random([megabytes * 250_000]), self.random([megabytes * 250_000])
        self.copy(source, target)
        return {"bytes": 2e6 * megabytes / min(timed(lambda: self.copy(source, target)) for _ in range(repeats))}


class TorchFloor(PaddleFloor):
    """The same with PyTorch."""

    def __init__(self):
        import torch

        torch.set_num_threads(cores())
        self.random, self.multiply = lambda shape: torch.rand(shape), torch.matmul
        self.copy = lambda source, target: target.copy_(source)


# ------------------------------------------------------------------------------------------------ head and loss


class HeadSide(OurSide):
    """LM head and cross entropy alone: the model's own forward, with its trunk replaced by a given hidden state."""

    def __init__(self, length: int, config: dict | None = None, plain: bool = False):
        super().__init__(1, length, {**(config or {}), "num_hidden_layers": 2}, plain)
        from benchmarks import networks

        width = self.fields["hidden_size"]
        hidden = self.paddle.to_tensor(np.random.default_rng(8).standard_normal((1, length, width), np.float32))
        hidden.stop_gradient = False
        self.hidden = hidden
        networks.replace_trunk(self.model)

    def warm_up(self) -> None:
        short = self.hidden[:, :8].detach()
        short.stop_gradient = False
        self.model(inputs_embeds=short, labels=self.ids[:, :8], return_logits=self.plain or None)[0].backward()
        self.drop_gradients()

    def forward_backward(self) -> float:
        loss = self.model(inputs_embeds=self.hidden, labels=self.ids, return_logits=self.plain or None)[0]
        loss.backward()
        self.hidden.clear_gradient(set_to_zero=False)
        return loss.item()


# ---------------------------------------------------------------------------------------------------------- data


class SentencePieceSide:
    """SentencePiece's own encode() of a list of texts in memory."""

    def __init__(self, model: str, text: str, megabytes: float):
        import sentencepiece

        self.texts = read_texts(text, megabytes)
        self.bytes = sum(len(document.encode()) for document in self.texts)
        self.processor = sentencepiece.SentencePieceProcessor(model_file=model)

    def encode(self, threads: int) -> dict:
        """Bytes of text a second: as lists of Python integers (encode's default) and as numpy arrays."""
        return {
            kind: self.bytes / timed(lambda: self.processor.encode(self.texts, num_threads=threads, **arguments))
            for kind, arguments in (("lists", {}), ("arrays", {"return_type": "numpy"}))
        }


class PaddleNLPTokenizerSide:
    """PaddleNLP's way from text to ids: tokenize(), then convert_tokens_to_ids()."""

    def __init__(self, folder: str, text: str, megabytes: float):
        from ernie35se.tokenizer import Ernie35Tokenizer

        self.texts = read_texts(text, megabytes)
        self.bytes = sum(len(document.encode()) for document in self.texts)
        self.tokenizer = Ernie35Tokenizer.from_pretrained(folder)

    def encode(self) -> dict:
        def run():
            for text in self.texts:
                self.tokenizer.convert_tokens_to_ids(self.tokenizer.tokenize(text))

        return {"bytes a second": self.bytes / timed(run)}


def read_texts(path: str, megabytes: float) -> list[str]:
    """The first documents of a JSONL file, some megabytes of them."""
    texts, size = [], 0
    with open(path, encoding="utf-8") as stream:
        for line in stream:
            texts.append(json.loads(line)["text"])
            size += len(line)
            if size >= megabytes * 1e6:
                break
    return texts


class IndexSide:
    """Index maps over made document lengths."""

    def __init__(self):
        from ernie35se.data import blend, index_maps

        self.index_maps, self.blend = index_maps, blend

    def lengths(self, tokens: int) -> np.ndarray:
        """Lengths of documents of 1 to 1,999 tokens, 1,000 on average, that add up to about `tokens`."""
        return np.random.default_rng(0).integers(1, 2000, max(2, tokens // 1000)).astype(np.int32)

    def build(self, tokens: int, length: int) -> dict:
        lens = self.lengths(tokens)
        samples = int(lens.sum(dtype=np.int64) - 1) // length
        start = time.perf_counter()
        maps = self.index_maps.build_index_maps(lens, 0, len(lens), samples, length, 1)
        return {"seconds": time.perf_counter() - start, "samples": len(maps.shuffle_idx)}

    def mix(self, samples: int) -> dict:
        weights = np.array([0.5, 0.3, 0.2])
        return {"seconds": timed(lambda: self.blend.build_blending_indices(weights, samples))}


class LoaderSide:
    """Batches of shuffled samples, as training draws them, from a token file."""

    def __init__(self, prefix: str, batch: int, length: int):
        import paddle

        from ernie35se.data.pretrain import build_train_valid_test_datasets, collate

        paddle.set_device("cpu")
        train, _, _ = build_train_valid_test_datasets([prefix], "1,0,0", [1000, 0, 0], length, 1)
        sampler = paddle.io.DistributedBatchSampler(train, batch, num_replicas=1, rank=0)
        self.batch, self.loader = batch, paddle.io.DataLoader(train, batch_sampler=sampler, collate_fn=collate)
        self.batches = iter(self.loader)

    def draw(self, count: int) -> dict:
        """Samples a second over `count` batches; starts over at the end of the samples."""
        start = time.perf_counter()
        for _ in range(count):
            if next(self.batches, None) is None:
                self.batches = iter(self.loader)
        return {"samples a second": count * self.batch / (time.perf_counter() - start)}
