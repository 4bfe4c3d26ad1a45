"""What a training run will need: parameters, memory per device, tokens and FLOPs per step.

Everything is counted from the fields of a config and plain numbers; no model, no framework is imported.
Symbols: B samples and T tokens of a micro-batch, N = B T, C hidden size, K width of all key heads, H heads, D
head size, F FFN width, V vocabulary, L layers, P parameters.

Two families of decoders are known. *Parallel*: ours, with blocks named as in modeling.py. *Serial*:
attention, then a gated FFN, each behind an RMSNorm, as Llama and Qwen2 are in PaddleNLP.

**Activations.** The floats that Paddle's autograd keeps between forward and backward, per token, from the
operators:

| block  | on every tensor parallel rank | divided by the tensor parallel degree                 | scores |
|--------|-------------------------------|-------------------------------------------------------|--------|
| fused  | 2C + 2: input, normed input,  | 6C + 4F: q and k before rotation (2C), q, k, v (3C),  | H T    |
|        | LayerNorm's mean and variance | o_proj's input (C + F), gate, silu(gate), up (3F)     |        |
| head   | 2C + 2                        | 6C                                                    | H T    |
| tail   | 2C + 2                        | 4F: gate, silu(gate), up, product                     |        |
| serial | 6C + 2D + 2: two RMSNorms of  | 6C + 2K + 3F: q, k and their rotations (2C + 2K),     | H T    |
|        | 3C, cosines and sines         | q, k, v at H heads (3C), o_proj's input (C), gate,    |        |
|        |                               | up, product (3F)                                      |        |
| final  | 2C + 2 (serial: 3C + 3)       | V: softmax of the logits, float32                     |        |
|        | in chunks (float32, one rank, our decoder): 3C + 2, and the gradient of the head's weight    |        |

**Working space.** What exists at the worst moment beyond that: see `_working_space`.

In float32 on CPU these counts equal what Paddle allocates to within a few floats
(tests/training/test_estimate.py measures them). Half precision follows from the same counts with 2 bytes an
element; allocator fragmentation, communication buffers and the CUDA context come on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Dict, List, NamedTuple, Tuple

from ..stages import TYPICAL_LENGTH, balanced_cuts

FLOAT32, HALF = 4, 2  # bytes
HEAD_CHUNK = 1024  # tokens; loss.CHUNK


# ---------------------------------------------------------------- what is described


@dataclass(frozen=True)
class Plan:
    """How a model is trained, as far as memory and speed depend on it."""

    seq_length: int
    micro_batch: int = 1
    accumulation: int = 1
    data_parallel: int = 1  # copies that each read their own samples, sharded ones not counted
    sharding_stage: int = 0  # 0 none, 1 optimizer, 2 and gradients, 3 and weights
    sharding_degree: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual: int = 1  # parts of each pipeline stage
    sequence_parallel: bool = False
    precision: str = "float32"  # or bfloat16, float16
    master_weights: bool = False  # O2: half-precision weights with float32 masters
    master_gradients: bool = False
    recompute: str = "none"  # or full, core_attn
    score_rows: int | None = None  # queries whose scores pass at a time; None: those of all, kept; 0: none are stored
    loss_in_place: bool = False  # a kernel turns logits into their gradient without a second copy
    kept_later: int = 0  # bytes that adapters keep in the blocks after the last one that attends
    frozen: bool = False  # the model's own matrices get no gradient (adapters)

    @property
    def devices(self) -> int:
        return self.data_parallel * self.sharding_degree * self.tensor_parallel * self.pipeline_parallel

    @property
    def samples_per_step(self) -> int:
        return self.micro_batch * self.accumulation * self.data_parallel * self.sharding_degree

    @property
    def tokens_per_step(self) -> int:
        return self.samples_per_step * self.seq_length


class Block(NamedTuple):
    """Counts of one kind of block; activations are floats per token."""

    part: str
    matrices: int  # weights of its linear layers
    biases: int
    norms: int
    largest_matrix: int
    kept: int  # activations that every tensor parallel rank keeps
    kept_split: int  # activations divided by the tensor parallel degree
    attends: bool
    attention_space: int  # working space at the softmax beyond what is kept at the block's end, scores aside
    attention_scores: int  # and how many score matrices (H T) then exist beyond the kept one
    block_space: int  # working space at its last operator beyond what is kept

    @property
    def parameters(self) -> int:
        return self.matrices + self.biases + self.norms


@dataclass(frozen=True)
class Decoder:
    """A causal language model as counts."""

    hidden: int
    ffn: int
    heads: int
    head_size: int
    vocabulary: int
    tied: bool
    blocks: Tuple[Block, ...]
    final_norm: int  # parameters
    final_kept: int  # activations per token, without the softmax
    head_bias: int
    buffers: int  # floats that are no parameters, for example tables of cosines in each layer
    chunked_head: bool  # the loss works in chunks of HEAD_CHUNK tokens where it can (loss.py, head_loss)

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def lm_head(self) -> int:
        return (0 if self.tied else self.embedding) + self.head_bias


def describe(config: Any) -> Decoder:
    """Counts of the model that a config describes: Ernie35Config, or a Llama- or Qwen2-like one of PaddleNLP.

    Raises:
        ValueError: the config lacks a field that every decoder has.
    """
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [name for name in needed if not isinstance(getattr(config, name, None), int)]
    if missing:
        raise ValueError(
            f"{type(config).__name__} has no {missing[0]}; memory is estimated for decoders that have it"
        )
    parallel = hasattr(config, "parallel_attn_hatf")
    return _parallel_decoder(config) if parallel else _serial_decoder(config)


def _parallel_decoder(config: Any) -> Decoder:
    hidden, ffn, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    has_bias = int(config.use_bias)
    wide = 3 * hidden + 2 * ffn
    fused = Block(
        "fused blocks", hidden * wide + (ffn + hidden) * hidden, has_bias * (wide + hidden), 2 * hidden,
        hidden * wide, 2 * hidden + 2, 6 * hidden + 4 * ffn, True, 8 * hidden, 2, 9 * hidden + 3 * ffn,
    )  # fmt: skip
    head = Block(
        "head block", 4 * hidden * hidden, has_bias * 4 * hidden, 2 * hidden,
        hidden * hidden, 2 * hidden + 2, 6 * hidden, True, 2 * hidden, 2, 0,
    )  # fmt: skip
    tail = Block(
        "tail block", 3 * hidden * ffn, has_bias * (2 * ffn + hidden), 2 * hidden,
        hidden * ffn, 2 * hidden + 2, 4 * ffn, False, 0, 0, 0,
    )  # fmt: skip
    trimmed = config.parallel_attn_hatf
    blocks = (head, *[fused] * (layers - 2), tail) if trimmed else (fused,) * layers
    return Decoder(
        hidden, ffn, config.num_attention_heads, hidden // config.num_attention_heads, config.vocab_size,
        bool(config.tie_word_embeddings), blocks, 2 * hidden, 2 * hidden + 2,
        config.vocab_size if config.use_bias and config.weight_share_add_bias else 0, 0, True,
    )  # fmt: skip


def _serial_decoder(config: Any) -> Decoder:
    hidden, ffn, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or hidden // heads
    query, key = heads * head_size, (getattr(config, "num_key_value_heads", None) or heads) * head_size
    qwen = str(getattr(config, "model_type", "")).startswith("qwen2")
    has_bias = qwen or bool(getattr(config, "attention_bias", False))
    block = Block(
        "blocks", hidden * (2 * query + 2 * key) + 3 * hidden * ffn, has_bias * (query + 2 * key), 2 * hidden,
        hidden * ffn, 6 * hidden + 2 * head_size + 2, 6 * query + 2 * key + 3 * ffn, True,
        -(3 * hidden + 3 * ffn + 1), 3 if qwen else 2, 0,
    )  # fmt: skip
    layers = config.num_hidden_layers
    tables = layers * 2 * getattr(config, "max_position_embeddings", 0) * head_size
    return Decoder(
        hidden, ffn, heads, head_size, config.vocab_size, bool(getattr(config, "tie_word_embeddings", False)),
        (block,) * layers, hidden, 3 * hidden + 3, 0, tables, False,
    )  # fmt: skip


# ---------------------------------------------------------------- parameters and FLOPs


def parameters_by_part(config: Any) -> Dict[str, int]:
    """Part -> number of parameters; the parts add up to the model. LayerNorms of all blocks are one part."""
    decoder = describe(config)
    parts = {"embedding": decoder.embedding}
    for block in decoder.blocks:
        parts[block.part] = parts.get(block.part, 0) + block.matrices + block.biases
    parts["norms"] = sum(block.norms for block in decoder.blocks) + decoder.final_norm
    parts["LM head"] = decoder.lm_head
    return parts


FLOPS_SOURCE = (
    "3 x (2 x matrix weights + 4 T C per attention layer) per token: Kaplan et al. 2020, section 2.1, with "
    "the attention term of Chowdhery et al. 2022, appendix B; recomputation as in Korthikanti et al. 2022"
)


def flops_per_step(config: Any, plan: Plan) -> int:
    """Floating point operations of one optimizer step over all devices, forward and backward.

    A multiply and an add are two. Per token a matrix costs 2 per weight, attention 4 T C a layer (scores and
    weighted sum, the masked half included); the backward pass costs twice the forward. Recomputation adds the
    forward it repeats.
    """
    decoder = describe(config)
    matrices = sum(block.matrices for block in decoder.blocks)
    attention = (
        4
        * plan.seq_length
        * decoder.heads
        * decoder.head_size
        * sum(block.attends for block in decoder.blocks)
    )
    forward = 2 * (matrices + decoder.embedding) + attention  # the LM head has the embedding's shape
    again = {"none": 0, "full": 2 * matrices + attention, "core_attn": attention}[plan.recompute]
    return plan.tokens_per_step * (3 * forward + again)


# ---------------------------------------------------------------- memory


class Row(NamedTuple):
    """A line of the memory table."""

    part: str
    bytes: int
    source: str


def memory_per_device(config: Any, plan: Plan) -> List[Row]:
    """Peak memory of the fullest device in bytes, by part; the rows add up to it."""
    decoder = describe(config)
    stages = [_stage_rows(decoder, plan, stage) for stage in range(plan.pipeline_parallel)]
    return max(stages, key=total_bytes)


def total_bytes(rows: List[Row]) -> int:
    return sum(row.bytes for row in rows)


def _stage_rows(decoder: Decoder, plan: Plan, stage: int) -> List[Row]:
    blocks = _blocks_of_stage(decoder, plan, stage)
    first, last = stage == 0, stage == plan.pipeline_parallel - 1
    count = _parameters_of_rank(decoder, plan, blocks, first, last)
    shard = plan.sharding_degree
    weight_bytes = HALF if plan.master_weights else FLOAT32
    gradient_bytes = FLOAT32 if plan.master_gradients else weight_bytes
    optimizer_bytes = 3 * FLOAT32 if plan.master_weights else 2 * FLOAT32
    weights = count * weight_bytes // (shard if plan.sharding_stage >= 3 else 1)
    if plan.precision != "float32" and not plan.master_weights:
        weights += count * HALF  # O1 keeps a half-precision copy of what its matrix products used
    gradients = count * gradient_bytes // (shard if plan.sharding_stage >= 2 else 1)
    optimizer = count * optimizer_bytes // (shard if plan.sharding_stage >= 1 else 1)
    in_flight = min(plan.pipeline_parallel - stage, plan.accumulation)
    activations = in_flight * _activation_bytes(decoder, plan, blocks, last)
    if plan.virtual > 1:  # interleaving keeps more micro-batches alive (Korthikanti et al. 2022, section 4.2.3)
        activations += activations * (plan.pipeline_parallel - 1) // (plan.pipeline_parallel * plan.virtual)
    masters = "float32 masters and two moments" if plan.master_weights else "AdamW's two moments, float32"
    return [
        Row("weights", weights, f"{count:,} parameters x {weight_bytes} B" + _divided(plan, 3)),
        Row("gradients", gradients, f"kept between steps, {gradient_bytes} B each" + _divided(plan, 2)),
        Row("optimizer", optimizer, masters + _divided(plan, 1)),
        Row("buffers", decoder.buffers * FLOAT32, "tables of cosines and sines in the layers"),
        Row("activations", activations, f"kept for the backward pass, recompute: {plan.recompute}"),
        Row(
            "working space",
            _working_space(decoder, plan, blocks, last),
            "the worst moment beyond what is kept",
        ),
    ]


def _divided(plan: Plan, from_stage: int) -> str:
    shared = plan.sharding_stage >= from_stage and plan.sharding_degree > 1
    return f", / {plan.sharding_degree} (sharding stage{plan.sharding_stage})" if shared else ""


def _blocks_of_stage(decoder: Decoder, plan: Plan, stage: int) -> Tuple[Block, ...]:
    """As pipeline stages are built: balanced by cost, part s, s + S, ... of the parts on stage s of S."""
    stages = plan.pipeline_parallel
    attention = 2 * TYPICAL_LENGTH * decoder.hidden
    costs = [block.matrices + attention * block.attends for block in decoder.blocks]
    cuts = balanced_cuts([0, *costs, 0, decoder.embedding], stages * plan.virtual)
    layers = [layer for part in range(stage, stages * plan.virtual, stages) for layer in range(cuts[part], cuts[part + 1])]
    return tuple(decoder.blocks[layer - 1] for layer in layers if 1 <= layer <= len(decoder.blocks))


def _parameters_of_rank(
    decoder: Decoder, plan: Plan, blocks: Tuple[Block, ...], first: bool, last: bool
) -> int:
    """Parameters on one tensor parallel rank of one pipeline stage; norms are not divided."""
    divided = sum(block.matrices + block.biases for block in blocks)
    divided += decoder.embedding if first or (last and decoder.tied) else 0
    divided += decoder.lm_head if last else 0
    whole = sum(block.norms for block in blocks) + (decoder.final_norm if last else 0)
    return math.ceil(divided / plan.tensor_parallel) + whole


def _largest_block(length: int, rows: int) -> int:
    """Scores of a causal block of `rows` queries with the keys up to its end, the largest there is."""
    starts = range(0, length, rows) if rows else []
    return max(((min(start + rows, length) - start) * min(start + rows, length) for start in starts), default=0)


class _Sizes:
    """Bytes of a micro-batch's tensors on one device."""

    def __init__(self, decoder: Decoder, plan: Plan):
        half = plan.precision != "float32"
        self.plan = plan
        self.tokens = plan.micro_batch * plan.seq_length
        self.element = HALF if half else FLOAT32
        scores = self.tokens * plan.seq_length * decoder.heads // plan.tensor_parallel
        # Softmax runs in float32; in half precision its result is kept a second time, for the next product.
        self.kept_scores = scores * (FLOAT32 + HALF if half else FLOAT32)
        self.passing_scores = scores * FLOAT32
        self.mask = plan.seq_length**2 * FLOAT32
        if plan.score_rows is not None:
            self.kept_scores = self.tokens * decoder.heads * FLOAT32 // plan.tensor_parallel  # one float32 per row and head
            block = _largest_block(plan.seq_length, plan.score_rows)
            self.passing_scores = self.passing_scores * block // plan.seq_length**2
            self.mask = 0
        self.logits = self.tokens * decoder.vocabulary // plan.tensor_parallel

    def whole(self, floats: int) -> int:
        """Bytes of `floats` per token that sequence parallelism alone divides."""
        return (
            self.tokens
            * floats
            * self.element
            // (self.plan.tensor_parallel if self.plan.sequence_parallel else 1)
        )

    def split(self, floats: int) -> int:
        """Bytes of `floats` per token that tensor parallelism divides."""
        return self.tokens * floats * self.element // self.plan.tensor_parallel

    def kept_by(self, block: Block) -> int:
        """Activations that the block keeps without recomputing whole blocks."""
        keeps_scores = block.attends and self.plan.recompute != "core_attn"
        return (
            self.whole(block.kept) + self.split(block.kept_split) + (self.kept_scores if keeps_scores else 0)
        )

    def space_in(self, block: Block) -> int:
        """Working space inside the block's forward beyond what it keeps."""
        if not block.attends:
            return self.split(block.block_space)
        matrices = block.attention_scores + (1 if self.plan.recompute == "core_attn" else 0)
        matrices = matrices if self.plan.score_rows is None else 1
        softmax = self.split(block.attention_space) + matrices * self.passing_scores
        return max(softmax, self.split(block.block_space)) + self.mask

    def attention_backward(self, decoder: Decoder) -> int:
        """Working space of the backward pass that computes scores again, some rows at a time: probabilities and their
        gradient; query, key, value, result, what comes in, and their gradients, each as a copy with heads first."""
        return 2 * self.passing_scores + self.split(10 * decoder.hidden)

    def final(self, decoder: Decoder) -> int:
        """Final norm, and the softmax of the logits in float32, or the gradients of the head that works in chunks."""
        if self.chunked(decoder):
            head_gradient = 0 if self.plan.frozen else decoder.embedding
            return self.whole(decoder.final_kept + decoder.hidden) + head_gradient * FLOAT32
        return self.whole(decoder.final_kept) + self.logits * FLOAT32

    def chunked(self, decoder: Decoder) -> bool:
        """Whether logits exist for HEAD_CHUNK tokens at a time only, and gradients are formed with them."""
        plan = self.plan
        whole = plan.tensor_parallel == plan.pipeline_parallel == 1
        return decoder.chunked_head and plan.precision == "float32" and whole


