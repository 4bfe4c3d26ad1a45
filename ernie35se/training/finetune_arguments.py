"""Settings of the fine-tuning script, read and checked like those of pretraining (arguments.py).

The method is the switch that is on (`lora`, `vera`, `lokr`, `dislora`, `reft`, `tare`, `prefix_tuning`); none
of them: all weights are trained (SFT). Names are those of PaddleNLP's SFT script, so its JSON files are
understood.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

from paddlenlp.utils.log import logger

from .. import peft
from ..data.sft import STRATEGIES, Limits
from ..peft.quant import ALGORITHMS
from ..peft.reft import ACTIVATIONS, INTERVENTIONS
from .arguments import (
    NOT_YET,
    NOT_YET_IN_FINETUNING,
    OPTIMIZERS,
    PretrainArguments,
    SettingError,
    _check_choices,
    _check_range,
    _default_text,
    _nearest,
    _setting,
    parse_arguments,
)

# switch -> method of the registry
SWITCHES = {
    "lora": "lora",
    "vera": "vera",
    "lokr": "lokr",
    "dislora": "dislora",
    "reft": "reft",
    "tare": "tare",
    "prefix_tuning": "prefix",
}
# metric_for_best_model -> whether more of it is better
METRICS = {"loss": False, "ppl": False, "accuracy": True}
GENERATION_METRICS = {"rouge1": True, "rouge2": True, "rougeL": True, "bleu4": True}
# Settings of pretraining that mean nothing here.
PRETRAINING_ONLY = ("continue_training", "decay_steps", "min_learning_rate", "eval_iters", "do_predict")


@dataclass(frozen=True)
class FinetuneModelArguments:
    """Which model is fine-tuned, and by which method."""

    _argument_group_name = "model"

    model_name_or_path: str = _setting(
        "", "Folder of an Ernie35 checkpoint, or a folder or name of any causal language model of PaddleNLP."
    )
    tokenizer_name_or_path: Optional[str] = _setting(
        None, "Folder or name of the tokenizer. Left out: the model's."
    )
    use_flash_attention: bool = _setting(
        False,
        "Flash attention; needs a GPU, falls back to plain attention with a warning where there is none.",
    )
    use_fused_ln: bool = _setting(
        False, "LayerNorm by the op of external_ops, which has to be built (Ernie35 only)."
    )
    fuse_linear: bool = _setting(False, "Paddle's fused linear layers; GPU only, Ernie35 only.")
    use_recompute_attn: bool = _setting(False, "Recompute the attention alone. Turns `--recompute` off.")
    recompute_granularity: str = _setting(
        "full",
        "What `--recompute` recomputes: whole blocks, or the attention core.",
        choices=["full", "core_attn"],
    )

    lora: bool = _setting(False, "LoRA: a low-rank update of the linear layers.")
    lora_path: Optional[str] = _setting(None, "Folder of a saved LoRA adapter to start from.")
    lora_rank: int = _setting(8, "LoRA's rank r.")
    lora_alpha: Optional[float] = _setting(None, "LoRA's alpha. Left out: 2r, with rslora 4.")
    lora_dropout: float = _setting(0.0, "Dropout on LoRA's input.")
    rslora: bool = _setting(False, "rsLoRA: scale alpha / sqrt(r) instead of alpha / r.")
    lora_plus_scale: float = _setting(1.0, "LoRA+: the learning rate of B as a multiple of A's.")
    pissa: bool = _setting(False, "PiSSA: start A and B from the weight's top singular triplets.")
    lora_use_mixer: bool = _setting(False, "MoSLoRA: a learnt r x r matrix between A and B.")
    mixer_num: int = _setting(1, "LinChain: this many such matrices in a chain; needs lora_use_mixer.")
    use_mora: bool = _setting(False, "MoRA: one square matrix of as many parameters.")
    use_quick_lora: bool = _setting(False, "The same as LoRA, fused; without dropout only.")
    lora_target_modules: Optional[List[str]] = _setting(
        None,
        "Regular expressions of the linear layers that get adapters (any method). Left out: all in the "
        "blocks.",
    )
    weight_quantize_algo: Optional[str] = _setting(
        None, f"QLoRA: store the frozen weights as one of {', '.join(ALGORITHMS)}."
    )
    weight_blocksize: int = _setting(64, "QLoRA: weights that share a scale.")
    weight_double_quant: bool = _setting(False, "QLoRA: store the scales in 8 bits too.")

    vera: bool = _setting(False, "VeRA: learnt vectors around frozen random matrices.")
    vera_path: Optional[str] = _setting(None, "Folder of a saved VeRA adapter to start from.")
    vera_rank: int = _setting(8, "VeRA's rank.")
    vera_dropout: float = _setting(0.0, "Dropout on VeRA's input.")
    vera_pissa_init: bool = _setting(
        False, "PaddleNLP's variant: A and B from the top singular triplets, B learnt."
    )

    lokr: bool = _setting(False, "LoKr: the update is a Kronecker product.")
    lokr_path: Optional[str] = _setting(None, "Folder of a saved LoKr adapter to start from.")
    lokr_dim: int = _setting(8, "Rank of LoKr's large factor.")
    lokr_rank: Optional[int] = _setting(None, "Another name of lokr_dim.")
    lokr_alpha: float = _setting(0.0, "LoKr's alpha; 0: lokr_dim, that is scale 1.")

    dislora: bool = _setting(False, "DisLoRA: train the weight's weakest directions.")
    dislora_path: Optional[str] = _setting(None, "Folder of a saved DisLoRA adapter to start from.")
    dislora_rank: int = _setting(8, "Directions that are trained.")
    dislora_alpha: float = _setting(12.0, "DisLoRA's alpha; the scale is alpha / rank.")
    dislora_dropout: float = _setting(0.0, "Dropout on DisLoRA's input.")
    dash_flag: int = _setting(50, "Optimizer step after which more directions join.")
    s_tsd: int = _setting(8, "How many join; at most dislora_rank.")
    prefer_small_sigma: bool = _setting(
        True, "Smallest singular values and lowest change first; else the opposite."
    )
    ortho_lambda: float = _setting(1.0, "Weight of the loss that keeps the directions orthonormal.")

    reft: bool = _setting(False, "ReFT: edits of a few prompt tokens' hidden states.")
    reft_path: Optional[str] = _setting(None, "Folder of saved ReFT interventions to start from.")
    layers: str = _setting("all", "ReFT: blocks that are edited, `all` or such as 0;2.")
    position: str = _setting("f7+l7", "ReFT: how many first and last prompt tokens are edited.")
    intervention_type: str = _setting("LoreftIntervention", "ReFT: the edit.", choices=list(INTERVENTIONS))
    rank: int = _setting(8, "ReFT: rank of the edit.")
    act_fn: str = _setting("linear", "ReFT: activation on W h + b.", choices=list(ACTIVATIONS))
    add_bias: bool = _setting(True, "ReFT: whether W has a bias.")
    dropout: float = _setting(0.0, "ReFT: dropout on the edit.")

    tare: bool = _setting(False, "TARE: token-aware editors behind the FFN.")
    tare_path: Optional[str] = _setting(None, "Folder of saved TARE editors to start from.")
    tare_n: int = _setting(8, "TARE: editors a layer.")
    tare_k: int = _setting(7, "TARE: editors a token.")

    prefix_tuning: bool = _setting(
        False, "Prefix tuning: learnt keys and values before every attention layer."
    )
    prefix_path: Optional[str] = _setting(None, "Folder of a saved prefix to start from.")
    num_prefix_tokens: int = _setting(128, "Keys and values a layer.")
    prefix_projection: bool = _setting(
        False, "Make them by a small network instead of learning them directly."
    )
    prefix_projection_hidden_size: Optional[int] = _setting(None, "Its hidden size. Left out: the model's.")
    prefix_dropout: float = _setting(0.0, "Dropout on the learnt keys and values.")

    neftune: bool = _setting(False, "NEFTune: noise on the embeddings while training, with any method.")
    neftune_noise_alpha: float = _setting(5.0, "Its size: alpha / sqrt(length x width).")

    def __post_init__(self):
        _check_choices(self)
        if not self.model_name_or_path.strip():
            raise SettingError("model_name_or_path", self.model_name_or_path, "expected a folder or a name")
        on = [switch for switch in SWITCHES if getattr(self, switch)]
        if len(on) > 1:
            raise SettingError(
                on[1], True, f"{' and '.join(on)} are on; expected one method, or none for SFT"
            )
        for switch, method in SWITCHES.items():
            path = getattr(self, f"{method}_path")
            if path is not None and not getattr(self, switch):
                raise SettingError(
                    f"{method}_path", path, f"it starts from a saved adapter, but {switch} is off"
                )
        if not self.lora and self.weight_quantize_algo is not None:
            raise SettingError(
                "weight_quantize_algo", self.weight_quantize_algo, "quantised weights need lora (QLoRA)"
            )
        if self.neftune:
            _check_range(self, "neftune_noise_alpha", above=0)
        self.adapter_config()  # its own checks

    @property
    def method(self) -> Optional[str]:
        """The method of the registry that is on, or None for SFT."""
        return next((method for switch, method in SWITCHES.items() if getattr(self, switch)), None)

    @property
    def adapter_path(self) -> Optional[str]:
        """The saved adapter to start from, if any."""
        return getattr(self, f"{self.method}_path") if self.method else None

    def adapter_config(self, seed: int = 42) -> Optional[peft.AdapterConfig]:
        """The configuration of the method that is on, None for SFT.

        Raises:
            ValueError: settings of the method that do not fit together.
        """
        if self.method is None:
            return None
        values = {name: getattr(self, flag) for name, flag in self._flags_of_method().items()}
        return peft.METHODS[self.method].config(
            base_model_name_or_path=self.model_name_or_path,
            target_modules=self.lora_target_modules,
            seed=seed,
            **values,
        )

    def _flags_of_method(self) -> Dict[str, str]:
        """Name of the adapter's setting -> name of the flag."""
        flags = _flags_of(self.method)
        if self.lokr_rank is not None:
            flags["lokr_dim"] = "lokr_rank"
        return flags

    def idle_settings(self) -> Dict[str, List[str]]:
        """Switch that is off -> settings that were changed and mean nothing without it."""
        flags = {switch: set(_flags_of(method).values()) for switch, method in SWITCHES.items()}
        flags["lokr"].add("lokr_rank")
        flags["neftune"] = {"neftune_noise_alpha"}
        changed = [item.name for item in dataclasses.fields(self) if getattr(self, item.name) != item.default]
        idle = {s: [name for name in changed if name in flags[s]] for s in flags if not getattr(self, s)}
        return {switch: names for switch, names in idle.items() if names}


