"""Masked cross entropy over the vocabulary: whole, shared out among tensor-parallel ranks, or in chunks with the LM head."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from . import cpu_ops, parallel

CHUNK = 1024  # tokens whose logits exist at a time: enough for the matrix products to run at their full speed


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


def head_loss(
    hidden: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None, labels: paddle.Tensor,
    ignored_index: int = -100, tied: bool = False,
) -> paddle.Tensor:  # fmt: skip
    """`causal_lm_loss` of the LM head's logits, without ever holding them all: float32, the whole vocabulary.

    The logits of CHUNK tokens at a time become their own gradient at once, in the forward pass, and from it come the
    gradients of hidden, weight and bias; the backward pass only multiplies those by what reaches the loss. Equal to the
    plain form to rounding. Backward runs once.

    Args:
        hidden: (B, T, C). weight: (C, V), or the embedding's (V, C) where `tied`. bias: (V,) or None. labels: (B, T).

    Raises:
        ValueError: labels of another shape.
    """
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(f"labels have shape {list(labels.shape)}; expected {list(hidden.shape[:-1])}, one label for each hidden state.")
    return _HeadLoss.apply(hidden, weight, bias, labels, ignored_index, tied)


class _HeadLoss(PyLayer):
    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, ignored_index, tied):
        ctx.needs = [t is not None and not t.stop_gradient for t in (hidden, weight, bias)]
        ctx.has_bias = bias is not None
        rows, labels = hidden.flatten(0, -2), labels.flatten()  # (N, C), (N,)
        counts = (labels != ignored_index).astype("float32")
        total = counts.sum().clip(min=1.0)
        losses, sums = [], [None, None, None]
        for start in range(0, rows.shape[0], CHUNK):
            part = slice(start, start + CHUNK)
            loss, dlogits = _loss_and_gradient(rows[part], weight, bias, labels[part], counts[part], total, tied)
            losses.append(loss)
            _add_gradients(sums, ctx.needs, rows[part], weight, dlogits, tied)
            del dlogits  # before the next chunk's exist
        if sums[0] is not None:
            sums[0] = (paddle.concat(sums[0]) if len(sums[0]) > 1 else sums[0][0]).reshape(hidden.shape)
        ctx.gradients = sums
        return paddle.add_n(losses) / total

    @staticmethod
    def backward(ctx, dloss):
        if ctx.gradients is None:
            raise RuntimeError("the LM head's gradients were handed on already: its backward runs once.")
        gradients, ctx.gradients = ctx.gradients, None
        if not (dloss.place.is_cpu_place() and float(dloss) == 1.0):
            gradients = [None if g is None else g.multiply_(dloss) for g in gradients]
        return tuple(gradients if ctx.has_bias else gradients[:2])


def _loss_and_gradient(rows, weight, bias, labels, counts, total, tied):
    """Summed loss of some tokens, and the gradient of `sum / total` with respect to their logits (n, V)."""
    scores = paddle.matmul(rows, weight, transpose_y=tied)  # (n, V)
    share = counts / total  # 0 where ignored
    targets = paddle.where(counts > 0, labels, paddle.zeros_like(labels))
    op = cpu_ops.usable(rows, weight)
    if op is not None:
        no_bias = paddle.zeros([0])
        dlogits, loss = op.cpu_cross_entropy_(scores, no_bias if bias is None else bias.detach(), targets.astype("int64"), share)
        return loss.sum(), dlogits
    if bias is not None:
        scores = scores.add_(bias)
    targets, share = targets.unsqueeze(-1), share.unsqueeze(-1)
    largest = scores.max(axis=-1, keepdim=True)
    target_scores = paddle.take_along_axis(scores, targets, axis=-1)
    scores = scores.subtract_(largest).exp_()
    normaliser = scores.sum(axis=-1, keepdim=True)
    loss = ((normaliser.log() + largest - target_scores).squeeze(-1) * counts).sum()
    return loss, scores.multiply_(share / normaliser).put_along_axis_(targets, -share, 1, "add")


def _add_gradients(sums, needs, rows, weight, dlogits, tied):
    """Add a chunk's part to sums: a list of hidden gradients, then those of weight and bias."""
    if needs[0]:
        sums[0] = (sums[0] or []) + [paddle.matmul(dlogits, weight, transpose_y=not tied)]
    if needs[1]:
        mine = paddle.matmul(*((dlogits, rows) if tied else (rows, dlogits)), transpose_x=True)
        sums[1] = mine if sums[1] is None else sums[1].add_(mine)
    if needs[2]:
        mine = dlogits.sum(axis=0)
        sums[2] = mine if sums[2] is None else sums[2].add_(mine)
