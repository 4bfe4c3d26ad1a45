"""Greedy decoding of a left-padded batch, for evaluation with generation and for samples.

Works with any model whose forward takes input_ids, position_ids, attention_mask, past_key_values and
use_cache. A batch gives the texts that its rows give alone: positions count from each row's first real token,
evenly spaced where the model wants that, and the spacing is fixed before the first token, so cached keys keep
theirs.
"""

from __future__ import annotations

from typing import List

import numpy as np
import paddle

from ..positions import position_interval


@paddle.no_grad()
def decode_greedily(model, batch: dict, max_new_tokens: int, eos_id: int) -> List[List[int]]:
    """New ids of each row, up to (without) its EOS.

    Args:
        batch: input_ids and attention_mask, (B, T), as `data.sft.collate_prompts` makes them.
    """
    was_training = model.training
    model.eval()
    ids = paddle.to_tensor(batch["input_ids"])
    mask = np.asarray(batch["attention_mask"])
    order = mask.cumsum(axis=1)  # (B, T): 1, 2, ... over the real tokens
    step = _steps_between_positions(model, mask.sum(axis=1) + max_new_tokens)  # (B, 1)
    new, done, cache = [[] for _ in ids], np.zeros(len(ids), dtype=bool), None
    for _ in range(max_new_tokens):
        columns = order if cache is None else order[:, -1:]
        output = model(
            input_ids=ids,
            position_ids=paddle.to_tensor((columns * step - 1).clip(min=0)),
            attention_mask=paddle.to_tensor(mask),
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
        )
        best = output.logits[:, -1].argmax(axis=-1)  # (B,)
        for row, token in enumerate(best.tolist()):
            done[row] |= token == eos_id
            if not done[row]:
                new[row].append(token)
        if done.all():
            break
        cache, ids = output.past_key_values, best.unsqueeze(-1)
        mask = np.concatenate([mask, np.ones_like(mask[:, :1])], axis=1)
        order = np.concatenate([order, order[:, -1:] + 1], axis=1)
    if was_training:
        model.train()
    return new


def _steps_between_positions(model, totals: np.ndarray) -> np.ndarray:
    config = model.config
    if not getattr(config, "enable_random_position_ids", False):
        return np.ones((len(totals), 1), dtype="int64")
    return np.array([[position_interval(int(total), config.max_position_embeddings)] for total in totals])
