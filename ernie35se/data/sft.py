"""Supervised fine-tuning data: conversations -> ids and labels -> (packed) batches. Lists in, lists out.

    bos  p p p  r r r eos  q q  s s eos        one conversation of two turns; p, q prompts, r, s responses
    -    . . .  x x x x    . .  x x x          x: learnt, EOS included; prompts are read but not learnt

Prompt and response are tokenised apart, so no token spans the two. The model's labels are aligned with its
scores: the label at t is the token after input t, so the last EOS is a label only, and a sample of n tokens
feeds the model n - 1.

Packing (`zero_padding`) lays samples of a batch end to end instead of padding each: attention is
block-diagonal and positions restart, so the losses are those of the samples alone.

Padding is on the right in training: causal attention never looks there, so flash attention needs no mask for
it. Generation pads on the left (`collate_prompts`), since new tokens are appended on the right.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from typing import Callable, Mapping, Sequence

import numpy as np

from .records import Conversation
from .templates import Template, encode_segments

IGNORED = -100
STRATEGIES = ("keep_answer", "drop", "raise")
DEFAULT_SRC_LENGTH, DEFAULT_TGT_LENGTH = 128, 160


@dataclass(frozen=True)
class Limits:
    """How many tokens a sample may have, special tokens included.

    Attributes:
        src_length: of one prompt. tgt_length: of one response, with its EOS. max_length: of the whole
        conversation.
        strategy: what happens to a longer one. `keep_answer`: the oldest turns go first; then the middle of a
            prompt is left out (its start and its end remain); a response is cut, and still ends in EOS, only
            where it alone is too long. `drop`: left out. `raise`: an error. All are counted.
    """

    src_length: int = DEFAULT_SRC_LENGTH
    tgt_length: int = DEFAULT_TGT_LENGTH
    max_length: int = DEFAULT_SRC_LENGTH + DEFAULT_TGT_LENGTH
    strategy: str = "keep_answer"

    @classmethod
    def of(cls, src_length=None, tgt_length=None, max_length=None, strategy="keep_answer") -> Limits:
        """Limits from settings that may be left out: max_length is the sum of the other two, and where
        max_length is given without tgt_length, a response may use all that src_length leaves.

        Raises:
            ValueError: limits that leave no room for a prompt or a response, or an unknown strategy.
        """
        src = DEFAULT_SRC_LENGTH if src_length is None else src_length
        if tgt_length is None:
            tgt_length = DEFAULT_TGT_LENGTH if max_length is None else max_length - src
        total = src + tgt_length if max_length is None else max_length
        if min(src, tgt_length, total - 1) < 1:
            raise ValueError(
                f"src_length {src}, tgt_length {tgt_length}, max_length {total}: expected room for one token "
                "of the prompt "
                "and one of the response; max_length is at least src_length + 1."
            )
        if strategy not in STRATEGIES:
            raise ValueError(f"truncation_strategy = {strategy!r}: expected one of {', '.join(STRATEGIES)}.")
        return cls(src, tgt_length, total, strategy)


class Encoder:
    """Conversations to samples.

    Args:
        encode: plain text -> ids; knows no special tokens.
        template: what stands around the user's text.
        special_ids: spelling -> id of the tokens that the template may spell.
        eos_id: ends every response. bos_id: starts every sample; None for tokenizers without one, where an empty prompt
            becomes an EOS.
        eos, bos: their spellings, for templates that write them.

    Attributes:
        counts: records seen, kept, dropped; prompts and responses cut; turns left out.
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        template: Template,
        eos_id: int,
        bos_id: int | None = None,
        limits: Limits = Limits(),
        special_ids: Mapping[str, int] | None = None,
        eos: str = "",
        bos: str = "",
    ):
        self.encode, self.template, self.limits = encode, template, limits
        self.special_ids = special_ids or {}
        self.eos_id, self.bos_id, self.eos, self.bos = eos_id, bos_id, eos, bos
        self.counts: Counter[str] = Counter()

    def __call__(self, conversation: Conversation) -> dict | None:
        """A sample, {"input_ids": [...], "labels": [...], "lengths": [n]}; None where it is dropped.

        Raises:
            ValueError: too long, with the strategy `raise`.
        """
        self.counts["records"] += 1
        turns = self._fitted(self._turns(conversation), conversation.place)
        if turns is None:
            self.counts["dropped"] += 1
            return None
        self.counts["kept"] += 1
        tokens, labels = [], []
        for prompt, response in turns:
            tokens += prompt + response
            labels += [IGNORED] * len(prompt) + response
        return {"input_ids": tokens[:-1], "labels": labels[1:], "lengths": [len(tokens) - 1]}

    def prompt_ids(self, conversation: Conversation) -> tuple[list[int], str]:
        """Ids of everything before the last response, and that response's text: what generation gets and
        should give. Each turn is cut as in training, then all of it is fitted to max_length - tgt_length by leaving out
        old turns, then the middle of the prompt."""
        turns = [self._cut(prompt, response) for prompt, response in self._turns(conversation)]
        room = max(1, self.limits.max_length - self.limits.tgt_length)
        while len(turns) > 1 and sum(len(p) + len(r) for p, r in turns) - len(turns[-1][1]) > room:
            turns = self._without_oldest(turns)
        ids = [token for prompt, response in turns[:-1] for token in prompt + response]
        return ids + _without_middle(turns[-1][0], room - len(ids)), conversation.turns[-1][1]

    def _turns(self, conversation: Conversation) -> list[tuple[list[int], list[int]]]:
        prompts = self.template.prompts(conversation.turns, conversation.system, self.eos, self.bos)
        turns = [
            (encode_segments(prompt, self.encode, self.special_ids), self.encode(response) + [self.eos_id])
            for prompt, (_, response) in zip(prompts, conversation.turns)
        ]
        return self._with_bos(turns)

    def _with_bos(self, turns):
        first, response = turns[0]
        if self.bos_id is not None and first[:1] != [self.bos_id]:
            first = [self.bos_id, *first]
        first = first or [self.eos_id]  # there must be something that the first response follows
        return [(first, response), *turns[1:]]

    def _without_oldest(self, turns):
        self.counts["turns left out"] += 1
        (prompt, response), *rest = self._with_bos(turns[1:])
        return [(_without_middle(prompt, self.limits.src_length), response), *rest]

    def _fitted(self, turns, place):
        """The turns within the limits, or None where the record is dropped."""
        limits = self.limits
        too_long = [
            f"{what} of {length} tokens ({name} is {limit})"
            for what, length, name, limit in (
                ("a prompt", max(len(p) for p, _ in turns), "src_length", limits.src_length),
                ("a response", max(len(r) for _, r in turns), "tgt_length", limits.tgt_length),
                ("a conversation", sum(len(p) + len(r) for p, r in turns), "max_length", limits.max_length),
            )
            if length > limit
        ]
        if not too_long:
            return turns
        if limits.strategy == "raise":
            raise ValueError(
                f"{place}: {'; '.join(too_long)}. Raise the limit, or choose --truncation_strategy "
                "keep_answer or drop."
            )
        if limits.strategy == "drop":
            return None
        turns = [self._cut(prompt, response) for prompt, response in turns]
        while len(turns) > 1 and sum(len(p) + len(r) for p, r in turns) > limits.max_length:
            turns = self._without_oldest(turns)
        if len(turns) == 1:
            turns = [self._cut(*turns[0], whole=limits.max_length)]
        return turns

    def _cut(self, prompt, response, whole=None):
        """Prompt and response within their own limits; with `whole`, within that together, the prompt giving
        way."""
        limits = self.limits
        response_limit = limits.tgt_length if whole is None else min(limits.tgt_length, whole - 1)
        if len(response) > response_limit:
            response = response[: response_limit - 1] + [self.eos_id]
            self.counts["responses cut"] += 1
        prompt_limit = limits.src_length if whole is None else min(limits.src_length, whole - len(response))
        if len(prompt) > prompt_limit:
            prompt = _without_middle(prompt, prompt_limit)
            self.counts["prompts cut"] += 1
        return prompt, response