def _activation_bytes(decoder: Decoder, plan: Plan, blocks: Tuple[Block, ...], last: bool) -> int:
    sizes = _Sizes(decoder, plan)
    tables = plan.seq_length * decoder.head_size * FLOAT32
    mask = sizes.mask if plan.recompute != "none" else 0  # an input of what is recomputed
    if plan.recompute == "full":
        kept = len(blocks) * sizes.whole(decoder.hidden)
    else:
        kept = sum(sizes.kept_by(block) for block in blocks)
    return kept + tables + mask + (sizes.final(decoder) if last else 0)


def _working_space(decoder: Decoder, plan: Plan, blocks: Tuple[Block, ...], last: bool) -> int:
    """Bytes at the worst moment beyond what is kept at the end of the forward pass. The moments:

    - the loss, where it works in chunks: the logits of one chunk and its part of the weight's gradient;
    - the loss otherwise: logits beside their softmax, in half precision also their float32 copy;
    - the LM head's backward: gradient of its weight (tied: a transposed copy as well) and of its input;
    - the forward of the last block that attends: scores before, during and after the softmax; nothing of the
      blocks after it is kept yet;
    - its backward, where that computes scores again block by block;
    - with full recomputation, that block again in the backward pass, with all that it keeps otherwise;
    - the backward of the last block: gradient of its widest matrix and of its FFN product.

    A frozen matrix has no gradient.
    """
    sizes = _Sizes(decoder, plan)
    moments = [0]
    if last and sizes.chunked(decoder):
        rows = min(sizes.tokens, HEAD_CHUNK)
        more = decoder.embedding if sizes.tokens > HEAD_CHUNK and not plan.frozen else 0  # a chunk's part of the weight's gradient
        copies = 1 if plan.loss_in_place else 2
        moments.append((copies * rows * decoder.vocabulary + more) * FLOAT32)
    elif last:
        copies = 0 if plan.frozen else 2 if decoder.tied else 1
        head_gradient = copies * decoder.embedding * sizes.element // plan.tensor_parallel
        half_copy = sizes.logits * HALF if plan.precision != "float32" else 0
        moments += [sizes.logits * FLOAT32 + half_copy, head_gradient + sizes.whole(decoder.hidden)]
    after = (sizes.final(decoder) if last else 0) + plan.kept_later
    position = max((i for i, block in enumerate(blocks) if block.attends), default=None)
    if position is not None:
        block = blocks[position]
        if plan.recompute == "full":
            moments.append(sizes.kept_by(block) + sizes.space_in(block) - after - sizes.whole(decoder.hidden))
        else:
            moments.append(sizes.space_in(block) - after - sum(map(sizes.kept_by, blocks[position + 1 :])))
        if plan.score_rows:
            moments.append(sizes.attention_backward(decoder) - after - sum(map(sizes.kept_by, blocks[position + 1 :])))
    largest = blocks[-1].largest_matrix if blocks and not plan.frozen else 0
    gradient = largest * sizes.element // plan.tensor_parallel
    moments.append(gradient + sizes.split(decoder.ffn) - sizes.whole(decoder.hidden))
    return max(moments)


