"""From settings to the parts of a pretraining run: tokenizer, config, datasets, model, plan for the estimate.

Everything here that a user can get wrong is a ValueError before training starts.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional

import paddle
from paddlenlp.utils.log import logger

from ..attention import score_rows
from ..configuration import BUILT_IN_CONFIGS, Ernie35Config
from ..data.pretrain import build_train_valid_test_datasets, parse_input_dir
from .. import conversion, cpu_ops, weight_files
from ..modeling import Ernie35ForCausalLM
from ..modeling_pipe import Ernie35ForCausalLMPipe
from ..stages import balanced_stages
from ..norm import usable_op
from ..tokenizer import MODEL_FILE, Ernie35Tokenizer
from .arguments import DataArguments, ModelArguments, PretrainArguments
from .checkpoint import checkpoints, last_checkpoint, what_is_missing
from .estimate import Plan
from .trainer import TEST_ITERS_PER_EVAL_ITER

WEIGHT_FILES = ("model_state*.pdparams", "model_state*.pdparams.index.json", "model*.safetensors*")
# Fields of the config that decide which weights a model has, and those that decide what it does with them.
SHAPE_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "parallel_attn_hatf", "use_bias", "weight_share_add_bias", "tie_word_embeddings",
)  # fmt: skip
BEHAVIOUR_FIELDS = (
    "max_position_embeddings", "enable_random_position_ids", "use_progressive_seq_len", "layer_norm_eps",
)  # fmt: skip
# What a run leaves in output_dir before its first checkpoint; a killed run may be started again over these.
LEFT_BY_A_START = ("runs", "log*", "*.log", "index-cache", "curves.png", ".*", "previous*")


@dataclass(frozen=True)
class Settings:
    """The three groups of settings of one run."""

    model: ModelArguments
    data: DataArguments
    training: PretrainArguments


# ---------------------------------------------------------------- tokenizer and config


def load_tokenizer(arguments: ModelArguments) -> Optional[Ernie35Tokenizer]:
    """The tokenizer that is named, else the one in the model's folder, else None."""
    folder = arguments.tokenizer_name_or_path
    if folder is None and os.path.isfile(os.path.join(arguments.model_name_or_path, MODEL_FILE)):
        folder = arguments.model_name_or_path
    if folder is None:
        logger.warning(
            "No tokenizer is named (--tokenizer_name_or_path): output_dir gets none, no text is shown."
        )
        return None
    return Ernie35Tokenizer.from_pretrained(folder)


def load_config(
    settings: Settings, tokenizer: Optional[Ernie35Tokenizer], weights: Optional[str]
) -> Ernie35Config:
    """The model's config with the run's settings in it; what is changed to fit them is said.

    Args:
        weights: folder whose weights the run loads (`weights_folder`); its config counts then.

    Raises:
        ValueError: no such config, or a tokenizer larger than the weights.
    """
    arguments, training = settings.model, settings.training
    name = weights or arguments.model_name_or_path
    config = (
        Ernie35Config.from_dict(_read_object(name))
        if os.path.isfile(name)
        else Ernie35Config.from_pretrained(name)
    )
    changes = {
        "use_flash_attention": arguments.use_flash_attention,
        "fuse_ln": arguments.use_fused_ln,
        "fuse_linear": arguments.fuse_linear,
        "use_recompute": training.recompute,
        "use_recompute_attn": arguments.use_recompute_attn,
        "recompute_granularity": arguments.recompute_granularity,
        "vocab_size": _vocabulary(config, tokenizer, from_scratch=weights is None),
        "max_position_embeddings": _positions(config, settings.data.max_seq_length),
    }
    if training.continue_training:
        changes["use_progressive_seq_len"] = True
    config = Ernie35Config.from_dict({**config.to_dict(), **changes})
    _set_degrees(config, settings)
    return config


def _set_degrees(config: Ernie35Config, settings: Settings) -> None:
    """Put the run's parallel degrees into the config, whatever run its file comes from.

    Raises:
        ValueError: degrees that do not divide this model.
    """
    training = settings.training
    degrees = training.degrees(settings.model.virtual_pp_degree)
    config.tensor_parallel_degree = degrees.tensor
    config.tensor_parallel_rank = 0 if training.dry_run else max(training.tensor_parallel_rank, 0)
    config.sequence_parallel = degrees.sequence_parallel
    config.virtual_pp_degree = degrees.virtual
    conversion.check_divides(config, degrees.tensor)
    if degrees.pipeline > 1:
        balanced_stages(config, degrees.pipeline * degrees.virtual)


