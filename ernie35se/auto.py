"""`import ernie35se.auto` lets PaddleNLP's Auto classes find this model; its own ERNIE still loads.

PaddleNLP 3.0.0b4 has no registry for models, and `model_type` "ernie" is its own ERNIE's as well. So the configuration is told
apart by what is in the file, and two class methods of the Auto models are asked a question first.
"""

from __future__ import annotations

import json

from paddlenlp.transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, ErnieConfig
from paddlenlp.transformers.auto.modeling import _BaseAutoModelClass

from .configuration import BUILT_IN_CONFIGS, Ernie35Config
from .modeling import Ernie35ForCausalLM, Ernie35Model
from .tokenizer import Ernie35Tokenizer

_MODEL_CLASSES = {AutoModel: Ernie35Model, AutoModelForCausalLM: Ernie35ForCausalLM}


def is_ernie35(config: dict) -> bool:
    """Whether a config.json describes this model: by its architectures, or by a key that only this model has."""
    architectures = config.get("architectures") or []
    return any(name.startswith("Ernie35") for name in architectures) or "parallel_attn_hatf" in config


class ErnieFamilyConfig(ErnieConfig):
    """What `model_type` "ernie" stands for: PaddleNLP's ERNIE or this model."""

    pretrained_init_configuration = {}

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        return (Ernie35Config if is_ernie35(config_dict) else ErnieConfig).from_dict(config_dict, **kwargs)


def _model_class(auto_class):
    if auto_class not in _MODEL_CLASSES:
        raise ValueError(
            f"{auto_class.__name__} has no ERNIE-3.5-SE form; use "
            f"{' or '.join(known.__name__ for known in _MODEL_CLASSES)}."
        )
    return _MODEL_CLASSES[auto_class]


def _register() -> None:
    AutoConfig.register("ernie", ErnieFamilyConfig, exist_ok=True)
    AutoConfig.MAPPING_NAMES["ernie35"] = [Ernie35Config]  # the built-in names
    AutoConfig.name2class = None  # made anew from MAPPING_NAMES at the next call
    AutoTokenizer.register(Ernie35Config, Ernie35Tokenizer, exist_ok=True)

    from_config = _BaseAutoModelClass._get_model_class_from_config.__func__
    from_pretrained = _BaseAutoModelClass._from_pretrained.__func__

    def _get_model_class_from_config(cls, pretrained_model_name_or_path, config_file_path, config=None):
        if config is None:
            with open(config_file_path, encoding="utf-8") as file:
                ours = is_ernie35(json.load(file))
        else:
            ours = isinstance(config, Ernie35Config)
        return _model_class(cls) if ours else from_config(cls, pretrained_model_name_or_path, config_file_path, config)

    def _from_pretrained(cls, pretrained_model_name_or_path, task=None, *args, **kwargs):
        if pretrained_model_name_or_path in BUILT_IN_CONFIGS:
            return _model_class(cls).from_pretrained(pretrained_model_name_or_path)  # says that it has no weights
        return from_pretrained(cls, pretrained_model_name_or_path, task, *args, **kwargs)

    _BaseAutoModelClass._get_model_class_from_config = classmethod(_get_model_class_from_config)
    _BaseAutoModelClass._from_pretrained = classmethod(_from_pretrained)


_register()
