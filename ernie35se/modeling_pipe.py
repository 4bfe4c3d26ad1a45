"""The blocks of modeling.py as pipeline stages (Huang et al. 2019; interleaved: Narayanan et al. 2021, section 2.2).

    layers, in order     EmbeddingPipe   block 0   ...   block L-1   FinalNormPipe   HeadPipe
    between layers       (x, position_ids) or (x, position_ids, attention_mask)      x        logits

Each block makes its own rotation tables and mask from the positions that travel with the state, so a stage needs nothing
but what the one before sends. Which layers form a stage is decided by stages.py. Parameters keep the names of
`Ernie35ForCausalLM` in every state dict, so a checkpoint does not show on how many stages it was made.
"""

from __future__ import annotations

from paddle import nn
from paddlenlp.transformers import model_utils
from paddlenlp.transformers.model_utils import PipelinePretrainedModel

from . import parallel
from .configuration import Ernie35Config
from .loss import causal_lm_loss
from .modeling import (
    CheckpointMixin,
    FusedBlock,
    HeadBlock,
    LMHead,
    TailBlock,
    block_class,
    default_positions,
    draw_seed,
    hidden_state_of,
    initialise,
    shared_inputs,
)
from .norm import layer_norm
from .stages import balanced_stages

__all__ = ["Ernie35ForCausalLMPipe"]

SHARED_EMBEDDING = "ernie_embedding"


class EmbeddingPipe(nn.Layer):
    """(input_ids, position_ids, attention_mask), the last two perhaps None -> what travels between blocks."""

    def __init__(self, config: Ernie35Config):
        super().__init__()
        self.config = config
        self.embed_tokens = parallel.vocab_embedding(config)

    @property
    def shared_weight(self):
        return self.embed_tokens.weight

    def forward(self, inputs):
        input_ids, position_ids, attention_mask = (*inputs, None, None)[:3] if isinstance(inputs, tuple) else (inputs, None, None)
        if position_ids is None:
            position_ids = default_positions(self.config, input_ids.shape[1], 0, attention_mask)
        elif position_ids.ndim == 1:
            position_ids = position_ids.unsqueeze(0)
        position_ids.stop_gradient = True
        x = parallel.scatter_sequence(self.config, self.embed_tokens(input_ids))
        return (x, position_ids) if attention_mask is None else (x, position_ids, attention_mask)


class _BlockPipe:
    """What turns a block of modeling.py into a stage's layer."""

    def __init__(self, config: Ernie35Config):
        super().__init__(config)
        self.config = config

    def forward(self, state, past=None, shared=None):
        if shared is not None:  # inside recompute
            return super().forward(state, past, shared)
        x, position_ids, *mask = state
        shared = shared_inputs(
            self.config, batch_of(self.config, x, position_ids), position_ids.shape[-1], position_ids=position_ids,
            attention_mask=mask[0] if mask else None, training=self.training,
        )  # fmt: skip
        if self.training and self.config.recompute_scope == "full":
            x.stop_gradient = False  # recompute cuts the graph at inputs without gradient
            x = parallel.recompute(hidden_state_of(self, shared), x)
        else:
            x = super().forward(x, None, shared)[0]
        return (x, position_ids, *mask)


class HeadBlockPipe(_BlockPipe, HeadBlock):
    pass


class FusedBlockPipe(_BlockPipe, FusedBlock):
    pass


class TailBlockPipe(_BlockPipe, TailBlock):
    pass


STAGE_LAYER = {HeadBlock: HeadBlockPipe, FusedBlock: FusedBlockPipe, TailBlock: TailBlockPipe}


class FinalNormPipe(nn.Layer):
    """State -> normed hidden state of all tokens (B, T, C)."""

    def __init__(self, config: Ernie35Config):
        super().__init__()
        self.config = config
        self.norm = layer_norm(config)

    def forward(self, state):
        x, position_ids = state[:2]
        return parallel.gather_sequence(self.config, self.norm(x), batch_of(self.config, x, position_ids))


class HeadPipe(LMHead):
    """The LM head; when tied, with a copy of the embedding that the pipeline keeps equal to the first stage's."""

    def __init__(self, config: Ernie35Config):
        super().__init__(config)
        if config.tie_word_embeddings:
            self.embed_tokens = parallel.vocab_embedding(config)
            # Clipping counts the first stage's alone. (Paddle means to set this, but looks for another name.)
            self.embed_tokens.weight.is_firstly_shared = False

    @property
    def shared_weight(self):
        return self.embed_tokens.weight

    def forward(self, x):
        return super().forward(x, self.shared_weight if self.config.tie_word_embeddings else None)


def batch_of(config: Ernie35Config, x, position_ids) -> int:
    """B, of a state (B, T, C), or (B T / N, C) with sequence parallel."""
    return x.shape[0] if x.ndim == 3 else x.shape[0] * parallel.tensor_degree(config) // position_ids.shape[-1]