def _read_object(path: str) -> dict:
    try:
        with open(path, encoding="utf-8-sig") as file:  # Windows editors put a mark before the text
            content = json.load(file)
    except ValueError as error:
        raise ValueError(f"model_name_or_path = {path!r}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(
            f"model_name_or_path = {path!r}: expected a JSON object, found a {type(content).__name__}"
        )
    return content


def weights_folder(settings: Settings) -> Optional[str]:
    """Folder whose weights the run starts from or measures; None where it starts from scratch.

    `--continue_training 1` starts from model_name_or_path. Without training, the first of these that holds
    weights is measured: resume_from_checkpoint, model_name_or_path, output_dir, its last checkpoint.

    Raises:
        ValueError: `--continue_training 1`, and there are no weights.
    """
    name, training = settings.model.model_name_or_path, settings.training
    if training.continue_training:
        _check_weights_exist(name)
        return name
    if training.do_train or training.dry_run:
        return None
    last, _ = last_checkpoint(training.output_dir)
    for folder in (training.resume_from_checkpoint, name, training.output_dir, last):
        if folder and has_weights(str(folder)):
            return str(folder)
    logger.warning(
        f"Neither {name} nor {training.output_dir} holds weights: a model that was never trained is measured."
    )
    return None


def _check_weights_exist(name: str) -> None:
    if name in BUILT_IN_CONFIGS:
        raise ValueError(
            f"model_name_or_path = {name!r}: no weights of it were ever released, so none can be continued "
            "from; train from scratch with --continue_training 0, or name a folder with weights"
        )
    if not has_weights(name):
        raise ValueError(
            f"model_name_or_path = {name!r}: holds no weights ({', '.join(WEIGHT_FILES)}), which "
            "--continue_training 1 starts from; name a folder with weights, or train from scratch with "
            "--continue_training 0"
        )


def has_weights(folder: str) -> bool:
    """Whether the folder holds a model's weights."""
    return os.path.isdir(folder) and any(
        fnmatch.filter(os.listdir(folder), pattern) for pattern in WEIGHT_FILES
    )


