"""Generation: cache, positions, sampling, beams. `generate()` keeps PaddleNLP's signature and replaces its loop.

What one request goes through:

    positions   fixed once for each row, from its own number of tokens + max_new_tokens, so that a batch equals single rows
                and cached keys keep their angles
    prefill     all prompt tokens at once; only the last position reaches the LM head
    decode      one token a step for the rows that have not ended; keys and values are written in place into a cache that
                holds the whole request, rotated already
    choose      greedy, sampling (top_k first, so that a small k never sorts the vocabulary) or beam search

A prompt's tokens are all real unless the caller's attention_mask says otherwise: PaddleNLP takes each pad id (which is unk's
here) for padding, even in the middle of a prompt.
"""

from __future__ import annotations

import copy

import numpy as np
import paddle
import paddle.nn.functional as F
from paddlenlp.generation.configuration_utils import DEFAULT_MAX_NEW_TOKENS

from .positions import position_interval


class KVCache:
    """Keys and values of one attention layer, (B, S, H, D), written in place into buffers for `capacity` tokens."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        self._key = self._value = None

    def append(self, key: paddle.Tensor, value: paddle.Tensor):
        """Add (B, T, H, D) each; returns all keys and values so far, (B, S, H, D)."""
        start, stop = self.length, self.length + key.shape[1]
        assert stop <= self.capacity, f"{stop} tokens, room for {self.capacity}"
        if self._key is None:
            shape = [key.shape[0], self.capacity, *key.shape[2:]]
            self._key, self._value = paddle.zeros(shape, key.dtype), paddle.zeros(shape, value.dtype)
        self._key[:, start:stop].copy_(key, True)
        self._value[:, start:stop].copy_(value, True)
        self.length = stop
        return self._key[:, :stop], self._value[:, :stop]

    def select(self, rows: paddle.Tensor) -> None:
        """Keep these rows, in this order; a row may be kept more than once (beams)."""
        if self._key is not None:
            self._key, self._value = self._key.index_select(rows), self._value.index_select(rows)


class Request:
    """The rows that are being decoded: their tokens, positions and cache."""

    def __init__(self, model, input_ids, attention_mask, position_ids, max_new_tokens: int, use_cache: bool):
        config = model.config
        self.model = model
        self.use_cache = use_cache
        self.input_ids = input_ids  # (B, S): prompt, then what was generated
        real = np.ones(input_ids.shape, dtype=np.int64) if attention_mask is None else attention_mask.numpy().astype(np.int64)
        _check_left_padded(real, input_ids.shape)
        self.mask = None if real.all() else paddle.to_tensor(real)  # (B, S)
        counts = real.sum(-1, keepdims=True)  # (B, 1)
        if position_ids is None:
            table, spaced = config.max_position_embeddings, config.enable_random_position_ids
            fits = [position_interval(int(n) + max_new_tokens, table) for n in counts[:, 0]]  # refuses what does not fit
            step = np.array(fits)[:, None] if spaced else np.ones_like(counts)
            where = np.maximum(real.cumsum(-1) * step - 1, 0)
        else:
            where = np.broadcast_to(position_ids.numpy(), input_ids.shape).astype(np.int64)
            step = where[:, -1:] - where[:, -2:-1] if where.shape[1] > 1 else np.ones_like(counts)
            step = np.where(counts > 1, np.maximum(step, 1), 1)
        self.position_ids = paddle.to_tensor(where)  # (B, S)
        self.step = paddle.to_tensor(step.astype(np.int64))  # (B, 1): distance of neighbouring positions
        capacity = input_ids.shape[1] + max_new_tokens
        self.cache = [KVCache(capacity) for _ in range(config.num_hidden_layers)] if use_cache else None

    @property
    def num_rows(self) -> int:
        return self.input_ids.shape[0]

    def row_tokens(self, row: int) -> paddle.Tensor:
        """(1, n): prompt and generated tokens of one row, without padding."""
        ids = self.input_ids[row : row + 1]
        return ids if self.mask is None else ids[:, int((self.mask[row] == 0).sum()) :]

    def logits(self) -> paddle.Tensor:
        """Scores of each row's next token, float32 (B, V)."""
        seen = self.cache[0].length if self.use_cache else 0
        hidden = self.model.ernie(
            input_ids=self.input_ids[:, seen:],
            position_ids=self.position_ids[:, seen:],
            attention_mask=self.mask,
            past_key_values=self.cache,
            use_cache=self.use_cache,
        ).last_hidden_state
        return self.model.lm_logits(hidden[:, -1:])[:, 0].astype("float32")

    def append(self, tokens: paddle.Tensor) -> None:
        """Add one token, (B, 1), to each row."""
        self.input_ids = paddle.concat([self.input_ids, tokens], axis=1)
        self.position_ids = paddle.concat([self.position_ids, self.position_ids[:, -1:] + self.step], axis=1)
        if self.mask is not None:
            self.mask = paddle.concat([self.mask, paddle.ones_like(tokens)], axis=1)

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order."""
        index = paddle.to_tensor(rows, dtype="int64")
        self.input_ids, self.position_ids = self.input_ids.index_select(index), self.position_ids.index_select(index)
        self.step = self.step.index_select(index)
        self.mask = None if self.mask is None else self.mask.index_select(index)
        for layer in self.cache or []:
            layer.select(index)


class Ernie35GenerationMixin:
    """`generate()` for Ernie35ForCausalLM, in place of PaddleNLP's."""

    def can_generate(self) -> bool:
        return True

    @paddle.no_grad()
    def generate(
        self, input_ids=None, generation_config=None, stopping_criteria=None, streamer=None, synced_gpus=None, **kwargs
    ):
        """Continue each row of a batch.

        Args:
            input_ids: (B, T), rows of unequal length padded on the left.
            generation_config: PaddleNLP's GenerationConfig; each of its fields may also be given by name: max_new_tokens,
                decode_strategy (`greedy_search`, `sampling`, `beam_search`), top_k, top_p, temperature, repetition_penalty,
                min_new_tokens, no_repeat_ngram_size, num_beams, length_penalty, num_return_sequences, eos_token_id, ...
            stopping_criteria: called with the unfinished rows' (ids, scores) after each token; true ends generation.
            streamer: its `put` gets each step's tokens, (B,), pad for ended rows; not with beam search.
            attention_mask: (B, T), 0 for padding. Without it every token counts.
            position_ids: (B, T). Without it positions are spaced as the model was trained (design of positions.py); with
                it, new tokens go on at the distance of the row's last two.

        Returns:
            (new ids, (B * num_return_sequences, longest answer), padded with the pad id; scores, (same, 1): mean log
            probability of the new tokens, for beams divided by length ** length_penalty instead of by length).

        Raises:
            ValueError: more tokens than positions, before anything is computed; a setting that does not exist.
        """
        settings, inputs = self._generation_settings(generation_config, kwargs)
        input_ids = inputs.pop("input_ids", input_ids)
        if input_ids is None or input_ids.ndim != 2 or 0 in input_ids.shape:
            seen = None if input_ids is None else input_ids.shape
            raise ValueError(f"generate() needs input_ids of shape (batch, tokens), at least one each; got {seen}.")
        was_training = self.training
        self.eval()
        try:
            request = Request(
                self, input_ids, inputs.get("attention_mask"), inputs.get("position_ids"), settings.max_new_tokens, settings.use_cache
            )
            if settings.decode_strategy == "beam_search":
                return self._beam_search(request, settings, inputs.get("logits_processors"))
            return self._decode(request, settings, inputs.get("logits_processors"), stopping_criteria, streamer)
        finally:
            if was_training:
                self.train()

    def _generation_settings(self, generation_config, kwargs):
        """(settings, what is left: the inputs); the model's ids where the settings have none."""
        settings = copy.deepcopy(generation_config or self.generation_config)
        inputs = settings.update(**kwargs)
        unknown = set(inputs) - {"input_ids", "attention_mask", "position_ids", "logits_processors"}
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
        """Greedy search and sampling."""
        request.select([row for row in range(request.num_rows) for _ in range(settings.num_return_sequences)])
        ends = _end_ids(settings)
        answers, scores = [[] for _ in range(request.num_rows)], [0.0] * request.num_rows
        rows = list(range(request.num_rows))  # which answer each row of the request belongs to
        processors = self._processors(request, settings, extra_processors)
        for _ in range(settings.max_new_tokens):
            logits = _processed(request, rows, request.logits(), processors)
            if settings.decode_strategy == "greedy_search":
                tokens = logits.argmax(-1, keepdim=True)
            else:
                tokens = sample(logits, settings.temperature, settings.top_k, settings.top_p)
            tokens = self.agreed(tokens)
            log_p = (logits.take_along_axis(tokens, 1) - logits.logsumexp(-1, keepdim=True)).flatten().tolist()
            request.append(tokens)
            shown = [settings.pad_token_id] * len(answers)
            for row, token, score in zip(rows, tokens.flatten().tolist(), log_p):
                answers[row].append(token)
                scores[row] += score
                shown[row] = token
            if streamer is not None:
                streamer.put(paddle.to_tensor(shown))
            going_on = [i for i, row in enumerate(rows) if answers[row][-1] not in ends]
            if len(going_on) < len(rows):
                rows = [rows[i] for i in going_on]
                if rows:
                    request.select(going_on)
            if not rows or (stopping_criteria and stopping_criteria(request.input_ids, None)):
                break
        if streamer is not None:
            streamer.end()
        means = [score / max(len(answer), 1) for score, answer in zip(scores, answers)]
        return _padded(answers, settings.pad_token_id), paddle.to_tensor(means, dtype="float32").unsqueeze(-1)

    def _beam_search(self, request, settings, extra_processors):
        """Beams of each row, kept apart from the other rows' (Graves 2012; scores as in GNMT, Wu et al. 2016)."""
        width, ends = settings.num_beams, _end_ids(settings)
        searches = [BeamRow(width, settings, ends) for _ in range(request.num_rows)]
        processors = self._processors(request, settings, extra_processors)
        owners = list(range(request.num_rows))  # which search each row of the request belongs to
        for _ in range(settings.max_new_tokens):
            log_p = F.log_softmax(_processed(request, owners, request.logits(), processors), axis=-1)  # (rows, V)
            values, tokens = (x.numpy() for x in log_p.topk(min(2 * width, log_p.shape[-1]), axis=-1))
            kept, next_tokens, next_owners = [], [], []
            for owner, search in enumerate(searches):
                mine = [i for i, o in enumerate(owners) if o == owner]
                if not mine:
                    continue
                for beam, token in search.advance(values[mine], tokens[mine]):
                    kept.append(mine[beam])
                    next_tokens.append(token)
                    next_owners.append(owner)
            owners = next_owners
            if not owners:
                break
            request.select(kept)
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
        """The same tokens on every rank that computes this model; here there is one."""
        return tokens


