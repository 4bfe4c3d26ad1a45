"""ERNIE-3.5-SE: a causal language model whose blocks compute attention and FFN in parallel from one projection.

Shapes: B batch, T new tokens, S all tokens (cached ones included), C hidden size, H heads, D = C/H head size,
F FFN width, V vocabulary, L layers.

    head block (layer 0)          fused block (layers between)           tail block (layer L-1)

    x                             x                                      x
    |--------.                    |---------------.                      |------------.
    |   input_layernorm           |        input_layernorm               |  post_attention_layernorm
    |   q_proj k_proj v_proj      |        qkv_gate_up_proj              |     /           \\
    |        |                    |        /       |     \\              |  gate_proj    up_proj
    |    attention                |   attention   gate    up             |   silu          |
    |        |                    |       |       silu    |              |     \\---- * ----/
    |      o_proj                 |       |        \\- * -/              |          |
    |        |                    |       |          |                   |      down_proj
    '------- +                    |   o_proj( concat[ffn, attention] )   |          |
             |                    '----------- +                         '--------- +
                                               |

The first layer is trimmed to attention and the last to the FFN (`parallel_attn_hatf`), so that the parallel blocks between
them read a state that has seen attention, and the output comes from an FFN. Without it every layer is a fused block.
"""

from __future__ import annotations

import math
import zlib

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddlenlp.transformers import PretrainedModel, model_utils, register_base_model
from paddlenlp.transformers.model_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from . import conversion, parallel
from .attention import AttentionInputs, choose_core, prepare_mask
from .configuration import BUILT_IN_CONFIGS, Ernie35Config
from .generation import Ernie35GenerationMixin, KVCache
from .linear import linear
from .loss import causal_lm_loss, head_loss
from .norm import layer_norm
from .positions import interval_position_ids, masked_position_ids, position_interval
from .rope import rope_tables, rotate

__all__ = ["Ernie35Model", "Ernie35ForCausalLM", "Ernie35PretrainedModel"]


def shared_inputs(
    config, batch, length, past_length=0, position_ids=None, attention_mask=None, use_cache=False, need_weights=False,
    training=False,
) -> AttentionInputs:  # fmt: skip
    """Rotation tables, mask and core: what every layer of one forward uses.

    Args:
        batch, length, past_length: B, T, and the number of cached tokens. The rest as in `Ernie35ForCausalLM.forward`.
    """
    total = past_length + length
    core = choose_core(config, need_weights)
    mask = prepare_mask(core, attention_mask, length, total)
    if position_ids is None:
        position_ids = default_positions(config, total, past_length, attention_mask)
    elif position_ids.ndim == 1:
        position_ids = position_ids.unsqueeze(0)
    if position_ids.shape[-1] != length:
        raise ValueError(f"position_ids have shape {position_ids.shape}; expected one for each of {length} new tokens.")
    cos, sin = rope_tables(position_ids, config.head_dim)
    return AttentionInputs(
        batch=batch,
        core=core,
        cos=cos,
        sin=sin,
        mask=mask,
        use_cache=bool(use_cache),
        need_weights=need_weights,
        recompute_core=training and config.recompute_scope == "core_attn" and not need_weights,
    )


def default_positions(config, total, past_length, attention_mask):
    """Positions of the new tokens where the caller gives none: (B or 1, T)."""
    spaced = config.enable_random_position_ids
    table = config.max_position_embeddings
    if spaced and past_length:
        raise ValueError(
            "with past_key_values pass position_ids too: evenly spaced positions depend on the final length, "
            "which the cached keys were turned for."
        )
    interval = position_interval(total, table) if spaced else 1
    position_interval(total, table)  # refuses what the table cannot hold
    if attention_mask is not None and attention_mask.ndim == 2:
        return masked_position_ids(attention_mask, table, spaced)[:, past_length:]
    return paddle.to_tensor(interval_position_ids(total, interval)[None, past_length:])


