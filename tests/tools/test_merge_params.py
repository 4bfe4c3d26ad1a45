"""The four merge tools: what they write computes what model and adapter compute; mistakes are told."""

import importlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
from finetune_run import write_base  # noqa: E402

from ernie35se import auto, peft  # noqa: E402, F401
from ernie35se.peft import DisLoRAConfig, LoKrConfig, LoRAConfig, TareConfig, VeRAConfig  # noqa: E402

ADAPTERS = {
    "lora": LoRAConfig(r=3, lora_dropout=0.5),
    "rslora": LoRAConfig(r=64, rslora=True),
    "pissa": LoRAConfig(r=3, pissa=True),
    "moslora": LoRAConfig(r=3, lora_use_mixer=True),
    "linchain": LoRAConfig(r=3, lora_use_mixer=True, mixer_num=2),
    "mora": LoRAConfig(r=3, use_mora=True),
    "qlora": LoRAConfig(
        r=3, weight_quantize_algo="nf4", weight_double_quant=True, target_modules=r".*\.o_proj"
    ),
    "qlora_int8": LoRAConfig(r=3, weight_quantize_algo="weight_only_int8", weight_blocksize=10, use_mora=True),
    "vera": VeRAConfig(),
    "vera_pissa": VeRAConfig(r=3, pissa_init=True),
    "lokr": LoKrConfig(lokr_dim=2, lokr_alpha=3),
    "dislora": DisLoRAConfig(r=4, s_tsd=2, dash_flag=1),
}


def load_model(folder):
    from paddlenlp.transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("merge") / "base"
    write_base(folder)
    (folder / "training_args.bin").write_text("left by a run")
    return folder


def write_adapter(base, folder, config):
    model = peft.wrap(load_model(base), config)
    rng = np.random.default_rng(0)
    for parameter in model.parameters():
        if not parameter.stop_gradient:
            parameter.set_value(
                parameter + paddle.to_tensor(rng.normal(0, 0.05, parameter.shape).astype("float32"))
            )
    peft.after_step(model, 1)
    peft.save(model, folder)
    (folder / "template.json").write_text("{}")
    return model


def logits_of(model):
    model.eval()
    ids = paddle.to_tensor(np.random.default_rng(1).integers(0, 80, (2, 9)))
    with paddle.no_grad():
        return model(input_ids=ids, return_dict=True).logits.numpy()


def merge(base, adapter, output, *flags, method):
    tool = importlib.import_module(f"merge_{method}_params")
    words = ["--model_name_or_path", base, f"--{method}_path", adapter, "--output_path", output, *flags]
    return tool.main([str(word) for word in words])


@pytest.mark.parametrize("name", ADAPTERS)
def test_merged_folder_computes_the_same(name, base, tmp_path, capsys):
    config = ADAPTERS[name]
    wrapped = write_adapter(base, tmp_path / "adapter", config)
    merge(base, tmp_path / "adapter", tmp_path / "out", method=config.method)
    expected, merged = logits_of(wrapped), load_model(tmp_path / "out")
    np.testing.assert_allclose(logits_of(merged), expected, atol=2e-5)
    assert np.abs(expected - logits_of(load_model(base))).max() > 1e-3
    out = capsys.readouterr().out
    assert (
        "weights merged in float32" in out and "changes logits by up to" in out and "That is more" not in out
    )
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "sentencepiece.bpe.model",
        "template.json",
    } <= made
    assert not {"training_args.bin", f"{config.method}_config.json"} & made
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", "out"}


