"""Parameter-efficient fine-tuning: one module a method, one way to wrap, save, load and merge them.

    wrap(model, LoRAConfig(r=8))     adapters in, everything else frozen
    save(model, folder)              <method>_config.json and <method>_model_state.safetensors
    load(model, folder)              the same adapters on the same base model
    merge(model)                     adapters out, their effect in the weights; the model is plain again

| method | what is learnt | merges |
|---|---|---|
| lora and its kin (lora.py) | a low-rank or square update of linear layers | yes |
| vera, lokr, dislora | other updates of linear layers | yes |
| reft, tare | edits that depend on the token | no |
| prefix | keys and values before each attention layer | no |

LoRA, rsLoRA, LoRA+, PiSSA, MoSLoRA and LinChain go with tensor parallel, and are saved as one device would; none of
them is made for pipeline parallel.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Callable, Iterator, NamedTuple, Union

import numpy as np
import paddle
from paddle import nn
from paddlenlp.utils.log import logger
from safetensors.numpy import load_file, save_file

from .. import conversion, parallel
from ..weight_files import warn_pickled
from . import base_weights, lora, prefix, reft
from .base import Adapter, AdapterConfig, AdapterLinear, insert, reading, refuse_parallel, replace_layer
from .dislora import DisLoRAConfig, DisLoRALinear
from .lokr import LoKrConfig, LoKrLinear
from .lora import LoRAConfig
from .neftune import add_noise
from .prefix import PrefixConfig
from .reft import ReFTConfig
from .tare import TareConfig, TareLinear
from .tokens import tell_labels
from .vera import VeRAConfig, VeRALinear

__all__ = [
    "METHODS", "wrap", "save", "load", "load_state", "check_fits", "merge", "merged", "is_wrapped", "trainable_share",
    "extra_loss", "after_step", "tell_labels",
    "saved_method", "remove_others", "read_state", "adapter_state", "add_noise", "AdapterConfig",
    "LoRAConfig", "VeRAConfig", "LoKrConfig", "DisLoRAConfig", "ReFTConfig", "TareConfig", "PrefixConfig",
]  # fmt: skip


class Method(NamedTuple):
    """One row of the registry: what it saves, and how it gets into a model: as layers around linear ones, or
    by `wrap`.

    Attributes:
        config: class of its settings.
        layer: (name, linear layer, config, start) -> AdapterLinear; None for methods of another kind.
        wrap: (model, config, start) -> None; None where putting in the layers is all.
    """

    config: type[AdapterConfig]
    layer: Callable | None = None
    wrap: Callable | None = None

    @property
    def merges(self) -> bool:
        """Whether the effect of its adapters can be put into the weights."""
        return self.layer is not None and getattr(self.layer, "mergeable", True)


METHODS: dict[str, Method] = {
    "lora": Method(LoRAConfig, lora.make_layer, lora.wrap),
    "vera": Method(VeRAConfig, VeRALinear),
    "lokr": Method(LoKrConfig, LoKrLinear),
    "dislora": Method(DisLoRAConfig, DisLoRALinear),
    "tare": Method(TareConfig, TareLinear),
    "reft": Method(ReFTConfig, wrap=reft.wrap),
    "prefix": Method(PrefixConfig, wrap=prefix.wrap),
}


def wrap(model: nn.Layer, config: AdapterConfig, start: bool = True) -> nn.Layer:
    """Put adapters into the model, in place, and freeze the rest.

    Args:
        start: whether to compute the adapters' starting values; False when saved ones will be loaded at once.

    Returns:
        The model; `model.adapter_config` is the configuration.

    Raises:
        ValueError: targets that match nothing or twice, a model that has adapters, or one that the method
        cannot take.
        NotImplementedError: a pipeline-parallel model.
    """
    if is_wrapped(model):
        raise ValueError(
            f"the model already has {model.adapter_config.name()} adapters; merge them, or load a fresh "
            "model."
        )
    refuse_parallel(model, config.name(), config.splits)
    method, base_samples = METHODS[config.method], base_weights.sample_model(model)
    if method.wrap is not None:
        method.wrap(model, config, start)
    else:
        insert(model, config, method.layer, start)
    own = {id(parameter) for parameter in adapter_state(model).values()}
    for parameter in model.parameters():
        if id(parameter) not in own:
            parameter.stop_gradient = True
    model.adapter_config, model.base_samples = config, base_samples
    if start:
        _change_bases(model, -1)
    _let_gradients_through(model)
    return model


def is_wrapped(model: nn.Layer) -> bool:
    """Whether `wrap` or `load` has put adapters into this model."""
    return getattr(model, "adapter_config", None) is not None


def adapters(model: nn.Layer) -> Iterator[tuple[str, Adapter]]:
    """Names and layers that hold adapters."""
    return ((name, layer) for name, layer in model.named_sublayers() if isinstance(layer, Adapter))


def adapter_state(model: nn.Layer) -> dict[str, paddle.Tensor]:
    """Name -> parameter of everything that belongs to the adapters."""
    return {f"{name}.{own}": p for name, layer in adapters(model) for own, p in layer.own_parameters()}


def trainable_share(model: nn.Layer) -> str:
    """A sentence: how many parameters train, of how many."""
    sizes = [(p.size, p.stop_gradient) for p in model.parameters()]
    total, trains = sum(size for size, _ in sizes), sum(size for size, frozen in sizes if not frozen)
    name = model.adapter_config.name() if is_wrapped(model) else "all weights"
    return f"{name}: {trains:,} of {total:,} parameters train ({trains / total:.2%})."


# --------------------------------------------------------------------------------------------- training


def extra_loss(model: nn.Layer) -> paddle.Tensor | None:
    """What the adapters add to the training loss, or None."""
    terms = [term for _, layer in adapters(model) if (term := layer.extra_loss()) is not None]
    return sum(terms[1:], terms[0]) if terms else None


def after_step(model: nn.Layer, step: int) -> None:
    """Tell the adapters that `step` optimizer steps are complete."""
    for _, layer in adapters(model):
        layer.after_step(step)


def _let_gradients_through(model) -> None:
    """A frozen embedding's output has no gradient, and recomputation cuts the graph at such inputs."""

    def after(layer, inputs, output):
        if layer.training and output.stop_gradient:
            output.stop_gradient = False
        return output

    model.get_input_embeddings().register_forward_post_hook(after)


