"""Adapters into weight files, without the model: one shard in memory at a time, arithmetic in float32.

    base/model-00001-of-00002.safetensors  --+
    adapter/lora_config.json, ...          --+-->  output/model-00001-of-00002.safetensors, config, ...

Each target's weight goes through the same layer that trained, so that merging is right by construction for
every method. The output folder gets its name when everything in it is written.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Union

import numpy as np
import paddle
from paddle import nn
from paddlenlp.utils.log import logger
from safetensors import safe_open
from safetensors.paddle import load_file, save_file

from ..weight_files import warn_pickled
from . import METHODS, base_weights, lora, read_state, saved_method
from . import load as load_adapter
from .base import DEFAULT_TARGETS, reading

SAFE, PICKLED = "model.safetensors", "model_state.pdparams"
_WEIGHTS = re.compile(r"(model.*\.safetensors|model_state.*\.pdparams)(\.index\.json)?|pytorch_model.*")
# What a training run leaves beside a model, and no model needs.
_RUN_FILES = re.compile(
    r"checkpoint-.*|training_args\.bin|trainer_state\.json|.*_results\.json|curves\.png|runs|optimizer.*|"
    r"scheduler.*|rng_state.*|generated-.*|complete\.json|progress\.json|previous.*|\..*|.*\.log"
)


def merge_files(
    base: Union[str, Path],
    adapter: Union[str, Path],
    output: Union[str, Path],
    methods: tuple = (),
    safe: bool = True,
) -> int:
    """Write the base model with the adapter's effect in its weights.

    Args:
        base, adapter: folders. output: a folder that does not exist, or is empty.
        methods: the methods that are accepted; empty: all that can be merged.
        safe: safetensors instead of pickled files.

    Returns:
        How many weights changed. Where the adapter was trained on other weights, that is said.

    Raises:
        ValueError: folders that do not hold what they should, or do not belong together.
    """
    base, adapter, output = Path(base), Path(adapter), Path(output)
    method = saved_method(adapter) if adapter.is_dir() else None
    if method is None or (methods and method not in methods):
        wanted = ", ".join(METHODS[name].config.file_name() for name in (methods or METHODS))
        raise ValueError(
            f"{adapter}: holds {f'a {method} adapter' if method else 'no adapter'}; expected {wanted}."
        )
    config = METHODS[method].config.load(adapter)
    if not METHODS[method].merges:
        raise ValueError(f"{adapter}: {config.name()} cannot be merged: what it does depends on the tokens.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(
            f"{output}: exists already; name a new folder, so that nothing of another model stays in it."
        )
    shards = weight_shards(base)
    state = read_state(adapter, method)
    merger = _Merger(config, state, base_weights.saved_samples(adapter / f"{method}_model_state.safetensors"))
    staging = output.with_name(f".tmp-{output.name}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        weight_map, size = {}, 0
        for number, shard in enumerate(shards, 1):
            state = {name: merger(name, value) for name, value in _read(shard).items()}
            file = _output_name(number, len(shards), safe)
            _write(state, staging / file)
            weight_map.update(dict.fromkeys(state, file))
            size += sum(value.size * value.element_size() for value in state.values())
            logger.info(f"{shard.name} -> {file}: {len(state)} weights.")
            del state
        merger.check_all_used()
        if len(shards) > 1:
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            name = f"{SAFE if safe else PICKLED}.index.json"
            (staging / name).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if found := base_weights.difference(merger.expected, merger.seen):
            logger.warning(f"{base}: {found} What is written is a model that nobody trained.")
        _copy_rest(base, adapter, staging, method)
        if output.exists():
            output.rmdir()
        staging.rename(output)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return merger.changed


class _Merger:
    """Weights by name -> weights with the adapter's effect."""

    def __init__(self, config, state: dict[str, np.ndarray], samples: base_weights.Samples | None = None):
        self.config, self.make = config, METHODS[config.method].layer
        self.expected, self.seen = samples or {}, {}
        self.layers: dict[str, dict[str, np.ndarray]] = {}
        for name, value in state.items():
            layer, _, own = name.rpartition(".")
            self.layers.setdefault(layer, {})[own] = value
        self.used: set[str] = set()
        self.changed = 0

    def __call__(self, name: str, value: paddle.Tensor) -> paddle.Tensor:
        if name in self.expected and value.ndim == 2:
            self.seen[name] = base_weights.sample(value)
        layer = name.removesuffix(".weight")
        quantised = getattr(self.config, "weight_quantize_algo", None) and re.fullmatch(
            DEFAULT_TARGETS[0], layer
        )
        if layer == name or value.ndim != 2 or not (layer in self.layers or quantised):
            return value
        base = nn.Linear(*value.shape, bias_attr=False)
        base.weight.set_value(value.astype("float32"))
        if quantised:
            base = lora.prepare(layer, base, self.config)
        self.changed += 1
        if layer not in self.layers:
            return base.weight.astype(value.dtype)
        self.used.add(layer)
        return self._merged(layer, base).astype(value.dtype)

    @paddle.no_grad()
    def _merged(self, name: str, base) -> paddle.Tensor:
        layer = self.make(name, base, self.config, False)
        own, saved = dict(layer.own_parameters()), self.layers[name]
        wrong = set(own) ^ set(saved) or [
            key for key in own if list(own[key].shape) != list(saved[key].shape)
        ]
        if wrong:
            raise ValueError(
                f"the adapter's {name}.{sorted(wrong)[0]} does not fit the base model's weight; is it its "
                "own?"
            )
        for key, parameter in own.items():
            parameter.set_value(paddle.to_tensor(np.asarray(saved[key])).astype("float32"))
        layer.change_base(-1)
        return layer.merged_weight()

    def check_all_used(self) -> None:
        left = sorted(set(self.layers) - self.used)
        if left:
            raise ValueError(
                f"the base model has no weight {left[0]}.weight ({len(left)} such), which the adapter "
                "changes."
            )


