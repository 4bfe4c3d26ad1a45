"""Runs scripts/run_finetune.py on each rank, once for each list of words in a JSON file.

    finetune_worker.py FOLDER FILE        FOLDER receives the logs
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cpu_gloo  # noqa: F401  before fleet.init

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import run_finetune  # noqa: E402

if __name__ == "__main__":
    for words in json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")):
        assert run_finetune.main(words) == 0, words