# ------------------------------------------------------------------------------------------ saving and
# loading


def saved_method(folder: Union[str, Path]) -> str | None:
    """The method whose adapters a folder holds, or None."""
    found = [name for name, method in METHODS.items() if (Path(folder) / method.config.file_name()).is_file()]
    if len(found) > 1:
        raise ValueError(f"{folder}: holds adapters of {' and '.join(found)}; expected one method a folder.")
    return found[0] if found else None


def remove_others(folder: Union[str, Path], method: str | None) -> None:
    """Delete the saved adapters of all methods but this one (None: of all) from a folder, and say so."""
    for name, other in METHODS.items():
        files = [Path(folder) / other.config.file_name(), *_weight_files(Path(folder), name)]
        files = [file for file in files if file.is_file()] if name != method else []
        for file in files:
            file.unlink()
        if files:
            logger.warning(f"Removed {', '.join(map(str, files))}: an adapter that an earlier run left.")


def whole_state(model: nn.Layer) -> dict[str, np.ndarray]:
    """Name -> float32 array of the adapters, put together from the pieces of all tensor-parallel ranks, which call
    this together."""
    whole = {}
    for name, value in adapter_state(model).items():
        value = value.astype("float32")
        if _degree(model) > 1 and conversion.layout(name, model.config) is not None:
            value = conversion.merge(name, parallel.all_pieces(model.config, value), model.config)
        whole[name] = value.numpy()
    return whole


def _degree(model) -> int:
    return getattr(model.config, "tensor_parallel_degree", 1) or 1


def save(model: nn.Layer, folder: Union[str, Path], state: dict[str, np.ndarray] | None = None) -> None:
    """Write weights, in float32 as safetensors, then the configuration; each arrives whole, by a rename.

    Args:
        state: what `whole_state` gave, where only one of several ranks writes.
    """
    folder, config = Path(folder), model.adapter_config
    folder.mkdir(parents=True, exist_ok=True)
    state = whole_state(model) if state is None else state
    weights, _ = _weight_files(folder, config.method)
    beside = weights.with_name(f".tmp-{weights.name}")
    metadata = {"format": "np", **base_weights.metadata_of(model)}
    save_file({name: np.ascontiguousarray(value) for name, value in state.items()}, str(beside), metadata)
    os.replace(beside, weights)
    config.save(folder)


def load(model: nn.Layer, folder: Union[str, Path]) -> nn.Layer:
    """Put the adapters of a folder into a plain model. Their parameters can be trained on. Says so where they were trained
    on other weights.

    Raises:
        ValueError: no adapters there, or such as do not fit this model.
    """
    method = saved_method(folder)
    if method is None:
        names = ", ".join(entry.config.file_name() for entry in METHODS.values())
        raise ValueError(f"{folder}: holds no adapter; expected one of {names}.")
    wrap(model, METHODS[method].config.load(folder), start=False)
    _set_state(model, _my_pieces(model, read_state(Path(folder), method)))
    if found := _other_base(model, folder):
        logger.warning(f"{folder}: {found}")
    _change_bases(model, -1)
    return model


