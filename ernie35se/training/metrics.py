"""Numbers about a run: perplexity, and tokens per second."""

from __future__ import annotations

import math
import time
from typing import Optional


def perplexity(loss: float) -> float:
    """exp(mean loss per token in nats); infinite where that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class Throughput:
    """Tokens per second of training alone: the clock stands still while a run saves or evaluates."""

    def __init__(self):
        self._tokens = 0
        self._seconds = 0.0
        self._running_since: Optional[float] = None

    def add(self, tokens: int) -> None:
        """Count tokens, and let the clock run."""
        self._tokens += tokens
        self.resume()

    def resume(self) -> None:
        """Let the clock run, if it does not yet."""
        if self._running_since is None:
            self._running_since = time.perf_counter()

    def pause(self) -> None:
        """Stop the clock."""
        if self._running_since is not None:
            self._seconds += time.perf_counter() - self._running_since
            self._running_since = None

    def take(self) -> Optional[float]:
        """Tokens per second since the last call (None if no time has passed), and start counting anew."""
        was_running = self._running_since is not None
        self.pause()
        rate = self._tokens / self._seconds if self._seconds > 0 else None
        self._tokens, self._seconds = 0, 0.0
        if was_running:
            self.resume()
        return rate
