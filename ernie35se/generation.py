"""Generation: cache, positions, sampling, beams. `generate()` keeps PaddleNLP's signature and replaces its
loop.

What one request goes through:

    positions   fixed once for each row, from its own number of tokens + max_new_tokens, so that a batch
                equals single rows and cached keys keep their angles
    prefill     all prompt tokens at once; only the last position reaches the LM head
    decode      one token a step for the rows that have not ended; keys and values are written in place into a
                cache that holds the whole request, rotated already
    choose      greedy, sampling (top_k first, so that a small k never sorts the vocabulary) or beam search

A prompt's tokens are all real unless the caller's attention_mask says otherwise: PaddleNLP takes each pad id
(which is unk's here) for padding, even in the middle of a prompt.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Iterator

import numpy as np
import paddle
import paddle.nn.functional as F
from paddlenlp.generation.configuration_utils import DEFAULT_MAX_NEW_TOKENS

from . import cpu_ops, parallel
from .attention import HIDDEN, AttentionInputs, blockwise_attention, choose_core, eager_attention, prepare_mask
from .positions import position_interval
from .rope import rope_tables, rotate

MOST_LIKELIEST = 64  # tokens up to which the CPU op beats Paddle's topk


class KVCache:
    """Keys and values of one attention layer, (B, H, S, D), written in place into buffers that hold the whole
    request.

    Attention reads the buffers as they are, without a copy; columns that are not written yet are not looked at. So
    that a request with much room left does not pay for it at every step, buffers start smaller than
    `capacity` and grow by a quarter.

    Args:
        capacity: columns of the whole request.
        ops: the module of CPU ops, one of which then does a step; or None.
        padding: with ops, columns in front of each row's first token, (B,); no elements where no row has any.
    """

    def __init__(self, capacity: int, ops=None, padding: paddle.Tensor | None = None):
        self.capacity, self.ops, self.padding = capacity, ops, padding
        self.length = self.room = 0  # columns written, columns there
        self._key = self._value = None

    def attend(self, query, key, value, shared: AttentionInputs) -> paddle.Tensor:
        """Rotate T new tokens, (B, T, H, D) each, add them to the cache, and run the core, or the op where it is a step.
        Returns the context, (B, T, H, D)."""
        if self.ops is not None and self.length:
            return self._step(query, key, value, shared)
        asked = slice(-1, None) if shared.last_only else slice(None)  # the queries that the core answers
        query = rotate(query[:, asked], shared.cos[:, asked], shared.sin[:, asked])
        key, value = self.append(rotate(key, shared.cos, shared.sin), value)
        return shared.core(query, key, value, shared.mask, False)[0]

    def append(self, key: paddle.Tensor, value: paddle.Tensor):
        """Add T tokens, (B, T, H, D) each. Returns what these tokens may look at: themselves while the cache
        was empty, else the buffers, (B, H, room, D)."""
        start, stop = self.length, self.length + key.shape[1]
        key_heads, value_heads = key.transpose([0, 2, 1, 3]), value.transpose([0, 2, 1, 3])  # (B, H, T, D)
        if stop > self.room:
            self._grow(key_heads, value_heads)
        else:
            self._key[:, :, start:stop].copy_(key_heads, True)
            self._value[:, :, start:stop].copy_(value_heads, True)
        self.length = stop
        return (self._key, self._value) if start else (key, value)

    def select(self, rows: paddle.Tensor) -> None:
        """Keep these rows, in this order; a row may be kept more than once (beams)."""
        if self._key is not None:
            self._key, self._value = self._key.index_select(rows), self._value.index_select(rows)
        if self.padding is not None and self.padding.size:
            self.padding = self.padding.index_select(rows)

    def room_for(self, needed: int) -> int:
        """Columns that the buffers will have once `needed` are written."""
        if needed <= self.room:
            return self.room
        return min(self.capacity, (needed + needed // 4 + 63) // 64 * 64)

    def _step(self, query, key, value, shared: AttentionInputs) -> paddle.Tensor:
        """One token a row, in one op: it writes the column and reads those up to it, without the padding."""
        column = self.length
        if column == self.room:
            self._grow(key.transpose([0, 2, 1, 3]), value.transpose([0, 2, 1, 3]))  # the op writes the column again
        self.length = column + 1
        return self.ops.cpu_decode_attention_(
            query, key, value, shared.cos, shared.sin, self._key, self._value, self.padding, column
        )[0]

    def _grow(self, key: paddle.Tensor, value: paddle.Tensor) -> None:
        """Make buffers that hold (B, H, T, D) more, and put them in. In one concat, which is much quicker than copying many
        columns into a buffer."""
        needed = self.length + key.shape[2]
        assert needed <= self.capacity, f"{needed} tokens, room for {self.capacity}"
        self.room = self.room_for(needed)
        self._key, self._value = self._larger(self._key, key), self._larger(self._value, value)

    def _larger(self, buffer: paddle.Tensor | None, more: paddle.Tensor) -> paddle.Tensor:
        """A buffer of `room` columns that holds what was written, then (B, H, T, D) more."""
        batch, heads, count, head_dim = more.shape
        rest = paddle.zeros([batch, heads, self.room - self.length - count, head_dim], more.dtype)
        written = [] if buffer is None else [buffer[:, :, : self.length]]
        return paddle.concat([*written, more, rest], axis=2)


class Request:
    """The rows that are being decoded: tokens and positions, on the host. The arrays are as wide as the
    request can get."""

    def __init__(
        self, config, input_ids, attention_mask, position_ids, max_new_tokens: int, interval: int | None
    ):
        batch, self.length = input_ids.shape
        width = self.length + max_new_tokens
        real = (
            np.ones(input_ids.shape, dtype=np.int64)
            if attention_mask is None
            else attention_mask.numpy().astype(np.int64)
        )
        _check_left_padded(real, input_ids.shape)
        self.ids = np.zeros((batch, width), dtype=np.int64)  # prompt, then what was generated
        self.ids[:, : self.length] = input_ids.numpy()
        self.padding = self.length - real.sum(-1)  # (B,): columns in front of each row's first token
        order = np.maximum(
            np.arange(1, width + 1) - self.padding[:, None], 0
        )  # (B, width): 1, 2, ... from the first token
        if position_ids is None:
            step = self._steps(config, max_new_tokens, interval)[:, None]
            self.positions = np.maximum(order * step - 1, 0)
        else:
            self.positions = self._continued(np.broadcast_to(position_ids.numpy(), input_ids.shape), width)
            last, table = int(self.positions.max()), config.max_position_embeddings
            if last >= table:
                raise ValueError(
                    f"position_ids that go on to {last} leave the model's table of {table} positions."
                )
        self.tokens = input_ids  # those that the model has not seen yet

    def _steps(self, config, max_new_tokens, interval) -> np.ndarray:
        """(B,): distance of neighbouring positions in each row."""
        counts, table = self.length - self.padding + max_new_tokens, config.max_position_embeddings
        fitting = [position_interval(int(n), table) for n in counts]  # refuses what does not fit
        if interval is None:
            return np.array(fitting if config.enable_random_position_ids else [1] * len(counts))
        if interval < 1 or int(counts.max()) * interval > table:
            raise ValueError(
                f"position_interval {interval} x {int(counts.max())} tokens does not fit into the model's "
                f"{table} positions."
            )
        return np.full(len(counts), interval)

    def _continued(self, given: np.ndarray, width: int) -> np.ndarray:
        """Given positions, which go on at the distance of each row's last two."""
        several = (self.length - self.padding) > 1
        step = np.maximum(given[:, -1] - given[:, -2], 1) if self.length > 1 else 1
        step = np.where(several, step, 1)[:, None]  # (B, 1)
        more = np.arange(1, width - self.length + 1)
        return np.concatenate([given, given[:, -1:] + step * more], axis=1)

    @property
    def num_rows(self) -> int:
        return len(self.ids)

    @property
    def mask(self) -> paddle.Tensor | None:
        """(B, S), 1 for real tokens; None where all are."""
        if not self.padding.any():
            return None
        return paddle.to_tensor((np.arange(self.length) >= self.padding[:, None]).astype(np.int64))

    def row_tokens(self, row: int) -> paddle.Tensor:
        """(1, n): prompt and generated tokens of one row, without padding."""
        return paddle.to_tensor(self.ids[row : row + 1, self.padding[row] : self.length])

    def all_tokens(self) -> paddle.Tensor:
        """(B, S): prompts, padded on the left, and generated tokens."""
        return paddle.to_tensor(self.ids[:, : self.length])

    def append(self, tokens: paddle.Tensor) -> None:
        """Add one token, (B, 1), to each row."""
        self.ids[:, self.length] = tokens.numpy()[:, 0]
        self.length += 1
        self.tokens = tokens

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order."""
        self.ids, self.padding, self.positions = self.ids[rows], self.padding[rows], self.positions[rows]
        self.tokens = self.tokens.index_select(paddle.to_tensor(rows, dtype="int64"))


class InPlaceForward:
    """The quick way through the model: blocks called one by one, on caches written in place.

    Rotation tables are made once, for all of the request's positions; the mask grows with the cache and
    changes by one column a step. From the queries of the last layer with attention on, only the last position
    goes on.
    """

    def __init__(self, model, request: Request):
        self.model, config = model, model.config
        layers, capacity = config.num_hidden_layers, request.ids.shape[1]
        self.ops = cpu_ops.usable(model.ernie.embed_tokens.weight)
        padding = paddle.to_tensor(request.padding if request.padding.any() else [], dtype="int64")
        self.caches = [KVCache(capacity, self.ops, padding) for _ in range(layers)]
        self.last_attention = layers - 2 if config.parallel_attn_hatf else layers - 1
        alike = (request.positions == request.positions[:1]).all()
        where = paddle.to_tensor(request.positions[: 1 if alike else None])
        heads = config.num_attention_heads // parallel.tensor_degree(config)
        tables = rope_tables(where, config.head_dim)  # expanded: Paddle's CPU kernels are slow where shapes differ
        self.cos, self.sin = (table.expand([-1, -1, heads, -1]).contiguous() for table in tables)
        self.mask = None  # of a step without the op: (room,), or (B, H, 1, room) with padding

    def logits(self, request: Request) -> paddle.Tensor:
        """Scores of each row's next token, (B, V)."""
        trunk, tokens, stop = self.model.ernie, request.tokens, request.length
        first = self.caches[0].length == 0
        core = self._prefill_core(request) if first else attend_to_cache
        mask = self._step_mask(request) if self.ops is None and not first else None
        span = slice(stop - tokens.shape[1], stop)
        shared = AttentionInputs(tokens.shape[0], core, self.cos[:, span], self.sin[:, span], mask)
        x = trunk.embed_tokens(tokens)  # (B, T, C)
        for number, (block, cache) in enumerate(zip(trunk.layers, self.caches)):
            if first and number == self.last_attention:
                shared = shared._replace(core=self._last_query_core(request), last_only=True)
            x, _, _ = block(x, cache, shared)
        return self.model.lm_logits(trunk.norm(x))[:, 0]

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order."""
        index = paddle.to_tensor(rows, dtype="int64")
        for cache in self.caches:
            cache.select(index)
        if self.cos.shape[0] > 1:
            self.cos, self.sin = self.cos.index_select(index), self.sin.index_select(index)
        self.mask = None

    def _prefill_core(self, request: Request) -> callable:
        """The model's attention core, in blocks if eager; the mask is made once for all layers."""
        core = choose_core(self.model.config)
        core = blockwise_attention if core is eager_attention else core
        mask = prepare_mask(core, request.mask, request.length, request.length)
        return lambda query, key, value, *_: core(query, key, value, mask)

    def _last_query_core(self, request: Request) -> callable:
        """Attention of the prompt's last token alone, which sees all but padding."""
        mask = prepare_mask(eager_attention, request.mask, 1, request.length)
        return lambda query, key, value, *_: eager_attention(query, key, value, mask)

    def _step_mask(self, request: Request) -> paddle.Tensor:
        """Additive: hides padding and the columns of the buffers that are not written yet."""
        cache, stop = self.caches[0], request.length
        if self.mask is None or stop > cache.room:
            room = cache.room_for(stop)
            columns = np.arange(room)
            padded, heads = request.padding.any(), self.cos.shape[2]
            hidden = (columns < request.padding[:, None]) | (columns >= stop)  # (B, room)
            mask = np.where(hidden, HIDDEN, 0.0).astype("float32")
            self.mask = paddle.to_tensor(mask[:, None, None].repeat(heads, axis=1) if padded else mask[0])
        else:
            self.mask[..., stop - 1].zero_()
        return self.mask