def _vocabulary(config: Ernie35Config, tokenizer: Optional[Ernie35Tokenizer], from_scratch: bool) -> int:
    """Size of the vocabulary: it holds the tokenizer's; from scratch it is a multiple of 128.

    It is the same under every layout, so that a run can go on under another one.
    """
    pieces = len(tokenizer) if tokenizer is not None else 0
    if not from_scratch:
        if pieces > config.vocab_size:
            raise ValueError(
                f"the tokenizer has {pieces} tokens, the weights have rows for {config.vocab_size} "
                "(vocab_size); take the tokenizer that belongs to the weights, or train from scratch with "
                "--continue_training 0"
            )
        return config.vocab_size
    wanted = max(config.vocab_size, pieces)
    rounded = -(-wanted // conversion.VOCABULARY_MULTIPLE) * conversion.VOCABULARY_MULTIPLE
    if rounded != config.vocab_size:
        logger.info(
            f"vocab_size {config.vocab_size} -> {rounded}: a multiple of {conversion.VOCABULARY_MULTIPLE} that holds "
            f"the config's vocabulary and the tokenizer's {pieces} tokens."
        )
    return rounded


def _positions(config: Ernie35Config, seq_length: int) -> int:
    if seq_length > config.max_position_embeddings:
        logger.info(
            f"max_position_embeddings {config.max_position_embeddings} -> {seq_length} (max_seq_length)."
        )
    return max(seq_length, config.max_position_embeddings)


# ---------------------------------------------------------------- datasets


def build_datasets(settings: Settings, vocab_size: int, planned_ranks: Optional[int] = None) -> List:
    """[train, valid, test], None where a split is empty; as many samples as the run will read.

    Args:
        planned_ranks: groups of devices that will read samples of their own, where this process only looks (a
            dry run); None: those of this run, of which one a node builds the index maps.

    Raises:
        ValueError: what is wrong with the files, or that a split the run needs is empty.
    """
    data, training = settings.data, settings.training
    many = planned_ranks is None and paddle.distributed.get_world_size() > 1
    data_ranks = planned_ranks or training.dataset_world_size
    rank = paddle.distributed.get_rank() if data.share_folder else training.local_process_index
    datasets = build_train_valid_test_datasets(
        parse_input_dir(data.input_dir), data.split, num_samples(training, data_ranks), data.max_seq_length,
        training.seed, data.data_cache_path, vocab_size=vocab_size,
        is_builder=not many or rank == 0, barrier=paddle.distributed.barrier if many else None,
    )  # fmt: skip
    needs = {"train": training.do_train, "valid": training.do_eval, "test": training.do_predict}
    for position, (name, needed) in enumerate(needs.items()):
        if needed and datasets[position] is None:
            flag = {"train": "do_train", "valid": "do_eval", "test": "do_predict"}[name]
            raise ValueError(
                f"split = {data.split!r}: the {name} split holds no documents, but --{flag} is on; give it "
                "a larger share, add documents, or turn the flag off"
            )
    return datasets


def num_samples(training: PretrainArguments, data_ranks: int) -> List[int]:
    """Samples that a run reads of each split, counted as in PaddleNLP's pretraining scripts."""
    steps = max(training.max_steps, 0)
    train = training.per_device_train_batch_size * training.gradient_accumulation_steps * steps
    one_evaluation = training.per_device_eval_batch_size * training.eval_iters
    valid = one_evaluation * (steps // training.eval_steps + 1)
    test = one_evaluation * TEST_ITERS_PER_EVAL_ITER
    asked = (training.do_train, training.do_eval, training.do_predict)
    return [count * data_ranks if wanted else 0 for count, wanted in zip((train, valid, test), asked)]


def first_sample(
    settings: Settings, config: Ernie35Config, plan: Plan, tokenizer: Optional[Ernie35Tokenizer]
) -> str:
    """The first training sample as text, or why there is none. The run uses the index maps made for it.

    Raises:
        ValueError: there are data, and something is wrong with them.
    """
    data, training = settings.data, settings.training
    if data.input_dir is None:
        return "First sample: none, no input_dir is set."
    try:
        parse_input_dir(data.input_dir)
    except ValueError as error:  # the description of the run does not depend on the data being here
        return f"First sample: none: {error}"
    training = dataclasses.replace(training, do_train=True, max_steps=max(training.max_steps, 1))
    asked = dataclasses.replace(settings, training=training)
    datasets = build_datasets(
        asked, config.vocab_size, planned_ranks=plan.data_parallel * plan.sharding_degree
    )
    ids = datasets[0][0]["text"]
    text = f"ids {ids[:16].tolist()} ..." if tokenizer is None else repr(tokenizer.decode(ids.tolist()))
    return f"First sample ({len(ids)} tokens): {text}"


# ---------------------------------------------------------------- model


def prepare_device(settings: Settings) -> None:
    """Compute on the device that the settings name; a launched process has its own GPU already.

    Raises:
        ValueError: the fused LayerNorm is asked for, and it is not built or does not run there.
    """
    device = settings.training.device
    if paddle.distributed.get_world_size() == 1 or device == "cpu":
        paddle.set_device(device)
    if settings.model.use_fused_ln:
        usable_op(paddle.get_device())


def build_model(
    training: PretrainArguments, config: Ernie35Config, weights: Optional[str]
) -> Ernie35ForCausalLM:
    """The model, new or with the weights of a folder; O2 makes them half precision.

    Raises:
        ValueError: weights that cannot be read, or that are not all of this model's.
    """
    dtype = "float32"
    if training.fp16_opt_level == "O2" and (training.bf16 or training.fp16):
        dtype = "bfloat16" if training.bf16 else "float16"
    kind = Ernie35ForCausalLMPipe if training.pipeline_parallel_degree > 1 else Ernie35ForCausalLM
    paddle.seed(training.seed)  # the same on all ranks, so that they hold parts of one model
    with paddle.utils.unique_name.guard():  # a checkpoint's optimizer state goes by these names
        if weights is None:
            return kind.from_config(config, dtype=dtype)
        logger.info(f"Weights come from {weights}.")
        return _with_weights(kind, weights, config, dtype)


def _with_weights(kind, weights: str, config: Ernie35Config, dtype: str) -> Ernie35ForCausalLM:
    """The model with a folder's weights, all of them."""
    try:
        model = kind.from_pretrained(weights, config=config, dtype=dtype)
    except Exception as error:  # the readers of weight files raise whatever the bytes lead them to
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(
            f"{weights}: the weights cannot be loaded into the model of its config.json: {reason[:300]} Copy the "
            "folder again, or name another one"
        ) from error
    missing = getattr(model, "missing_weights", None)
    if missing is None:  # pipeline stages do not tell
        missing = sorted(model.state_dict().keys() - weight_files.Folder(Path(weights)).pieces().keys())
    if missing:
        raise ValueError(
            f"{weights}: {len(missing)} weights of the model of its config.json are not in its files, such as "
            f"{missing[0]}; they would start at random. Take the config.json that belongs to these weights"
        )
    return model


# ---------------------------------------------------------------- output folder and estimate


def check_output_dir(training: PretrainArguments) -> None:
    """Refuse to train over files that no checkpoint explains.

    Raises:
        ValueError: output_dir cannot be written, or holds files but no checkpoint, and nothing says what to
            do.
    """
    folder = Path(training.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise ValueError(
            f"output_dir = {training.output_dir!r}: cannot be written: {error.strerror}"
        ) from None
    if not os.access(folder, os.W_OK):
        raise ValueError(f"output_dir = {training.output_dir!r}: cannot be written: no permission")
    if not training.do_train or training.overwrite_output_dir or training.resume_from_checkpoint:
        return
    foreign = [name for name in names if not any(fnmatch.fnmatch(name, known) for known in LEFT_BY_A_START)]
    if foreign and not any(name.startswith("checkpoint-") for name in foreign):
        raise ValueError(
            f"output_dir = {training.output_dir!r}: holds {', '.join(foreign[:5])} but no checkpoint to "
            "resume from; choose another folder, or set --overwrite_output_dir to train from scratch over it"
        )


def check_checkpoint(training: PretrainArguments) -> None:
    """ValueError unless resume_from_checkpoint, where it is set, is a whole checkpoint."""
    named = training.resume_from_checkpoint
    missing = what_is_missing(named) if named else None
    if missing:
        found = ", ".join(path.name for path in checkpoints(training.output_dir)) or "none"
        raise ValueError(
            f"resume_from_checkpoint = {named!r} is not a whole checkpoint: {missing}; checkpoints in "
            f"{training.output_dir}: {found}. Name one of them, or leave the setting out to take the newest"
        )


def check_same_model(training: PretrainArguments, config: Ernie35Config) -> None:
    """A run continues with the model that it began with.

    Raises:
        ValueError: the checkpoint that would be resumed holds a model of other sizes.
    """
    folder = training.resume_from_checkpoint
    if not folder and not training.overwrite_output_dir:
        folder, _ = last_checkpoint(training.output_dir)
    if not (training.do_train and folder and os.path.isfile(os.path.join(folder, "config.json"))):
        return
    saved = Ernie35Config.from_pretrained(str(folder))
    for name in SHAPE_FIELDS + BEHAVIOUR_FIELDS:
        before, now = getattr(saved, name), getattr(config, name)
        if before != now and name in SHAPE_FIELDS:
            raise ValueError(
                f"{folder}: holds a model with {name} {before}, the settings ask for {now}; resume with the model and "
                "tokenizer that began this run, choose another output_dir, or start again with --overwrite_output_dir"
            )
        if before != now:
            logger.warning(f"{name} of the model has changed since {folder}: {before} -> {now}.")


def make_plan(settings: Settings, config: Ernie35Config) -> Plan:
    """How the run uses devices, for the estimate."""
    data, training = settings.data, settings.training
    tensor, pipeline, virtual, sharding, stage, _ = training.degrees(settings.model.virtual_pp_degree)
    devices = training.devices()
    if stage and training.sharding_parallel_degree == -1:
        sharding = max(devices // (tensor * pipeline), 1)
    half = "bfloat16" if training.bf16 else "float16"
    precision = half if training.bf16 or training.fp16 else "float32"
    return Plan(
        seq_length=data.max_seq_length,
        micro_batch=training.per_device_train_batch_size,
        accumulation=training.gradient_accumulation_steps,
        data_parallel=max(devices // (tensor * pipeline * sharding), 1),
        sharding_stage=int(stage[-1]) if stage else 0,
        sharding_degree=sharding,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        virtual=virtual,
        sequence_parallel=training.sequence_parallel,
        precision=precision,
        master_weights=training.fp16_opt_level == "O2",
        master_gradients=training.amp_master_grad,
        recompute=config.recompute_scope,
        score_rows=0 if config.use_flash_attention else score_rows(config, data.max_seq_length, precision),
        loss_in_place=precision == "float32" and cpu_ops.usable() is not None,
    )
