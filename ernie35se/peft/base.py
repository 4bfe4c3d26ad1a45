"""What all methods share: settings that are saved, layers that hold an adapter, and the targets they go to.

Adapters change the model in place: a linear layer is replaced by an `AdapterLinear` that holds it as `base`,
or a small layer is added to the model with hooks on its blocks. So the model stays the class it is, with its
generate() and config, and recomputation, sharding and evaluation see nothing new.

Everything random in an adapter is drawn from (seed, parameter's name), never from the global state: replicas
of data parallel start equal, and so does a resumed run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Iterator, Optional, Union

import numpy as np
import paddle
from paddle import nn

from .. import parallel

# Ernie35's, and what the models of PaddleNLP call the linear layers of their blocks.
DEFAULT_TARGETS = [
    r".*\.([qkvo]_proj|(gate|up|down)_proj|qkv_gate_up_proj|qkv_proj|gate_up_fused_proj|query_key_value|"
    r"dense|dense_h_to_4h|dense_4h_to_h|out_proj|linear[12]|fc_(in|out)|c_attn|c_proj|w[12])"
]
# In files that PaddleNLP wrote, and of no meaning here unless they ask for something.
_PADDLENLP_KEYS = {
    "scaling", "dtype", "tensor_parallel_degree", "head_dim", "do_qat", "merge_weights", "merge_weight",
    "enable_lora_list", "trainable_modules", "trainable_bias", "loraga", "multi_query_group_num", "lora_plus",
    "num_attention_heads", "num_hidden_layers", "hidden_size", "nola", "nola_basis_num",
}  # fmt: skip
_HARMLESS = {
    "scaling",
    "dtype",
    "head_dim",
    "num_attention_heads",
    "num_hidden_layers",
    "hidden_size",
    "nola_basis_num",
}


@dataclass
class AdapterConfig:
    """Settings of a method, saved beside its weights.

    Attributes:
        base_model_name_or_path: the model that the adapter belongs to.
        target_modules: regular expressions; each must match whole names of linear layers.
        seed: of everything random in the adapter.
    """

    method: ClassVar[str] = ""

    splits: ClassVar[bool] = False  # whether its parameters can be cut with tensor-parallel layers

    base_model_name_or_path: Optional[str] = None
    target_modules: Union[str, list, None] = None
    seed: int = 42

    @classmethod
    def file_name(cls) -> str:
        return f"{cls.method}_config.json"

    def save(self, folder: Union[str, Path]) -> None:
        """Write `<method>_config.json`; it arrives whole, by a rename."""
        path = Path(folder) / self.file_name()
        beside = path.with_name(f".tmp-{path.name}")
        beside.write_text(json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n", encoding="utf-8")
        os.replace(beside, path)

    @classmethod
    def load(cls, folder: Union[str, Path]) -> AdapterConfig:
        """Read what `save`, or PaddleNLP, wrote.

        Raises:
            ValueError: a setting that is unknown, or one of PaddleNLP's that cannot be honoured.
        """
        path = Path(folder) / cls.file_name()
        with reading(path):
            values = dict(json.loads(path.read_text(encoding="utf-8")))
        known = {item.name for item in dataclasses.fields(cls)}
        for key in set(values) - known:
            value = values[key]
            if key not in _PADDLENLP_KEYS or (key not in _HARMLESS and value not in (None, False, -1, 1, [])):
                raise ValueError(f"{path}: {key} = {value!r} is no setting of {cls.method} here; remove it.")
        try:
            return cls(**{key: value for key, value in values.items() if key in known})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from None

    def require_positive(self, *names: str) -> None:
        """Raise a ValueError for the first of these settings that is no whole number of at least 1."""
        for name in names:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{self.method}: {name} = {value!r}: expected a whole number of at least 1.")


    def require_number(self, *names: str, positive: bool = False, below: float = math.inf) -> None:
        """Raise a ValueError for the first of these settings that is no finite number of at least 0 (`positive`: above 0)
        and below the bound."""
        bounds = "above 0" if positive else "at least 0"
        bounds += f" and below {below:g}" if below < math.inf else ""
        for name in names:
            value = getattr(self, name)
            fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not fits or not 0 <= value < below or (positive and value == 0):
                raise ValueError(f"{self.method}: {name} = {value!r}: expected a finite number {bounds}.")


class Adapter(nn.Layer):
    """A layer with parameters of the adapter; they are what is saved."""

    def own_parameters(self) -> Iterator[tuple[str, paddle.Tensor]]:
        """Names (relative to this layer) and parameters of the adapter, frozen ones included."""
        return self.named_parameters()

    def make(
        self, name: str, start: np.ndarray, trainable: bool = True, learning_rate: float = 1.0, dtype=None
    ):
        """Add a parameter that starts as `start`; its learning rate is multiplied by `learning_rate`."""
        attr = paddle.ParamAttr(learning_rate=learning_rate, initializer=nn.initializer.Constant(0.0))
        parameter = self.create_parameter(list(start.shape), attr=attr, dtype=dtype or self._dtype)
        if start.any():  # it is zero already
            parameter.set_value(paddle.to_tensor(start.astype("float32", copy=False)).astype(parameter.dtype))
        parameter.stop_gradient = not trainable
        self.add_parameter(name, parameter)
        return parameter

    def kept_floats(self, rows: int, length: int) -> int:
        """Floats that autograd keeps of a micro-batch of this shape because of the adapter, for the estimate of memory."""
        raise NotImplementedError

    # -- what some methods need of the training loop

    def extra_loss(self) -> Optional[paddle.Tensor]:
        """A term added to the training loss; None for most methods."""
        return None

    def after_step(self, step: int) -> None:
        """Called after every optimizer step with the number of completed ones."""


class AdapterLinear(Adapter):
    """y = base(x) + update(dropout(x)), with the linear layer `base` frozen.

    A method defines `update`, a linear function of x; from it follows the merged weight. One that starts from
    a part of W (PiSSA, DisLoRA) also defines `taken_from_base`, which the base loses.
    """

    mergeable = True

    def __init__(self, base: nn.Layer, dropout: float = 0.0):
        super().__init__(dtype=base._dtype)
        self.base = base
        self.in_features, self.out_features = base.weight.shape  # of a cut layer this rank's
        self.seam = parallel.LowRankSeam(base)
        self.model_config = getattr(base, "model_config", None)  # says how the layer is cut
        self.dropout = nn.Dropout(dropout) if dropout else None
        self.active = True  # off while the weights are merged for evaluation

    def own_parameters(self):
        return ((name, p) for name, p in self.named_parameters() if not name.startswith("base."))

    def forward(self, x):
        if not self.active:
            return self.base(x)
        return self.base(x) + self.update(x if self.dropout is None else self._dropped(x))

    def _dropped(self, x):
        with self.seam.dropout_state() if self.training else contextlib.nullcontext():
            return self.dropout(x)

    def update(self, x: paddle.Tensor) -> paddle.Tensor:
        """(..., in) -> (..., out): what the adapter adds, without dropout."""
        raise NotImplementedError

    def kept_by_update(self) -> int:
        """Floats a token that autograd keeps of `update`, its input not counted, which the base keeps anyway."""
        raise NotImplementedError

    def kept_floats(self, rows, length):
        dropped = 0 if self.dropout is None else self.in_features + self.in_features // 4  # values, and a byte each
        return rows * length * (self.kept_by_update() + dropped)

    def taken_from_base(self) -> Optional[paddle.Tensor]:
        """(in, out) part of W that the adapter holds at its start, or None. Depends on frozen parameters
        alone."""
        return None

    @paddle.no_grad()
    def delta_weight(self) -> paddle.Tensor:
        """(in, out): the update as a matrix, by applying it to every unit vector."""
        return self.update(paddle.eye(self.in_features, dtype=self.base.weight.dtype))

    @paddle.no_grad()
    def merged_weight(self) -> paddle.Tensor:
        """(in, out): the weight of one linear layer that does what base and adapter do together."""
        return self.base.weight + self.delta_weight()

    @paddle.no_grad()
    def change_base(self, sign: int) -> None:
        """Add (1) or take away (-1) what `taken_from_base` says."""
        taken = self.taken_from_base()
        if taken is not None:
            self.base.weight.set_value(self.base.weight + sign * taken)


# -------------------------------------------------------------------------------------------------------
# files


@contextlib.contextmanager
def reading(file: Path):
    """Whatever the readers of a damaged file raise becomes a ValueError that names it."""
    try:
        yield
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
        raise ValueError(f"{file}: cannot be read ({type(error).__name__}: {reason[:200]}). Copy it again.") from None


# -------------------------------------------------------------------------------------------------------
# random


def generator(seed: int, name: str) -> np.random.Generator:
    """Random numbers that depend on the seed and a parameter's name alone."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def kaiming_uniform(seed: int, name: str, shape: tuple[int, ...], fan_in: int) -> np.ndarray:
    """Uniform within 1 / sqrt(fan_in), as LoRA starts A (He et al. 2015 with a = sqrt(5))."""
    return generator(seed, name).uniform(-1, 1, shape) / math.sqrt(fan_in)


