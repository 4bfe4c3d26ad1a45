"""Shared fixtures."""

import os
from pathlib import Path

import pytest

from ernie35se.runtime import tune_cpu

# Before any test computes: every process that a test starts then sums in the same order as this one, bit for bit.
os.environ.setdefault("OMP_NUM_THREADS", "1")
tune_cpu("cpu")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: minutes rather than seconds; left out by `-m 'not slow'`, run in CI")


@pytest.fixture(scope="session")
def reference() -> Path:
    """Folder of reference values (`shared/reference` beside the repository); tests skip where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "reference"
    if not folder.is_dir():
        pytest.skip(f"reference values are not at {folder}")
    return folder
