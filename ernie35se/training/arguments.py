"""Settings of the pretraining script: three dataclasses, read from a JSON file, from flags, or from both.

    run_pretrain.py configs/pretrain/demo_cpu.json                    a file
    run_pretrain.py configs/pretrain/demo_cpu.json --max_steps 10     a file, with flags that override it
    run_pretrain.py --input_dir data --output_dir out --max_steps 10  flags alone

The `help` of a field is its documentation: `--help` and the README's table (`settings_table`) are made from
it. Everything is checked before a model exists. An unknown name, a wrong type or a value out of range is a
ValueError that names the file (or the command line), the setting, the value and what was expected. Nothing is
silently ignored: what this machine cannot do either falls back with one warning (half precision, flash
attention) or is refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import importlib.util
import json
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import (
    Any,
    Callable,
    Dict,
    List,
    Optional,
    Sequence,
    Tuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import paddle
from paddlenlp.trainer import PdArgumentParser, TrainingArguments
from paddlenlp.utils.log import logger

from ..data.pretrain import parse_splits
from .degrees import Degrees, first_fault

LARGEST_COUNT = 2**31 - 1
LONGEST_NUMBER = 4000  # digits; Python reads up to 4300
REPORTERS = ("visualdl", "tensorboard", "wandb", "autonlp", "all", "none")
PACKAGE_OF_REPORTER = {"visualdl": "visualdl", "tensorboard": "tensorboardX", "wandb": "wandb", "autonlp": "ray"}

# (setting, does this value ask for it?, why it is refused). Whoever honours one deletes its line.
NOT_YET = (
    ("sep_parallel_degree", lambda value: value > 1, "this model has no segment parallelism"),
    ("context_parallel_degree", lambda value: value > 1, "this model has no context parallelism"),
    ("expert_parallel_degree", lambda value: value > 1, "this model has no experts"),
    ("expert_tensor_parallel_degree", lambda value: value > 1, "this model has no experts"),
    ("use_expert_parallel", bool, "this model has no experts"),
    ("enable_auto_parallel", bool, "automatic parallelism is not available for this model"),
    ("to_static", bool, "training in static mode is not available for this model"),
    ("do_export", bool, "exporting is not part of pretraining"),
    ("use_async_save", bool, "a checkpoint must be whole when training goes on; leave it off"),
    ("distributed_dataloader", bool, "every process reads its own samples; leave it off"),
)

OPTIMIZERS = ("adamw", "adamw_mini", "adamw_custom", "adamw_16bit_moment")  # what PaddleNLP's Trainer can make
# Settings of PaddleNLP's own that take one of a few words.
THEIR_CHOICES = {
    "optim": OPTIMIZERS,
    **dict.fromkeys(("evaluation_strategy", "save_strategy", "logging_strategy"), ("no", "steps", "epoch")),
}

# What pretraining has and fine-tuning does not, in the same form.
NOT_YET_IN_FINETUNING = (
    ("pipeline_parallel_degree", lambda value: value > 1, "samples differ in length, and stages exchange one length; leave it at 1"),
    ("virtual_pp_degree", lambda value: value > 1, "samples differ in length, and stages exchange one length; leave it at 1"),
    ("sequence_parallel", bool, "samples have lengths that the ranks cannot share evenly; leave it off"),
)


class SettingError(ValueError):
    """A setting with a value that cannot be used: `name`, the value seen, and what was expected instead."""

    def __init__(self, name: str, value: Any, expected: str):
        super().__init__(f"{name} = {value!r}: {expected}")
        self.name, self.value, self.expected = name, value, expected


def _setting(default: Any, help: str, **extra: Any):
    """A dataclass field whose `help` documents it; `choices` are checked for file and flags alike."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help, **extra})
    return field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True)