def sample(logits: paddle.Tensor, temperature: float, top_k: int, top_p: float) -> paddle.Tensor:
    """Draw one token a row from softmax(logits / temperature), cut to the `top_k` likeliest (0: all) and to the fewest
    likeliest that together exceed `top_p` (Holtzman et al. 2020, nucleus sampling).

    As in PaddleNLP, top_p counts the probability mass of the whole vocabulary, not of the k kept. logits: (B, V); returns (B, 1).
    """
    vocab = logits.shape[-1]
    probabilities = F.softmax(logits / temperature, axis=-1)
    if not top_k and top_p >= 1.0:
        return paddle.multinomial(probabilities)
    kept, ids = probabilities.topk(min(top_k, vocab) if top_k else vocab, axis=-1)  # sorted, likeliest first
    if top_p < 1.0:
        before = kept.cumsum(-1) - kept  # mass of the likelier ones; the first has none and always stays
        kept = kept * (before <= top_p).astype(kept.dtype)
    return ids.take_along_axis(paddle.multinomial(kept), 1)


class BeamRow:
    """The beams of one prompt.

    A finished answer's score is its log probability / length ** length_penalty. The search ends when no open beam can beat the
    worst of `width` finished answers (with `early_stopping`: as soon as there are `width`).
    """

    def __init__(self, width: int, settings, ends: set[int]):
        self.width, self.penalty, self.early = width, settings.length_penalty, bool(settings.early_stopping)
        self.ends, self.left = ends, settings.max_new_tokens
        self.open = [(0.0, [])]  # (log probability, tokens)
        self.finished = []  # (score, tokens), best first

    def advance(self, log_p: np.ndarray, tokens: np.ndarray) -> list[tuple[int, int]]:
        """One step. log_p, tokens: (open beams, candidates). Returns (beam it continues, token) of each new open beam."""
        self.left -= 1
        candidates = sorted(
            ((self.open[b][0] + float(p), b, int(t)) for b in range(len(self.open)) for p, t in zip(log_p[b], tokens[b])),
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
        longest = length + self.left if self.penalty > 0 else length  # totals only fall; a longer one divides by more
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
        raise ValueError(f"attention_mask has shape {list(real.shape)}; expected that of input_ids, {list(shape)}.")
    if (np.diff(real, axis=-1) < 0).any() or not real[:, -1].all():
        raise ValueError("attention_mask has padding after a real token; generation wants rows padded on the left.")


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