def normal(seed: int, name: str, shape: tuple[int, ...], deviation: float) -> np.ndarray:
    """Normal with mean 0, float32: prefix networks of large models are large."""
    drawn = generator(seed, name).standard_normal(shape, dtype="float32")
    drawn *= deviation
    return drawn


def top_singular(weight: paddle.Tensor, rank: int, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Singular value decomposition in float64: U (in, n), S (n,) falling, V (n, out), all n = min(in, out) of
    them.

    Raises:
        ValueError: a rank above n.
    """
    most = min(weight.shape)
    if rank > most:
        raise ValueError(
            f"{name}: rank {rank}, but the weight of shape {weight.shape} has {most} singular values only."
        )
    return np.linalg.svd(weight.astype("float32").numpy().astype("float64"), full_matrices=False)


# ------------------------------------------------------------------------------------------------------
# targets


def find_targets(model: nn.Layer, patterns: Union[str, list, None]) -> list[str]:
    """Names of the linear layers that the patterns match, in the model's order.

    Raises:
        ValueError: a pattern that matches nothing, or a layer that two of them match.
    """
    patterns = (
        DEFAULT_TARGETS if patterns is None else [patterns] if isinstance(patterns, str) else list(patterns)
    )
    linear = [name for name, layer in model.named_sublayers() if is_linear(layer)]
    matched: dict[str, str] = {}
    for pattern in patterns:
        try:
            hits = [name for name in linear if re.fullmatch(pattern, name)]
        except re.error as error:
            raise ValueError(f"target_modules: {pattern!r} is no regular expression ({error}).") from None
        if not hits:
            example = linear[0] if linear else "none: this model has no linear layers"
            raise ValueError(
                f"target_modules: {pattern!r} matches no linear layer. Patterns match whole names, such as "
                f"{example!r}; "
                f"for a suffix write '.*\\.{re.sub(r'^[.*]+', '', pattern)}'."
            )
        for name in hits:
            if name in matched:
                raise ValueError(
                    f"target_modules: {matched[name]!r} and {pattern!r} both match {name!r}; each layer "
                    "takes one adapter."
                )
            matched[name] = pattern
    return [name for name in linear if name in matched]


def is_linear(layer: nn.Layer) -> bool:
    """Whether it is a plain linear layer, full-precision or quantised, that an adapter can hold."""
    if isinstance(layer, AdapterLinear):
        return False
    return isinstance(layer, (nn.Linear, *parallel.CUT_LINEAR)) or getattr(layer, "is_quantised_linear", False)


def replace_layer(model: nn.Layer, name: str, layer: nn.Layer) -> None:
    """Put `layer` where the sublayer of that dotted name was."""
    parent_name, _, last = name.rpartition(".")
    parent = get_layer(model, parent_name)
    if last.isdigit() and isinstance(parent, (nn.LayerList, nn.Sequential)):
        parent[int(last)] = layer
    else:
        setattr(parent, last, layer)


def get_layer(model: nn.Layer, name: str) -> nn.Layer:
    """The sublayer of that dotted name; the model itself for an empty one."""
    for part in filter(None, name.split(".")):
        model = model[int(part)] if part.isdigit() else getattr(model, part)
    return model


def blocks_of(model: nn.Layer) -> list[nn.Layer]:
    """The transformer blocks: the longest list of layers that is in no other (as the experts of a block are).

    Raises:
        ValueError: a model without one.
    """
    lists = {name: layer for name, layer in model.named_sublayers() if isinstance(layer, nn.LayerList)}
    lists = [layer for name, layer in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
    if not lists:
        raise ValueError(f"{type(model).__name__} holds no list of blocks; this method needs one.")
    return list(max(lists, key=len))


def refuse_parallel(model: nn.Layer, what: str, splits: bool = False) -> None:
    """Raise where the model is cut over devices in a way that the method was not made for.

    Args:
        splits: whether the method's parameters can be cut with the layers they belong to.
    """
    config = model.config
    if getattr(config, "tensor_parallel_degree", 1) > 1 and not splits:
        raise ValueError(
            f"{what} is not made for tensor parallel (tensor_parallel_degree is "
            f"{config.tensor_parallel_degree}); set it to 1."
        )
    if getattr(config, "pipeline_parallel_degree", 1) > 1 or type(model).__name__.endswith("Pipe"):
        raise NotImplementedError(
            f"{what} is not made for pipeline parallel; set pipeline_parallel_degree to 1."
        )


def insert(model: nn.Layer, config: AdapterConfig, make_layer, start: bool = True) -> None:
    """Replace every target of `config` by make_layer(name, base, config, start)."""
    for name in find_targets(model, config.target_modules):
        base = get_layer(model, name)
        if parallel.LowRankSeam(base).cut:
            base.model_config = model.config
        replace_layer(model, name, make_layer(name, base, config, start))