class WholeForward:
    """The model's own forward, for models whose blocks are watched by hooks (prefix tuning, ReFT) and for
    `use_cache=False`."""

    def __init__(self, model, request: Request, use_cache: bool):
        self.model, self.use_cache = model, use_cache
        self.past = None

    def logits(self, request: Request) -> paddle.Tensor:
        """Scores of each row's next token, (B, V)."""
        start = request.length - request.tokens.shape[1] if self.use_cache else 0
        output = self.model(
            input_ids=paddle.to_tensor(request.ids[:, start : request.length]),
            position_ids=paddle.to_tensor(request.positions[:, start : request.length]),
            attention_mask=request.mask,
            past_key_values=self.past,
            use_cache=self.use_cache,
            return_dict=True,
        )
        self.past = output.past_key_values
        return output.logits[:, -1]

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order."""
        if self.past is not None:
            index = paddle.to_tensor(rows, dtype="int64")
            self.past = tuple(tuple(part.index_select(index) for part in layer) for layer in self.past)


def attend_to_cache(query, key, value, mask, need_weights=False):
    """Attention core of one new token: query (B, 1, H, D), a cache's key and value (B, H, S, D); nothing is
    transposed."""
    batch, _, heads, head_dim = query.shape
    scores = paddle.matmul(query.reshape([batch, heads, 1, head_dim]) * head_dim**-0.5, key, transpose_y=True)
    weights = F.softmax(scores.astype("float32") + mask, axis=-1).astype(value.dtype)  # (B, H, 1, S)
    return paddle.matmul(weights, value).reshape([batch, 1, heads, head_dim]), None


def choose_forward(model, request: Request, use_cache: bool):
    """The quick way where nothing watches the model, else its own forward."""
    watched = any(
        layer._forward_pre_hooks or layer._forward_post_hooks
        for layer in (model, model.ernie, *model.ernie.layers)
    )
    if watched or not use_cache or model.config.sequence_parallel:
        return WholeForward(model, request, use_cache)
    return InPlaceForward(model, request)


class Ernie35GenerationMixin:
    """`generate()` for Ernie35ForCausalLM, in place of PaddleNLP's."""

    def can_generate(self) -> bool:
        return True

    def generate(
        self,
        input_ids=None,
        generation_config=None,
        stopping_criteria=None,
        streamer=None,
        synced_gpus=None,
        **kwargs,
    ):
        """Continue each row of a batch.

        Args:
            input_ids: (B, T), rows of unequal length padded on the left.
            generation_config: PaddleNLP's GenerationConfig; each of its fields may also be given by name:
                max_new_tokens, decode_strategy (`greedy_search`, `sampling`, `beam_search`), top_k, top_p,
                temperature, repetition_penalty, min_new_tokens, no_repeat_ngram_size, num_beams,
                length_penalty, num_return_sequences, eos_token_id, ...
            stopping_criteria: called with the unfinished rows' (ids, scores) after each token; true ends
                generation.
            streamer: its `put` gets each step's tokens, (B,), pad for ended rows; not with beam search.
            attention_mask: (B, T), 0 for padding. Without it every token counts.
            position_interval: distance of neighbouring positions, the same for all rows. Without it each
                row's own.
            position_ids: (B, T). Without it positions are spaced as the model was trained (design of
                positions.py); with it, new tokens go on at the distance of the row's last two.

        Returns:
            (new ids, (B * num_return_sequences, longest answer), padded with the pad id; scores, (same, 1):
            mean log probability of the new tokens, for beams divided by length ** length_penalty instead of
            by length).

        Raises:
            ValueError: more tokens than positions, before anything is computed; a setting that does not
                exist.
        """
        settings, inputs = self._generation_settings(generation_config, kwargs)
        request = self._request(input_ids, settings, inputs)
        extra = inputs.get("logits_processors")
        if settings.decode_strategy == "beam_search":
            with _eval_mode(self):
                return self._beam_search(request, settings, extra)
        return self._decode(request, settings, extra, stopping_criteria, streamer)

    def generate_steps(self, input_ids=None, generation_config=None, **kwargs) -> Iterator[dict[int, int]]:
        """`generate` by greedy search or sampling, one step at a time: yields {row: new token} of the rows
        that go on, until all have ended. Rows that are sent in (`steps.send({2})`) end with the token just
        seen.

        Arguments and errors as in `generate`; the errors come before the first step.
        """
        settings, inputs = self._generation_settings(generation_config, kwargs)
        if settings.decode_strategy == "beam_search" or settings.num_return_sequences > 1:
            raise ValueError(
                "beam search and several answers a prompt show no tokens before the end; use generate()."
            )
        request = self._request(input_ids, settings, inputs)
        return self._bare_steps(request, settings, inputs.get("logits_processors"))

    def _bare_steps(self, request, settings, extra_processors):
        steps, dropped = self._steps(request, settings, extra_processors), None
        while True:
            try:
                step = steps.send(dropped)
            except StopIteration:
                return
            dropped = yield {row: token for row, token, _ in step}

    def _request(self, input_ids, settings, inputs) -> Request:
        """The rows, checked before anything is computed."""
        input_ids = inputs.get("input_ids", input_ids)
        if input_ids is None or input_ids.ndim != 2 or 0 in input_ids.shape:
            seen = None if input_ids is None else input_ids.shape
            raise ValueError(
                f"generate() needs input_ids of shape (batch, tokens), at least one each; got {seen}."
            )
        return Request(
            self.config,
            input_ids,
            inputs.get("attention_mask"),
            inputs.get("position_ids"),
            settings.max_new_tokens,
            inputs.get("position_interval"),
        )

    def _generation_settings(self, generation_config, kwargs):
        """(settings, what is left: the inputs); the model's ids where the settings have none."""
        settings = copy.deepcopy(generation_config or self.generation_config)
        if generation_config is None:
            settings.use_cache = True  # the model's own has the config's, which is about forward() and off
        inputs = settings.update(**kwargs)
        unknown = set(inputs) - {
            "input_ids",
            "attention_mask",
            "position_ids",
            "position_interval",
            "logits_processors",
        }
        if unknown:
            raise ValueError(f"generate() does not know {', '.join(sorted(unknown))}.")
        if settings.max_length and settings.max_new_tokens == DEFAULT_MAX_NEW_TOKENS:  # its old name
            settings.max_new_tokens = settings.max_length
        if settings.min_length and not settings.min_new_tokens:
            settings.min_new_tokens = settings.min_length
        for name in ("eos_token_id", "pad_token_id"):
            if getattr(settings, name) is None:
                setattr(settings, name, getattr(self.config, name))
        _check_settings(settings)
        return settings, inputs

    def _decode(self, request, settings, extra_processors, stopping_criteria, streamer):
        """Greedy search and sampling, to the end."""
        request.select([row for row in range(request.num_rows) for _ in range(settings.num_return_sequences)])
        answers, scores = [[] for _ in range(request.num_rows)], [0.0] * request.num_rows
        for step in self._steps(request, settings, extra_processors):
            shown = [settings.pad_token_id] * len(answers)
            for row, token, score in step:
                answers[row].append(token)
                scores[row] += score
                shown[row] = token
            if streamer is not None:
                streamer.put(paddle.to_tensor(shown))
            if stopping_criteria and stopping_criteria(request.all_tokens(), None):
                break
        if streamer is not None:
            streamer.end()
        means = [score / max(len(answer), 1) for score, answer in zip(scores, answers)]
        return _padded(answers, settings.pad_token_id), paddle.to_tensor(means, dtype="float32").unsqueeze(-1)

    def _steps(self, request, settings, extra_processors):
        """Yields [(row, token, its log probability)] of the unfinished rows after each token; rows sent in
        end there."""
        ends, rows = _end_ids(settings), list(
            range(request.num_rows)
        )  # rows: whose each row of the request is
        forward = choose_forward(self, request, settings.use_cache)
        processors = self._processors(request, settings, extra_processors)
        for _ in range(settings.max_new_tokens):
            with _eval_mode(self):
                logits = _processed(request, rows, forward.logits(request).astype("float32"), processors)
                if settings.decode_strategy == "greedy_search":
                    _, tokens, log_sums = likeliest(logits, 1)
                else:
                    tokens, log_sums = sample(logits, settings.temperature, settings.top_k, settings.top_p)
                tokens = self.agreed(tokens)
                log_p = (logits.take_along_axis(tokens, 1) - log_sums[:, :1]).flatten().tolist()
                request.append(tokens)
            step = list(zip(rows, request.ids[:, request.length - 1].tolist(), log_p))
            dropped = (yield step) or ()
            going_on = [
                i for i, (row, token, _) in enumerate(step) if token not in ends and row not in dropped
            ]
            if not going_on:
                return
            if len(going_on) < len(rows):
                rows = [rows[i] for i in going_on]
                request.select(going_on)
                forward.select(going_on)

    def _beam_search(self, request, settings, extra_processors):
        """Beams of each row, kept apart from the other rows' (Graves 2012; scores as in GNMT, Wu et al.
        2016)."""
        width, ends = settings.num_beams, _end_ids(settings)
        searches = [BeamRow(width, settings, ends) for _ in range(request.num_rows)]
        forward = choose_forward(self, request, settings.use_cache)
        processors = self._processors(request, settings, extra_processors)
        owners = list(range(request.num_rows))  # which search each row of the request belongs to
        for _ in range(settings.max_new_tokens):
            logits = forward.logits(request).astype("float32")
            logits = _processed(request, owners, logits, processors)
            values, tokens, log_sums = likeliest(logits, min(2 * width, logits.shape[-1]))
            log_p, tokens = (values - log_sums[:, :1]).numpy(), tokens.numpy()
            kept, next_tokens, next_owners = [], [], []
            for owner, search in enumerate(searches):
                mine = [i for i, o in enumerate(owners) if o == owner]
                if not mine:
                    continue
                for beam, token in search.advance(log_p[mine], tokens[mine]):
                    kept.append(mine[beam])
                    next_tokens.append(token)
                    next_owners.append(owner)
            owners = next_owners
            if not owners:
                break
            request.select(kept)
            forward.select(kept)
            request.append(paddle.to_tensor(next_tokens, dtype="int64").unsqueeze(-1))
        best = [answer for search in searches for answer in search.best(settings.num_return_sequences)]
        scores = paddle.to_tensor([score for score, _ in best], dtype="float32").unsqueeze(-1)
        return _padded([tokens for _, tokens in best], settings.pad_token_id), scores

    def _processors(self, request, settings, extra):
        """PaddleNLP's logits processors, for each row with its own length; empty where none is asked for."""

        def for_row(row):
            length = request.row_tokens(row).shape[1]
            return self.get_logits_processor(
                min_length=length + settings.min_new_tokens if settings.min_new_tokens > 0 else None,
                max_length=length + settings.max_new_tokens,
                eos_token_id=settings.eos_token_id,
                forced_bos_token_id=settings.forced_bos_token_id,
                forced_eos_token_id=settings.forced_eos_token_id,
                repetition_penalty=settings.repetition_penalty,
                no_repeat_ngram_size=settings.no_repeat_ngram_size,
                logits_processors=extra,
            )

        processors = [for_row(row) for row in range(request.num_rows)]
        return processors if any(len(p._processors) for p in processors) else []

    def agreed(self, tokens: paddle.Tensor) -> paddle.Tensor:
        """The first rank's tokens, on every tensor-parallel rank that computes this model."""
        return parallel.all_pieces(self.config, tokens)[0]