class ModelArguments:
    """Which model is trained and how its layers compute."""

    _argument_group_name = "model"

    model_type: str = _setting("ernie", "Model family. Only `ernie` exists here.")
    model_name_or_path: str = _setting(
        "ernie/tiny-random-ernie",
        "A built-in name (`ernie/tiny-random-ernie`, `baidu/ernie-3.5-se-3b`), a config JSON file, a folder "
        "with a `config.json`, or, with `--continue_training 1`, a folder with weights.",
    )
    tokenizer_name_or_path: Optional[str] = _setting(
        None, "Folder of the tokenizer. Left out: the model's folder, where that holds one."
    )
    use_flash_attention: bool = _setting(
        False,
        "Flash attention; needs a GPU, falls back to plain attention with a warning where there is none.",
    )
    use_fused_ln: bool = _setting(
        False, "LayerNorm by the op of external_ops, which has to be built (docs/fused_ln.md)."
    )
    fuse_linear: bool = _setting(
        False, "Paddle's fused linear layers; GPU only, ignored with a warning on CPU."
    )
    use_recompute_attn: bool = _setting(
        False, "Recompute the attention alone in the backward pass. Turns `--recompute` off."
    )
    recompute_granularity: str = _setting(
        "full",
        "What `--recompute` recomputes: whole blocks, or the attention core.",
        choices=["full", "core_attn"],
    )
    virtual_pp_degree: int = _setting(
        1, "Parts that each pipeline stage holds, interleaved with the other stages' (less idle time)."
    )

    def __post_init__(self):
        _check_choices(self)
        if self.model_type != "ernie":
            raise SettingError(
                "model_type", self.model_type, f"expected 'ernie'{_nearest(self.model_type, ['ernie'])}"
            )
        if not self.model_name_or_path.strip():
            raise SettingError("model_name_or_path", self.model_name_or_path, "expected a name or a path")
        _check_range(self, "virtual_pp_degree", at_least=1, whole=True)


@dataclass(frozen=True)
class DataArguments:
    """Which tokens are read and how they are cut into samples."""

    _argument_group_name = "data"

    input_dir: Optional[str] = _setting(
        None,
        "Token files: a prefix, a folder of prefixes (weight 1.0 each), or weights and prefixes: "
        "`0.3 a 0.7 b`.",
    )
    split: str = _setting(
        "949,50,1", "Shares of train, validation and test documents; `,` or `/` between them."
    )
    max_seq_length: int = _setting(1024, "Tokens per sample.")
    data_cache_path: Optional[str] = _setting(
        None, "Folder for index maps. Left out: `index-cache` beside the token files."
    )
    share_folder: bool = _setting(
        False, "All nodes see one file system: a single process builds the index maps, not one per node."
    )

    def __post_init__(self):
        _check_range(self, "max_seq_length", at_least=1, whole=True)
        try:
            parse_splits(self.split)
        except ValueError as error:
            raise SettingError("split", self.split, str(error)) from None
        if self.input_dir is not None and not self.input_dir.strip():
            raise SettingError(
                "input_dir", self.input_dir, "expected a prefix, a folder, or weights and prefixes"
            )


