"""Masked cross entropy over the vocabulary: whole, or shared out among tensor-parallel ranks."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F

from . import parallel


def causal_lm_loss(
    logits: paddle.Tensor, labels: paddle.Tensor, ignored_index: int = -100, vocab_size: int | None = None
) -> paddle.Tensor:
    """Mean negative log likelihood of the labels that count, in float32.

    Paddle's own mean divides by all tokens, ignored ones included; this one by those that count. Without any, the loss
    is zero and still has a graph, so that a rank with nothing to learn takes part in the backward pass.

    Args:
        logits: (B, T, V), any float type; or, of a tensor-parallel rank, its columns (B, T, V / N).
        labels: (B, T) integers, already aligned with the logits.
        vocab_size: V; logits of fewer columns are a rank's. None: they are whole.

    Raises:
        ValueError: shapes that do not belong together.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"labels have shape {labels.shape}; expected {logits.shape[:-1]}, one label for each logit row.")
    with paddle.amp.auto_cast(enable=False):
        scores, targets = logits.astype("float32"), labels.unsqueeze(-1)
        if vocab_size is None or logits.shape[-1] == vocab_size:
            token_loss = F.cross_entropy(scores, targets, reduction="none", ignore_index=ignored_index)
        else:
            token_loss = parallel.vocab_cross_entropy(scores, targets, ignored_index)
        # (B, T, 1), 0 where ignored
        count = (labels != ignored_index).astype("float32").sum()
        return token_loss.sum() / count.clip(min=1.0)
