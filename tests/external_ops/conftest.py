"""What the tests of the op share."""

import sys
from pathlib import Path

import pytest

EXTERNAL_OPS = Path(__file__).resolve().parents[2] / "external_ops"
sys.path.insert(0, str(EXTERNAL_OPS))  # for `kernels`, the float64 reference and the ctypes structures


@pytest.fixture(scope="session")
def op():
    """The installed op."""
    return pytest.importorskip("fused_ln", reason="the op is not built: pip install ./external_ops --no-build-isolation")
