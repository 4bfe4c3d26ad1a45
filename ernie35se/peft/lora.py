"""LoRA and its kin, all of them linear updates of a frozen linear layer.

    LoRA      s x A B                        s = alpha / r              Hu et al. 2021, arXiv:2106.09685
    rsLoRA    the same                       s = alpha / sqrt(r)        Kalajdzievski 2023, arXiv:2312.03732
    LoRA+     the same, B learns faster by `lora_plus_scale`            Hayou et al. 2024, arXiv:2402.12354
    PiSSA     x A B, started from W's top singular triplets             Meng et al. 2024, arXiv:2404.02948
    MoSLoRA   s x A M B, M (r, r)                                       Wu et al. 2024, arXiv:2406.11909
    LinChain  s x A M1 ... Mn B                                         arXiv:2411.00039
    MoRA      decompress(compress(x) M), M square                       Jiang et al. 2024, arXiv:2405.12130

Here A is (in, r) and B (r, out), in the layout of Paddle's weights. Names of settings and parameters are
PaddleNLP's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Optional

import numpy as np
import paddle
from paddlenlp.peft.lora.lora_quick_layers import quick_lora
from paddlenlp.utils.log import logger

from .. import conversion, parallel
from . import quant
from .base import (
    AdapterConfig,
    AdapterLinear,
    find_targets,
    get_layer,
    insert,
    kaiming_uniform,
    replace_layer,
    top_singular,
)


@dataclass
class LoRAConfig(AdapterConfig):
    """Attributes beyond AdapterConfig's: rank `r`; `lora_alpha` (None: 2r, or 4 with rslora); `lora_dropout`;
    the switches `rslora`, `pissa`, `use_mora`, `lora_use_mixer` with the number of mixers `mixer_num`,
    `use_quick_lora`; `lora_plus_scale`, the learning rate of B as a multiple of A's. QLoRA:
    `weight_quantize_algo`, how the model's linear layers are stored (None: as they are), `weight_blocksize`,
    `weight_double_quant`; see quant.py."""

    method: ClassVar[str] = "lora"

    r: int = 8
    lora_alpha: Optional[float] = None
    lora_dropout: float = 0.0
    rslora: bool = False
    lora_plus_scale: float = 1.0
    pissa: bool = False
    use_mora: bool = False
    lora_use_mixer: bool = False
    mixer_num: int = 1
    use_quick_lora: bool = False
    weight_quantize_algo: Optional[str] = None
    weight_blocksize: int = 64
    weight_double_quant: bool = False

    def __post_init__(self):
        self.require_positive("r", "mixer_num")
        if self.lora_alpha is None:
            self.lora_alpha = 4 if self.rslora else 2 * self.r
        self.require_number("lora_alpha", "lora_plus_scale", positive=True)
        self.require_number("lora_dropout", below=1)
        if self.mixer_num > 1 and not self.lora_use_mixer:
            raise ValueError(f"lora: mixer_num = {self.mixer_num} needs lora_use_mixer.")
        shapes = [name for name in ("pissa", "use_mora", "lora_use_mixer") if getattr(self, name)]
        if len(shapes) > 1:
            raise ValueError(f"lora: {' and '.join(shapes)} exclude each other; choose one.")
        if self.rslora and (self.pissa or self.use_mora):
            raise ValueError(
                f"lora: {shapes[0]} has no scale alpha / r that rslora could change; turn one of them off."
            )
        if self.use_mora and self.lora_plus_scale != 1:
            raise ValueError(
                "lora: use_mora has no matrix B that lora_plus_scale could speed up; turn one of them off."
            )
        if self.weight_quantize_algo is not None:
            quant.check_settings(self.weight_quantize_algo, self.weight_blocksize)
            for name in ("pissa", "use_quick_lora"):
                if getattr(self, name):
                    raise ValueError(
                        f"lora: {name} needs the weights themselves, not quantised; turn one of them off."
                    )
        elif self.weight_double_quant:
            raise ValueError("lora: weight_double_quant needs weight_quantize_algo.")
        if self.use_quick_lora and (self.lora_dropout or self.use_mora or self.lora_use_mixer):
            logger.warning(
                "use_quick_lora covers plain LoRA without dropout alone: the ordinary form is used."
            )
            self.use_quick_lora = False

    @property
    def scaling(self) -> float:
        """The factor s."""
        if self.pissa or self.use_mora:
            return 1.0
        return self.lora_alpha / (math.sqrt(self.r) if self.rslora else self.r)

    @property
    def splits(self) -> bool:
        """Whether the adapters can be cut with tensor-parallel layers."""
        return not (self.use_mora or self.weight_quantize_algo)

    def name(self) -> str:
        """The name of the method that the switches add up to."""
        if self.weight_quantize_algo:  # whatever the adapter on top
            return "QLoRA"
        if self.lora_use_mixer:
            return "LinChain" if self.mixer_num > 1 else "MoSLoRA"
        names = {"pissa": "PiSSA", "use_mora": "MoRA", "rslora": "rsLoRA"}
        return next((name for switch, name in names.items() if getattr(self, switch)), "LoRA")


class LoRALinear(AdapterLinear):
    """A and B, with mixers between them where asked for."""

    def __init__(self, name, base, config: LoRAConfig, start: bool = True):
        super().__init__(base, config.lora_dropout)
        self.scaling, self.quick = config.scaling, config.use_quick_lora and not self.seam.cut
        self.name, rank = name, config.r
        whole = self._whole_weight() if config.pissa and start else None
        inside, outside = self._whole_shape()
        if config.pissa:
            a, b = (
                self._top_triplets(whole, rank)
                if start
                else (np.zeros([inside, rank]), np.zeros([rank, outside]))
            )
        else:
            a = kaiming_uniform(config.seed, f"{name}.lora_A", (inside, rank), fan_in=inside)
            b = np.zeros([rank, outside])
        self.make_piece("lora_A", a)
        self.mixers = (
            ["lora_AB", *(f"lora_AB_{i}" for i in range(1, config.mixer_num))]
            if config.lora_use_mixer
            else []
        )
        for mixer in self.mixers:
            self.make(mixer, kaiming_uniform(config.seed, f"{name}.{mixer}", (rank, rank), fan_in=rank))
        self.make_piece("lora_B", b, learning_rate=config.lora_plus_scale)
        self.starts_from_base = config.pissa
        if config.pissa:  # the base loses exactly this, now and whenever the adapter is loaded
            self.make_piece("lora_A_start", a, trainable=False)
            self.make_piece("lora_B_start", b, trainable=False)

    def _whole_shape(self):
        degree = parallel.tensor_degree(self.model_config) if self.seam.cut else 1
        inside, outside = self.in_features, self.out_features
        return (inside * degree, outside) if self.seam.rows else (inside, outside * degree)

    def _whole_weight(self):
        if not self.seam.cut:
            return self.base.weight
        pieces = parallel.all_pieces(self.model_config, self.base.weight)
        return conversion.merge(f"{self.name}.weight", pieces, self.model_config)

    def make_piece(self, own, start, **options):
        """`make` of this rank's piece of `start`."""
        if not self.seam.cut:
            return self.make(own, start, **options)
        config, name = self.model_config, f"{self.name}.{own}"
        degree, rank = parallel.tensor_degree(config), parallel.tensor_rank(config)
        parameter = self.make(own, conversion.split(name, start, config, degree, rank), **options)
        if (cut := conversion.layout(name, config)) is not None:
            parallel.mark_cut(parameter, cut.axis)
        return parameter

    def _top_triplets(self, weight, rank):
        u, s, v = top_singular(weight, rank, self.name)
        root = np.sqrt(s[:rank])
        return u[:, :rank] * root, root[:, None] * v[:rank]

    def forward(self, x):
        if self.quick and self.training and self.active:
            base = self.base
            return quick_lora(x, self.lora_A, self.lora_B, base.weight, base.bias, self.scaling)
        return super().forward(x)

    def update(self, x):
        x = self.seam.after_first(x @ self.lora_A)
        for mixer in self.mixers:
            x = x @ getattr(self, mixer)
        return self.seam.before_last(x) @ self.lora_B * self.scaling

    def kept_by_update(self):
        return self.lora_A.shape[-1] * (1 + len(self.mixers))

    @paddle.no_grad()
    def delta_weight(self):
        product = self.lora_A  # of a cut layer this rank's rows or columns, as base.weight has them
        for factor in (*self.mixers, "lora_B"):
            product = product @ getattr(self, factor)
        return product * self.scaling

    def taken_from_base(self):
        return self.lora_A_start @ self.lora_B_start if self.starts_from_base else None


