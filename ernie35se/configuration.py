"""Ernie35Config: the shape of an ERNIE-3.5-SE model, and its two built-in sizes."""

from __future__ import annotations

import copy
import difflib
import os

from paddlenlp.transformers import PretrainedConfig
from paddlenlp.utils.log import logger

__all__ = ["Ernie35Config", "BUILT_IN_CONFIGS"]

_SHARED = {
    "vocab_size": 32000,
    "layer_norm_eps": 1e-6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "parallel_attn_hatf": True,
    "enable_random_position_ids": True,
    "use_bias": True,
    "weight_share_add_bias": True,
    "tie_word_embeddings": False,
    "use_flash_attention": True,
    "tensor_parallel_output": True,
    "fuse_ln": False,
    "fuse_linear": False,
    "use_recompute": False,
    "use_recompute_attn": False,
}

BUILT_IN_CONFIGS = {
    "baidu/ernie-3.5-se-3b": {
        **_SHARED,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 24,
        "max_position_embeddings": 32768,
        "use_progressive_seq_len": True,
    },
    "ernie/tiny-random-ernie": {
        **_SHARED,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 3,
        "num_attention_heads": 12,
        "max_position_embeddings": 4096,
        "use_progressive_seq_len": False,
    },
}


class Ernie35Config(PretrainedConfig):
    """Settings of an ERNIE-3.5-SE model; the defaults are those of `ernie/tiny-random-ernie`.

    Args:
        vocab_size: rows of the embedding, columns of the LM head.
        hidden_size: width C of the residual stream; `num_attention_heads` must divide it into an even head size.
        intermediate_size: width F of the FFN branch.
        num_hidden_layers: number of blocks L; at least 2 with `parallel_attn_hatf`.
        num_attention_heads: number of heads H.
        max_position_embeddings: one more than the largest position. Random positions are drawn below it, which is
            why it is larger than the training length.
        layer_norm_eps: epsilon of every LayerNorm, in (0, 1e-3].
        hidden_act: `silu`, the only one.
        initializer_range: reported only; the real standard deviation is sqrt(0.3333 / hidden_size).
        parallel_attn_hatf: head-tail trimming. The first block is attention only, the last FFN only, those between
            compute both in parallel. False: every block is parallel.
        enable_random_position_ids: train on random sorted positions, evaluate on evenly spaced ones.
        use_progressive_seq_len: the trainer starts with shorter sequences.
        use_bias: biases in the linear layers.
        weight_share_add_bias: with `use_bias`, a bias on the LM head.
        tie_word_embeddings: the LM head uses the embedding's weight. `weight_share` is its old name.
        ignored_index: label that the loss skips.
        use_flash_attention: flash attention where there is a GPU.
        fuse_ln: the fused LayerNorm op. fuse_linear: Paddle's fused linear on GPU.
        use_recompute: recompute in the backward pass what `recompute_granularity` names, `full` (whole blocks) or
            `core_attn` (attention scores). use_recompute_attn: `core_attn`, whatever the two say.
        tensor_parallel_output: keep the logits split by vocabulary under tensor parallel.

    Raises:
        ValueError: a value that no model can have; the message names the field, the value and what is expected.
    """

    model_type = "ernie"
    keys_to_ignore_at_inference = ["past_key_values"]
    pretrained_init_configuration = BUILT_IN_CONFIGS
    # PaddleNLP's Trainer and command line say "recompute"; the files of this model say "use_recompute".
    attribute_map = {"weight_share": "tie_word_embeddings", "recompute": "use_recompute"}
    _unsavable_keys = set()  # a set of our own: the base class fills the one it finds, which all configs share

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 768,
        intermediate_size: int = 2048,
        num_hidden_layers: int = 3,
        num_attention_heads: int = 12,
        max_position_embeddings: int = 4096,
        layer_norm_eps: float = 1e-6,
        hidden_act: str = "silu",
        initializer_range: float = 0.02,
        parallel_attn_hatf: bool = True,
        enable_random_position_ids: bool = True,
        use_progressive_seq_len: bool = False,
        use_bias: bool = True,
        weight_share_add_bias: bool = True,
        tie_word_embeddings: bool = False,
        ignored_index: int = -100,
        use_flash_attention: bool = False,
        fuse_ln: bool = False,
        fuse_linear: bool = False,
        use_recompute: bool = False,
        use_recompute_attn: bool = False,
        recompute_granularity: str = "full",
        use_cache: bool = False,
        pad_token_id: int = 0,
        bos_token_id: int = 1,
        eos_token_id: int = 2,
        **kwargs,
    ):
        tie_word_embeddings = kwargs.pop("weight_share", tie_word_embeddings)
        use_recompute = kwargs.pop("recompute", use_recompute)
        super().__init__(
            tie_word_embeddings=tie_word_embeddings,
            use_cache=use_cache,
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            use_flash_attention=use_flash_attention,
            recompute_granularity=recompute_granularity,
            **kwargs,
        )
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.layer_norm_eps = layer_norm_eps
        self.hidden_act = hidden_act
        self.initializer_range = initializer_range
        self.parallel_attn_hatf = parallel_attn_hatf
        self.enable_random_position_ids = enable_random_position_ids
        self.use_progressive_seq_len = use_progressive_seq_len
        self.use_bias = use_bias
        self.weight_share_add_bias = weight_share_add_bias
        self.ignored_index = ignored_index
        self.fuse_ln = fuse_ln
        self.fuse_linear = fuse_linear
        self.use_recompute = use_recompute
        self.use_recompute_attn = use_recompute_attn
        if use_recompute and use_recompute_attn:
            logger.info("use_recompute_attn is on: only attention scores are recomputed, use_recompute is off.")
            self.use_recompute = False
        self.validate()

    @property
    def head_dim(self) -> int:
        """Size D of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def recompute_scope(self) -> str:
        """What the backward pass computes again: `none`, `full` (whole blocks) or `core_attn`."""
        if self.use_recompute_attn:
            return "core_attn"
        return self.recompute_granularity if self.use_recompute else "none"

    def validate(self) -> None:
        """Raise a ValueError for the first field whose value no model can have."""
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        ):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"config field {field} is {value!r}; expected a whole number of at least 1.")
        for field in (
            "parallel_attn_hatf",
            "enable_random_position_ids",
            "use_progressive_seq_len",
            "use_bias",
            "weight_share_add_bias",
            "tie_word_embeddings",
        ):
            if getattr(self, field) not in (True, False):  # a string, "no" as well, would count as true
                raise ValueError(f"config field {field} is {getattr(self, field)!r}; expected true or false.")
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"config field hidden_size is {self.hidden_size}; with num_attention_heads {self.num_attention_heads} "
                f"it must be a multiple of {2 * self.num_attention_heads}, so that every head has an even size."
            )
        if self.parallel_attn_hatf and self.num_hidden_layers < 2:
            raise ValueError(
                f"config field num_hidden_layers is {self.num_hidden_layers}; parallel_attn_hatf needs at least 2, "
                "one attention block and one FFN block. Raise it or set parallel_attn_hatf to false."
            )
        if not isinstance(self.layer_norm_eps, (int, float)) or not 0 < self.layer_norm_eps <= 1e-3:
            raise ValueError(f"config field layer_norm_eps is {self.layer_norm_eps!r}; expected a value in (0, 1e-3].")
        if self.hidden_act != "silu":
            raise ValueError(f"config field hidden_act is {self.hidden_act!r}; this model has 'silu' only.")
        if self.recompute_granularity not in ("full", "core_attn"):
            raise ValueError(
                f"config field recompute_granularity is {self.recompute_granularity!r}; expected 'full' or 'core_attn'."
            )
        for field in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = getattr(self, field)
            if value is not None and not (isinstance(value, int) and 0 <= value < self.vocab_size):
                raise ValueError(
                    f"config field {field} is {value!r}; expected an id below vocab_size, which is {self.vocab_size}."
                )

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """As the base class, but a folder or name that holds no configuration is an error, not the defaults."""
        name = str(pretrained_model_name_or_path)
        if name not in BUILT_IN_CONFIGS and not os.path.exists(name):
            raise ValueError(
                f"{name!r} is neither a folder nor a built-in model. Built-in: {', '.join(sorted(BUILT_IN_CONFIGS))}; "
                "or name a folder that holds a config.json."
            )
        try:
            config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        except FileNotFoundError:
            seen = ", ".join(sorted(os.listdir(name))[:8])
            raise ValueError(f"{name}: no config.json found (seen: {seen or 'an empty folder'}).") from None
        except OSError as error:
            raise ValueError(f"{name}: {error}") from None
        if not isinstance(config_dict, dict):
            raise ValueError(f"{name}: expected a JSON object of settings, found {type(config_dict).__name__}.")
        return copy.deepcopy(config_dict), kwargs  # the base class edits what it gets

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As the base class, but unknown keys are named, and values set by `kwargs` are checked too."""
        known = set(cls().to_dict()) | {"init_args", "init_class", "torch_dtype", *cls.attribute_map}
        known |= {"transformers_version", "initializer_range"}
        for key in config_dict:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                logger.warning(f"config key {key!r} is not one of this model's and has no effect.{hint}")
        result = super().from_dict(config_dict, **kwargs)
        (result[0] if isinstance(result, tuple) else result).validate()
        return result