def sample(logits: paddle.Tensor, temperature: float, top_k: int, top_p: float):
    """Draw one token a row from softmax(logits / temperature), cut to the `top_k` likeliest (0: all) and to
    the fewest likeliest that together exceed `top_p` (Holtzman et al. 2020, nucleus sampling).

    As in PaddleNLP, top_p counts the probability mass of the whole vocabulary, not of the k kept. logits: (B,
    V); returns the tokens, (B, 1), and `likeliest`'s log sums.
    """
    vocab = logits.shape[-1]
    if not top_k and top_p >= 1.0:
        log_sums = likeliest(logits, 1)[2]
        return paddle.multinomial(F.softmax(logits / temperature, axis=-1)), log_sums
    values, ids, log_sums = likeliest(logits, min(top_k, vocab) if top_k else vocab, temperature)
    kept = (values / temperature - log_sums[:, 1:]).exp()  # probabilities, the largest first
    if top_p < 1.0:
        before = kept.cumsum(-1) - kept  # mass of the likelier ones; the first has none and always stays
        kept = kept * (before <= top_p).astype(kept.dtype)
    return ids.take_along_axis(paddle.multinomial(kept), 1), log_sums


def likeliest(logits: paddle.Tensor, count: int, temperature: float = 1.0):
    """The `count` largest logits of each row, (B, count), the largest first; their ids; and (B, 2): log sum exp of the row,
    and of the row / temperature. One op on CPU where there is one and `count` is small."""
    ops = cpu_ops.usable(logits) if count <= MOST_LIKELIEST else None
    if ops is not None:
        return ops.cpu_top_k(logits, count, temperature)
    if count == 1:  # quicker than topk
        ids = logits.argmax(-1, keepdim=True)
        values = logits.take_along_axis(ids, 1)
    else:
        values, ids = logits.topk(count, axis=-1)
    temperatures = [1.0] if temperature == 1.0 else [1.0, temperature]
    log_sums = [_log_sum_exp(logits / t, values[:, :1] / t, ids[:, :1]) for t in temperatures]
    return values, ids, paddle.concat([log_sums[0], log_sums[-1]], axis=1)


