"""Answer prompts with a trained Ernie35 model.

    python scripts/predict.py --model_name_or_path output/demo/model
    python scripts/predict.py --model_name_or_path output/demo/model --data_file prompts.jsonl --batch_size 8
    python scripts/predict.py --model_name_or_path output/demo/model --data_file prompts.jsonl --resume
    python scripts/predict.py --model_name_or_path output/demo/model --lora_path output/lora --stream --interactive
    NPROC=2 MODEL=output/demo/model bash scripts/launch/predict_tp.sh

Without --data_file it answers example prompts. Answers are written to --predict_file, a line each, in the
prompts' order, as they are ready. docs/prediction.md has more; `--help` lists every setting.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Optional, Sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without an installed package too

from ernie35se.runtime import check_versions, log_to_stderr, tune_cpu

EXAMPLES = (
    "Return the number of",
    "This module provides",
    "If the file does not exist,",
    "The quick brown fox",
)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run with these words of a command line; returns the exit status, 2 for a user's mistake, 130 for
    Ctrl-C."""
    try:
        log_to_stderr()
        check_versions()
        from ernie35se.prediction import parse_predict_arguments

        settings, decoding = parse_predict_arguments(argv)
        tune_cpu(settings.device)
        run(settings, decoding)
    except (ValueError, OSError) as error:
        print(f"predict.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; --resume continues the file", file=sys.stderr)
        return 130
    return 0


def run(settings, decoding) -> None:
    """Load the model, then answer what the settings ask for."""
    from ernie35se.data.records import Conversation, read_prompts
    from ernie35se.parallel import leave_together
    from ernie35se.prediction import AnswerFile, is_first_process, load_predictor

    if settings.data_file is not None:
        prompts = list(read_prompts(settings.data_file))
        if not prompts:
            raise ValueError(f"{settings.data_file}: holds no records; expected one prompt a line.")
    else:
        prompts = [Conversation(((text, ""),), None, f"example {n}") for n, text in enumerate(EXAMPLES, 1)]
    answers = None
    if not settings.interactive:
        answers = AnswerFile(
            settings.predict_file,
            [prompt.turns[-1][0] for prompt in prompts],
            settings.resume,
            writes=is_first_process(),
        )
    predictor = load_predictor(settings, settings.tensor_parallel_degree)
    if settings.interactive:
        converse(predictor, decoding)
        return
    answers.agree(predictor.model)
    with answers:
        if settings.stream:
            stream_all(predictor, decoding, prompts, answers)
        else:
            answer_all(
                predictor, decoding, prompts, answers, settings.batch_size, shown=settings.data_file is None
            )
    leave_together()


def answer_all(predictor, decoding, prompts, answers, batch_size: int, shown: bool) -> None:
    """Batches, with a progress bar; examples are printed too. Of several processes the first shows them."""
    from tqdm import tqdm

    from ernie35se.predictor import say_truncated

    encoded = [predictor.encode(prompt) for prompt in prompts]
    say_truncated([(prompt.place, one) for prompt, one in zip(prompts, encoded)], predictor.src_length)
    progress = dict(total=len(prompts), initial=answers.done, unit="prompt", dynamic_ncols=True)
    with tqdm(**progress, disable=not answers.writes) as bar:
        for number, text in predictor.answers(
            [one.ids for one in encoded], decoding, batch_size, answers.done
        ):
            answers.put(number, text)
            bar.update()
    if shown and answers.writes:
        for source, text in answers.lines():
            print(f"{source} ...\n    {text}")


def stream_all(predictor, decoding, prompts, answers) -> None:
    """One prompt at a time, its answer printed as it comes."""
    for number in range(answers.done, len(prompts)):
        print(f"{prompts[number].turns[-1][0]} ...")
        text = ""
        for piece in predictor.stream(prompts[number], decoding, seed=decoding.seed + number):
            print(piece, end="", flush=True)
            text += piece
        print("\n", flush=True)
        answers.put(number, text)


def converse(predictor, decoding) -> None:
    """Answer lines of the standard input until it ends; each stands alone."""
    if sys.stdin.isatty():
        print("A prompt and Enter; an empty line or Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            break
        if not prompt.strip():
            break
        if decoding.decode_strategy == "beam_search":
            print(predictor.predict([prompt], decoding)[0], flush=True)
            continue
        for piece in predictor.stream(prompt, decoding):
            print(piece, end="", flush=True)
        print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