# ---------------------------------------------------------------- communication


def communication_per_step(config: Any, plan: Plan) -> List[Row]:
    """Bytes that the busiest device sends in one optimizer step, by kind of parallelism; none where N = 1.

    A ring of N sends (N - 1) / N of the data in an all-gather or a reduce-scatter and twice that in an all-reduce
    (Patarasuk and Yuan 2009). With n = a micro-batch's hidden state, in such units of n (N - 1) / N:

    - tensor parallel (Shoeybi et al. 2019, section 3): a row layer sums its output forwards, 2 units, and each column
      layer its input's gradient backwards, 2 units: 4 in a fused block, 8 in the head block (q, k, v), 6 in the tail;
      2 for the embedding, 2 for the LM head's input. Sequence parallel takes apart each sum into its two halves, and
      gathers once more at either end. Recomputation repeats the forward sums.
    - pipeline: the state forwards and its gradient backwards, once a part and micro-batch (Narayanan et al. 2021).
    - sharding, in units of all gradients or all weights (Rajbhandari et al. 2020, section 7, but counted as Paddle
      does it): stage 1 reduces gradients once and broadcasts weights, 1 unit each; stage 2 reduces gradients in every
      micro-batch, since none has room for the others' sums; stage 3 sums gradients in every micro-batch, 2 units, and
      gathers weights in its forward and backward pass, 1 unit each, and for recomputation once more.
    - data parallel: 2 units of the gradients.
    """
    decoder = describe(config)
    stages = [_stage_communication(decoder, plan, stage) for stage in range(plan.pipeline_parallel)]
    return max(stages, key=total_bytes)