class MoRALinear(AdapterLinear):
    """One square matrix of n^2 parameters, n = sqrt((in + out) r) made even.

    Compress: x, repeated to fill whole groups of n, is cut into groups; group g is rotated by g times RoPE's
    angles, so that the groups can be told apart. Each group meets the matrix. Decompress: the groups laid out
    in a row, cut or repeated to `out` values. (The form with rotation of the paper, section 3.2.)
    """

    def __init__(self, name, base, config: LoRAConfig, start: bool = True):
        super().__init__(base, config.lora_dropout)
        size = max(2, int(math.sqrt((self.in_features + self.out_features) * config.r) + 0.5) // 2 * 2)
        self.make("lora_A", np.zeros([size, size]))
        self.size, self.groups = size, -(-self.in_features // size)
        angles = np.outer(np.arange(self.groups), 10000.0 ** (-np.arange(0, size, 2) / size))
        angles = np.concatenate([angles, angles], axis=-1)  # (groups, n)
        for buffer, value in (("cos", np.cos(angles)), ("sin", np.sin(angles))):
            self.register_buffer(buffer, paddle.to_tensor(value, dtype=self._dtype), persistable=False)

    def update(self, x):
        x = _repeated(x, self.groups * self.size).reshape([*x.shape[:-1], self.groups, self.size])
        first, second = x.chunk(2, axis=-1)
        x = x * self.cos + paddle.concat([-second, first], axis=-1) * self.sin
        return _repeated((x @ self.lora_A).flatten(-2), self.out_features)

    def kept_by_update(self):
        return 2 * self.groups * self.size + 2 * self.in_features


def _repeated(x, width):
    """The last axis cut to `width`, or repeated until it has that many values."""
    times = -(-width // x.shape[-1])
    return (paddle.concat([x] * times, axis=-1) if times > 1 else x)[..., :width]


def make_layer(name, base, config: LoRAConfig, start: bool = True) -> AdapterLinear:
    """The adapter of the kind that the switches ask for, around one linear layer."""
    return (MoRALinear if config.use_mora else LoRALinear)(name, base, config, start)


def prepare(name, base, config: LoRAConfig):
    """A linear layer as the method wants it: quantised, where QLoRA is asked for."""
    if not config.weight_quantize_algo:
        return base
    return quant.QuantisedLinear(
        base, config.weight_quantize_algo, config.weight_blocksize, config.weight_double_quant
    )


def wrap(model, config: LoRAConfig, start: bool = True) -> None:
    """Put the adapters into the model. QLoRA quantises all linear layers of the blocks, with adapter or
    without."""
    if config.weight_quantize_algo:
        for name in find_targets(model, None):
            replace_layer(model, name, prepare(name, get_layer(model, name), config))
    insert(model, config, make_layer, start)
