"""From settings to the parts of a fine-tuning run: tokenizer, samples, model with adapters, a look at the
data.

Everything here that a user can get wrong is a ValueError before training starts.
"""

from __future__ import annotations

import inspect
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Dict, List, Optional

import paddle
from paddlenlp.trainer.trainer_utils import IntervalStrategy
from paddlenlp.transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from paddlenlp.utils.log import logger

from .. import (
    auto,  # noqa: F401  makes the Auto classes find this model
    conversion,
    peft,
)
from ..configuration import BUILT_IN_CONFIGS, Ernie35Config
from ..data import sft
from ..data.records import SPLITS, Conversation, find_split_files, parse_records, read_conversations
from ..data.templates import load_template
from ..tokenizer import MODEL_FILE, Ernie35Tokenizer
from ..weight_files import warn_pickled_folder
from . import build, finetune_estimate
from .checkpoint import last_checkpoint
from .finetune import Generation
from .finetune_arguments import FinetuneArguments, FinetuneDataArguments, FinetuneModelArguments

TOKENIZER_CONFIG = "tokenizer_config.json"
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
RESUME_FIX = "resume with the settings that began this run, choose another output_dir, or set --overwrite_output_dir"

# ---------------------------------------------------------------- tokenizer


def load_tokenizer(arguments: FinetuneModelArguments):
    """The tokenizer that is named, else the model's.

    Raises:
        ValueError: none there, or one without an end-of-sequence token.
    """
    setting = "tokenizer_name_or_path" if arguments.tokenizer_name_or_path else "model_name_or_path"
    name = getattr(arguments, setting)
    if os.path.isfile(os.path.join(name, MODEL_FILE)):
        tokenizer = Ernie35Tokenizer.from_pretrained(name)
    else:
        wanted = f"a tokenizer's folder, with {MODEL_FILE} or {TOKENIZER_CONFIG}, or a name that can be downloaded"
        fix = "Name another one with --tokenizer_name_or_path."
        _check_folder(setting, name, TOKENIZER_CONFIG, wanted, fix)
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except Exception as error:  # whatever the many tokenizers raise
            raise _not_loaded(setting, name, error, wanted, fix) from None
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{name}: the tokenizer has no end-of-sequence token, without which no answer would ever end."
        )
    return tokenizer


def _check_folder(setting: str, name: str, file: str, wanted: str, fix: str) -> None:
    """ValueError where `name` is a file, or a folder without `file`."""
    if os.path.isfile(name):
        raise ValueError(f"{setting} = {name!r}: is a file; expected {wanted}. {fix}")
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, file)):
        raise ValueError(f"{setting} = {name!r}: the folder holds {_contents(name)}; expected {wanted}. {fix}")


def _contents(folder: str) -> str:
    names = sorted(os.listdir(folder))
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "") or "nothing"


def _not_loaded(setting: str, name: str, error: Exception, wanted: str, fix: str) -> ValueError:
    if os.path.isdir(name):
        reason = f"cannot be read ({type(error).__name__}: {str(error)[:200]})"
    else:
        reason = f"there is no such folder, and nothing of that name could be downloaded ({type(error).__name__})"
    return ValueError(f"{setting} = {name!r}: {reason}; expected {wanted}. {fix}")


def plain_encoder(tokenizer) -> Callable[[str], List[int]]:
    """Text -> ids without special tokens, whatever the text spells."""
    if hasattr(tokenizer, "encode_plain"):
        return tokenizer.encode_plain
    return lambda text: tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text, split_special_tokens=True))


def make_encoder(tokenizer, data: FinetuneDataArguments) -> sft.Encoder:
    """Conversations -> samples, by the template and the limits of the settings."""
    template = load_template(data.template, _own_template(tokenizer))
    specials = {**getattr(tokenizer, "added_tokens_encoder", {})}
    specials.update({token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens})
    bos = tokenizer.special_tokens_map.get("bos_token")  # asking for an absent one by name logs an error
    bos_id = tokenizer.convert_tokens_to_ids(str(bos)) if bos else None
    adds_bos = bos is not None and tokenizer("a")["input_ids"][:1] == [bos_id]
    return sft.Encoder(
        plain_encoder(tokenizer), template, tokenizer.eos_token_id, bos_id if adds_bos else None,
        data.limits(), specials, str(tokenizer.eos_token), str(bos or ""),
    )  # fmt: skip