def _stage_communication(decoder: Decoder, plan: Plan, stage: int) -> List[Row]:
    blocks = _blocks_of_stage(decoder, plan, stage)
    first, last = stage == 0, stage == plan.pipeline_parallel - 1
    element = HALF if plan.precision != "float32" else FLOAT32
    state = plan.micro_batch * plan.seq_length * decoder.hidden * element
    parameters = _parameters_of_rank(decoder, plan, blocks, first, last)
    gradients = parameters * (FLOAT32 if plan.master_gradients or not plan.master_weights else HALF)
    weights = parameters * (HALF if plan.master_weights else FLOAT32)

    def share(ranks):
        return (ranks - 1) / ranks

    units = sum(tensor_units(block.part, plan) for block in blocks) + (first + last) * _end_units(plan)
    rows = [
        Row("tensor", int(units * state * share(plan.tensor_parallel) * plan.accumulation),
            f"{units} half sums of the hidden state a micro-batch"),
        Row("pipeline", _pipeline_bytes(plan, state, first, last),
            "the state forwards, its gradient backwards, each micro-batch"),
    ]  # fmt: skip
    sharded = sum(times * size for times, size in zip(_sharding_units(plan), (gradients, weights)))
    rows.append(Row("sharding", int(sharded * share(plan.sharding_degree)), "gradients and weights"))
    rows.append(Row("data", int(2 * gradients * share(plan.data_parallel)), "gradients"))
    return [row for row in rows if row.bytes]


