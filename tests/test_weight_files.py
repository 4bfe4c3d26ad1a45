"""Weight files cut and joined: exact, in both formats, in the memory of one array."""

import gc
import json
import pickle
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import paddle
import pytest
from model_helpers import build_model, tiny_config
from safetensors.numpy import load_file

from ernie35se import conversion, weight_files
from ernie35se.modeling import Ernie35ForCausalLM

TOOLS = Path(__file__).resolve().parents[1] / "tools"
SIZES = dict(hidden_size=24, intermediate_size=36, vocab_size=42, num_attention_heads=6)
KINDS = {
    "plain": {},
    "tied_untrimmed": dict(tie_word_embeddings=True, parallel_attn_hatf=False),
    "no_bias": dict(use_bias=False),
}


def saved_model(folder: Path, extension: str, **options):
    model = build_model(tiny_config(**SIZES, **options))
    model.save_pretrained(str(folder), safe_serialization=extension == "safetensors")
    (folder / "tokenizer_config.json").write_text("{}")
    return model


def load(path: Path) -> dict[str, np.ndarray]:
    """Read by the formats' own libraries."""
    return load_file(path) if path.suffix == ".safetensors" else paddle.load(str(path), return_numpy=True)


def tool(name: str, *arguments) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(TOOLS / name), *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.parametrize("extension", ["pdparams", "safetensors"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("degree", [2, 3])
def test_split_and_merge_are_exact(tmp_path, extension, kind, degree):
    model = saved_model(tmp_path / "whole", extension, **KINDS[kind])
    whole = {name: value.numpy() for name, value in model.state_dict().items()}
    for name in ("pieces", "again"):
        (tmp_path / name).mkdir()
    written = weight_files.split_folder(
        weight_files.Folder(tmp_path / "whole"), tmp_path / "pieces", model.config, degree
    )
    for rank, path in enumerate(written):
        piece = load(path)
        assert list(piece) == list(load(next((tmp_path / "whole").glob(f"model*.{extension}"))))
        for name, value in piece.items():
            np.testing.assert_array_equal(value, conversion.split(name, whole[name], model.config, degree, rank))
    folder = weight_files.Folder(tmp_path / "pieces")
    assert (folder.tensor, folder.pipeline) == (degree, 1)
    (path,) = weight_files.merge_folder(folder, tmp_path / "again", model.config)
    merged = load(path)
    assert merged.keys() == whole.keys()
    for name, value in merged.items():
        np.testing.assert_array_equal(value, whole[name], err_msg=name)
        assert value.dtype == whole[name].dtype
    assert not list(tmp_path.rglob(".tmp-*"))


def test_stages_are_joined_and_a_tied_copy_is_written_once(tmp_path):
    model = saved_model(tmp_path / "whole", "pdparams", tie_word_embeddings=True)
    whole = load(tmp_path / "whole" / "model_state.pdparams")
    first = {name: value for name, value in whole.items() if "layers.3" not in name and "lm_head" not in name}
    last = {name: value for name, value in whole.items() if name not in first or "embed_tokens" in name}
    for tensor in range(2):
        for stage, content in enumerate((first, last)):
            piece = {n: conversion.split(n, v, model.config, 2, tensor) for n, v in content.items()}
            paddle.save(piece, str(tmp_path / f"model_state.tp0{tensor}_pp0{stage}.pdparams"))
    folder = weight_files.Folder(tmp_path)
    assert (folder.tensor, folder.pipeline) == (2, 2)
    (path,) = weight_files.merge_folder(folder, tmp_path / "whole", model.config)
    merged = load(path)
    assert merged.keys() == whole.keys()
    for name, value in merged.items():
        np.testing.assert_array_equal(value, whole[name], err_msg=name)
    (tmp_path / "model_state.tp01_pp00.pdparams").unlink()
    with pytest.raises(ValueError, match="tensor-parallel rank 1, pipeline stage 0 is missing"):
        weight_files.Folder(tmp_path)


@pytest.mark.parametrize("extension", ["pdparams", "safetensors"])
def test_the_memory_is_that_of_one_array(tmp_path, extension):
    config = tiny_config(hidden_size=240, intermediate_size=480, vocab_size=240, num_attention_heads=6, num_hidden_layers=8)
    names = [name for name in conversion.parameter_names(config) if name.endswith("weight")]
    shapes = {"o_proj": (720, 240), "qkv_gate_up_proj": (240, 1680), "embed_tokens": (240, 240), "lm_head": (240, 240)}
    shapes = {n: shapes[n.split(".")[-2]] for n in names if "self_attn_mlp" in n or n.split(".")[-2] in ("embed_tokens", "lm_head")}
    path = tmp_path / f"model_state.{extension}"
    path = path if extension == "pdparams" else tmp_path / "model.safetensors"
    rng = np.random.default_rng(0)
    weight_files.write_arrays(
        path, {n: (s, "F32") for n, s in shapes.items()}, lambda n: rng.standard_normal(shapes[n]).astype("float32")
    )
    largest, total = (f(int(np.prod(s)) * 4 for s in shapes.values()) for f in (max, sum))
    (tmp_path / "pieces").mkdir()
    weight_files.split_folder(weight_files.Folder(tmp_path), tmp_path / "pieces", config, 2)  # imports and caches
    gc.collect()
    tracemalloc.start()
    weight_files.split_folder(weight_files.Folder(tmp_path), tmp_path / "pieces", config, 2)
    weight_files.merge_folder(weight_files.Folder(tmp_path / "pieces"), tmp_path / "pieces", config)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total > 5 * largest and peak < 3 * largest, (peak, largest, total)


def test_bfloat16_keeps_its_bits(tmp_path):
    bits = np.arange(42 * 24, dtype="uint16").reshape(42, 24)
    config = tiny_config(**SIZES)
    weight_files.write_arrays(
        tmp_path / "model.safetensors", {"ernie.embed_tokens.weight": ((42, 24), "BF16")}, lambda name: bits
    )
    (tmp_path / "pieces").mkdir()
    weight_files.split_folder(weight_files.Folder(tmp_path), tmp_path / "pieces", config, 2)
    piece = weight_files.read_arrays(tmp_path / "pieces" / "model.tp01.safetensors")["ernie.embed_tokens.weight"]
    assert piece.kind == "BF16"
    np.testing.assert_array_equal(piece.values, bits[21:])


def test_weights_in_several_files_are_split_too(tmp_path):
    model = build_model(tiny_config(**SIZES))
    model.save_pretrained(str(tmp_path), max_shard_size="20KB")
    folder = weight_files.Folder(tmp_path)
    assert len(folder.names) > 2
    state = model.state_dict()
    assert folder.files[0, 0].keys() == state.keys()
    for name, array in folder.files[0, 0].items():
        np.testing.assert_array_equal(array.values, state[name].numpy(), err_msg=name)


class Evil:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize("extension", ["pdparams", "safetensors"])
def test_a_file_that_is_cut_short_is_named(tmp_path, extension):
    saved_model(tmp_path, extension)
    path = next(tmp_path.glob(f"model*.{extension}"))
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ValueError, match=path.name):
        weight_files.Folder(tmp_path)


def test_a_pickle_of_anything_else_is_refused(tmp_path, capsys):
    (tmp_path / "model_state.pdparams").write_bytes(pickle.dumps({"w": Evil()}, protocol=4))
    with pytest.raises(ValueError, match="builtins.print"):
        weight_files.Folder(tmp_path)
    assert capsys.readouterr().out == ""


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """What is logged about pickled files."""
    lines: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(weight_files.logger, level, lines.append)
    return lines


def test_reading_a_pickled_file_says_that_its_source_is_trusted(tmp_path, said):
    for extension, name in (("pdparams", "model_state.pdparams"), ("safetensors", "model.safetensors")):
        saved_model(tmp_path / extension, extension)
        said.clear()
        weight_files.Folder(tmp_path / extension)
        weight_files.warn_pickled_folder(tmp_path / extension)
        expected = [f"{tmp_path / extension / name}: a pickled file"] * 2 if extension == "pdparams" else []
        assert [line.split(" file")[0] + " file" for line in said] == expected
        assert all("you trust its source" in line for line in said)
    weight_files.warn_pickled_folder(Path("Qwen/Qwen2-7B"))  # a name: nothing is there to say
    assert not said


def test_the_tools_make_complete_folders(tmp_path):
    model = saved_model(tmp_path / "whole", "pdparams")
    done = tool("split_tensor_parallel.py", tmp_path / "whole", tmp_path / "pieces", "--degree", 2)
    assert done.returncode == 0, done.stderr
    done = tool("merge_tensor_parallel.py", tmp_path / "pieces", tmp_path / "again")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "pieces" / "config.json").read_text())["tensor_parallel_degree"] == 2
    assert (tmp_path / "again" / "tokenizer_config.json").is_file()
    again = Ernie35ForCausalLM.from_pretrained(str(tmp_path / "again"))
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(again.state_dict()[name].numpy(), value.numpy(), err_msg=name)
    shutil.rmtree(tmp_path / "again")
    for words, message in (
        (("split_tensor_parallel.py", tmp_path / "whole", tmp_path / "x", "--degree", 4), "does not divide num_attention_heads 6"),
        (("merge_tensor_parallel.py", tmp_path / "whole", tmp_path / "x"), "whole already"),
    ):
        done = tool(*words)
        assert done.returncode == 2 and message in done.stderr and not (tmp_path / "x").exists()