def _own_template(tokenizer) -> Optional[str]:
    source = getattr(tokenizer, "chat_template", None)
    return source if isinstance(source, str) else None


def pad_id(tokenizer) -> int:
    """The id that fills rows up; any does, as it is masked."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


# ---------------------------------------------------------------- data


@dataclass
class Samples:
    """What became of the records of one split: conversations that were kept, and the sample of each."""

    conversations: List[Conversation]
    samples: List[dict]
    rows: List[dict]  # the samples, packed where that is asked for
    counts: Counter = field(default_factory=Counter)


def load_samples(data: FinetuneDataArguments, encoder: sft.Encoder) -> Dict[str, Samples]:
    """The splits that there are, as samples; what was left out or cut is said.

    Raises:
        ValueError: data that cannot be read, or a split of which nothing is left.
    """
    made = {}
    for split, (conversations, skipped) in _conversations(data).items():
        encoder.counts.clear()
        kept = [(talk, sample) for talk in conversations if (sample := encoder(talk)) is not None]
        conversations, samples = [talk for talk, _ in kept], [sample for _, sample in kept]
        counts = Counter({**encoder.counts, **{f"skipped, {reason}": n for reason, n in skipped.items()}})
        logger.info(f"{split}: {said(counts)}")
        if not samples:
            fix = "Raise src_length, tgt_length or max_length." if counts["dropped"] else "Look at its records."
            raise ValueError(
                f"dataset_name_or_path = {data.dataset_name_or_path or data.hub[0]!r}: nothing is left of the {split} "
                f"split ({said(counts)}). {fix}"
            )
        rows = samples
        if data.zero_padding:
            limit = encoder.limits.max_length
            rows = sft.pack_samples(samples, limit, data.greedy_zero_padding)
            logger.info(
                f"{split}: {len(samples):,} samples packed into {len(rows):,} rows of up to {limit} tokens; "
                "padding "
                f"{sft.padding_share(samples):.1%} -> {sft.padding_share(rows):.1%}."
            )
        made[split] = Samples(conversations, samples, rows, counts)
    return made


def said(counts: Counter) -> str:
    """Counts of records as words."""
    return ", ".join(f"{number:,} {what}" for what, number in sorted(counts.items())) or "it has no records"


def _conversations(data: FinetuneDataArguments) -> Dict[str, tuple]:
    if data.dataset_name_or_path is not None:
        found = {}
        for split, files in find_split_files(data.dataset_name_or_path).items():
            skipped = Counter()
            found[split] = (read_conversations(files, skipped), skipped)
        return found
    return _from_hub(*data.hub, "task_name" if data.data_name is None else "data_name")


def _from_hub(dataset: str, task: Optional[str], setting: str) -> Dict[str, tuple]:
    try:
        # PaddleNLP puts another function at datasets.load_dataset, with a squad that needs datasets 2, and trusts remote code.
        from datasets.load import load_dataset

        splits = load_dataset(dataset, task)
    except Exception as error:  # network, cache, unknown name: many kinds
        raise ValueError(
            f"{setting} = {dataset!r}: cannot be loaded ({type(error).__name__}: {str(error)[:200]}). Without a "
            "network, download "
            "its records elsewhere and give their folder as --dataset_name_or_path."
        ) from None
    found = {}
    for split, own in (("train", "train"), ("dev", "validation"), ("test", "test")):
        if own in splits:
            skipped = Counter()
            pairs = ((f"{dataset}/{own}:{i}", dict(record)) for i, record in enumerate(splits[own], 1))
            found[split] = (list(parse_records(pairs, skipped)), skipped)
    return found


def check_splits(splits: Dict[str, Samples], training: FinetuneArguments) -> None:
    """ValueError where a split that the run needs is absent, before anything is trained."""
    if training.do_train and "train" not in splits:
        raise ValueError(f"do_train: there is no train split; found {', '.join(splits)}.")
    evaluates = training.do_eval or training.evaluation_strategy != IntervalStrategy.NO
    if evaluates and "dev" not in splits:
        why = "load_best_model_at_end" if training.load_best_model_at_end else "do_eval"
        raise ValueError(
            f"{why}: there is nothing to evaluate on; found the splits {', '.join(splits)} of "
            f"{', '.join(SPLITS)}. Add a dev "
            "file, or set do_eval false, evaluation_strategy no and load_best_model_at_end false."
        )


def preview(splits: Dict[str, Samples], tokenizer, count: int, histogram: bool = True) -> str:
    """Samples of the first split as text, the learnt part in [[ ]], counts, and a histogram of lengths."""
    lines = []
    for split, made in splits.items():
        lengths = [len(sample["input_ids"]) for sample in made.samples]
        lines.append(f"{split}: {said(made.counts)}; {min(lengths)} to {max(lengths)} tokens, {sum(lengths):,} in all")
    made = next(iter(splits.values()))
    for number, sample in enumerate(made.samples[:count], 1):
        lines += [
            f"--- sample {number} ({made.conversations[number - 1].place}); learnt: [[ ]]",
            sft.preview(sample, tokenizer.decode),
        ]
    if histogram:
        lines += ["--- lengths in tokens", *sft.length_histogram([len(s["input_ids"]) for s in made.samples])]
    return "\n".join(lines)


def generation_of(made: Samples, encoder: sft.Encoder, tokenizer) -> Generation:
    """Prompts and references of a split."""
    pairs = [encoder.prompt_ids(conversation) for conversation in made.conversations]
    return Generation(
        prompts=[ids for ids, _ in pairs],
        references=[text for _, text in pairs],
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        max_new_tokens=encoder.limits.tgt_length,
        eos_id=tokenizer.eos_token_id,
        pad_id=pad_id(tokenizer),
    )


# ---------------------------------------------------------------- model


def set_device(training: FinetuneArguments) -> None:
    """Compute on the device that the settings name; a launched process has its own GPU already. A dry run needs none."""
    if training.dry_run:
        paddle.set_device("cpu")
    elif paddle.distributed.get_world_size() == 1 or training.device == "cpu":
        paddle.set_device(training.device)


def check_model_name(arguments: FinetuneModelArguments) -> None:
    """ValueError for a built-in name, which has no weights that could be trained on."""
    name = arguments.model_name_or_path
    if name in BUILT_IN_CONFIGS:
        raise ValueError(
            f"model_name_or_path = {name!r}: no weights of it were ever released; pretrain a model first "
            "(scripts/run_pretrain.py) and name its folder. A dry run takes the name."
        )


def load_config(arguments: FinetuneModelArguments, training: FinetuneArguments):
    """The model's config with the run's settings in it.

    Raises:
        ValueError: no such model, or degrees that do not divide it.
    """
    name = arguments.model_name_or_path
    wanted = "a model's folder, with config.json and weights, or a name that can be downloaded"
    fix = "Name one with --model_name_or_path."
    _check_folder("model_name_or_path", name, "config.json", wanted, fix)
    try:
        config = AutoConfig.from_pretrained(name)
    except Exception as error:
        raise _not_loaded("model_name_or_path", name, error, wanted, fix) from None
    degree = max(training.tensor_parallel_degree, 1)
    if degree > 1:
        if not isinstance(config, Ernie35Config):
            raise ValueError(
                f"tensor_parallel_degree = {degree}: fine-tuning cuts Ernie35 only, not {type(config).__name__}; set it to 1"
            )
        conversion.check_divides(config, degree)
    if degree > 1 and not training.dry_run:  # a dry run builds the whole model, in one process
        config.tensor_parallel_degree, config.tensor_parallel_rank = degree, max(training.tensor_parallel_rank, 0)
        config.tensor_parallel_output = False  # accuracy, label smoothing and generation look at all columns
    config.use_flash_attention = arguments.use_flash_attention
    config.recompute_granularity = arguments.recompute_granularity
    if isinstance(config, Ernie35Config):
        config.use_recompute = training.recompute
        config.use_recompute_attn = arguments.use_recompute_attn
        config.fuse_ln, config.fuse_linear = arguments.use_fused_ln, arguments.fuse_linear
        config.use_progressive_seq_len = False  # sequence-length warm-up would cut samples
    else:
        config.recompute = training.recompute
        for flag in ("use_fused_ln", "fuse_linear", "use_recompute_attn"):
            if getattr(arguments, flag):
                logger.warning(
                    f"{flag} is a setting of Ernie35; it has no effect on {type(config).__name__}."
                )
    return config


def check_own_folder(arguments: FinetuneModelArguments, training: FinetuneArguments) -> None:
    """ValueError where a run would write over the model or the adapter that it starts from."""
    output, starts = training.output_dir, {"model_name_or_path": arguments.model_name_or_path}
    if not training.do_train or not os.path.exists(output):
        return
    if arguments.adapter_path:
        starts[f"{arguments.method}_path"] = arguments.adapter_path
    for setting, folder in starts.items():
        if os.path.isdir(folder) and os.path.samefile(folder, output):
            raise ValueError(
                f"output_dir = {output!r}: is the folder of {setting}, which the run would write over; name another folder."
            )


def check_same_method(arguments: FinetuneModelArguments, training: FinetuneArguments) -> None:
    """A run continues with the method, and the settings of it, that it began with.

    Raises:
        ValueError: the checkpoint that would be resumed is another method's.
    """
    folder = _checkpoint_to_resume(training)
    if folder is None:
        return
    before, now = peft.saved_method(folder), arguments.method
    if before != now:
        raise ValueError(f"{folder}: was made by {before or 'SFT'}, the settings ask for {now or 'SFT'}; {RESUME_FIX}")
    if now is None or arguments.adapter_path:
        return
    saved, wanted = peft.METHODS[now].config.load(folder), arguments.adapter_config(training.seed)
    for name, value in vars(wanted).items():
        if getattr(saved, name) != value:
            raise ValueError(f"{folder}: was made with {name} {getattr(saved, name)!r}, the settings say {value!r}; {RESUME_FIX}")


def check_same_model(training: FinetuneArguments, config) -> None:
    """All weights of a run continue with the model that it began with; adapters are compared when they are there.

    Raises:
        ValueError: the checkpoint that would be resumed holds a model of other sizes.
    """
    if isinstance(config, Ernie35Config):
        return build.check_same_model(training, config)
    folder = _checkpoint_to_resume(training)
    if folder is None or not os.path.isfile(os.path.join(folder, "config.json")):
        return
    saved = AutoConfig.from_pretrained(str(folder))
    for name in SIZES:
        before, now = getattr(saved, name, None), getattr(config, name, None)
        if before != now:
            raise ValueError(f"{folder}: holds a model with {name} {before}, model_name_or_path has {now}; {RESUME_FIX}")


def check_same_adapters(training: FinetuneArguments, model) -> None:
    """ValueError where the adapters of the checkpoint that would be resumed do not fit this model."""
    folder = _checkpoint_to_resume(training)
    if folder is None or not peft.is_wrapped(model):
        return
    try:
        peft.check_fits(model, folder)
    except ValueError as error:
        raise ValueError(f"{folder}: {error} {RESUME_FIX[0].upper()}{RESUME_FIX[1:]}.") from None


def _checkpoint_to_resume(training: FinetuneArguments):
    folder = training.resume_from_checkpoint
    if not folder and not training.overwrite_output_dir:
        folder, _ = last_checkpoint(training.output_dir)
    return folder if training.do_train and folder else None


def check_adapter_path(arguments: FinetuneModelArguments) -> None:
    """ValueError where the adapter to start from is not there, or is another method's."""
    folder, method = arguments.adapter_path, arguments.method
    if folder is None:
        return
    if not os.path.isdir(folder):
        raise ValueError(
            f"{method}_path = {folder!r}: no such folder; expected one with {peft.METHODS[method].config.file_name()}, "
            "as a run or peft.save leaves it."
        )
    found = peft.saved_method(folder)
    if found != method:
        raise ValueError(
            f"{method}_path = {folder!r}: holds {f'a {found} adapter' if found else 'no adapter'}; expected a {method} "
            f"one, with {peft.METHODS[method].config.file_name()}."
        )


