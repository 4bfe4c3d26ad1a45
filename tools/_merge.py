"""The four merge tools: one command line, one implementation (ernie35se/peft/merging.py)."""

from __future__ import annotations

from typing import Sequence

from _common import make_parser

LARGEST_DIFFERENCE = 1e-4  # in logits, float32


def truth(text: str) -> bool:
    """argparse type: True or False, 1 or 0."""
    values = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in values:
        raise ValueError(text)
    return values[text.lower()]


def run(method: str, doc: str, argv: Sequence[str] | None) -> int | None:
    """Parse, merge, compare. Returns the exit status.

    Raises:
        ValueError: what the user has to mend.
    """
    example = (
        f"  python tools/merge_{method}_params.py --model_name_or_path output/model --{method}_path "
        f"output/{method} "
        "--output_path output/merged"
    )
    parser = make_parser(doc, example)
    parser.add_argument("--model_name_or_path", required=True, help="folder of the base model")
    parser.add_argument(f"--{method}_path", required=True, dest="adapter", help="folder of the saved adapter")
    parser.add_argument("--output_path", required=True, help="folder to write; must not exist yet")
    parser.add_argument("--device", default="cpu", help="cpu or gpu (default: cpu)")
    parser.add_argument(
        "--safe_serialization", type=truth, default=True, help="safetensors, else .pdparams (default: True)"
    )
    parser.add_argument(
        "--check",
        type=truth,
        default=True,
        help="compare logits, which takes the whole model in memory (default: True)",
    )
    arguments = parser.parse_args(argv)

    import paddle

    from ernie35se.peft.merging import compare_logits, merge_files
    from ernie35se.runtime import tune_cpu

    try:
        paddle.set_device(arguments.device)
    except ValueError as error:
        raise ValueError(f"--device {arguments.device}: {error}; expected cpu, or gpu where there is one") from None
    tune_cpu(arguments.device)
    base, output = arguments.model_name_or_path, arguments.output_path
    changed = merge_files(base, arguments.adapter, output, (method,), arguments.safe_serialization)
    print(f"{output}: {changed} weights merged in float32.")
    if not arguments.check:
        return None
    found = dict(compare_logits(base, arguments.adapter, output))
    print(
        f"The adapter changes logits by up to {found['changed']:.3g}; merging, by up to "
        f"{found['merged']:.3g}."
    )
    if found["merged"] > LARGEST_DIFFERENCE:
        print(
            f"That is more than {LARGEST_DIFFERENCE:g}, what float32 weights give; weights stored in 16 bits "
            "round more "
            "coarsely. Compare before you rely on the merged model."
        )
    return None
