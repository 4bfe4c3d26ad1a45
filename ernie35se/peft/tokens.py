"""What an adapter's hooks know of the batch in hand: which tokens are real, and which are the prompt.

Hooks deep in the model see hidden states alone. A hook on the model itself notes the rest before each
forward.
"""

from __future__ import annotations

import inspect

import paddle


class BatchNotes:
    """Notes the arguments of each forward of `model`.

    Attributes:
        arguments: of the forward in hand, by name.
    """

    def __init__(self, model):
        self._signature = inspect.signature(model.forward)
        self.arguments: dict = {}
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, model, inputs, named):
        self.arguments = self._signature.bind(*inputs, **named).arguments

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
        real, labels = self.real_tokens(batch, length), self.arguments.get("labels")
        if labels is None:
            return real
        learnt = (labels != -100).astype(
            "int64"
        )  # the label at t is the token after t, so t itself is prompt
        return real & (learnt.cumsum(axis=-1) - learnt == 0)