def split_heads(x, width: int, shared: AttentionInputs):
    """(B, T, H W) -> (B, T, H, W), with the H heads of this rank; (B T, H W) too, as sequence parallel has it."""
    return x.reshape([shared.batch, -1, x.shape[-1] // width, width])


def as_rows(context, rows: list[int], shared: AttentionInputs):
    """(B, T, H, D) -> (B, T, C), or (B T, C) where the state's `rows` are (B T,)."""
    return context.flatten(2) if shared.last_only else context.reshape([*rows, -1])


def last_tokens(x, shared: AttentionInputs):
    """x, (B, T, W), cut to its last token where generation goes on with that one alone."""
    return x[:, -1:] if shared.last_only else x


def attend(query, key, value, past, shared: AttentionInputs):
    """Rotate, extend the cached keys and values, and run the attention core.

    Args:
        query, key, value: (B, T, H, D). past: cached (key, value), each (B, S - T, H, D), keys already rotated; a KVCache,
            which does all of this in place; or None.

    Returns:
        context (B, T, H, D), present (key, value) of all S tokens or (), probabilities (B, H, T, S) or None.
    """
    if isinstance(past, KVCache):
        return past.attend(query, key, value, shared), (), None
    query, key = rotate(query, shared.cos, shared.sin), rotate(key, shared.cos, shared.sin)
    if past:
        key = paddle.concat([past[0], key], axis=1)  # (B, S, H, D)
        value = paddle.concat([past[1], value], axis=1)
    if shared.recompute_core:
        context = parallel.recompute(lambda q, k, v: shared.core(q, k, v, shared.mask)[0], query, key, value)
        weights = None
    else:
        context, weights = shared.core(query, key, value, shared.mask, shared.need_weights)
    present = (key, value) if shared.use_cache else ()
    return context, present, weights


class Attention(nn.Layer):
    """Self-attention with separate projections: the head block's."""

    def __init__(self, config: Ernie35Config):
        super().__init__()
        hidden = config.hidden_size
        self.head_dim = config.head_dim
        self.q_proj = parallel.column_linear(config, hidden, hidden)
        self.k_proj = parallel.column_linear(config, hidden, hidden)
        self.v_proj = parallel.column_linear(config, hidden, hidden)
        self.o_proj = parallel.row_linear(config, hidden, hidden)

    def forward(self, x, past, shared):
        query, key, value = (projection(x) for projection in (self.q_proj, self.k_proj, self.v_proj))  # (B, T, C)
        rows = query.shape[:-1]
        query, key, value = (split_heads(y, self.head_dim, shared) for y in (query, key, value))  # (B, T, H, D)
        context, present, weights = attend(query, key, value, past, shared)
        return self.o_proj(as_rows(context, rows, shared)), present, weights


class ParallelAttentionMLP(nn.Layer):
    """Attention and FFN side by side from one projection: the fused block's.

    The projection's columns are [3C | F | F]. The 3C are interleaved by head, (H, 3D), so that tensor parallel may cut
    them between heads. On the way out the FFN's columns come first.
    """

    def __init__(self, config: Ernie35Config):
        super().__init__()
        hidden, ffn = config.hidden_size, config.intermediate_size
        self.head_dim = config.head_dim
        self.qkv_share = 3 * hidden / (3 * hidden + 2 * ffn)
        self.qkv_gate_up_proj = parallel.column_linear(config, hidden, 3 * hidden + 2 * ffn)
        self.o_proj = parallel.row_linear(config, ffn + hidden, hidden)

    def forward(self, x, past, shared):
        fused = self.qkv_gate_up_proj(x)  # (B, T, 3C + 2F)
        qkv_width = round(fused.shape[-1] * self.qkv_share)
        ffn_width = (fused.shape[-1] - qkv_width) // 2
        qkv, gate, up = fused.split([qkv_width, ffn_width, ffn_width], axis=-1)
        query, key, value = split_heads(qkv, 3 * self.head_dim, shared).chunk(3, axis=-1)  # (B, T, H, D)
        context, present, weights = attend(query, key, value, past, shared)
        context = as_rows(context, gate.shape[:-1], shared)  # (B, T, C)
        gate, up = last_tokens(gate, shared), last_tokens(up, shared)
        return self.o_proj(paddle.concat([F.silu(gate) * up, context], axis=-1)), present, weights


class MLP(nn.Layer):
    """Gated FFN (SwiGLU, Shazeer 2020): the tail block's."""

    def __init__(self, config: Ernie35Config):
        super().__init__()
        hidden, ffn = config.hidden_size, config.intermediate_size
        self.gate_proj = parallel.column_linear(config, hidden, ffn)
        self.up_proj = parallel.column_linear(config, hidden, ffn)
        self.down_proj = parallel.row_linear(config, ffn, hidden)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class HeadBlock(nn.Layer):
    """Attention only. Every block maps x (B, T, C) to (x, present, probabilities)."""

    def __init__(self, config: Ernie35Config):
        super().__init__()
        self.input_layernorm = layer_norm(config)
        self.self_attn = Attention(config)

    def forward(self, x, past, shared):
        update, present, weights = self.self_attn(self.input_layernorm(x), past, shared)
        return last_tokens(x, shared) + update, present, weights


class FusedBlock(nn.Layer):
    """Attention and FFN in parallel."""

    def __init__(self, config: Ernie35Config):
        super().__init__()
        self.input_layernorm = layer_norm(config)
        self.self_attn_mlp = ParallelAttentionMLP(config)

    def forward(self, x, past, shared):
        update, present, weights = self.self_attn_mlp(self.input_layernorm(x), past, shared)
        return last_tokens(x, shared) + update, present, weights


class TailBlock(nn.Layer):
    """FFN only; its cache entry is empty."""

    def __init__(self, config: Ernie35Config):
        super().__init__()
        self.post_attention_layernorm = layer_norm(config)
        self.mlp = MLP(config)

    def forward(self, x, past, shared):
        return x + self.mlp(self.post_attention_layernorm(x)), (), None


def block_class(config: Ernie35Config, layer: int) -> type[nn.Layer]:
    """Which block stands at this layer."""
    if config.parallel_attn_hatf and layer == 0:
        return HeadBlock
    if config.parallel_attn_hatf and layer == config.num_hidden_layers - 1:
        return TailBlock
    return FusedBlock


def hidden_state_of(block: nn.Layer, shared: AttentionInputs):
    """The block as a function from tensor to tensor, which is what `parallel.recompute` takes."""
    return lambda x: block(x, None, shared)[0]


class LMHead(nn.Layer):
    """Hidden state to vocabulary scores: weight (C, V) of its own, or the embedding's (V, C) when tied."""

    def __init__(self, config: Ernie35Config):
        super().__init__()
        self.config = config
        self.weight = None if config.tie_word_embeddings else parallel.vocab_parameter(self, config)
        has_bias = config.use_bias and config.weight_share_add_bias
        self.bias = parallel.vocab_parameter(self, config, is_bias=True) if has_bias else None

    def forward(self, x, embedding_weight=None, labels=None):
        """Scores (B, T, V) of x (B, T, C), or the loss of labels (B, T). Both through this call: sharding stage 3 puts
        the weight together for its layer's calls only."""
        if labels is not None:
            return self._loss(x, labels, embedding_weight)
        return self._scores(x, embedding_weight)

    def _scores(self, x, embedding_weight):
        tied = self.weight is None
        logits = linear(parallel.enter_vocab(self.config, x), embedding_weight if tied else self.weight, self.bias, tied)
        return parallel.leave_vocab(self.config, logits)  # (B, T, V)

    def _loss(self, x, labels, embedding_weight):
        """Without whole logits in float32 on one rank."""
        config, tied = self.config, self.weight is None
        weight = embedding_weight if tied else self.weight
        whole = parallel.tensor_degree(config) == 1 and x.dtype == weight.dtype == paddle.float32
        if whole and not paddle.amp.is_autocast_enabled():
            return head_loss(x, weight, self.bias, labels, config.ignored_index, tied)
        return causal_lm_loss(self._scores(x, embedding_weight), labels, config.ignored_index, config.vocab_size)


@paddle.no_grad()
def initialise(named_parameters, config: Ernie35Config, seed: int) -> None:
    """Give every parameter its starting value.

    | parameter                                    | starts as                                       |
    |----------------------------------------------|-------------------------------------------------|
    | weight of a LayerNorm                        | 1                                               |
    | every bias                                   | 0                                               |
    | o_proj.weight, down_proj.weight of a block   | normal, deviation sqrt(0.3333 / C) / sqrt(2 L)  |
    | every other weight                           | normal, deviation sqrt(0.3333 / C)              |

    Weights that do not exist yet (lazy creation, while a checkpoint is read) are left alone. Each weight is drawn whole,
    from a state made of `seed` and its own name, and cut then: processes with the same seed make the same model, whichever
    parts of it they hold.
    """
    deviation = math.sqrt(0.3333 / config.hidden_size)
    for name, parameter in named_parameters:
        if not parameter._is_initialized():
            continue
        if name.endswith("bias"):
            parameter.zero_()
        elif name.endswith("norm.weight"):
            parameter.fill_(1.0)
        else:
            scaled = name.endswith(("o_proj.weight", "down_proj.weight"))
            scale = 1 / math.sqrt(2 * config.num_hidden_layers) if scaled else 1.0
            parameter.set_value(_draw(name, parameter, config, deviation * scale, seed))


def draw_seed() -> int:
    """A seed for one model's weights, from the global random state."""
    return paddle.randint(0, 2**31 - 1, [1]).item()


def _draw(name: str, parameter, config: Ernie35Config, deviation: float, seed: int):
    degree = parallel.tensor_degree(config) if getattr(parameter, "is_distributed", False) else 1
    shape = list(parameter.shape)
    if degree > 1:
        shape[conversion.layout(name, config).axis] *= degree
    with parallel.random_state(seed ^ zlib.crc32(name.removeprefix("ernie.").encode())):
        whole = (paddle.standard_normal(shape, dtype="float32") * deviation).astype(parameter.dtype)
    return conversion.split(name, whole, config, degree, parallel.tensor_rank(config)) if degree > 1 else whole


class CheckpointMixin:
    """What the model in one piece and the model in pipeline stages add to PaddleNLP's loading, saving and conversion."""

    config_class = Ernie35Config
    pretrained_init_configuration = BUILT_IN_CONFIGS

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """As PaddleNLP's; says that the built-in configurations have no weights to download.

        Raises:
            ValueError: a built-in name.
        """
        if pretrained_model_name_or_path in BUILT_IN_CONFIGS:
            raise ValueError(
                f"No weights of {pretrained_model_name_or_path!r} were ever released, so there is nothing to download. "
                "Train it from scratch: Ernie35ForCausalLM.from_config(Ernie35Config.from_pretrained("
                f"{pretrained_model_name_or_path!r})), or scripts/run_pretrain.py with --continue_training 0."
            )
        with model_utils.no_init_weights():  # the checkpoint has them
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    @classmethod
    def _load_pretrained_model(cls, model, *args, **kwargs):
        """As the base class; weights that the checkpoint lacks start as in a new model."""
        result = super()._load_pretrained_model(model, *args, **kwargs)
        missing = set(result[1])
        lacking = [(name, p) for name, p in model._parameters_by_name() if name in missing]
        initialise(lacking, model.config, model._start_seed)
        return result

    def _parameters_by_name(self):
        """(state-dict name, parameter)."""
        return list(self.named_parameters())

    @classmethod
    def _get_tensor_parallel_mappings(cls, config, is_split=True):
        """PaddleNLP's hook: name -> function that cuts or joins that weight."""

        def action(name):
            if is_split:
                degree, rank = config.tensor_parallel_degree, config.tensor_parallel_rank
                return lambda array: conversion.split(name, array, config, degree, rank)
            return lambda shards: conversion.merge(name, shards, config)

        return {name: action(name) for name in conversion.parameter_names(config)}


class Ernie35PretrainedModel(CheckpointMixin, PretrainedModel):
    """Base of the models in one piece."""

    base_model_prefix = "ernie"

    def __init__(self, config: Ernie35Config):
        super().__init__(config)
        self._start_seed = draw_seed()  # before any layer draws: how many numbers those take depends on the layout

    @classmethod
    def _load_pretrained_model(cls, *args, **kwargs):
        """As PaddleNLP's, which only warns of weights that the files lack: `missing_weights` names them."""
        model, missing, *others = super()._load_pretrained_model(*args, **kwargs)
        model.missing_weights = sorted(missing)
        return model, missing, *others

    def _initialise(self, prefix: str = "") -> None:
        if model_utils._init_weights:  # off while a checkpoint is being read
            mine = [(name, p) for name, p in self._parameters_by_name() if name.startswith(prefix)]
            initialise(mine, self.config, self._start_seed)


@register_base_model
class Ernie35Model(Ernie35PretrainedModel):
    """The trunk: embedding, blocks, final LayerNorm."""

    def __init__(self, config: Ernie35Config):
        super().__init__(config)
        parallel.check_supported(config)
        self.embed_tokens = parallel.vocab_embedding(config)
        self.layers = nn.LayerList([block_class(config, i)(config) for i in range(config.num_hidden_layers)])
        self.norm = layer_norm(config)
        parallel.mark_partial_gradients(config, self)
        self._initialise()

    def get_input_embeddings(self):
        return self.embed_tokens

    def set_input_embeddings(self, value):
        self.embed_tokens = value

    def forward(
        self,
        input_ids=None,
        position_ids=None,
        attention_mask=None,
        inputs_embeds=None,
        use_cache=False,
        past_key_values=None,
        output_attentions=False,
        output_hidden_states=False,
        return_dict=True,
    ):
        """Arguments and errors as in `Ernie35ForCausalLM.forward`; returns the final hidden state (B, T, C)."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds, and not both.")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds  # (B, T, C)
        past_key_values = past_key_values or [None] * self.config.num_hidden_layers
        past_length = past_key_values[0][0].shape[1] if past_key_values[0] else 0
        batch = x.shape[0]
        shared = shared_inputs(
            self.config, batch, x.shape[1], past_length, position_ids, attention_mask, use_cache,
            bool(output_attentions), self.training,
        )  # fmt: skip
        x = parallel.scatter_sequence(self.config, x)
        plain = not (use_cache or output_attentions)  # what is recomputed returns its hidden state only
        recompute_blocks = self.training and plain and self.config.recompute_scope == "full"
        if recompute_blocks:
            x.stop_gradient = False  # recompute cuts the graph at inputs without gradient, as of a frozen embedding

        hidden_states, presents, attentions = [], [], []
        for block, past in zip(self.layers, past_key_values):
            if output_hidden_states:
                hidden_states.append(parallel.gather_sequence(self.config, x, batch))
            if recompute_blocks:
                x, present, weights = parallel.recompute(hidden_state_of(block, shared), x), (), None
            else:
                x, present, weights = block(x, past, shared)
            presents.append(present)
            attentions.append(weights)
        hidden_states.append(parallel.gather_sequence(self.config, self.norm(x), batch))  # (B, T, C)

        output = BaseModelOutputWithPast(
            last_hidden_state=hidden_states[-1],
            past_key_values=tuple(presents) if use_cache else None,
            hidden_states=tuple(hidden_states) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
        )
        return output if return_dict else output.to_tuple()


class Ernie35ForCausalLM(Ernie35GenerationMixin, Ernie35PretrainedModel):
    """The language model: trunk, LM head, loss; `generate()` is generation.py's."""

    _tied_weights_keys = ["lm_head.weight"]

    def __init__(self, config: Ernie35Config):
        super().__init__(config)
        self.ernie = Ernie35Model(config)
        self.lm_head = LMHead(config)
        self._initialise("lm_head")

    def get_output_embeddings(self):
        return self.lm_head

    def lm_logits(self, hidden_state):
        """(B, T, C) -> (B, T, V)."""
        return self.lm_head(hidden_state, self.ernie.embed_tokens.weight)

    def forward(
        self,
        input_ids=None,
        position_ids=None,
        attention_mask=None,
        inputs_embeds=None,
        labels=None,
        use_cache=False,
        past_key_values=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        return_logits=None,
    ):
        """Scores of the next token, and the loss where labels are given. A pure function of its inputs.

        Args:
            input_ids: (B, T) integers; or inputs_embeds: (B, T, C).
            position_ids: (T,), (1, T) or (B, T). None: evenly spaced (`enable_random_position_ids`) or 0, 1, 2, ...; with
                a (B, S) attention_mask, each row counts from its own first real token.
            attention_mask: (B, S), 1 for real tokens; (B, T, S) or (B, 1, T, S), 1 where a query may look.
            labels: (B, T), aligned with the logits: labels[:, t] is the token after input_ids[:, t]. Entries equal to
                `config.ignored_index` do not count.
            use_cache: also return the keys and values of all tokens, to be passed as past_key_values.
            past_key_values: one entry a layer, (key, value), each (B, S - T, H, D); () for a layer without attention.
            return_logits: in train mode with labels, whether to return logits (B, T, V) beside the loss. Default: no.

        Returns:
            With return_dict a `CausalLMOutputWithPast`; else a tuple (loss, logits, ...) with labels, (logits, ...)
            without. Rows of padding hold finite values that mean nothing.

        Raises:
            ValueError: more tokens than positions, or a mask, position_ids or labels of another shape.
        """
        config = self.config
        return_dict = config.use_return_dict if return_dict is None else return_dict
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        output_hidden_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        trunk = self.ernie(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            past_key_values=past_key_values,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        logits = None
        if labels is not None and self.training and not return_logits:
            loss = self.lm_head(trunk.last_hidden_state, self.ernie.embed_tokens.weight, labels)
        else:
            logits = self.lm_logits(trunk.last_hidden_state)  # (B, T, V)
            loss = None if labels is None else causal_lm_loss(logits, labels, config.ignored_index, config.vocab_size)
        if return_dict:
            return CausalLMOutputWithPast(
                loss=loss,
                logits=logits,
                past_key_values=trunk.past_key_values,
                hidden_states=trunk.hidden_states,
                attentions=trunk.attentions,
            )
        head = (logits,) if loss is None else (loss, logits)
        return head + trunk.to_tuple()[1:]