def describe_run(arguments: FinetuneModelArguments, training: FinetuneArguments, config, splits: Dict[str, Samples]) -> str:
    """What trains, memory, tokens and FLOPs of a step, and the steps of an epoch; no weight is read."""
    check_adapter_path(arguments)
    adapter = arguments.adapter_config(training.seed)
    if arguments.adapter_path:
        adapter = peft.METHODS[arguments.method].config.load(arguments.adapter_path)
    first = splits.get("train") or next(iter(splits.values()))
    longest = max(len(row["input_ids"]) for row in first.rows)
    plan = finetune_estimate.make_plan(training, config, longest)
    counts = finetune_estimate.count(config, adapter, plan.micro_batch, longest)
    lines = [finetune_estimate.report(config, plan, counts)]
    if "train" in splits:
        rows, per_step = len(first.rows), plan.samples_per_step
        lines.append(f"An epoch: {rows:,} rows, {-(-rows // per_step):,} optimizer steps.")
    return "\n".join(lines)


def build_model(arguments: FinetuneModelArguments, training: FinetuneArguments, config, packs: bool, generates: bool):
    """The model with its weights, and with the adapters of the method, new or loaded; what trains is said.

    Args:
        packs, generates: whether it will get packed rows, and be evaluated by generating.
    """
    check_adapter_path(arguments)
    dtype = "float32"
    if training.fp16_opt_level == "O2" and (training.bf16 or training.fp16):
        dtype = "bfloat16" if training.bf16 else "float16"
    warn_pickled_folder(Path(arguments.model_name_or_path))
    with paddle.utils.unique_name.guard():  # a checkpoint's optimizer state goes by these names
        model = _with_weights(arguments.model_name_or_path, config, dtype)
        check_takes(model, packs, generates)
        if arguments.adapter_path:
            _load_adapter(model, arguments, training)
        elif arguments.method:
            peft.wrap(model, arguments.adapter_config(training.seed))
    if arguments.neftune:
        peft.add_noise(model, arguments.neftune_noise_alpha)
    logger.info(peft.trainable_share(model))
    return model