@dataclass
class PretrainArguments(TrainingArguments):
    """How training runs. PaddleNLP's other TrainingArguments are accepted too, with their meaning there."""

    _argument_group_name = "training"

    output_dir: str = _setting("", "Folder for checkpoints, logs, curves.png and the final model.")
    overwrite_output_dir: bool = _setting(
        False, "Start from scratch although output_dir holds files; checkpoints in it are not resumed from."
    )
    do_train: bool = _setting(False, "Train.")
    do_eval: bool = _setting(
        False, "Evaluate every eval_steps while training, and at the end; alone: evaluate once."
    )
    do_predict: bool = _setting(False, "Measure the loss on the test split at the end.")
    dry_run: bool = _setting(
        False, "Print settings, parameters, memory, tokens and FLOPs per step and one sample, then stop."
    )
    dry_run_devices: int = _setting(
        1, "With dry_run: devices of the run that is described. 1: as many as the parallel degrees ask for."
    )
    continue_training: bool = _setting(
        False,
        "Start from the weights in model_name_or_path, with the sequence-length warm-up; else from scratch.",
    )
    per_device_train_batch_size: int = _setting(8, "Samples per device and micro-batch in training.")
    per_device_eval_batch_size: int = _setting(8, "Samples per device and batch in evaluation.")
    gradient_accumulation_steps: int = _setting(1, "Micro-batches per optimizer step.")
    max_steps: int = _setting(-1, "Optimizer steps to train; needed for training.")
    learning_rate: float = _setting(5e-5, "Highest learning rate, reached after warm-up.")
    min_learning_rate: float = _setting(1e-5, "Learning rate at decay_steps and after.")
    lr_scheduler_type: str = _setting(
        "linear", "Shape of the decay from learning_rate to min_learning_rate.", choices=["cosine", "linear"]
    )
    decay_steps: Optional[int] = _setting(
        None, "Step at which min_learning_rate is reached. Left out: max_steps."
    )
    warmup_steps: int = _setting(0, "Steps of linear warm-up; 0 means warmup_ratio x max_steps.")
    warmup_ratio: float = _setting(0.0, "Share of max_steps spent in warm-up, where warmup_steps is 0.")
    adam_beta1: float = _setting(0.9, "AdamW's beta1.")
    adam_beta2: float = _setting(0.999, "AdamW's beta2.")
    adam_epsilon: float = _setting(1e-8, "AdamW's epsilon.")
    weight_decay: float = _setting(0.0, "AdamW's weight decay; biases and LayerNorms get none.")
    max_grad_norm: float = _setting(1.0, "Gradients are clipped to this global norm; 0 turns clipping off.")
    seed: int = _setting(42, "Seed of initialisation, shuffling and positions.")

    logging_steps: int = _setting(500, "Log every so many steps.")
    save_steps: int = _setting(500, "Write a checkpoint every so many steps.")
    save_total_limit: Optional[int] = _setting(None, "Newest checkpoints to keep. Left out: all of them.")
    eval_steps: int = _setting(500, "Evaluate every so many steps.")
    eval_iters: int = _setting(10, "Batches per evaluation; the test split gets ten times as many.")
    report_to: Optional[List[str]] = _setting(
        ["visualdl"], "Where curves are logged: " + ", ".join(f"`{name}`" for name in REPORTERS) + "."
    )
    disable_tqdm: Optional[bool] = _setting(False, "No progress bars.")
    dataloader_num_workers: int = _setting(0, "Processes that load data; 0 loads in the training process.")
    resume_from_checkpoint: Optional[str] = _setting(
        None, "Checkpoint folder to resume from. Left out: the newest one in output_dir."
    )
    unified_checkpoint: Optional[bool] = _setting(
        False, "PaddleNLP's unified checkpoints, which load under other parallel degrees."
    )

    device: Optional[str] = _setting(
        None, "`cpu` or `gpu`. Left out: a GPU where there is one, else the CPU."
    )
    bf16: bool = _setting(False, "bfloat16; GPU only, falls back to float32 with a warning on CPU.")
    fp16: bool = _setting(False, "float16; GPU only, falls back to float32 with a warning on CPU.")
    fp16_opt_level: str = _setting(
        "O1",
        "O1: mixed precision per operator; O2: half-precision weights, float32 masters. For bf16 as well.",
        choices=["O0", "O1", "O2"],
    )
    scale_loss: float = _setting(2.0**15, "Initial loss scale of float16 training.")
    amp_master_grad: bool = _setting(False, "With O2: float32 gradients for clipping and the update.")
    recompute: bool = _setting(
        False,
        "Recompute activations in the backward pass instead of keeping them; see recompute_granularity.",
    )
    sharding: str = _setting(
        "", "`stage1` (optimizer), `stage2` (and gradients) or `stage3` (and weights) split over devices."
    )
    sharding_parallel_degree: int = _setting(-1, "Devices that share one sharded copy; -1: all of them.")
    tensor_parallel_degree: int = _setting(-1, "Devices that share each layer.")
    pipeline_parallel_degree: int = _setting(-1, "Pipeline stages, each some of the layers on devices of its own.")
    sequence_parallel: bool = _setting(
        False, "Split activations along the sequence between the devices of a tensor-parallel group."
    )

    def __post_init__(self):
        _check_choices(self)
        self._check_numbers()
        self._check_reporters()
        self._check_parallelism()
        self._resolve_device()
        self._resolve_precision()
        if self.do_eval and self.evaluation_strategy == "no":
            self.evaluation_strategy = "steps"
        # PaddleNLP's own step joins the process group and forgets parallel degrees in a single process; a dry
        # run describes any number of devices from one process and needs neither.
        if not self.dry_run:
            _refuse_not_yet(self)
            if self.sharding and paddle.distributed.get_world_size() == 1:
                logger.warning(f"sharding {self.sharding} does nothing in a single process.")
            super().__post_init__()
        self._resolve_schedule()

    def _check_numbers(self):
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise SettingError(item.name, value, "expected a finite number")
        for name in (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "logging_steps",
            "save_steps",
            "eval_steps",
            "eval_iters",
        ):
            _check_range(self, name, at_least=1, whole=True)
        for name in ("decay_steps", "save_total_limit"):
            if getattr(self, name) is not None:
                _check_range(self, name, at_least=1, whole=True)
        for name in ("warmup_steps", "dataloader_num_workers", "seed"):
            _check_range(self, name, at_least=0, whole=True)
        for name in ("learning_rate", "adam_epsilon", "scale_loss"):
            _check_range(self, name, above=0)
        for name in ("min_learning_rate", "weight_decay", "max_grad_norm"):
            _check_range(self, name, at_least=0)
        for name in ("adam_beta1", "adam_beta2"):
            _check_range(self, name, at_least=0, below=1)
        _check_range(self, "warmup_ratio", at_least=0, at_most=1)
        if self.min_learning_rate > self.learning_rate:
            raise SettingError(
                "min_learning_rate",
                self.min_learning_rate,
                f"expected at most learning_rate, {self.learning_rate}",
            )
        if self.max_steps != -1:
            _check_range(self, "max_steps", at_least=1, whole=True)

    def _check_reporters(self):
        for name in self.report_to or []:
            if name not in REPORTERS:
                raise SettingError(
                    "report_to", name, f"expected one of {', '.join(REPORTERS)}{_nearest(name, REPORTERS)}"
                )
            package = PACKAGE_OF_REPORTER.get(name)
            if package and not self.dry_run and importlib.util.find_spec(package) is None:
                raise SettingError(
                    "report_to", name, f"it needs the package {package}, which is not installed; pip install {package}"
                )

    def _check_parallelism(self):
        for name in ("sharding_parallel_degree", "tensor_parallel_degree", "pipeline_parallel_degree"):
            if getattr(self, name) != -1:
                _check_range(self, name, at_least=1, whole=True)
        if self.sharding not in ("", "stage1", "stage2", "stage3"):
            raise SettingError("sharding", self.sharding, "expected stage1, stage2 or stage3, or nothing")
        _check_range(self, "dry_run_devices", at_least=1, whole=True)
        self._check_degrees()

    def degrees(self, virtual: int = 1) -> Degrees:
        """The parallel degrees, 1 where something is off. Before PaddleNLP's step has turned names to options."""
        stage = self.sharding if isinstance(self.sharding, str) else " ".join(o.value for o in self.sharding)
        return Degrees(
            tensor=max(self.tensor_parallel_degree, 1),
            pipeline=max(self.pipeline_parallel_degree, 1),
            virtual=virtual,
            sharding=max(self.sharding_parallel_degree, 1),
            stage=stage,
            sequence_parallel=self.sequence_parallel,
        )

    def devices(self) -> int:
        """Processes of the run; those that a dry run describes."""
        world = paddle.distributed.get_world_size()
        if world == 1 and self.dry_run:
            return self.dry_run_devices if self.dry_run_devices > 1 else self.degrees().product
        return world

    def _check_degrees(self, virtual: int = 1, seq_length: int = 0) -> None:
        degrees = self.degrees(virtual)
        if self.devices() == 1 and self.sharding:
            degrees = degrees._replace(sharding=1)  # accepted, and said to do nothing
        batch = self.per_device_train_batch_size, self.gradient_accumulation_steps
        fault = first_fault(degrees, self.devices(), seq_length, *batch)
        if fault is not None:
            raise SettingError(*fault)

    def _resolve_schedule(self):
        if self.decay_steps is None and self.max_steps > 0:
            self.decay_steps = self.max_steps
        if self.warmup_steps == 0 and self.max_steps > 0:
            self.warmup_steps = int(self.warmup_ratio * self.max_steps)

    def _resolve_device(self):
        if self.device is None:
            self.device = "gpu" if gpu_count() else "cpu"
        if not re.fullmatch(r"cpu|gpu(:\d+)?", self.device):
            raise SettingError("device", self.device, "expected cpu or gpu")
        if self.device != "cpu" and gpu_count() == 0 and not self.dry_run:
            raise SettingError(
                "device",
                self.device,
                "this machine has no GPU that Paddle can use; set --device cpu, or install paddlepaddle-gpu",
            )

    def _resolve_precision(self):
        if self.fp16 and self.bf16:
            raise SettingError("fp16", self.fp16, "fp16 and bf16 are both on; expected at most one of them")
        if self.fp16_opt_level == "O2" and not (self.fp16 or self.bf16):
            raise SettingError("fp16_opt_level", "O2", "O2 needs bf16 or fp16; turn one on, or set O1")
        if (self.fp16 or self.bf16) and self.device == "cpu":
            asked = "bf16" if self.bf16 else "fp16"
            logger.warning(
                f"{asked} was asked for, the CPU has no kernels for it: training in float32 instead."
            )
            self.bf16 = self.fp16 = self.amp_master_grad = False
            self.fp16_opt_level = "O1"
        if self.amp_master_grad and not (self.fp16 or self.bf16):
            logger.warning("amp_master_grad has nothing to do without bf16 or fp16: turned off.")
            self.amp_master_grad = False