def _sharding_units(plan: Plan) -> Tuple[int, int]:
    """How often a step's sharding sends all gradients, and all weights."""
    if plan.sharding_stage == 3:
        return 2 * plan.accumulation, (3 if plan.recompute == "full" else 2) * plan.accumulation
    return (plan.accumulation if plan.sharding_stage == 2 else 1), 1


def tensor_units(part: str, plan: Plan) -> int:
    """Halves of a sum that tensor parallel makes in one block's forward and backward pass."""
    column_layers = {"head block": 3, "tail block": 2}.get(part, 1)
    forward = 1 + column_layers if plan.sequence_parallel else 2
    backward = 1 + column_layers if plan.sequence_parallel else 2 * column_layers
    if part == "blocks":  # serial: attention, then FFN
        forward, backward = 2 * forward, 2 * backward
    return forward + backward + (forward if plan.recompute == "full" else 0)


def _end_units(plan: Plan) -> int:
    return 3 if plan.sequence_parallel else 2


def _pipeline_bytes(plan: Plan, state: int, first: bool, last: bool) -> int:
    if plan.pipeline_parallel == 1:
        return 0
    state //= plan.tensor_parallel if plan.sequence_parallel else 1
    parts_sending_forward = plan.virtual - (1 if last else 0)
    parts_sending_backward = plan.virtual - (1 if first else 0)
    return state * plan.accumulation * (parts_sending_forward + parts_sending_backward)