# ---- the model ------------------------------------------------------------------------------------------------------


class Ernie35ForCausalLMPipe(CheckpointMixin, PipelinePretrainedModel, parallel.PipelineLayer):
    """This process's stage (or stages, with virtual_pp_degree) of the language model.

    Raises:
        ValueError: more stages than blocks, or what `parallel.check_supported` refuses.
    """

    _tied_weights_keys = ["lm_head.weight"]
    # No base_model_prefix: PaddleNLP would look for a trunk.

    def __init__(self, config: Ernie35Config):
        parallel.check_supported(config, pipeline=True)
        self.config = config
        self._start_seed, trunk_seed = draw_seed(), draw_seed()  # in the order in which Ernie35ForCausalLM draws them
        virtual = max(int(config.virtual_pp_degree or 1), 1)
        self._cuts = balanced_stages(config, parallel.pipeline_degree() * virtual)
        self._add_layers(config)
        parallel.PipelineLayer.__init__(
            self,
            layers=self.get_sequential_layers(),
            loss_fn=_Loss(config),
            topology=parallel.topology(),
            seg_method=self._cuts if virtual == 1 else "layer:Block",  # the latter only passes Paddle's check
            num_virtual_pipeline_stages=virtual,
        )
        parallel.mark_partial_gradients(config, self)
        if model_utils._init_weights:
            named = self._parameters_by_name()
            initialise([item for item in named if item[0].startswith("lm_head")], config, self._start_seed)
            initialise([item for item in named if not item[0].startswith("lm_head")], config, trunk_seed)
            self._synchronize_shared_weights()  # again: a tied copy, where stages were seeded differently

    def _add_layers(self, config: Ernie35Config) -> None:
        def add(name, kind, shared=False):
            description = (
                parallel.SharedLayerDesc(SHARED_EMBEDDING, kind, shared_weight_attr="shared_weight", config=config)
                if shared
                else parallel.LayerDesc(kind, config=config)
            )
            self.add_sequential_layer(description, name)

        tied = config.tie_word_embeddings
        add("ernie", EmbeddingPipe, tied)
        for i in range(config.num_hidden_layers):
            add(f"ernie.layers.{i}", STAGE_LAYER[block_class(config, i)])
        add("ernie", FinalNormPipe)
        add("lm_head", HeadPipe, tied)

    def _segment_network_for_interleave(self, seg_method) -> None:
        """Paddle's takes a list of cuts only without virtual stages. Stage s of S holds parts s, s + S, s + 2 S, ..."""
        self.segment_parts = self._cuts
        mine = range(self._stage_id, self._total_stages_with_virtual_stages, self._num_stages)
        self._start_poss = [self._cuts[part] for part in mine]
        self._end_poss = [self._cuts[part + 1] for part in mine]

    def _parameters_by_name(self):
        self._set_pipeline_name_mapping()
        return [(self._pp_to_single_mapping[name], parameter) for name, parameter in self.named_parameters()]

    def _set_pipeline_name_mapping(self, mappings=None):
        """PaddleNLP's calls a tied copy of the embedding `lm_head.embed_tokens`; here it has the embedding's own name."""
        prefixes = self.get_sequential_name_prefixes()
        pairs = {}
        for name in parallel.PipelineLayer.state_dict(self):
            first, second, *rest = name.split(".")
            if first == "shared_layers":  # shared_layers.<key>.<parameter>
                prefix = "ernie" if rest[0] == "embed_tokens" else "lm_head"
            elif second.isdigit():  # <first layer of the chunk>.<place in it>.<parameter>
                prefix = prefixes[str(int(first) + int(second))]
            else:  # <layer>.<parameter>
                prefix, rest = prefixes[first], [second, *rest]
            if rest[0] == "embed_tokens":
                prefix = "ernie"
            pairs[name] = ".".join([prefix, *rest])
        self._pp_to_single_mapping = pairs
        self._single_to_pp_mapping = {single: name for name, single in pairs.items()}
        return self._single_to_pp_mapping

    @classmethod
    def _prepare_pipeline_inputs_func(cls, inputs):
        """PaddleNLP's hook: one micro-batch (a dict) or all of a step (a list) -> [first stage's, last stage's]."""
        first = ("input_ids", "position_ids", "attention_mask")
        if isinstance(inputs, dict):
            return [tuple(inputs.get(key) for key in first), inputs.get("labels")]
        columns = [[batch.get(key) for batch in inputs] for key in first]
        return [
            tuple(None if column[0] is None else column for column in columns),
            [batch["labels"] for batch in inputs],
        ]


class _Loss(nn.Layer):
    """Logits and labels of one micro-batch -> its loss."""

    def __init__(self, config: Ernie35Config):
        super().__init__()
        self.config = config

    def forward(self, logits, labels):
        return causal_lm_loss(logits, labels, self.config.ignored_index, self.config.vocab_size)