def _flags_of(method: str) -> Dict[str, str]:
    """Name of a setting of the method's -> name of its flag; mostly the same word."""
    own = [item.name for item in dataclasses.fields(peft.METHODS[method].config)]
    other = {"r": f"{method}_rank", "pissa_init": "vera_pissa_init"}
    flags = {name: other.get(name, name) for name in own}
    known = {item.name for item in dataclasses.fields(FinetuneModelArguments)}
    return {name: flag for name, flag in flags.items() if flag in known}


@dataclass(frozen=True)
class FinetuneDataArguments:
    """Which records are learnt, and how they become tokens."""

    _argument_group_name = "data"

    dataset_name_or_path: Optional[str] = _setting(
        None,
        "Folder with train, dev and test files (.json, .jsonl, also .gz), or a single file. See "
        "docs/finetune.md.",
    )
    dataset_path: Optional[str] = _setting(None, "Another name of dataset_name_or_path.")
    task_name: Optional[str] = _setting(
        None, "A dataset of Hugging Face's hub, such as squad; with data_name one of that dataset's tasks. Needs a network."
    )
    data_name: Optional[str] = _setting(None, "A dataset of the hub, where task_name is the task in it.")
    src_length: int = _setting(128, "Most tokens of a prompt.")
    tgt_length: Optional[int] = _setting(
        None,
        "Most tokens of a response, EOS included. Left out: 160, or with max_length what src_length leaves "
        "of it.",
    )
    max_length: Optional[int] = _setting(
        None, "Most tokens of a conversation. Left out: src_length + tgt_length."
    )
    truncation_strategy: str = _setting(
        "keep_answer",
        "Over-long records: keep_answer (old turns, then the middle of the prompt give way), drop, or raise.",
        choices=list(STRATEGIES),
    )
    template: Optional[str] = _setting(
        None,
        "What stands around the prompt: plain (the default), alpaca, chatml, tokenizer (its own), or a jinja "
        "file.",
    )
    chat_template: Optional[str] = _setting(None, "Another name of template.")
    zero_padding: bool = _setting(False, "Pack samples into rows of max_length instead of padding them.")
    greedy_zero_padding: bool = _setting(False, "Pack tighter: longest first. Turns zero_padding on.")
    flash_mask: bool = _setting(
        False, "Packing with flashmask attention; needs a GPU. Turns zero_padding on."
    )
    preview_data: int = _setting(
        0, "Print this many samples, the learnt part in [[ ]], with counts and lengths, and stop."
    )
    eval_with_do_generation: bool = _setting(
        False, "Evaluate by generating too: ROUGE and BLEU; the texts are saved. Never packed."
    )

    def __post_init__(self):
        _check_choices(self)
        object.__setattr__(self, "dataset_name_or_path", self._either("dataset_name_or_path", "dataset_path"))
        object.__setattr__(self, "template", self._either("template", "chat_template"))
        object.__setattr__(
            self, "zero_padding", self.zero_padding or self.greedy_zero_padding or self.flash_mask
        )
        _check_range(self, "preview_data", at_least=0, whole=True)
        for name in ("src_length", "tgt_length", "max_length"):
            if getattr(self, name) is not None:
                _check_range(self, name, at_least=1, whole=True)
        try:
            self.limits()
        except ValueError as error:
            raise SettingError("max_length", self.max_length, str(error)) from None

    def _either(self, name: str, other: str) -> Any:
        first, second = getattr(self, name), getattr(self, other)
        if first is not None and second is not None and first != second:
            raise SettingError(other, second, f"{name} = {first!r} says otherwise; give one of the two")
        return second if first is None else first

    @property
    def hub(self) -> Optional[Tuple[str, Optional[str]]]:
        """Name of a dataset of the hub and of its task, as PaddleNLP's load_dataset takes them; None for neither."""
        names = [name for name in (self.data_name, self.task_name) if name is not None]
        return (names[0], names[1] if len(names) > 1 else None) if names else None

    def limits(self) -> Limits:
        """How long samples may be."""
        return Limits.of(self.src_length, self.tgt_length, self.max_length, self.truncation_strategy)