def _without_middle(ids: list[int], limit: int) -> list[int]:
    """The first and last halves of `limit` ids: instructions stand at a prompt's start, the cue to answer at
    its end."""
    if len(ids) <= limit:
        return ids
    limit = max(limit, 1)
    tail = limit // 2
    return ids[: limit - tail] + (ids[-tail:] if tail else [])


# -------------------------------------------------------------------------------------------------------
# packing


def pack(lengths: Sequence[int], max_length: int, greedy: bool = False) -> list[list[int]]:
    """Which samples share a row of at most `max_length` tokens: lists of sample numbers.

    In order, a new row starts where the next sample does not fit. Greedy: longest first, each into the
    fullest row that still takes it (best-fit decreasing), which leaves fewer gaps.

    Raises:
        ValueError: a sample longer than a row.
    """
    for number, length in enumerate(lengths):
        if length > max_length:
            raise ValueError(f"sample {number} has {length} tokens, more than a row of {max_length}.")
    return _pack_greedily(lengths, max_length) if greedy else _pack_in_order(lengths, max_length)


def _pack_in_order(lengths, max_length):
    rows, used = [], max_length + 1
    for number, length in enumerate(lengths):
        if used + length > max_length:
            rows.append([])
            used = 0
        rows[-1].append(number)
        used += length
    return rows


def _pack_greedily(lengths, max_length):
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for number in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(room, (lengths[number], -1))
        if at < len(room):
            left, row = room.pop(at)
        else:
            left, row = max_length, len(rows)
            rows.append([])
        rows[row].append(number)
        insort(room, (left - lengths[number], row))
    return [sorted(row) for row in rows]