def check_takes(model, packs: bool, generates: bool) -> None:
    """ValueError for a model of another kind whose forward lacks what fine-tuning, packing or generating passes to it."""
    wanted = {"input_ids": "", "attention_mask": ""}
    if packs:
        wanted["position_ids"] = "zero_padding"
    if generates:
        wanted.update(dict.fromkeys(("position_ids", "past_key_values", "use_cache"), "eval_with_do_generation"))
    missing = {name: setting for name, setting in wanted.items() if name not in inspect.signature(model.forward).parameters}
    if missing:
        settings = " and ".join(sorted(set(filter(None, missing.values()))))
        raise ValueError(
            f"model_name_or_path: {type(model).__name__} of PaddleNLP takes no {' and no '.join(missing)}; expected a model that "
            f"takes {', '.join(wanted)}. {f'Set {settings} false, or choose' if settings else 'Choose'} another model."
        )


def _load_adapter(model, arguments: FinetuneModelArguments, training: FinetuneArguments) -> None:
    """Put the saved adapter in; its settings count, and those of the run that say otherwise are named."""
    setting, folder = f"{arguments.method}_path", arguments.adapter_path
    try:
        peft.load(model, folder)
    except ValueError as error:
        raise ValueError(f"{setting} = {folder!r}: {error}") from None
    saved, wanted = model.adapter_config, arguments.adapter_config(training.seed)
    default = type(saved)()
    ignored = [
        f"{name} {value!r} (saved: {getattr(saved, name)!r})"
        for name, value in vars(wanted).items()
        if name not in ("base_model_name_or_path", "seed") and value not in (getattr(saved, name), getattr(default, name))
    ]
    if ignored:
        logger.warning(f"{setting}: the saved adapter's settings count, not those of this run: {', '.join(ignored)}.")