@pytest.mark.parametrize("safe", ["True", "False"])
def test_shard_by_shard(safe, base, tmp_path):
    sharded = tmp_path / "base"
    model = load_model(base)
    model.save_pretrained(str(sharded), max_shard_size="20KB", safe_serialization=True)
    count = len(list(sharded.glob("model-*.safetensors")))
    assert count > 2
    wrapped = write_adapter(sharded, tmp_path / "adapter", LoRAConfig(r=3))
    merge(sharded, tmp_path / "adapter", tmp_path / "out", "--safe_serialization", safe, method="lora")
    suffix = "safetensors" if safe == "True" else "pdparams"
    assert len(list((tmp_path / "out").glob(f"*-of-{count:05d}.{suffix}"))) == count
    np.testing.assert_allclose(logits_of(load_model(tmp_path / "out")), logits_of(wrapped), atol=2e-5)


def test_pickled_files_are_read_with_a_warning_that_names_them(base, tmp_path, monkeypatch):
    """A base model and an adapter in .pdparams: each is named once, and the merged folder is safetensors."""
    from ernie35se import weight_files

    said = []
    monkeypatch.setattr(weight_files.logger, "warning", said.append)
    shutil.copytree(base, tmp_path / "base", ignore=shutil.ignore_patterns("model*"))
    load_model(base).save_pretrained(str(tmp_path / "base"), safe_serialization=False)
    wrapped = write_adapter(base, tmp_path / "adapter", LoRAConfig(r=3))
    saved = tmp_path / "adapter" / "lora_model_state.safetensors"
    paddle.save(load_file(saved), str(saved.with_suffix(".pdparams")))
    saved.unlink()
    said.clear()
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", "--check", "False", method="lora")
    named = [line.partition(":")[0] for line in said if "you trust its source" in line]
    read = (tmp_path / "adapter" / "lora_model_state.pdparams", tmp_path / "base" / "model_state.pdparams")
    assert named == [str(file) for file in read]
    assert [path.name for path in (tmp_path / "out").glob("model*")] == ["model.safetensors"]
    np.testing.assert_allclose(logits_of(load_model(tmp_path / "out")), logits_of(wrapped), atol=2e-5)