def _log_sum_exp(logits, largest, largest_id) -> paddle.Tensor:
    """log sum exp of each row, (B, 1), by way of softmax: on CPU Paddle's own logsumexp takes 4 times as long, its
    log_softmax twice. The largest's probability cannot underflow."""
    return largest - F.softmax(logits, axis=-1).take_along_axis(largest_id, 1).log()


@contextlib.contextmanager
def _eval_mode(model):
    """No gradients, no dropout."""
    was_training = model.training
    if was_training:
        model.eval()
    try:
        with paddle.no_grad():
            yield
    finally:
        if was_training:
            model.train()


class BeamRow:
    """The beams of one prompt.

    A finished answer's score is its log probability / length ** length_penalty. The search ends when no open
    beam can beat the worst of `width` finished answers (with `early_stopping`: as soon as there are `width`).
    """

    def __init__(self, width: int, settings, ends: set[int]):
        self.width, self.penalty, self.early = width, settings.length_penalty, bool(settings.early_stopping)
        self.ends, self.left = ends, settings.max_new_tokens
        self.open = [(0.0, [])]  # (log probability, tokens)
        self.finished = []  # (score, tokens), best first

    def advance(self, log_p: np.ndarray, tokens: np.ndarray) -> list[tuple[int, int]]:
        """One step. log_p, tokens: (open beams, candidates). Returns (beam it continues, token) of each new
        open beam."""
        self.left -= 1
        candidates = sorted(
            (
                (self.open[b][0] + float(p), b, int(t))
                for b in range(len(self.open))
                for p, t in zip(log_p[b], tokens[b])
            ),
            key=lambda c: -c[0],
        )[: 2 * self.width]
        going_on = []
        for rank, (total, beam, token) in enumerate(candidates):
            answer = self.open[beam][1] + [token]
            if token in self.ends:
                if rank < self.width:
                    self._finish(total, answer)
            elif len(going_on) < self.width:
                going_on.append((total, beam, token))
        previous, self.open = self.open, []
        for total, beam, token in going_on:
            self.open.append((total, previous[beam][1] + [token]))
        if self._is_done():
            self.open = []
            return []
        return [(beam, token) for _, beam, token in going_on]

    def best(self, count: int) -> list[tuple[float, list[int]]]:
        """The best answers, open beams counting as ended where they stand."""
        for total, tokens in self.open:
            self._finish(total, tokens)
        return self.finished[:count]

    def _finish(self, total: float, tokens: list[int]) -> None:
        self.finished.append((total / len(tokens) ** self.penalty, tokens))
        self.finished = sorted(self.finished, key=lambda answer: -answer[0])[: self.width]

    def _is_done(self) -> bool:
        if not self.open:
            return True
        if self.left == 0 or len(self.finished) < self.width:
            return False
        if self.early:
            return True
        length = len(self.open[0][1])
        longest = (
            length + self.left if self.penalty > 0 else length
        )  # totals only fall; a longer one divides by more
        return self.open[0][0] / longest**self.penalty <= self.finished[-1][0]


