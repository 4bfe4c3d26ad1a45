"""Shared by the parallel tests."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_pictures():
    """Drawing takes longer than the short runs of this process; the launch scripts' runs draw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ernie35se.training.callbacks.draw_curves", lambda *args: None)
        yield
