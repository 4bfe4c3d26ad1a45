"""What an adapter's hooks know of the batch in hand: which tokens are real, and which are the prompt.

Hooks deep in the model see hidden states alone. A hook on the model itself notes the rest before each
forward.
"""

from __future__ import annotations

import inspect

import paddle


def tell_labels(model, labels: paddle.Tensor) -> None:
    """Say the labels of the next forward to the adapters of a model that computes its scores alone."""
    for notes in getattr(model, "batch_notes", None) or []:
        notes.tell(labels)


class BatchNotes:
    """Notes the arguments of each forward of `model`.

    Attributes:
        arguments: of the forward in hand, by name.
        labels: the batch's, whether the model was given them or `tell_labels` said them; None without.
    """

    def __init__(self, model):
        self._signature = inspect.signature(model.forward)
        self.arguments: dict = {}
        self.labels = self._told = None
        model.batch_notes = [*(getattr(model, "batch_notes", None) or []), self]
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def tell(self, labels: paddle.Tensor) -> None:
        """Labels of the next forward, which the model itself does not get."""
        self._told = labels

    def _note(self, model, inputs, named):
        self.arguments = self._signature.bind(*inputs, **named).arguments
        self.labels = self.arguments.get("labels") if self._told is None else self._told
        self._told = None

    @property
    def decodes(self) -> bool:
        """Whether this forward continues from cached tokens."""
        return bool(self.arguments.get("past_key_values"))

    def real_tokens(self, batch: int, length: int) -> paddle.Tensor:
        """(B, T) booleans: what is no padding."""
        mask = self.arguments.get("attention_mask")
        if mask is None:
            return paddle.ones([batch, length], dtype="bool")
        if mask.ndim == 2:
            return mask[:, -length:].astype("bool")
        mask = mask.reshape([mask.shape[0], -1, mask.shape[-2], mask.shape[-1]])[:, 0]  # (B, T, S)
        return mask.astype("bool").any(axis=-1)

    def prompt_tokens(self, batch: int, length: int) -> paddle.Tensor:
        """(B, T) booleans: the real tokens up to the one whose label is learnt first; without labels all real
        ones."""
        real, labels = self.real_tokens(batch, length), self.labels
        if labels is None:
            return real
        learnt = (labels != -100).astype(
            "int64"
        )  # the label at t is the token after t, so t itself is prompt
        return real & (learnt.cumsum(axis=-1) - learnt == 0)
