"""NEFTune: noise on the embeddings while training (Jain et al. 2023, arXiv:2310.05914).

Uniform in +-alpha / sqrt(L d) with L the real length of the row and d the width. Nothing is learnt or saved,
and outside of training the model is unchanged.
"""

from __future__ import annotations

import math

import paddle

from .tokens import BatchNotes


def add_noise(model, alpha: float = 5.0):
    """Hook the noise to the model's embeddings. Returns a handle whose remove() ends it.

    Raises:
        ValueError: an alpha that is not above 0.
    """
    if not 0 < alpha < math.inf:
        raise ValueError(f"neftune_noise_alpha = {alpha}: expected a finite number above 0.")
    notes = BatchNotes(model)

    def after(layer, inputs, embedded):  # (B, T, C)
        if not layer.training:
            return embedded
        lengths = notes.real_tokens(*embedded.shape[:2]).astype("float32").sum(axis=-1).clip(min=1)  # (B,)
        size = alpha / (lengths * embedded.shape[-1]).sqrt()
        noise = paddle.uniform(embedded.shape, dtype="float32", min=-1.0, max=1.0) * size.reshape([-1, 1, 1])
        return embedded + noise.astype(embedded.dtype)

    return model.get_input_embeddings().register_forward_post_hook(after)