ARGUMENT_CLASSES = (ModelArguments, DataArguments, PretrainArguments)
Settings = Tuple[ModelArguments, DataArguments, PretrainArguments]


def gpu_count() -> int:
    """GPUs that this build of Paddle can use; 0 for the CPU build."""
    return paddle.device.cuda.device_count() if paddle.device.is_compiled_with_cuda() else 0


# ---------------------------------------------------------------- reading


def parse_pretrain_arguments(argv: Optional[Sequence[str]] = None) -> Settings:
    """Read `[file.json] [--flag value ...]` into (model, data, training) arguments; flags win over the file.

    Args:
        argv: words of the command line without the program; None means `sys.argv[1:]`.

    Raises:
        ValueError: an unreadable file, an unknown name, a wrong type, a value out of range, or settings that
            cannot be honoured together. The message names the file or the command line, the setting and the
            fix.
    """
    return parse_arguments(argv, ARGUMENT_CLASSES, "run_pretrain.py", _reconcile)


def parse_arguments(
    argv: Optional[Sequence[str]], classes: tuple, program: str, reconcile: Callable
) -> tuple:
    """Read `[file.json] [--flag value ...]` into one object of each of `classes`, checked together by `reconcile`;
    see `parse_pretrain_arguments`."""
    words = list(sys.argv[1:] if argv is None else argv)
    path = words.pop(0) if words and not words[0].startswith("-") else None
    parser = _Parser(
        classes, prog=program, usage="%(prog)s [settings.json] [--flag value ...]", allow_abbrev=False
    )
    from_file = _read_settings_file(path, classes) if path is not None else {}
    from_flags = vars(parser.parse_strictly(words, _hints(classes)))
    values = {**from_file, **from_flags}

    try:
        built = [
            cls(**{item.name: values[item.name] for item in dataclasses.fields(cls) if item.name in values})
            for cls in classes
        ]
        return reconcile(*built)
    except SettingError as error:
        if error.name not in values:
            seen = f"{error.name} is not set"
            if type(error.value) in (int, float) and error.value >= 0:
                seen += f" (and so {error.value})"
            raise ValueError(f"{seen}: {error.expected}") from None
        source = "command line" if error.name in from_flags else path
        raise ValueError(f"{source}: {error}") from None
    except AssertionError as error:  # PaddleNLP checks some settings by assert
        raise ValueError(f"these settings do not fit together: {error}") from None