def weight_shards(folder: Path) -> list[Path]:
    """The weight files of a model's folder, in order.

    Raises:
        ValueError: none, a part missing, files of tensor-parallel ranks, or such as PyTorch wrote.
    """
    for single in (SAFE, PICKLED):
        index = folder / f"{single}.index.json"
        if index.is_file():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            missing = [name for name in names if not (folder / name).is_file()]
            if missing:
                raise ValueError(f"{index}: names {missing[0]}, which is not there. Copy the model again.")
            return [_checked(folder / name) for name in names]
        if (folder / single).is_file():
            return [_checked(folder / single)]
    if folder.is_dir() and any(folder.glob("model_state.tp*.pdparams")):
        raise ValueError(
            f"{folder}: holds a tensor-parallel model; join it first with tools/merge_tensor_parallel.py."
        )
    raise ValueError(f"{folder}: holds no {SAFE} or {PICKLED}; expected the base model's folder.")


def _checked(file: Path) -> Path:
    if file.suffix == ".safetensors":
        with reading(file), safe_open(str(file), framework="np") as opened:
            written_by = (opened.metadata() or {}).get("format")
        if written_by == "pt":
            raise ValueError(
                f"{file}: written by PyTorch, which stores weights transposed. Load the model with PaddleNLP "
                "(convert_from_torch=True), save it, and name that folder."
            )
    return file


def _read(file: Path) -> dict[str, paddle.Tensor]:
    if file.suffix == ".safetensors":
        with reading(file):
            return load_file(str(file))
    warn_pickled(file)
    with reading(file):
        state = paddle.load(str(file))
        return {name: paddle.to_tensor(value) for name, value in state.items() if name != "StructuredToParameterName@@"}


def _write(state: dict[str, paddle.Tensor], file: Path) -> None:
    if file.suffix == ".safetensors":
        save_file(state, str(file), metadata={"format": "np"})
    else:
        paddle.save(state, str(file))


def _output_name(number: int, count: int, safe: bool) -> str:
    stem, suffix = (SAFE if safe else PICKLED).rsplit(".", 1)
    return f"{stem}.{suffix}" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}.{suffix}"


def _copy_rest(base: Path, adapter: Path, target: Path, method: str) -> None:
    """Config, generation config, tokenizer and template: the base's, and what the adapter's folder has
    besides."""
    for folder in (base, adapter):
        for file in sorted(folder.iterdir()):
            skipped = (
                _WEIGHTS.fullmatch(file.name)
                or _RUN_FILES.fullmatch(file.name)
                or file.name.startswith(f"{method}_")
            )
            if file.is_file() and not skipped and (folder == base or not (target / file.name).exists()):
                shutil.copy2(file, target / file.name)


@paddle.no_grad()
def compare_logits(base, adapter, output, length: int = 16) -> Iterator[tuple[str, float]]:
    """("changed", largest difference that the adapter makes), ("merged", largest difference that merging
    makes), in logits of fixed random tokens. Needs the models in memory, one after the other."""
    from paddlenlp.transformers import AutoModelForCausalLM

    from .. import auto  # noqa: F401

    def logits(model):
        model.eval()
        return model(input_ids=ids, return_dict=True).logits.astype("float32")

    def opened(folder):
        return AutoModelForCausalLM.from_pretrained(str(folder), dtype="float32")

    model = opened(base)
    ids = paddle.to_tensor(np.random.default_rng(0).integers(0, model.config.vocab_size, (2, length)))
    plain = logits(model)
    adapted = logits(load_adapter(model, adapter))
    yield "changed", (adapted - plain).abs().max().item()
    del model
    yield "merged", (adapted - logits(opened(output))).abs().max().item()