def _with_weights(name: str, config, dtype: str):
    """The model with its weights, all of them."""
    try:
        model = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=dtype)
    except Exception as error:  # the readers of weight files raise whatever the bytes lead them to
        if os.path.isdir(name) and not build.has_weights(name):
            raise ValueError(
                f"model_name_or_path = {name!r}: the folder holds {_contents(name)}; expected weights, "
                f"{' or '.join(build.WEIGHT_FILES)}. Name the folder that pretraining wrote, or copy it again."
            ) from None
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        reason = next((line for line in lines if "expected shape" in line), lines[0])
        raise ValueError(
            f"model_name_or_path = {name!r}: the weights cannot be loaded into the model of config.json: "
            f"{reason[:300]} Copy the folder again, or name another one."
        ) from error
    missing = getattr(model, "missing_weights", [])  # PaddleNLP's models only log a warning
    if missing:
        raise ValueError(
            f"model_name_or_path = {name!r}: {len(missing)} weights of the model of config.json are not in its files, "
            f"such as {missing[0]}; they would start at random. Take the config.json that belongs to these weights."
        )
    return model


def check_lengths(limits: sft.Limits, config, tokenizer) -> None:
    """ValueError where samples or the tokenizer's ids would not fit the model."""
    table = getattr(config, "max_position_embeddings", None)
    if table and limits.max_length - 1 > table:
        raise ValueError(
            f"max_length = {limits.max_length}: the model has {table} positions; lower max_length."
        )
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model rows for {config.vocab_size}; take the "
            "model's tokenizer."
        )
