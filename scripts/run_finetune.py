"""Fine-tune a causal language model, evaluate one, or look at what a run would do.

    python scripts/run_finetune.py configs/finetune/lora.json
    python scripts/run_finetune.py configs/finetune/lora.json --lora_rank 16 --output_dir out/r16
    python scripts/run_finetune.py configs/finetune/lora.json --preview_data 3
    python -m paddle.distributed.launch scripts/run_finetune.py configs/finetune/lora.json

The same command resumes a run that was interrupted. `--help` lists every setting; docs/finetune.md explains
methods and data.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Optional, Sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without an installed package too

from ernie35se.runtime import check_versions, log_to_stderr, tune_cpu


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run with these words of a command line. Returns the exit status: 2 for a user's mistake, told in one
    message, 130 for Ctrl-C."""
    try:
        log_to_stderr()
        check_versions()
        from ernie35se.training.finetune_arguments import parse_finetune_arguments

        settings = parse_finetune_arguments(argv)
        tune_cpu(settings[-1].device)
        trainer = prepare(*settings)
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"run_finetune.py: error: {error}", file=sys.stderr)
        return 2
    from ernie35se.training.resumable import NotFiniteError

    try:
        if trainer is not None:
            run(trainer)
    except NotFiniteError as error:
        print(f"run_finetune.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the same command resumes from the last checkpoint, if there is one", file=sys.stderr)
        return 130
    return 0


def prepare(model_args, data_args, training_args):
    """The trainer, ready to run; None after a look at data or settings.

    Raises:
        ValueError: what the user has to mend.
    """
    from paddlenlp.trainer import set_seed

    from ernie35se.data import sft
    from ernie35se.training import build, finetune_build
    from ernie35se.training.finetune import FinetuneTrainer, describe_template

    looks_only = training_args.dry_run or data_args.preview_data
    if not looks_only:
        finetune_build.check_model_name(model_args)
        finetune_build.check_own_folder(model_args, training_args)
        build.check_output_dir(training_args)
        build.check_checkpoint(training_args)
        finetune_build.check_same_method(model_args, training_args)
    finetune_build.set_device(training_args)
    set_seed(training_args.seed)
    tokenizer = finetune_build.load_tokenizer(model_args)
    encoder = finetune_build.make_encoder(tokenizer, data_args)
    splits = finetune_build.load_samples(data_args, encoder)
    print(finetune_build.preview(splits, tokenizer, data_args.preview_data or 1, bool(data_args.preview_data)))
    if data_args.preview_data:
        return None
    config = finetune_build.load_config(model_args, training_args)
    finetune_build.check_lengths(encoder.limits, config, tokenizer)
    if not training_args.dry_run:
        finetune_build.check_splits(splits, training_args)
        finetune_build.check_same_model(training_args, config)
    if training_args.dry_run:
        describe(model_args, data_args, training_args)
        print(finetune_build.describe_run(model_args, training_args, config, splits))
        return None
    train, dev = splits.get("train"), splits.get("dev")
    generates = data_args.eval_with_do_generation and dev is not None
    model = finetune_build.build_model(model_args, training_args, config, data_args.zero_padding, generates)
    finetune_build.check_same_adapters(training_args, model)
    if generates and data_args.zero_padding:
        print("Evaluation with generation is never packed: each prompt is a row of its own.")
    return FinetuneTrainer(
        model=model,
        args=training_args,
        train_dataset=train.rows if train else None,
        eval_dataset=dev.rows if dev else None,
        data_collator=functools.partial(
            sft.collate, pad_id=finetune_build.pad_id(tokenizer), flash_mask=data_args.flash_mask
        ),
        tokenizer=tokenizer,
        generation=finetune_build.generation_of(dev, encoder, tokenizer) if generates else None,
        template=describe_template(encoder.template, encoder.limits),
    )


def describe(*groups) -> None:
    """Print the settings."""
    from ernie35se.training.finetune_arguments import PRETRAINING_ONLY

    for group in groups:
        print(f"{group._argument_group_name} settings")
        ours = [kind.__annotations__ for kind in type(group).__mro__ if kind.__module__.startswith("ernie35se.")]
        for item in dataclasses.fields(group):
            if any(item.name in names for names in ours) and item.name not in PRETRAINING_ONLY:
                print(f"  {item.name} = {getattr(group, item.name)!r}")


def run(trainer) -> None:
    """Train, save, evaluate: whichever of them the settings ask for. An error here keeps its traceback."""
    from ernie35se.parallel import leave_together

    training_args = trainer.args
    if training_args.do_train:
        metrics = trainer.train().metrics
        trainer.save_model(merge_tensor_parallel=True)
        trainer.save_state()
        if trainer.start.step < trainer.state.global_step:  # else the results of the run that trained stay
            record(trainer, "train", metrics)
    if training_args.do_eval:
        record(trainer, "eval", trainer.evaluate())
    leave_together()


def record(trainer, part: str, metrics) -> None:
    """Log metrics and write them to <part>_results.json and all_results.json."""
    trainer.log_metrics(part, metrics)
    trainer.save_metrics(part, metrics)


if __name__ == "__main__":
    sys.exit(main())