class _Parser(PdArgumentParser):
    """PaddleNLP's parser, which makes a flag of every field; here errors raise and name the nearest flag."""

    def error(self, message):
        raise ValueError(f"command line: {message}")

    def parse_strictly(self, words: Sequence[str], known: Sequence[str]):
        """Namespace of only those settings that `words` gives; the nearest `known` one stands in errors."""
        for action in self._actions:
            if action.dest != "help":
                action.default, action.required = argparse.SUPPRESS, False
                action.choices = None  # _check_choices names the nearest one
        for flag, times in Counter(word.split("=")[0] for word in words if word.startswith("--")).items():
            if times > 1:
                logger.warning(f"command line: {flag} is given {times} times: the last one counts.")
        namespace, unknown = self.parse_known_args(words)
        for word in unknown:
            if word.startswith("-"):
                name = word.split("=")[0].lstrip("-")
                raise ValueError(f"command line: unknown flag {word!r}{_nearest(name, known, '--')}")
        if unknown:
            raise ValueError(
                f"command line: {unknown[0]!r} belongs to no flag; flags look like --max_steps 10"
            )
        return namespace


def _read_settings_file(path: str, classes: tuple) -> Dict[str, Any]:
    """Settings of a JSON object, types checked; see `parse_pretrain_arguments` for the errors."""

    def pairs(items):
        seen = {}
        for key, value in items:
            if key in seen:
                raise ValueError(f"{path}: {key!r} is given twice; keep one of them")
            seen[key] = value
        return seen

    def whole(text):
        if len(text) > LONGEST_NUMBER:
            raise ValueError(f"{path}: a number of {len(text)} digits, {text[:10]}..., is not one that can be used")
        return int(text)

    def constant(text):
        raise ValueError(f"{path}: {text} is not a number that can be used")

    try:
        with open(path, encoding="utf-8-sig") as file:  # Windows editors put a mark before the text
            settings = json.load(file, object_pairs_hook=pairs, parse_constant=constant, parse_int=whole)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read as a settings file: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}: line {error.lineno}, column {error.colno}: not JSON: {error.msg}"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply; expected one object of settings") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: expected a JSON object of settings, found a {type(settings).__name__}")
    return {key: _typed(path, key, value, _hints(classes)) for key, value in settings.items()}


