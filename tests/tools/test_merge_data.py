"""Joining token files: every id in its place, types promoted, inputs never touched."""

import struct

import numpy as np
import pytest
from merge_data import main

from ernie35se.data.indexed import TokenFileWriter


def write(prefix, documents, vocab_size=300):
    with TokenFileWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add_document(np.array(document))
    return prefix


def write_plain(prefix, ids, lens, docs):
    """A token file that numpy alone writes."""
    np.save(f"{prefix}_ids.npy", ids)
    np.savez(f"{prefix}_idx.npz", lens=np.array(lens, np.int32), docs=np.array(docs, np.int64))
    return prefix


def write_bin(prefix, ids, lens):
    """Megatron-LM's pair, laid out by hand: uint16 is code 8."""
    ids = np.array(ids, np.uint16)
    prefix.with_suffix(".bin").write_bytes(ids.tobytes())
    pointers = np.cumsum([0, *lens[:-1]]) * 2
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, 8, len(lens), len(lens) + 1)
        + np.array(lens, "<i4").tobytes()
        + pointers.astype("<i8").tobytes()
        + np.arange(len(lens) + 1, dtype="<i8").tobytes()
    )
    return prefix


def read(prefix):
    ids, idx = np.load(f"{prefix}_ids.npy"), np.load(f"{prefix}_idx.npz")
    return ids.dtype, ids.tolist(), idx["lens"].tolist(), idx["docs"].tolist()


def merge(inputs, output, *flags):
    return main(["--inputs", *map(str, inputs), "--output_prefix", str(output), *map(str, flags)])


def test_documents_follow_in_the_order_given(tmp_path, capsys):
    a = write(tmp_path / "a", [[1, 2, 3], [4]])
    b = write_bin(tmp_path / "b", [5, 6, 7], [1, 2])
    sentences = write_plain(tmp_path / "c", np.array([8, 9, 10], np.uint16), [1, 1, 1], [0, 2, 3])
    assert merge([b, sentences, a], tmp_path / "new" / "all") == 0
    assert read(tmp_path / "new" / "all") == (
        np.uint16,
        [5, 6, 7, 8, 9, 10, 1, 2, 3, 4],
        [1, 2, 1, 1, 1, 3, 1],
        [0, 1, 2, 4, 5, 6, 7],
    )
    assert "6 documents, 10 tokens, uint16; verified" in capsys.readouterr().out


@pytest.mark.parametrize(
    "first, second, expected",
    [
        (np.uint16, np.uint16, np.uint16),
        (np.uint8, np.uint16, np.uint16),
        (np.uint16, np.int32, np.int32),
        (np.int64, np.uint8, np.int32),
    ],
)
def test_the_type_is_the_widest(tmp_path, first, second, expected):
    a = write_plain(tmp_path / "a", np.array([1, 2], first), [2], [0, 1])
    b = write_plain(tmp_path / "b", np.array([3, 200], second), [2], [0, 1])
    merge([a, b], tmp_path / "c")
    assert read(tmp_path / "c")[:2] == (expected, [1, 2, 3, 200])


def test_ids_too_large_for_uint16_here_become_int32(tmp_path):
    a = write_plain(tmp_path / "a", np.array([1, 65535], np.uint16), [2], [0, 1])
    merge([a], tmp_path / "c")
    assert read(tmp_path / "c")[:2] == (np.int32, [1, 65535])
    huge = write_plain(tmp_path / "h", np.array([1, 2**31]), [2], [0, 1])
    with pytest.raises(ValueError, match="id 2147483648, expected ids below"):
        merge([huge], tmp_path / "d")


def test_a_folder_is_joined_in_sorted_order(tmp_path):
    for name, token in (("b", 2), ("a", 1), ("c", 3)):
        write(tmp_path / name, [[token]])
    (tmp_path / "out").mkdir()
    merge([tmp_path], tmp_path / "out" / "all")
    assert read(tmp_path / "out" / "all")[1] == [1, 2, 3]


def test_empty_documents_are_counted(tmp_path, capsys):
    a = write_plain(tmp_path / "a", np.array([1, 2], np.uint16), [1, 0, 1], [0, 1, 2, 3])
    merge([a], tmp_path / "c")
    assert read(tmp_path / "c")[1:3] == ([1, 2], [1, 1])
    assert "1 empty documents left out" in capsys.readouterr().out


def test_an_input_is_never_overwritten(tmp_path):
    a, b = write(tmp_path / "a", [[1]]), write(tmp_path / "b", [[2]])
    (tmp_path / "link").symlink_to(tmp_path)
    for output in (a, tmp_path / "link" / "b", tmp_path / "x" / ".." / "a"):
        (tmp_path / "x").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match="is an input"):
            merge([a, b], output)
    assert read(a)[1] == [1] and read(b)[1] == [2]
    merge([a, b], tmp_path / "c")
    merge([b], tmp_path / "c")  # an older output is replaced
    assert read(tmp_path / "c")[1] == [2]


def test_mistakes(tmp_path, tool):
    a = write(tmp_path / "a", [[1, 250]])
    damaged = write(tmp_path / "d", [[1, 2]])
    with open(f"{damaged}_ids.npy", "ab") as stream:
        stream.write(b"x")
    for inputs, flags, message in (
        ([tmp_path / "gone"], [], "gone"),
        ([a, damaged], [], "d_ids.npy"),
        ([a], ["--vocab_size", 250], "id 250 at token 1"),
    ):
        with pytest.raises(ValueError, match=message):
            merge(inputs, tmp_path / "out" / "c", *flags)
        assert not (tmp_path / "out").exists()
    done = tool("merge_data", "--inputs", damaged, "--output_prefix", tmp_path / "c")
    assert done.returncode == 2 and "d_ids.npy" in done.stderr and "Traceback" not in done.stderr
