"""Which position each token gets: pure functions.

ERNIE-3.5-SE trains short and predicts long by never letting the model count on neighbours being one apart
(randomized positional encodings, Ruoss et al. 2023, section 4). In training a sequence of T tokens gets T sorted positions
drawn at random from the whole table; in evaluation and generation, evenly spaced ones:

    training,   T = 5, table of 32:    2   3   11   20   29      (another draw at every step)
    evaluation, T = 5, interval 8:     7  15   23   31   39      (interval - 1, 2 * interval - 1, ...)

The trainer draws the random ones and passes them to the model; the model itself fills in the even ones.
"""

from __future__ import annotations

import numpy as np

MAX_INTERVAL = 8
_LONGEST_AT_MAX_INTERVAL = 4096


def random_position_ids(seq_length: int, max_position_embeddings: int, seed: int) -> np.ndarray:
    """Sorted sample without replacement from the position table, int64 of shape (seq_length,).

    Raises:
        ValueError: more tokens than positions.
    """
    _check_fits(seq_length, max_position_embeddings)
    permutation = np.random.RandomState(seed).permutation(max_position_embeddings)
    return np.sort(permutation[:seq_length]).astype(np.int64)


def interval_position_ids(seq_length: int, interval: int) -> np.ndarray:
    """interval - 1, 2 * interval - 1, ...: int64 of shape (seq_length,). Interval 1 gives 0, 1, 2, ..."""
    return np.arange(1, seq_length + 1, dtype=np.int64) * interval - 1


def position_interval(total_length: int, max_position_embeddings: int) -> int:
    """Distance between the positions of neighbouring tokens, so that `total_length` of them fit into the table.

    8 up to 4096 tokens, as in training-length text; beyond that the largest that fits. At least 1.

    Raises:
        ValueError: more tokens than positions.
    """
    _check_fits(total_length, max_position_embeddings)
    fitting = max_position_embeddings // max(total_length, 1)
    return min(MAX_INTERVAL, fitting) if total_length <= _LONGEST_AT_MAX_INTERVAL else fitting


def masked_position_ids(attention_mask, max_position_embeddings: int, spaced: bool):
    """Positions of padded rows: each row counts from its own first real token, as if it stood alone.

    Args:
        attention_mask: (B, S) integers, 1 for a real token; a numpy array or a Paddle tensor.
        spaced: evenly spaced by each row's own `position_interval`; otherwise 0, 1, 2, ...

    Returns:
        (B, S) of the same type, int64. Padding gets position 0.
    """
    seen = attention_mask.astype("int64").cumsum(-1)  # (B, S): real tokens up to and including each column
    if not spaced:
        return (seen - 1).clip(0, max_position_embeddings - 1)
    count = seen[:, -1:].clip(1, max_position_embeddings)  # (B, 1)
    fitting = max_position_embeddings // count
    short = (count <= _LONGEST_AT_MAX_INTERVAL).astype("int64")
    interval = short * fitting.clip(1, MAX_INTERVAL) + (1 - short) * fitting
    return (seen * interval - 1).clip(0, max_position_embeddings - 1)


def progressive_sequence_length(global_step: int, max_seq_length: int) -> int:
    """Length that training sequences are cut to: 512, 1024, 2048 before steps 500, 1000, 1500, then everything.

    Args:
        global_step: number of completed optimizer steps.
    """
    for before_step, length in ((500, 512), (1000, 1024), (1500, 2048)):
        if global_step < before_step:
            return min(length, max_seq_length)
    return max_seq_length


def _check_fits(length: int, max_position_embeddings: int) -> None:
    if length > max_position_embeddings:
        raise ValueError(
            f"{length} tokens need as many positions, but the model's table has {max_position_embeddings} "
            "(max_position_embeddings). Shorten the input or raise max_position_embeddings."
        )