def pipeline_idle(plan: Plan) -> float:
    """Share of a step in which a stage waits (Narayanan et al. 2021, section 2.2)."""
    waiting = (plan.pipeline_parallel - 1) / (plan.accumulation * plan.virtual)
    return waiting / (1 + waiting)


# ---------------------------------------------------------------- the report


def report(config: Any, plan: Plan) -> str:
    """Parameters by part, memory of the fullest device, tokens and FLOPs of a step, as text."""
    parts, rows = parameters_by_part(config), memory_per_device(config, plan)
    total = sum(parts.values())
    lines = [f"Parameters: {total:,}"]
    lines += [f"  {part:<14} {count:>15,}  {100 * count / total:5.1f} %" for part, count in parts.items()]
    lines += [
        f"Memory of the fullest of {plan.devices} device(s), {plan.precision}: {gib(total_bytes(rows))}",
        *[f"  {row.part:<14} {gib(row.bytes):>12}  {row.source}" for row in rows if row.bytes],
        f"Tokens per step: {plan.tokens_per_step:,} ({plan.samples_per_step} samples of {plan.seq_length})",
        f"FLOPs per step: {flops_per_step(config, plan):.3e}  ({FLOPS_SOURCE})",
    ]
    if plan.devices > 1:
        lines.append("Sent by the busiest device in a step (ring collectives):")
        lines += [f"  {row.part:<14} {gib(row.bytes):>12}  {row.source}" for row in communication_per_step(config, plan)]
    if plan.pipeline_parallel > 1:
        lines.append(f"Pipeline idle: {100 * pipeline_idle(plan):.1f} % of a step")
    return "\n".join(lines)


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