def load_state(model: nn.Layer, folder: Union[str, Path]) -> None:
    """Give the adapters of a wrapped model the values saved in a folder (to resume, or to go back to the
    best).

    Raises:
        ValueError: a folder that holds none of this method, or such as do not fit.
    """
    state = _my_pieces(model, read_state(Path(folder), model.adapter_config.method))
    _check_state(model, state)
    _change_bases(model, 1)
    _set_state(model, state)
    _change_bases(model, -1)


def check_fits(model: nn.Layer, folder: Union[str, Path]) -> None:
    """ValueError unless the adapters saved in a folder are such as this wrapped model has, on the same weights."""
    _check_state(model, _my_pieces(model, read_state(Path(folder), model.adapter_config.method)))
    if found := _other_base(model, folder):
        raise ValueError(found)


def _other_base(model, folder: Union[str, Path]) -> str | None:
    safe, _ = _weight_files(Path(folder), model.adapter_config.method)
    return base_weights.difference(base_weights.saved_samples(safe), model.base_samples)


def _weight_files(folder: Path, method: str) -> tuple[Path, Path]:
    """As we write them, and as PaddleNLP does."""
    return folder / f"{method}_model_state.safetensors", folder / f"{method}_model_state.pdparams"


def read_state(folder: Path, method: str) -> dict[str, np.ndarray]:
    """Name -> array of the adapters saved in a folder. Raises ValueError where there are none."""
    safe, pickled = _weight_files(folder, method)
    if safe.is_file():
        with reading(safe):
            return load_file(str(safe))
    if pickled.is_file():
        warn_pickled(pickled)
        with reading(pickled):
            return paddle.load(str(pickled), return_numpy=True)
    raise ValueError(f"{folder}: has neither {safe.name} nor {pickled.name}.")


def _my_pieces(model, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Whole arrays -> this tensor-parallel rank's pieces."""
    config, degree = model.config, _degree(model)
    if degree == 1:
        return state
    rank = parallel.tensor_rank(config)
    return {name: conversion.split(name, value, config, degree, rank) for name, value in state.items()}


def _check_state(model, state) -> None:
    wanted = {name: list(value.shape) for name, value in adapter_state(model).items()}
    seen = {name: list(value.shape) for name, value in state.items()}
    for what, names in (
        ("lacks", sorted(set(wanted) - set(seen))),
        ("has besides", sorted(set(seen) - set(wanted))),
    ):
        if names:
            raise ValueError(
                f"the saved {model.adapter_config.name()} adapter {what} {names[0]!r} ({len(names)} in all): "
                "it was made "
                "for another model, with other targets, or by a version with other names."
            )
    for name, shape in wanted.items():
        if seen[name] != shape:
            raise ValueError(
                f"the saved adapter's {name} has shape {seen[name]}; expected {shape} for this model."
            )


@paddle.no_grad()
def _set_state(model, state) -> None:
    _check_state(model, state)
    for name, parameter in adapter_state(model).items():
        parameter.set_value(paddle.to_tensor(np.asarray(state[name])).astype(parameter.dtype))


def _change_bases(model, sign: int) -> None:
    for _, layer in adapters(model):
        if isinstance(layer, AdapterLinear):
            layer.change_base(sign)


# ------------------------------------------------------------------------------------------------ merging


def merge(model: nn.Layer) -> nn.Layer:
    """Add the adapters' effect to the weights and take them out, in place. All weights can be trained again;
    quantised ones become ordinary.

    Raises:
        ValueError: a method that cannot be merged.
    """
    _refuse_unmergeable(model)
    for name, layer in list(adapters(model)):
        weight, base = layer.merged_weight(), layer.base
        if getattr(base, "is_quantised_linear", False):
            base = base.to_linear()
        base.weight.set_value(weight)
        replace_layer(model, name, base)
    model.adapter_config = None
    for parameter in model.parameters():
        parameter.stop_gradient = False  # as in any plain model
    return model


@contextlib.contextmanager
def merged(model: nn.Layer):
    """The adapters merged for a while (`merge_weights`: evaluation without their cost), then exactly as
    before."""
    _refuse_unmergeable(model)
    kept = []
    for _, layer in adapters(model):
        if getattr(layer.base, "is_quantised_linear", False):
            raise ValueError("merge_weights needs full-precision weights; this model's are quantised.")
        kept.append((layer, layer.base.weight.clone()))
        layer.base.weight.set_value(layer.merged_weight())
        layer.active = False
    try:
        yield model
    finally:
        for layer, weight in kept:
            layer.base.weight.set_value(weight)
            layer.active = True


def _refuse_unmergeable(model) -> None:
    if not is_wrapped(model):
        raise ValueError("the model has no adapters to merge.")
    config = model.adapter_config
    if not METHODS[config.method].merges:
        raise ValueError(
            f"{config.name()} cannot be merged: what it does depends on the tokens. Load it beside the model."
        )