@dataclass
class FinetuneArguments(PretrainArguments):
    """How fine-tuning runs. PaddleNLP's other TrainingArguments are accepted too."""

    _argument_group_name = "training"

    output_dir: str = _setting("", "Folder for checkpoints, logs, curves.png and the final adapter or model.")
    num_train_epochs: float = _setting(3.0, "Passes over the training data, where max_steps is not given.")
    max_steps: int = _setting(-1, "Optimizer steps to train; -1: as many as num_train_epochs takes.")
    per_device_train_batch_size: int = _setting(1, "Samples (packed: rows) per device and micro-batch.")
    learning_rate: float = _setting(3e-5, "Highest learning rate, reached after warm-up.")
    lr_decay_ratio: float = _setting(0.0, "The rate falls to this share of learning_rate; 0: to zero.")
    label_smoothing: float = _setting(0.0, "Share of the loss spread over all tokens, from 0 to below 1.")
    merge_weights: bool = _setting(
        False, "Merge the adapters while evaluating, which is faster for many batches."
    )
    early_stopping_patience: int = _setting(
        0, "Stop after this many evaluations without a better metric_for_best_model; 0: never."
    )
    optim: str = _setting("adamw", "Optimizer.", choices=OPTIMIZERS)
    sharding_stage1_overlap: bool = _setting(
        False, "The same as `--sharding_parallel_config enable_stage1_overlap`; for SFT only."
    )
    logging_steps: int = _setting(10, "Log every so many steps.")
    metric_for_best_model: Optional[str] = _setting(
        None, "What the best model has the best of: loss (the default), accuracy, ppl, rougeL, bleu4, ..."
    )

    def __post_init__(self):
        for name, asked, reason in NOT_YET_IN_FINETUNING:
            if hasattr(self, name) and asked(getattr(self, name)):
                methods = "SFT, LoRA and its kin, VeRA, LoKr, DisLoRA, ReFT, TARE, Prefix"
                raise SettingError(
                    name, getattr(self, name), f"no method ({methods}) is made for it: {reason}"
                )
        _check_range(self, "lr_decay_ratio", at_least=0, at_most=1)
        _check_range(self, "label_smoothing", at_least=0, below=1)
        _check_range(self, "early_stopping_patience", at_least=0, whole=True)
        _check_range(self, "num_train_epochs", above=0)
        for item in dataclasses.fields(PretrainArguments):
            if item.name in PRETRAINING_ONLY and getattr(self, item.name) != item.default:
                raise SettingError(
                    item.name, getattr(self, item.name), "a setting of pretraining; leave it out here"
                )
        if self.evaluation_strategy == "no" and (self.load_best_model_at_end or self.early_stopping_patience):
            needy = "load_best_model_at_end" if self.load_best_model_at_end else "early_stopping_patience"
            raise SettingError("evaluation_strategy", "no", f"{needy} needs evaluations; set epoch or steps")
        if self.load_best_model_at_end and self.save_strategy != self.evaluation_strategy:
            raise SettingError(
                "save_strategy",
                self.save_strategy,
                f"load_best_model_at_end goes back to a checkpoint that was evaluated; set it to {self.evaluation_strategy!r}, "
                "as evaluation_strategy",
            )
        if self.early_stopping_patience and not self.metric_for_best_model:
            self.metric_for_best_model = "loss"
        self._resolve_metric()
        if self.sharding_stage1_overlap and "enable_stage1_overlap" not in self.sharding_parallel_config:
            self.sharding_parallel_config = f"{self.sharding_parallel_config} enable_stage1_overlap".strip()
        self.min_learning_rate = self.lr_decay_ratio * self.learning_rate
        super().__post_init__()


    def _resolve_metric(self):
        """Check metric_for_best_model; PaddleNLP would take more of anything but the loss for better."""
        if self.metric_for_best_model is None:
            return
        known = {**METRICS, **GENERATION_METRICS}
        name = self.metric_for_best_model.removeprefix("eval_")
        if name not in known:
            raise SettingError(
                "metric_for_best_model",
                self.metric_for_best_model,
                f"expected one of {', '.join(known)}{_nearest(name, known)}",
            )
        if self.greater_is_better is None:
            self.greater_is_better = known[name]
        elif self.greater_is_better != known[name]:
            better = "more" if known[name] else "less"
            raise SettingError("greater_is_better", self.greater_is_better, f"{better} of {name} is better; leave it out")


