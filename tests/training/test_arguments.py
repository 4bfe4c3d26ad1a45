"""The settings of run_pretrain.py: what is accepted, what is refused and in which words."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ernie35se.training import arguments
from ernie35se.training.arguments import parse_pretrain_arguments, settings_table

ROOT = Path(__file__).resolve().parents[2]
TASK = ["--do_train", "--input_dir", "tokens", "--output_dir", "out", "--max_steps", "40"]

# The command line is frozen: every flag that users' scripts rely on, with a value that a CPU takes.
PROMISED = """
--model_type ernie --model_name_or_path m --tokenizer_name_or_path t --input_dir i --output_dir o --split 949,50,1
--max_seq_length 128 --per_device_train_batch_size 1 --per_device_eval_batch_size 1 --gradient_accumulation_steps 2
--use_flash_attention 0 --use_fused_ln 0 --fuse_linear 0 --bf16 0 --fp16 0 --fp16_opt_level O1 --scale_loss 512
--amp_master_grad 0 --learning_rate 3e-4 --min_learning_rate 3e-5 --lr_scheduler_type cosine --decay_steps 30
--max_steps 40 --save_steps 20 --adam_beta2 0.95 --weight_decay 0.1 --warmup_steps 4 --warmup_ratio 0.01
--max_grad_norm 1.0 --logging_steps 2 --eval_steps 20 --eval_iters 3 --dataloader_num_workers 0 --sharding stage2
--sharding_parallel_degree 8 --tensor_parallel_degree 1 --pipeline_parallel_degree 1 --virtual_pp_degree 1
--sequence_parallel 0 --report_to visualdl --disable_tqdm 1 --continue_training 0 --recompute 1
--recompute_granularity core_attn --use_recompute_attn 0 --do_train 1 --do_eval 1 --do_predict 1 --save_total_limit 3
--resume_from_checkpoint c --overwrite_output_dir 1 --unified_checkpoint 0 --device cpu --data_cache_path d
""".split()


@pytest.fixture
def said(monkeypatch):
    """Warnings logged while a test runs."""
    texts = []
    monkeypatch.setattr(arguments.logger, "warning", lambda text, *rest: texts.append(text))
    return texts


def write(folder, content):
    path = folder / "settings.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def refusal(*words):
    with pytest.raises(ValueError) as caught:
        parse_pretrain_arguments(list(words))
    return str(caught.value)


def test_every_promised_flag_is_accepted_and_arrives():
    groups = parse_pretrain_arguments(PROMISED)
    given = dict(zip(PROMISED[::2], PROMISED[1::2]))
    for flag, text in given.items():
        value = next(getattr(group, flag[2:]) for group in groups if hasattr(group, flag[2:]))
        if flag in (
            "--sharding",
            "--sharding_parallel_degree",
            "--tensor_parallel_degree",
            "--pipeline_parallel_degree",
        ):
            continue  # PaddleNLP clears these in a single process
        value = value[0] if isinstance(value, list) else getattr(value, "value", value)
        same = type(value)(float(text)) if isinstance(value, (bool, int, float)) else text
        assert value == same, flag


def test_the_same_settings_from_a_file_and_from_flags(tmp_path):
    content = {"do_train": True, "input_dir": "tokens", "output_dir": "out", "max_steps": 40, "learning_rate": 1,
               "recompute": 1, "report_to": "none"}  # fmt: skip
    from_file = parse_pretrain_arguments([write(tmp_path, content)])
    from_flags = parse_pretrain_arguments(
        [*TASK, "--learning_rate", "1", "--recompute", "--report_to", "none"]
    )
    for one, other in zip(from_file, from_flags):
        first, second = dataclasses.asdict(one), dataclasses.asdict(other)
        first.pop("logging_dir", None), second.pop("logging_dir", None)  # holds the time of day
        assert first == second


def test_flags_override_the_file(tmp_path):
    path = write(
        tmp_path, {"do_train": True, "input_dir": "i", "output_dir": "o", "max_steps": 40, "seed": 7}
    )
    _, data, training = parse_pretrain_arguments([path, "--max_steps", "10", "--input_dir", "other"])
    assert (training.max_steps, training.seed, data.input_dir) == (10, 7, "other")
    assert training.decay_steps == 10


def test_defaults_that_are_promised():
    _, _, training = parse_pretrain_arguments(TASK)
    assert (training.decay_steps, training.min_learning_rate, training.eval_iters) == (40, 1e-5, 10)
    assert training.warmup_steps == 0
    assert parse_pretrain_arguments([*TASK, "--warmup_ratio", "0.25"])[2].warmup_steps == 10
    assert (
        parse_pretrain_arguments([*TASK, "--warmup_ratio", "0.25", "--warmup_steps", "3"])[2].warmup_steps
        == 3
    )
    for steps in ("40", "90"):  # as long as the run, and longer
        assert parse_pretrain_arguments([*TASK, "--warmup_steps", steps])[2].warmup_steps == int(steps)


@pytest.mark.parametrize("words, expected", [
    (["--recompute"], True), (["--recompute", "1"], True), (["--recompute", "true"], True),
    (["--recompute=0"], False), (["--recompute", "False"], False), ([], False),
])  # fmt: skip
def test_spellings_of_booleans(words, expected):
    assert parse_pretrain_arguments([*TASK, *words])[2].recompute is expected


@pytest.mark.parametrize("words, parts", [
    (["--max_step", "3"], ["--max_step", "did you mean --max_steps?"]),  # an abbreviation is not accepted either
    (["--learning-rate", "3"], ["did you mean --learning_rate?"]),
    (["--max_steps", "many"], ["--max_steps", "'many'"]),
    (["--max_steps", "1.5"], ["--max_steps", "'1.5'"]),
    (["--recompute", "perhaps"], ["--recompute", "perhaps"]),
    (["--max_steps", "3", "4"], ["'4'", "belongs to no flag"]),
    (["--lr_scheduler_type", "cosin"], ["lr_scheduler_type", "cosin", "cosine"]),
    (["--recompute_granularity", "half"], ["recompute_granularity", "core_attn"]),
    (["--model_type", "erni"], ["model_type", "did you mean ernie?"]),
    (["--model_type", "llama"], ["model_type = 'llama'"]),
    (["--report_to", "visualdll"], ["report_to", "did you mean visualdl?"]),
    (["--metric_for_best_model", "accuracy"], ["metric_for_best_model = 'accuracy'", "expected loss"]),
    (["--optim", "adafactor"], ["optim = 'adafactor'", "expected one of adamw, adamw_mini, adamw_custom"]),
    (["--optim", "adamv"], ["optim = 'adamv'", "did you mean adamw?"]),
    (["--save_strategy", "epochs"], ["save_strategy = 'epochs'", "expected one of no, steps, epoch; did you mean epoch?"]),
    (["--split", "1,2,x"], ["split", "'x'"]), (["--split", "0,0,0"], ["split"]), (["--split", "1,-1,1"], ["split"]),
    (["--learning_rate", "nan"], ["learning_rate"]), (["--learning_rate", "-1"], ["learning_rate = -1.0", "above 0"]),
    (["--learning_rate", "0"], ["learning_rate"]), (["--learning_rate", "inf"], ["learning_rate"]),
    (["--min_learning_rate", "0.1"], ["min_learning_rate", "at most learning_rate"]),
    (["--per_device_train_batch_size", "0"], ["per_device_train_batch_size = 0", "at least 1"]),
    (["--max_seq_length", "0"], ["max_seq_length"]), (["--max_steps", "0"], ["max_steps"]),
    (["--max_steps", "-3"], ["max_steps"]), (["--max_steps", str(2**40)], ["max_steps"]),
    (["--warmup_ratio", "1.5"], ["warmup_ratio", "at most 1"]), (["--adam_beta2", "1"], ["adam_beta2", "below 1"]),
    (["--save_total_limit", "0"], ["save_total_limit"]), (["--scale_loss", "0"], ["scale_loss"]),
    (["--fp16", "--bf16"], ["fp16 and bf16"]), (["--fp16_opt_level", "O2"], ["O2 needs bf16 or fp16"]),
    (["--device", "tpu"], ["device = 'tpu'", "cpu or gpu"]), (["--sharding", "stage4"], ["sharding", "stage3"]),
    (["--tensor_parallel_degree", "2"], ["tensor_parallel_degree = 2", "this is a single process"]),
    (["--pipeline_parallel_degree", "2"], ["pipeline_parallel_degree = 2", "this is a single process"]),
    (["--virtual_pp_degree", "2"], ["virtual_pp_degree = 2", "no stages to interleave"]),
    (["--sequence_parallel"], ["sequence_parallel", "tensor_parallel_degree is 1"]),
    (["--to_static"], ["to_static"]), (["--input_dir", " "], ["input_dir"]),
])  # fmt: skip
def test_refusals_on_the_command_line(words, parts):
    message = refusal(*TASK, *words)
    assert message.startswith("command line: ")
    assert all(part in message for part in parts), message


def test_of_a_flag_given_twice_the_last_counts_and_that_is_said(monkeypatch):
    said = []
    monkeypatch.setattr(arguments.logger, "warning", said.append)
    assert parse_pretrain_arguments([*TASK, "--seed", "3", "--report_to", "none", "visualdl", "--seed=4"])[2].seed == 4
    assert said == ["command line: --seed is given 2 times: the last one counts."]


@pytest.mark.parametrize("missing, name", [
    (["--do_train"], "do_train"), (["--input_dir", "tokens"], "input_dir"), (["--output_dir", "out"], "output_dir"),
    (["--max_steps", "40"], "max_steps"),
])  # fmt: skip
def test_what_training_cannot_do_without(missing, name):
    words = [word for word in TASK if word not in missing]
    assert refusal(*words).startswith(f"{name} is not set: ")


@pytest.mark.skipif(arguments.gpu_count() > 0, reason="this machine has a GPU")
def test_a_gpu_where_there_is_none_is_refused():
    assert "no GPU" in refusal(*TASK, "--device", "gpu")
    parse_pretrain_arguments([*TASK, "--device", "gpu", "--dry_run"])


def test_a_reporter_whose_package_is_missing_is_refused(monkeypatch):
    monkeypatch.setattr(arguments.importlib.util, "find_spec", lambda name: None)
    seen = refusal(*TASK, "--report_to", "tensorboard")
    assert "report_to = 'tensorboard'" in seen and "pip install tensorboardX" in seen


def test_a_mark_before_the_text_is_read_over(tmp_path):
    path = tmp_path / "settings.json"
    path.write_text('{"max_seq_length": 77}', encoding="utf-8-sig")
    assert parse_pretrain_arguments([str(path), *TASK])[1].max_seq_length == 77


@pytest.mark.parametrize("content, parts", [
    ('{"max_steps": 1, "max_steps": 2}', ["'max_steps' is given twice"]),
    ('{"max_steps": 1,\n "seed": }', ["line 2, column 10"]),
    ("[1, 2]", ["expected a JSON object", "list"]),
    ("", ["line 1"]),
    ('{"learning_rate": NaN}', ["NaN"]),
    ("[" * 100_000, ["nested too deeply"]),
    ('{"max_steps": ' + "9" * 5000 + "}", ["5000 digits, 9999999999..."]),
    ({"max_stesp": 3}, ["unknown setting 'max_stesp'; did you mean max_steps?"]),
    ({"zzzzzz": 3}, ["unknown setting 'zzzzzz'"]),
    ({"max_steps": "3"}, ['max_steps = "3": expected an integer']),
    ({"max_steps": 3.0}, ["max_steps", "an integer"]),
    ({"max_steps": True}, ["max_steps", "an integer"]),
    ({"max_steps": None}, ["max_steps = null", "an integer"]),
    ({"learning_rate": "1e-4"}, ["learning_rate", "a number"]),
    ({"learning_rate": 10**400}, ["learning_rate", "a number"]),
    ({"bf16": "true"}, ['bf16 = "true": expected true or false']),
    ({"bf16": 2}, ["bf16 = 2", "true or false"]),
    ({"split": [949, 50, 1]}, ["split", "a string in quotes"]),
    ({"report_to": [1]}, ["report_to", "a list of a string"]),
    ({"learning_rate": -1}, ["learning_rate = -1.0: expected a finite number above 0"]),
    ({"lr_scheduler_type": "cosin"}, ["lr_scheduler_type = 'cosin'", "did you mean cosine?"]),
])  # fmt: skip
def test_refusals_of_a_file(tmp_path, content, parts):
    path = write(tmp_path, content)
    message = refusal(path, *TASK[:5])
    assert message.startswith(f"{path}: ")
    assert all(part in message for part in parts), message


def test_files_that_cannot_be_read(tmp_path):
    assert "No such file" in refusal(str(tmp_path / "none.json"))
    assert "cannot be read" in refusal(str(tmp_path))
    (tmp_path / "latin.json").write_bytes(b'{"split": "\xe9"}')
    assert "UTF-8" in refusal(str(tmp_path / "latin.json"))


def test_half_precision_on_cpu_falls_back_with_one_warning(said):
    _, _, training = parse_pretrain_arguments([*TASK, "--device", "cpu", "--bf16", "--fp16_opt_level", "O2",
                                               "--amp_master_grad"])  # fmt: skip
    assert (
        not (training.bf16 or training.fp16 or training.amp_master_grad) and training.fp16_opt_level == "O1"
    )
    assert len(said) == 1 and "float32" in said[0]


def test_what_a_cpu_lacks_falls_back_with_one_warning_each(said):
    model, _, _ = parse_pretrain_arguments(
        [*TASK, "--device", "cpu", "--use_flash_attention", "--fuse_linear"]
    )
    assert not model.use_flash_attention and not model.fuse_linear
    assert [text.split()[0] for text in said] == ["use_flash_attention", "fuse_linear"]


def test_recompute_of_attention_turns_recompute_off_and_says_so(said):
    model, _, training = parse_pretrain_arguments([*TASK, "--recompute", "--use_recompute_attn"])
    assert model.use_recompute_attn and not training.recompute
    assert len(said) == 1 and "recompute" in said[0]


def test_sharding_in_one_process_is_accepted_and_said_to_do_nothing(said):
    parse_pretrain_arguments([*TASK, "--sharding", "stage2", "--sharding_parallel_degree", "8"])
    assert len(said) == 1 and "does nothing in a single process" in said[0]


def test_a_dry_run_describes_many_devices_from_one_process():
    model, _, training = parse_pretrain_arguments(
        ["--dry_run", "--tensor_parallel_degree", "4", "--pipeline_parallel_degree", "4", "--virtual_pp_degree", "2",
         "--gradient_accumulation_steps", "4", "--dry_run_devices", "64", "--sequence_parallel", "--use_fused_ln", "--sharding", "stage1", "--device", "gpu", "--bf16"])  # fmt: skip
    assert (training.tensor_parallel_degree, training.pipeline_parallel_degree, model.virtual_pp_degree) == (
        4,
        4,
        2,
    )
    assert (training.sharding, training.bf16, model.use_fused_ln) == ("stage1", True, True)
    assert training.devices() == 64
    with pytest.raises(ValueError, match="gradient_accumulation_steps is not set .and so 1.: .* a multiple of .* 4"):
        parse_pretrain_arguments(["--dry_run", "--pipeline_parallel_degree", "4", "--virtual_pp_degree", "2"])
    with pytest.raises(ValueError, match="= 6 devices do not divide the 64"):
        parse_pretrain_arguments(["--dry_run", "--dry_run_devices", "64", "--tensor_parallel_degree", "6"])


def test_paddlenlps_other_settings_pass_through():
    _, _, training = parse_pretrain_arguments([*TASK, "--sharding_parallel_config", "enable_stage1_overlap",
                                               "--logging_first_step", "--ignore_data_skip", "1"])  # fmt: skip
    assert training.logging_first_step and training.ignore_data_skip


def test_every_config_file_loads():
    files = sorted((ROOT / "configs" / "pretrain").glob("*.json"))
    assert {"demo_cpu.json", "3b_stage2.json", "3b_stage2_throughput.json"} <= {file.name for file in files}
    for file in files:
        parse_pretrain_arguments([str(file), "--dry_run"])


def test_the_3b_configs_hold_the_published_recipe():
    read = {name: json.loads((ROOT / f"configs/pretrain/{name}.json").read_text())
            for name in ("3b_stage2", "3b_stage2_throughput")}  # fmt: skip
    recipe = {
        "model_name_or_path": "baidu/ernie-3.5-se-3b", "split": "949,50,1", "max_seq_length": 4096,
        "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "bf16": True, "fp16_opt_level": "O2",
        "scale_loss": 512, "use_flash_attention": True, "use_fused_ln": True, "lr_scheduler_type": "cosine",
        "learning_rate": 3e-4, "min_learning_rate": 3e-5, "warmup_steps": 2000, "max_steps": 300000, "save_steps": 200,
        "eval_steps": 200, "logging_steps": 2, "adam_beta2": 0.95, "weight_decay": 0.1, "max_grad_norm": 1.0,
        "dataloader_num_workers": 0, "recompute": True, "sharding": "stage2", "sharding_parallel_degree": 8,
        "report_to": "visualdl", "disable_tqdm": True, "continue_training": False, "save_total_limit": 10,
    }  # fmt: skip
    changed = {
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 2,
        "amp_master_grad": False, "logging_steps": 1, "eval_steps": 50, "recompute": False, "save_total_limit": 5,
        "tensor_parallel_degree": 1, "pipeline_parallel_degree": 1, "virtual_pp_degree": 1,
    }  # fmt: skip
    assert recipe.items() <= read["3b_stage2"].items()
    assert {**recipe, **changed}.items() <= read["3b_stage2_throughput"].items()


def test_the_settings_table_documents_every_promised_flag():
    rows = [row for part in settings_table().values() for row in part]
    flags = [row[0] for row in rows]
    assert set(PROMISED[::2]) <= set(flags) and len(flags) == len(set(flags))
    assert all(help.strip() and "|" not in help for _, _, help in rows)
    assert ("--eval_iters", "10") in [row[:2] for row in rows]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
NAMES = st.sampled_from(sorted(arguments._hints())) | st.text(max_size=12)


def only_value_errors(words):
    try:
        parse_pretrain_arguments(words)
    except ValueError as error:
        assert str(error).strip()


QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUICK
@given(content=st.dictionaries(NAMES, ANYTHING, max_size=4), task=st.booleans())
def test_any_json_object_is_taken_or_refused(tmp_path, content, task):
    only_value_errors([write(tmp_path, json.dumps(content)), *(TASK if task else ["--dry_run"])])


@QUICK
@given(content=st.binary(max_size=60) | st.text(alphabet='{}[]",:tfn10.eE- \\u', max_size=60).map(str.encode))
def test_any_bytes_are_taken_or_refused(tmp_path, content):
    path = tmp_path / "settings.json"
    path.write_bytes(content)
    only_value_errors([str(path)])


VALUES = st.sampled_from(["1", "0", "-1", "true", "nan", "1e999", "", "stage2", "O2", "a b", "10000000000"])
FLAGS = st.sampled_from(sorted(arguments._hints())).map("--{}".format)


@QUICK
@given(words=st.lists(st.one_of(FLAGS, FLAGS, VALUES, st.text(max_size=6)), max_size=6), task=st.booleans())
def test_any_command_line_is_taken_or_refused(words, task):
    if any(re.match("-h|--h$|--help", word) for word in words):
        return  # prints the help and leaves
    only_value_errors([*(TASK if task else ["--dry_run"]), *words])