def join(samples: Sequence[dict]) -> dict:
    """One row of several samples, end to end."""
    return {
        key: [value for sample in samples for value in sample[key]]
        for key in ("input_ids", "labels", "lengths")
    }


def pack_samples(samples: Sequence[dict], max_length: int, greedy: bool = False) -> list[dict]:
    """The samples joined into rows of at most `max_length` tokens."""
    rows = pack([len(sample["input_ids"]) for sample in samples], max_length, greedy)
    return [join([samples[number] for number in row]) for row in rows]


def padding_share(rows: Sequence[dict], width: int | None = None) -> float:
    """Share of padding among the tokens of rows as wide as the longest of them (or as `width`)."""
    lengths = [len(row["input_ids"]) for row in rows]
    width = width or max(lengths)
    return 1 - sum(lengths) / (width * len(lengths))


# -------------------------------------------------------------------------------------------------------
# batches


def collate(samples: Sequence[dict], pad_id: int, flash_mask: bool = False) -> dict[str, np.ndarray]:
    """A right-padded batch of B samples or packed rows, T the longest.

    Returns:
        input_ids, labels (IGNORED at padding) and position_ids, int64 (B, T). Positions count 0, 1, 2, ... in
        each sample; padding has 0. With packed rows attention_mask (B, 1, T, T), true where query t may look
        at s; else, if there is padding, attention_mask (B, T), 1 for real tokens. With `flash_mask` instead
        of any mask attn_mask_startend_row_indices (B, 1, T), int32: column s is hidden from the queries from
        that row on.
    """
    width = max(len(sample["input_ids"]) for sample in samples)
    shape = (len(samples), width)
    batch = {
        "input_ids": np.full(shape, pad_id, dtype=np.int64),
        "labels": np.full(shape, IGNORED, dtype=np.int64),
        "position_ids": np.zeros(shape, dtype=np.int64),
    }
    number_of = np.zeros(
        shape, dtype=np.int64
    )  # which sample of its row a token belongs to, 1, 2, ...; 0 for padding
    ends = np.full((len(samples), 1, width), width, dtype=np.int32)
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        batch["input_ids"][row, :length] = sample["input_ids"]
        batch["labels"][row, :length] = sample["labels"]
        start = 0
        for number, part in enumerate(sample["lengths"], 1):
            batch["position_ids"][row, start : start + part] = np.arange(part)
            number_of[row, start : start + part] = number
            ends[row, 0, start : start + part] = start + part
            start += part
    if flash_mask:
        batch["attn_mask_startend_row_indices"] = ends
    elif number_of.max() > 1:
        batch["attention_mask"] = block_diagonal_mask(number_of)
    elif (number_of == 0).any():
        batch["attention_mask"] = number_of.astype(np.int64)
    return batch


def block_diagonal_mask(number_of: np.ndarray) -> np.ndarray:
    """(B, T) sample numbers, 0 for padding -> boolean (B, 1, T, T): a query sees its own sample, up to
    itself."""
    same = (number_of[:, None, :, None] == number_of[:, None, None, :]) & (number_of > 0)[:, None, None, :]
    return same & np.tri(number_of.shape[1], dtype=bool)


def collate_prompts(prompts: Sequence[list[int]], pad_id: int) -> dict[str, np.ndarray]:
    """A left-padded batch for generation: input_ids and attention_mask, int64 (B, T)."""
    width = max(map(len, prompts))
    input_ids = np.full((len(prompts), width), pad_id, dtype=np.int64)
    mask = np.zeros((len(prompts), width), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return {"input_ids": input_ids, "attention_mask": mask}


# ------------------------------------------------------------------------------------------------------- a
# look


def preview(row: dict, decode: Callable[[list[int]], str]) -> str:
    """The row's text, what is learnt between [[ and ]]; one line a sample."""
    lines, start = [], 0
    for length in row["lengths"]:
        labels = row["labels"][start : start + length]
        tokens = [*row["input_ids"][start : start + length], labels[-1]]
        learnt = [False, *(label != IGNORED for label in labels)]
        runs = groupby(zip(learnt, tokens), key=lambda pair: pair[0])
        texts = [(is_learnt, decode([token for _, token in run])) for is_learnt, run in runs]
        lines.append("".join(f"[[{text}]]" if is_learnt else text for is_learnt, text in texts))
        start += length
    return "\n".join(lines)


def length_histogram(lengths: Sequence[int], bins: int = 8, width: int = 40) -> list[str]:
    """Lines such as `    1 -   16 |####     12`, one a bin of equal width."""
    step = max(1, -(-max(lengths) // bins))
    counts = Counter((length - 1) // step for length in lengths)
    most = max(counts.values())
    return [
        f"{number * step + 1:6d} - {(number + 1) * step:6d} "
        f"|{'#' * round(width * counts[number] / most):{width}s} "
        f"{counts[number]}"
        for number in range(max(counts) + 1)
    ]
