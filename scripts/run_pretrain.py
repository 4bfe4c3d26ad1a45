"""Pretrain an Ernie35 model, evaluate one, or tell what a run would need.

    python scripts/run_pretrain.py configs/pretrain/demo_cpu.json
    python scripts/run_pretrain.py configs/pretrain/demo_cpu.json --max_steps 10 --output_dir out/short
    python scripts/run_pretrain.py configs/pretrain/3b_stage2.json --input_dir data --dry_run
    python -m paddle.distributed.launch scripts/run_pretrain.py configs/pretrain/3b_stage2.json --input_dir
    data

The same command resumes a run that was interrupted. `--help` lists every setting.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Optional, Sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without an installed package too

from ernie35se.runtime import check_versions, log_to_stderr, tune_cpu


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run with these words of a command line; returns the exit status, 2 for a user's mistake, 130 for
    Ctrl-C."""
    try:
        log_to_stderr()
        check_versions()
        from ernie35se.training.arguments import parse_pretrain_arguments

        arguments = parse_pretrain_arguments(argv)
        tune_cpu(arguments[-1].device)
        job = prepare(arguments)
    except (ValueError, OSError) as error:
        print(f"run_pretrain.py: error: {error}", file=sys.stderr)
        return 2
    try:
        return 0 if job is None else run(*job)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command resumes from the last checkpoint, if there is one", file=sys.stderr)
        return 130


def prepare(arguments):
    """What a run needs: (settings, tokenizer, model, datasets). None after a dry run.

    Raises:
        ValueError: what the user has to mend.
    """
    from paddlenlp.trainer import set_seed

    from ernie35se.training import build

    settings = build.Settings(*arguments)
    training = settings.training
    if training.dry_run:
        return dry_run(settings)
    build.check_output_dir(training)
    build.check_checkpoint(training)
    build.prepare_device(settings)
    set_seed(training.seed)
    tokenizer = build.load_tokenizer(settings.model)
    weights = build.weights_folder(settings)
    config = build.load_config(settings, tokenizer, weights)
    build.check_same_model(training, config)
    datasets = build.build_datasets(settings, config.vocab_size)
    return settings, tokenizer, build.build_model(training, config, weights), datasets


def run(settings, tokenizer, model, datasets) -> int:
    """Train, save, evaluate, test: whichever the settings ask for; returns the exit status, 2 for a run that
    diverged. Any other error here keeps its traceback."""
    from ernie35se.data.pretrain import collate
    from ernie35se.parallel import leave_together
    from ernie35se.training.resumable import NotFiniteError
    from ernie35se.training.trainer import PretrainTrainer

    training = settings.training
    train, valid, test = datasets
    trainer = PretrainTrainer(
        model=model,
        args=training,
        train_dataset=train,
        eval_dataset=valid,
        data_collator=collate,
        tokenizer=tokenizer,
    )
    if training.do_train:
        try:
            metrics = trainer.train().metrics
        except NotFiniteError as error:
            print(f"run_pretrain.py: error: {error}", file=sys.stderr)
            return 2
        trainer.save_model(merge_tensor_parallel=True)
        trainer.save_state()
        if trainer.start.step < trainer.state.global_step:  # else the results of the run that trained stay
            record(trainer, "train", metrics)
    if training.do_eval:
        record(trainer, "eval", trainer.evaluate())
    if training.do_predict:
        record(trainer, "test", trainer.predict(test).metrics)
    leave_together()
    return 0


def record(trainer, part: str, metrics) -> None:
    """Log metrics and write them to <part>_results.json and all_results.json."""
    trainer.log_metrics(part, metrics)
    trainer.save_metrics(part, metrics)


def dry_run(settings) -> None:
    """Print settings, parameters, memory, tokens and FLOPs of a step, and the first sample of the data."""
    from paddle.distributed import get_rank

    from ernie35se.training import build, estimate

    if get_rank() != 0:
        return
    for group in (settings.model, settings.data, settings.training):
        print(f"{group._argument_group_name} settings")
        for name in type(group).__dict__["__annotations__"]:
            print(f"  {name} = {getattr(group, name)!r}")
    tokenizer = build.load_tokenizer(settings.model)
    config = build.load_config(settings, tokenizer, build.weights_folder(settings))
    plan = build.make_plan(settings, config)
    print(estimate.report(config, plan))
    print(build.first_sample(settings, config, plan, tokenizer))


if __name__ == "__main__":
    sys.exit(main())
