"""Installs `ernie35se`. The versions that work together are pinned here and nowhere else.

    pip install -e '.[cpu]'          # paddlepaddle
    pip install -e '.[gpu]'          # paddlepaddle-gpu, from PaddlePaddle's own index: docs/install.md
    pip install -e '.[cpu,test]'     # and what the tests need

An extra can add a requirement but not take one away, so Paddle itself is in no base list: choose `cpu` or `gpu`.
The lists are plain literals, because `ernie35se.runtime.check_versions` reads them from this file.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

REQUIREMENTS = [
    "paddlenlp==3.0.0b4",
    "visualdl==2.5.3",
    "fast_dataindex==0.1.2",
    "sentencepiece==0.2.3",
    "numpy==1.26.4",  # the newest that paddlenlp accepts
    "aistudio-sdk<0.3",  # 0.3 dropped a name that paddlenlp imports
    "pyarrow<20",  # this and the next two: newer ones need numpy 2
    "datasets<4",
    "pandas<3",
    "protobuf<7",  # 7 makes VisualDL refuse booleans among the settings
    "zstandard>=0.22,<1",
    "matplotlib>=3.8,<4",
    "tqdm>=4.60,<5",
    "packaging>=22",
    "jinja2>=3,<4",
    "safetensors>=0.5,<1",
    "rouge-score==0.1.2",
    "sacrebleu>=2.4,<3",
]
EXTRAS = {
    "cpu": ["paddlepaddle==3.3.1"],
    "gpu": ["paddlepaddle-gpu==3.3.1"],
    # setuptools builds external_ops: before 70.1 that takes the package wheel too, and 80 is the newest tried
    # openai and playwright try the server and its page; playwright drives a Chromium that is installed already
    "test": [
        "pytest>=8,<10",
        "hypothesis>=6.100,<7",
        "setuptools>=70.1,<81",
        "openai>=3.63,<4",
        "playwright>=1.65,<2",
    ],
    "bench": ["torch==2.13.0"],  # what tools/benchmark.py compares with
}


def version() -> str:
    """The package's version, read without importing it."""
    text = (Path(__file__).resolve().parent / "ernie35se" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE).group(1)


setup(
    name="ernie35se",
    version=version(),
    description="Pretraining, fine-tuning and prediction for ERNIE-3.5-SE on PaddlePaddle",
    packages=find_packages(include=["ernie35se", "ernie35se.*"]),
    python_requires=">=3.10,<3.13",
    install_requires=REQUIREMENTS,
    extras_require=EXTRAS,
)