ARGUMENT_CLASSES = (FinetuneModelArguments, FinetuneDataArguments, FinetuneArguments)
FinetuneSettings = Tuple[FinetuneModelArguments, FinetuneDataArguments, FinetuneArguments]


def parse_finetune_arguments(argv: Optional[Sequence[str]] = None) -> FinetuneSettings:
    """Read `[file.json] [--flag value ...]` into (model, data, training) arguments; flags win over the file.

    Raises:
        ValueError: as in arguments.parse_pretrain_arguments.
    """
    return parse_arguments(argv, ARGUMENT_CLASSES, "run_finetune.py", _reconcile)


def _reconcile(model, data, training) -> FinetuneSettings:
    """Check what spans more than one group, and resolve what one group means for another."""
    source = data.dataset_name_or_path
    if not (source or "").strip() and (source is not None or data.hub is None):
        raise SettingError(
            "dataset_name_or_path", source, "expected a folder or file of records, or a task_name"
        )
    metric = (training.metric_for_best_model or "").removeprefix("eval_")
    if metric in GENERATION_METRICS and not data.eval_with_do_generation:
        raise SettingError(
            "metric_for_best_model", training.metric_for_best_model, "it is measured with eval_with_do_generation only; set that"
        )
    looks_only = training.dry_run or data.preview_data
    if not looks_only:
        for name, asked, reason in NOT_YET:
            if hasattr(training, name) and asked(getattr(training, name)):
                raise SettingError(name, getattr(training, name), reason)
        if not (training.do_train or training.do_eval):
            raise SettingError(
                "do_train", False, "nothing to do; set do_train, do_eval, dry_run or preview_data"
            )
        if not training.output_dir:
            raise SettingError("output_dir", training.output_dir, "expected the folder to write to")
    changes = {}
    if data.flash_mask:
        if training.device == "cpu":
            raise SettingError(
                "flash_mask", True, "flashmask attention exists on GPU only; use zero_padding here"
            )
        if model.method == "prefix":
            raise SettingError("flash_mask", True, "a prefix has no place in its mask; use zero_padding")
        changes["use_flash_attention"] = True
    elif training.device == "cpu":
        for name in ("use_flash_attention", "fuse_linear"):
            if getattr(model, name):
                logger.warning(f"{name} needs a GPU: the plain form is used, which gives the same values.")
                changes[name] = False
    if model.method and model.fuse_linear:
        logger.warning("adapters go around plain linear layers: fuse_linear is turned off.")
        changes["fuse_linear"] = False
    if model.use_recompute_attn and training.recompute:
        logger.warning("use_recompute_attn is on: it replaces recompute, which is turned off.")
        training.recompute = False
    if model.method == "reft" and data.zero_padding:
        raise SettingError(
            "zero_padding", True, "ReFT edits the ends of one prompt a row; packed rows have several"
        )
    overlap = "stage1_overlap" in str(training.sharding_parallel_config)
    if model.method and overlap:
        asked = "sharding_stage1_overlap" if training.sharding_stage1_overlap else "sharding_parallel_config"
        raise SettingError(
            asked,
            getattr(training, asked),
            f"stage1_overlap expects a gradient of every weight, which {model.method} does not give; leave it out",
        )
    if model.method and training.unified_checkpoint:
        logger.info(
            "unified_checkpoint has no effect with adapters: their checkpoints are one small file anyway."
        )
        training.unified_checkpoint = False
    adapter = model.adapter_config()
    if adapter is not None and training.tensor_parallel_degree > 1 and not adapter.splits:
        raise SettingError(
            "tensor_parallel_degree",
            training.tensor_parallel_degree,
            f"{adapter.name()} is not made for tensor parallel; SFT, LoRA, rsLoRA, LoRA+, PiSSA, MoSLoRA and LinChain are",
        )
    if training.merge_weights and model.weight_quantize_algo is not None:
        raise SettingError("merge_weights", True, "it needs full-precision weights; leave it out with weight_quantize_algo")
    for switch, names in model.idle_settings().items():
        logger.warning(f"{switch} is off, so {', '.join(names)} {'has' if len(names) == 1 else 'have'} no effect.")
    if source is not None and data.hub is not None:
        logger.warning(f"dataset_name_or_path says where the records are, so {' and '.join(filter(None, data.hub))} has no effect.")
    if training.merge_weights and (model.method is None or not peft.METHODS[model.method].merges):
        raise SettingError("merge_weights", True, f"{model.method or 'SFT'} has nothing that could be merged")
    return dataclasses.replace(model, **changes), data, training


def finetune_settings_table() -> Dict[str, List[Tuple[str, str, str]]]:
    """Documented settings by part: {"model": [(flag, default, help), ...], "data": ..., "training": ...}."""
    return {
        cls._argument_group_name: [
            (f"--{item.name}", _default_text(item), item.metadata["help"])
            for item in dataclasses.fields(cls)
            if item.name in cls.__dict__["__annotations__"]
        ]
        for cls in ARGUMENT_CLASSES
    }