def _typed(path: str, key: str, value: Any, hints: Dict[str, Any]) -> Any:
    """`value` of the JSON key as its field wants it."""
    if key not in hints:
        raise ValueError(f"{path}: unknown setting {key!r}{_nearest(key, hints)}")
    try:
        return _convert(value, hints[key])
    except (TypeError, OverflowError):
        expected = _type_name(hints[key])
        raise ValueError(f"{path}: {key} = {json.dumps(value)}: expected {expected}") from None


def _convert(value: Any, hint: Any) -> Any:
    """`value` as `hint`, or TypeError. 0 and 1 are booleans, an integer is a float; no other casts."""
    if get_origin(hint) is Union:
        inner = next(part for part in get_args(hint) if part is not type(None))
        return None if value is None else _convert(value, inner)
    if get_origin(hint) is list:
        items = value if isinstance(value, list) else [value]
        return [_convert(item, get_args(hint)[0]) for item in items]
    if hint is bool and type(value) is int and value in (0, 1):
        return bool(value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not (hint if hint in (bool, int, float, dict) else str):
        raise TypeError
    return value


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Union:
        return " or ".join("null" if part is type(None) else _type_name(part) for part in get_args(hint))
    if get_origin(hint) is list:
        return f"a list of {_type_name(get_args(hint)[0])}"
    names = {bool: "true or false", int: "an integer", float: "a number", dict: "an object"}
    return names.get(hint, "a string in quotes")


@functools.lru_cache(maxsize=None)
def _hints(classes: tuple = ARGUMENT_CLASSES) -> Dict[str, Any]:
    """Name -> type of every setting; one whose default is None may be null whatever its annotation says."""
    hints = {}
    for cls in classes:
        types = get_type_hints(cls)
        for item in dataclasses.fields(cls):
            optional = item.default is None
            hints[item.name] = Optional[types[item.name]] if optional else types[item.name]
    return hints


def _nearest(word: str, known: Sequence[str], prefix: str = "") -> str:
    """ "; did you mean ...?" for the known name nearest to `word`, or an empty string where none is near."""
    near = difflib.get_close_matches(str(word).lstrip("-"), list(known), n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


# ---------------------------------------------------------------- checks


def _check_choices(arguments: Any) -> None:
    for item in dataclasses.fields(arguments):
        choices, value = item.metadata.get("choices") or THEIR_CHOICES.get(item.name), getattr(arguments, item.name)
        if choices and value not in choices:
            raise SettingError(
                item.name, value, f"expected one of {', '.join(choices)}{_nearest(value, choices)}"
            )


def _check_range(arguments, name, above=None, at_least=None, below=None, at_most=None, whole=False) -> None:
    """SettingError unless the setting lies in the range; whole numbers also stay below 2^31."""
    value = getattr(arguments, name)
    if whole and at_most is None:
        at_most = LARGEST_COUNT
    kind = "a whole number" if whole else "a finite number"
    bounds = {
        "above": (above, lambda bound: value > bound),
        "at least": (at_least, lambda bound: value >= bound),
        "below": (below, lambda bound: value < bound),
        "at most": (at_most, lambda bound: value <= bound),
    }
    bounds = {words: (bound, holds) for words, (bound, holds) in bounds.items() if bound is not None}
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not all(holds(bound) for bound, holds in bounds.values()):
        limits = " and ".join(f"{words} {bound}" for words, (bound, _) in bounds.items())
        raise SettingError(name, value, f"expected {kind} {limits}")


def _reconcile(model: ModelArguments, data: DataArguments, training: PretrainArguments) -> Settings:
    """Check what spans more than one group, and resolve what one group means for another."""
    training._check_degrees(model.virtual_pp_degree, data.max_seq_length)
    if not training.dry_run:
        _check_task(data, training)
    changes = {}
    if training.device == "cpu":
        if model.use_flash_attention:
            logger.warning(
                "use_flash_attention needs a GPU: using plain attention, which gives the same values."
            )
            changes["use_flash_attention"] = False
        if model.fuse_linear:
            logger.warning(
                "fuse_linear has no CPU kernel: using plain linear layers, which give the same values."
            )
            changes["fuse_linear"] = False
    if model.use_recompute_attn and training.recompute:
        logger.warning("use_recompute_attn is on: it replaces recompute, which is turned off.")
        training.recompute = False
    return dataclasses.replace(model, **changes), data, training


def _refuse_not_yet(arguments: Any) -> None:
    for name, asked, reason in NOT_YET:
        if hasattr(arguments, name) and asked(getattr(arguments, name)):
            raise SettingError(name, getattr(arguments, name), reason)


def _check_task(data: DataArguments, training: PretrainArguments) -> None:
    if not (training.do_train or training.do_eval or training.do_predict):
        raise SettingError(
            "do_train", False, "nothing to do; set --do_train, --do_eval, --do_predict or --dry_run"
        )
    if not training.output_dir:
        raise SettingError("output_dir", training.output_dir, "expected the folder to write to")
    if data.input_dir is None:
        raise SettingError(
            "input_dir", None, "expected the token files to read: a prefix or a folder of them"
        )
    if training.metric_for_best_model not in (None, "loss", "eval_loss"):
        raise SettingError(
            "metric_for_best_model", training.metric_for_best_model, "pretraining measures the loss; expected loss"
        )
    if training.do_train and training.max_steps == -1:
        raise SettingError("max_steps", -1, "expected the number of optimizer steps to train")


# ---------------------------------------------------------------- documentation


def settings_table() -> Dict[str, List[Tuple[str, str, str]]]:
    """Documented settings by part: {"model": [(flag, default, help), ...], "data": ..., "training": ...}."""
    table = {}
    for cls in ARGUMENT_CLASSES:
        own = cls.__dict__.get("__annotations__", {})
        rows = [
            (f"--{item.name}", _default_text(item), item.metadata["help"])
            for item in dataclasses.fields(cls)
            if item.name in own
        ]
        table[cls._argument_group_name] = sorted(rows, key=lambda row: list(own).index(row[0][2:]))
    return table


def _default_text(item: dataclasses.Field) -> str:
    if item.default_factory is not dataclasses.MISSING:
        return " ".join(item.default_factory())
    if item.default is None or item.default == "":
        return ""
    return f"{item.default:g}" if isinstance(item.default, float) else str(item.default)
