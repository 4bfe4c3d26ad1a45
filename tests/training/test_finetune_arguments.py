"""Settings of fine-tuning: PaddleNLP's keys, defaults, other names, and what the settings files hold."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ernie35se import peft
from ernie35se.training.finetune_arguments import ARGUMENT_CLASSES, parse_finetune_arguments

ROOT = Path(__file__).resolve().parents[2]

# A public SFT file of PaddleNLP with every key that its configs have.
PADDLENLP = {
    "model_name_or_path": "Qwen/Qwen2-7B",
    "dataset_name_or_path": "./data",
    "output_dir": "./checkpoints/sft_ckpts",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "per_device_eval_batch_size": 8,
    "eval_accumulation_steps": 16,
    "num_train_epochs": 3,
    "learning_rate": 3e-05,
    "warmup_steps": 30,
    "logging_steps": 1,
    "evaluation_strategy": "epoch",
    "save_strategy": "epoch",
    "src_length": 1024,
    "max_length": 2048,
    "fp16": False,
    "bf16": True,
    "fp16_opt_level": "O2",
    "do_train": True,
    "do_eval": True,
    "disable_tqdm": True,
    "load_best_model_at_end": True,
    "eval_with_do_generation": False,
    "metric_for_best_model": "accuracy",
    "recompute": True,
    "save_total_limit": 1,
    "overwrite_output_dir": True,
    "tensor_parallel_degree": 1,
    "pipeline_parallel_degree": 1,
    "sharding": "stage2",
    "sharding_parallel_degree": 1,
    "zero_padding": False,
    "unified_checkpoint": True,
    "use_flash_attention": True,
}
REQUIRED = ["--model_name_or_path", "m", "--dataset_name_or_path", "d", "--output_dir", "o", "--do_train", "1", "--device", "cpu"]


def parsed(*words):
    """All settings by name."""
    groups = parse_finetune_arguments([*map(str, words)])
    return {item.name: getattr(group, item.name) for group in groups for item in dataclasses.fields(group)}


@pytest.mark.parametrize("from_file", [True, False])
def test_all_keys_of_paddlenlps_sft_files_are_understood(from_file, tmp_path):
    """On a CPU bf16 and flash attention fall back, and O2 with them; all else is taken as it is written."""
    (tmp_path / "sft.json").write_text(json.dumps(PADDLENLP))
    flags = [word for key, value in PADDLENLP.items() for word in (f"--{key}", value)]
    found = parsed(*([tmp_path / "sft.json"] if from_file else flags), "--device", "cpu")
    found["evaluation_strategy"], found["save_strategy"] = (found[key].value for key in ("evaluation_strategy", "save_strategy"))
    fallback = {"bf16": False, "fp16_opt_level": "O1", "use_flash_attention": False}
    parallel = ["tensor_parallel_degree", "pipeline_parallel_degree", "sharding_parallel_degree", "sharding"]
    expected = {key: value for key, value in {**PADDLENLP, **fallback}.items() if key not in parallel}
    assert {key: found[key] for key in expected} == expected
    assert [found[key] or None for key in parallel] == [-1, -1, -1, None]  # how PaddleNLP writes: none, in one process


def test_defaults_of_the_methods():
    """The defaults of each method, however it is switched on."""
    found = parsed(*REQUIRED)
    expected = dict(
        src_length=128, truncation_strategy="keep_answer", label_smoothing=0, lr_decay_ratio=0, merge_weights=False,
        lora_rank=8, lora_dropout=0, lora_plus_scale=1, mixer_num=1, vera_rank=8, lokr_dim=8, dislora_rank=8,
        dislora_alpha=12, dash_flag=50, s_tsd=8, prefer_small_sigma=True, ortho_lambda=1, layers="all", position="f7+l7",
        intervention_type="LoreftIntervention", rank=8, act_fn="linear", add_bias=True, dropout=0, tare_n=8, tare_k=7,
        neftune_noise_alpha=5, num_prefix_tokens=128, prefix_projection=False, prefix_dropout=0, weight_blocksize=64,
        weight_double_quant=False, weight_quantize_algo=None,
    )  # fmt: skip
    assert {key: found[key] for key in expected} == expected

    def adapter(*words):
        return parse_finetune_arguments([*REQUIRED, *words])[0].adapter_config()

    assert adapter("--lora", "1").lora_alpha == 16 and adapter("--lora", "1", "--lora_rank", "3").lora_alpha == 6
    assert adapter("--lora", "1", "--rslora", "1").lora_alpha == 4
    assert adapter("--lokr", "1", "--lokr_rank", "5").lokr_dim == 5 and adapter("--lokr", "1").scaling == 1
    assert adapter("--vera", "1", "--vera_pissa_init", "1").pissa_init and adapter() is None
    assert adapter("--dislora", "1").scaling == 1.5


@pytest.mark.parametrize("switch, method", [
    ("lora", "lora"), ("vera", "vera"), ("lokr", "lokr"), ("dislora", "dislora"), ("reft", "reft"), ("tare", "tare"),
    ("prefix_tuning", "prefix"),
])  # fmt: skip
def test_each_method_has_a_path_to_start_from(switch, method):
    model = parse_finetune_arguments([*REQUIRED, f"--{switch}", "1", f"--{method}_path", "saved"])[0]
    assert (model.method, model.adapter_path) == (method, "saved") and method in peft.METHODS
    with pytest.raises(ValueError, match=f"{method}_path = 'saved': it starts from a saved adapter, but {switch} is off"):
        parse_finetune_arguments([*REQUIRED, f"--{method}_path", "saved"])


def test_settings_without_their_switch_are_said(monkeypatch):
    from ernie35se.training import finetune_arguments

    said = []
    monkeypatch.setattr(finetune_arguments.logger, "warning", said.append)
    parsed(*REQUIRED, "--lora_rank", 3, "--pissa", 1, "--rank", 4, "--lokr_rank", 2, "--neftune_noise_alpha", 3)
    expected = {"lora is off, so lora_rank, pissa have no effect.", "lokr is off, so lokr_rank has no effect.",
                "reft is off, so rank has no effect.", "neftune is off, so neftune_noise_alpha has no effect."}  # fmt: skip
    assert set(said) == expected
    said.clear()
    parsed(*REQUIRED, "--lora", 1, "--lora_rank", 3, "--lora_dropout", 0.1, "--neftune", 1, "--lora_target_modules", ".*")
    assert not said
    parsed(*REQUIRED, "--task_name", "squad")
    assert said == ["dataset_name_or_path says where the records are, so squad has no effect."]


def test_other_names_mean_the_same():
    words = ["--model_name_or_path", "m", "--output_dir", "o", "--do_train", "1", "--device", "cpu"]
    found = parsed(*words, "--dataset_path", "d", "--chat_template", "alpaca", "--greedy_zero_padding", "1")
    assert (found["dataset_name_or_path"], found["template"], found["zero_padding"]) == ("d", "alpaca", True)
    with pytest.raises(ValueError, match="dataset_path = 'e': dataset_name_or_path = 'd' says otherwise"):
        parsed(*REQUIRED, "--dataset_path", "e")
    assert "enable_stage1_overlap" in parsed(*REQUIRED, "--sharding_stage1_overlap", "1")["sharding_parallel_config"]


def test_flash_mask_is_packing_with_flash_attention():
    """On a GPU, which a dry run needs not have; a prefix has no place in its mask."""
    words = ["--model_name_or_path", "m", "--dataset_path", "d", "--dry_run", "1", "--device", "gpu", "--flash_mask", "1"]
    found = parsed(*words)
    assert found["zero_padding"] and found["use_flash_attention"] and found["flash_mask"]
    with pytest.raises(ValueError, match="flash_mask = True: a prefix has no place in its mask"):
        parsed(*words, "--prefix_tuning", "1")
    with pytest.raises(ValueError, match="flash_mask = True: flashmask attention exists on GPU only; use zero_padding here"):
        parsed(*words, "--device", "cpu")


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("[fq]*/*.json")), ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_settings_file_loads_and_holds_no_default_of_another_method(file):
    content = json.loads(file.read_text())
    found = parsed(file, "--device", "cpu")
    assert set(content) <= {item.name for cls in ARGUMENT_CLASSES for item in dataclasses.fields(cls)}
    same = {key for key in content if found[key] == content[key]}
    assert set(content) - same <= {"bf16", "fp16", "fp16_opt_level", "use_flash_attention", "evaluation_strategy",
                                   "save_strategy", "sharding", "tensor_parallel_degree", "pipeline_parallel_degree",
                                   "zero_padding", "device", "report_to"}  # fmt: skip


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("method, rate", [("sft", 3e-5), ("lora", 3e-4), ("pt", 3e-2)])
def test_qwen_files_hold_what_paddlenlps_do(method, rate, small):
    content = json.loads((ROOT / "configs" / "qwen" / f"{method}_argument{'_0p5b' if small else ''}.json").read_text())
    expected = dict(
        model_name_or_path="Qwen/Qwen2.5-0.5B-Instruct" if small else "Qwen/Qwen2-7B", dataset_name_or_path="./data",
        learning_rate=rate, src_length=1024, max_length=2048, num_train_epochs=3, per_device_train_batch_size=1,
        gradient_accumulation_steps=4, warmup_steps=30, fp16_opt_level="O2", recompute=True, evaluation_strategy="epoch",
        save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="accuracy", use_flash_attention=not small,
    )  # fmt: skip
    assert {key: content[key] for key in expected} == expected
    assert (content.get("fp16", False), content.get("bf16", False)) == (small, not small)
    assert content.get("sharding") == ("stage2" if method == "sft" else None)
    assert (content.get("lora", False), content.get("prefix_tuning", False)) == (method == "lora", method == "pt")