def test_half_precision_weights_keep_their_type(base, tmp_path):
    from safetensors.paddle import load_file as load_tensors
    from safetensors.paddle import save_file

    shutil.copytree(base, tmp_path / "base", ignore=shutil.ignore_patterns("model*"))
    state = {name: value.astype("bfloat16") for name, value in load_model(base).state_dict().items()}
    save_file(state, str(tmp_path / "base" / "model.safetensors"), metadata={"format": "np"})
    write_adapter(base, tmp_path / "adapter", LoRAConfig(r=3))
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", "--check", "False", method="lora")
    before, after = (load_tensors(str(tmp_path / name / "model.safetensors")) for name in ("base", "out"))
    key = "ernie.layers.0.self_attn.q_proj.weight"
    assert set(before) == set(after) and after[key].dtype == paddle.bfloat16
    adapter = load_tensors(str(tmp_path / "adapter" / "lora_model_state.safetensors"))
    a, b = (adapter[key.replace("weight", f"lora_{side}")].numpy() for side in "AB")
    expected = before[key].astype("float32").numpy() + 2 * a @ b
    np.testing.assert_allclose(after[key].astype("float32").numpy(), expected, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("safe", [True, False])
def test_damaged_files_are_named_and_leave_nothing(safe, base, tmp_path):
    name = "model.safetensors" if safe else "model_state.pdparams"
    shutil.copytree(base, tmp_path / "base", ignore=shutil.ignore_patterns("model*"))
    load_model(base).save_pretrained(str(tmp_path / "base"), safe_serialization=safe)
    write_adapter(base, tmp_path / "lora", LoRAConfig(r=3))
    whole = (tmp_path / "base" / name).read_bytes()
    for size in (300, len(whole) - 100):
        (tmp_path / "base" / name).write_bytes(whole[:size])
        with pytest.raises(ValueError, match=f"{name}: cannot be read .* Copy it again"):
            merge(tmp_path / "base", tmp_path / "lora", tmp_path / "out", method="lora")
    (tmp_path / "lora" / "lora_model_state.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match="lora_model_state.safetensors: cannot be read .* Copy it again"):
        merge(base, tmp_path / "lora", tmp_path / "out", method="lora")
    assert {path.name for path in tmp_path.iterdir()} == {"base", "lora"}


@pytest.mark.parametrize("name", ["lora", "pissa", "qlora", "vera", "lokr", "dislora"])
def test_merging_twice_or_into_another_base_is_said(name, base, tmp_path, monkeypatch):
    from ernie35se.peft import merging

    said = []
    monkeypatch.setattr(merging.logger, "warning", said.append)
    method = ADAPTERS[name].method
    write_adapter(base, tmp_path / "adapter", ADAPTERS[name])
    merge(base, tmp_path / "adapter", tmp_path / "once", "--check", "False", method=method)
    assert not [line for line in said if "other weights" in line]
    merge(tmp_path / "once", tmp_path / "adapter", tmp_path / "twice", "--check", "False", method=method)
    (line,) = [line for line in said if "other weights" in line]
    assert line.startswith(f"{tmp_path / 'once'}: the adapter was trained on other weights than these (")


def test_what_an_interrupted_merge_left_is_no_part_of_the_next(base, tmp_path, monkeypatch):
    """Killed between two files: the folder has not got its name, and the same command begins anew."""
    from ernie35se.peft import merging

    write_adapter(base, tmp_path / "lora", LoRAConfig(r=3))
    (tmp_path / ".tmp-out").mkdir()
    (tmp_path / ".tmp-out" / "model-00001-of-00002.safetensors").write_text("half")
    (tmp_path / "out").mkdir()  # empty, as one made beforehand
    monkeypatch.setattr(merging, "_copy_rest", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        merge(base, tmp_path / "lora", tmp_path / "out", method="lora")
    assert not list((tmp_path / "out").iterdir()) and not (tmp_path / ".tmp-out").exists()
    monkeypatch.undo()
    (tmp_path / ".tmp-out").mkdir()
    (tmp_path / ".tmp-out" / "model-00001-of-00002.safetensors").write_text("half")
    merge(base, tmp_path / "lora", tmp_path / "out", method="lora")
    assert [file.name for file in (tmp_path / "out").glob("model*")] == ["model.safetensors"]


def test_mistakes(base, tmp_path):
    write_adapter(base, tmp_path / "lora", LoRAConfig(r=3))
    write_adapter(base, tmp_path / "tare", TareConfig())
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="holds a lora adapter; expected vera_config.json"):
        merge(base, tmp_path / "lora", out, method="vera")
    with pytest.raises(ValueError, match="holds no adapter; expected lora_config.json"):
        merge(base, tmp_path / "absent", out, method="lora")
    with pytest.raises(ValueError, match="holds a tare adapter"):
        merge(base, tmp_path / "tare", out, method="lora")
    with pytest.raises(ValueError, match="holds no model.safetensors or model_state.pdparams"):
        merge(tmp_path, tmp_path / "lora", out, method="lora")
    write_base(tmp_path / "other", num_hidden_layers=2)
    with pytest.raises(ValueError, match="the base model has no weight ernie.layers"):
        merge(tmp_path / "other", tmp_path / "lora", out, method="lora")
    write_base(tmp_path / "wide", hidden_size=48)
    with pytest.raises(ValueError, match="does not fit the base model's weight"):
        merge(tmp_path / "wide", tmp_path / "lora", out, method="lora")
    assert not out.exists() and not list(tmp_path.glob(".tmp*"))
    with pytest.raises(ValueError, match="--device abacus: .*; expected cpu, or gpu where there is one"):
        merge(base, tmp_path / "lora", out, "--device", "abacus", method="lora")
    out.mkdir()
    (out / "mine").write_text("")
    with pytest.raises(ValueError, match="exists already"):
        merge(base, tmp_path / "lora", out, method="lora")
    file = tmp_path / "index" / "model.safetensors.index.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(ValueError, match="names model-1.safetensors, which is not there"):
        merge(file.parent, tmp_path / "lora", tmp_path / "new", method="lora")