def _processed(request: Request, rows: list[int], logits: paddle.Tensor, processors: list) -> paddle.Tensor:
    """Logits after each row's own processors, which see its tokens without padding."""
    if not processors:
        return logits
    changed = [processors[row](request.row_tokens(i), logits[i : i + 1]) for i, row in enumerate(rows)]
    return paddle.concat(changed)


def _end_ids(settings) -> set[int]:
    ends = settings.eos_token_id
    return set(ends) if isinstance(ends, (list, tuple)) else set() if ends is None else {ends}


def _padded(answers: list[list[int]], pad: int) -> paddle.Tensor:
    width = max(len(answer) for answer in answers)
    return paddle.to_tensor([answer + [pad] * (width - len(answer)) for answer in answers], dtype="int64")


def _check_left_padded(real: np.ndarray, shape) -> None:
    if list(real.shape) != list(shape):
        raise ValueError(
            f"attention_mask has shape {list(real.shape)}; expected that of input_ids, {list(shape)}."
        )
    if (np.diff(real, axis=-1) < 0).any() or not real[:, -1].all():
        raise ValueError(
            "attention_mask has padding after a real token; generation wants rows padded on the left."
        )


def _check_settings(settings) -> None:
    def refuse(name, expected):
        raise ValueError(f"{name} is {getattr(settings, name)!r}; expected {expected}.")

    if settings.decode_strategy not in ("greedy_search", "sampling", "beam_search"):
        refuse("decode_strategy", "'greedy_search', 'sampling' or 'beam_search'")
    if settings.max_new_tokens < 1:
        refuse("max_new_tokens", "at least 1")
    if settings.num_return_sequences < 1:
        refuse("num_return_sequences", "at least 1")
    if settings.decode_strategy == "greedy_search" and settings.num_return_sequences > 1:
        refuse("num_return_sequences", "1 with greedy_search, whose answers would all be the same")
    if settings.decode_strategy == "sampling":
        if not settings.temperature > 0:
            refuse("temperature", "a number above 0 (for the likeliest token use greedy_search)")
        if settings.top_k < 0:
            refuse("top_k", "at least 0")
        if not 0 < settings.top_p <= 1:
            refuse("top_p", "a number in (0, 1]")
    if settings.decode_strategy == "beam_search":
        if settings.num_beams < 2:
            refuse("num_beams", "at least 2 with beam_search")
        if settings.num_return_sequences > settings.num_beams:
            refuse("num_return_sequences", f"at most num_beams, {settings.num_beams}")
        if settings.num_beam_groups > 1:
            refuse("num_beam_groups", "1: diverse beam search does not exist here")
