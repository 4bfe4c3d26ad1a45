"""tools/split_tensor_parallel.py and merge_tensor_parallel.py: unlucky folders."""

import json

import merge_tensor_parallel
import numpy as np
import paddle
import pytest
import split_tensor_parallel

from ernie35se import conversion, weight_files
from ernie35se.configuration import Ernie35Config

SIZES = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4)


@pytest.fixture
def whole(tmp_path):
    folder = tmp_path / "whole"
    Ernie35Config(**SIZES).save_pretrained(str(folder))
    table = np.arange(128, dtype="float32").reshape(16, 8)
    paddle.save({"ernie.embed_tokens.weight": paddle.to_tensor(table)}, str(folder / "model_state.pdparams"))
    return folder


def split(whole, target, degree):
    assert split_tensor_parallel.main([str(whole), str(target), "--degree", str(degree)]) == 0


def test_pieces_of_two_degrees_are_never_mixed(whole, tmp_path):
    split(whole, tmp_path / "two", 2)
    with pytest.raises(ValueError, match="two holds model_state.tp00.pdparams already"):
        split(whole, tmp_path / "two", 4)
    split(whole, tmp_path / "four", 4)
    for rank in (2, 3):  # as an older tool, or a copy, left them
        name = f"model_state.tp0{rank}.pdparams"
        (tmp_path / "two" / name).write_bytes((tmp_path / "four" / name).read_bytes())
    with pytest.raises(ValueError, match="embed_tokens.weight: 4 pieces of 8, 8, 4, 4 along axis 0; .* expects 16"):
        merge_tensor_parallel.main([str(tmp_path / "two"), str(tmp_path / "again")])
    assert not (tmp_path / "again").exists()


def test_a_missing_last_piece_is_told_as_such(whole, tmp_path):
    split(whole, tmp_path / "two", 2)
    (tmp_path / "two" / "model_state.tp01.pdparams").unlink()
    with pytest.raises(ValueError, match="1 piece of 8 .*A rank's piece is missing, or cut for another degree"):
        merge_tensor_parallel.main([str(tmp_path / "two"), str(tmp_path / "again")])
    assert not (tmp_path / "again").exists()


def test_a_split_that_stops_midway_leaves_no_rank_alone(whole, tmp_path, monkeypatch):
    def stop(name, array, config, degree, rank):
        if rank == 1:
            raise KeyboardInterrupt
        return array[: 16 // degree]

    monkeypatch.setattr(conversion, "split", stop)
    with pytest.raises(KeyboardInterrupt):
        split(whole, tmp_path / "two", 2)
    assert not (tmp_path / "two").exists()


def test_both_ways(whole, tmp_path):
    split(whole, tmp_path / "four", 4)
    assert merge_tensor_parallel.main([str(tmp_path / "four"), str(tmp_path / "again")]) == 0
    (arrays,) = weight_files.Folder(tmp_path / "again").files.values()
    np.testing.assert_array_equal(arrays["ernie.embed_tokens.weight"].values, np.arange(128.0).reshape(16, 8))
    assert json.loads((tmp_path / "again" / "config.json").read_text())["tensor_parallel_degree"] == 1
