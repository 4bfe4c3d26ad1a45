"""Merge a LoRA, rsLoRA, PiSSA, MoSLoRA, LinChain, MoRA or QLoRA adapter into its base model: a complete
folder that needs no adapter.

Arithmetic is in float32, one weight file in memory at a time. The folder gets its name when it is whole.
"""

from __future__ import annotations

from typing import Sequence

from _common import run_tool
from _merge import run


def main(argv: Sequence[str] | None = None) -> int | None:
    return run("lora", __doc__, argv)


if __name__ == "__main__":
    run_tool(main)
