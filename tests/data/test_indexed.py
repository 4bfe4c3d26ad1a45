"""Token files: round trips in every form, and malformed files of every kind."""

import io
import os
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ernie35se.data.indexed import TokenFileWriter, find_prefixes, open_tokens, token_dtype

IDS = np.array([5, 6, 7, 8, 9, 4, 65000], np.uint16)
LENS = np.array([3, 2, 0, 1, 1], np.int32)
DOCS = np.array([0, 1, 3, 5])
CODE = {
    np.dtype(np.uint8): 1,
    np.dtype(np.int32): 4,
    np.dtype(np.int64): 5,
    np.dtype(np.float32): 7,
    np.dtype(np.uint16): 8,
}


def write_npy(prefix, ids=IDS, lens=LENS, docs=DOCS):
    np.save(f"{prefix}_ids.npy", ids)
    np.savez(f"{prefix}_idx.npz", lens=lens, docs=docs)


def mmap_index(ids=IDS, lens=LENS, docs=DOCS, modes=False, version=1, code=None):
    """Megatron-LM's .idx, by its published layout."""
    pointers = np.concatenate([[0], np.cumsum(lens)[:-1]]).astype(np.int64) * ids.itemsize
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, code or CODE[ids.dtype], len(lens), len(docs))
    body = lens.astype("<i4").tobytes() + pointers.tobytes() + docs.astype("<i8").tobytes()
    return head + body + (bytes(len(lens)) if modes else b"")


def lazy_index(ids=IDS, lens=LENS, docs=DOCS, size_type="<i4"):
    """The older form, `TNTIDX`, by fairseq's, Megatron-LM's (int64 sizes) and PaddleNLP's (int32) layout."""
    head = b"TNTIDX\x00\x00" + struct.pack(
        "<6Q", 1, CODE[ids.dtype], ids.itemsize, len(lens), len(lens), len(docs)
    )
    pointers = np.concatenate([[0], np.cumsum(lens)]).astype("<i8")
    dims = np.arange(len(lens) + 1, dtype="<i8")
    return (
        head
        + dims.tobytes()
        + pointers.tobytes()
        + lens.astype(size_type).tobytes()
        + docs.astype("<i8").tobytes()
    )


def write_bin(prefix, index, ids=IDS):
    Path(f"{prefix}.bin").write_bytes(ids.tobytes())
    Path(f"{prefix}.idx").write_bytes(index)


FORMS = {
    "npy": write_npy,
    "mmap": lambda prefix: write_bin(prefix, mmap_index()),
    "mmap with modes": lambda prefix: write_bin(prefix, mmap_index(modes=True)),
    "lazy, PaddleNLP": lambda prefix: write_bin(prefix, lazy_index()),
    "lazy, Megatron": lambda prefix: write_bin(prefix, lazy_index(size_type="<i8")),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_reads_the_same(tmp_path, form):
    FORMS[form](tmp_path / "c")
    tokens = open_tokens(tmp_path / "c")
    assert [tokens.read(i).tolist() for i in range(5)] == [[5, 6, 7], [8, 9], [], [4], [65000]]
    assert [tokens.document(i).tolist() for i in range(3)] == [[5, 6, 7], [8, 9], [4, 65000]]
    assert (tokens.num_tokens, tokens.num_sequences, tokens.num_documents, tokens.dtype) == (
        7,
        5,
        3,
        np.uint16,
    )
    assert tokens.read(0, 1).tolist() == [6, 7] and tokens.read(0, 1, 1).tolist() == [6]
    tokens.check(65001)
    assert tokens.lens.dtype == np.int32 and tokens.docs.dtype == np.int64


def test_fingerprint_is_of_the_content(tmp_path):
    for i, form in enumerate(FORMS):
        FORMS[form](tmp_path / f"c{i}")
    prints = {open_tokens(tmp_path / f"c{i}").fingerprint() for i in range(len(FORMS))}
    assert len(prints) == 1
    others = [
        {"ids": IDS.astype(np.int32)},
        {"ids": np.where(IDS == 9, 10, IDS).astype(np.uint16)},
        {"lens": np.array([2, 3, 0, 1, 1], np.int32)},
        {"docs": np.array([0, 2, 3, 5])},
    ]
    for changed in others:
        write_npy(tmp_path / "c", **changed)
        prints.add(open_tokens(tmp_path / "c").fingerprint())
    assert len(prints) == 1 + len(others)


def test_changed_content_of_the_same_size_is_noticed_in_one_process(tmp_path):
    write_npy(tmp_path / "c")
    tokens = open_tokens(tmp_path / "c")
    before, stat = tokens.fingerprint(), os.stat(f"{tmp_path}/c_ids.npy")
    with open(f"{tmp_path}/c_ids.npy", "r+b") as stream:
        stream.seek(-2, os.SEEK_END)
        stream.write(struct.pack("<H", 3))
    os.utime(
        f"{tmp_path}/c_ids.npy", ns=(stat.st_atime_ns, stat.st_mtime_ns)
    )  # even where the times are put back
    assert tokens.fingerprint() != before


def test_reads_stay_in_bounds_and_copies_reopen(tmp_path):
    write_npy(tmp_path / "c")
    tokens = open_tokens(tmp_path / "c")
    for call in [(5,), (-1,), (0, 4), (0, 0, 4), (0, -1), (0, 2, -1)]:
        with pytest.raises(IndexError, match="of 5|which has 3"):
            tokens.read(*call)
    for index in (-1, 3):
        with pytest.raises(IndexError, match=f"document {index} of 3"):
            tokens.document(index)
    data = pickle.dumps(tokens)
    assert len(data) < 500 and (pickle.loads(data).ids == IDS).all()


def npz(**arrays):
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def npy_claiming(count, dtype="<u2"):
    head = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({count},), }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head) + 1) + head + b"\n" + b"12345678"


def zip_claiming(count):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("lens.npy", npy_claiming(count, "<i4"))
        archive.writestr("docs.npy", npy(DOCS))
    return stream.getvalue()


OBJECTS = np.array([{}, []], dtype=object)
# (file that is wrong, its bytes, words of the message)
MALFORMED = {
    "empty": ("_ids.npy", b"", "not a readable .npy header"),
    "other content": ("_ids.npy", b"PK" * 100, "not a readable .npy header"),
    "header cut short": ("_ids.npy", npy(IDS)[:40], "not a readable .npy header"),
    "data cut short": ("_ids.npy", npy(IDS)[:-3], "cut short.*expected"),
    "data too long": ("_ids.npy", npy(IDS) + b"xx", "too long"),
    "claims more memory than there is": ("_ids.npy", npy_claiming(2**62), "cut short"),
    "negative count": ("_ids.npy", npy_claiming(-4), "shape|header"),
    "floats": ("_ids.npy", npy(IDS.astype(np.float32)), "float32 values; expected integers"),
    "booleans": ("_ids.npy", npy(IDS > 5), "bool values; expected integers"),
    "objects": ("_ids.npy", npy(OBJECTS), "Python objects.*never unpickled"),
    "two dimensions": ("_ids.npy", npy(IDS.reshape(1, 7)), "2 dimensions"),
    "no dimension": ("_ids.npy", npy(np.uint16(3)), "0 dimensions"),
    "no ids": ("_ids.npy", npy(IDS[:0]), "no values"),
    "of another corpus": ("_ids.npy", npy(IDS[:-1]), "add up to 7 tokens but .*_ids.npy holds 6"),
    "npz empty": ("_idx.npz", b"", "not a readable .npz"),
    "npz other content": ("_idx.npz", npy(LENS), "not a readable .npz"),
    "npz cut short": ("_idx.npz", npz(lens=LENS, docs=DOCS)[:-30], "not a readable .npz"),
    "npz without docs": ("_idx.npz", npz(lens=LENS, doc=DOCS), "lens.npy, doc.npy; expected.* and docs"),
    "npz without lens": ("_idx.npz", npz(docs=DOCS), "holds docs.npy"),
    "npz of objects": ("_idx.npz", npz(lens=OBJECTS, docs=DOCS), "Python objects"),
    "npz of floats": ("_idx.npz", npz(lens=LENS * 1.0, docs=DOCS), "lens in .* float64 values"),
    "npz of two dimensions": ("_idx.npz", npz(lens=LENS, docs=DOCS[None]), "docs in .* 2 dimensions"),
    "npz claims too much": ("_idx.npz", zip_claiming(2**61), "lens in .*cut short"),
    "negative length": ("_idx.npz", npz(lens=np.array([4, 4, -1, 0]), docs=DOCS), "length -1 of sequence 2"),
    "lengths that wrap": ("_idx.npz", npz(lens=np.array([2**63 - 1, 2**63 - 1, 9]), docs=DOCS), "add up to"),
    "no lengths": ("_idx.npz", npz(lens=LENS[:0], docs=DOCS), "no values"),
    "sum of lengths": ("_idx.npz", npz(lens=LENS + 1, docs=DOCS), "add up to 12 tokens.*holds 7"),
    "docs not from 0": ("_idx.npz", npz(lens=LENS, docs=DOCS[1:]), "from 1 to 5; expected.* 0 .* 5"),
    "docs end early": ("_idx.npz", npz(lens=LENS, docs=DOCS[:-1]), "from 0 to 3"),
    "docs fall": ("_idx.npz", npz(lens=LENS, docs=np.array([0, 3, 1, 5])), "boundary 3 followed by 1"),
    "one boundary": ("_idx.npz", npz(lens=LENS, docs=DOCS[:1]), "1 document boundaries"),
    "idx empty": (".idx", b"", "an empty file"),
    "idx other magic": (".idx", b"\x89HDF" * 20, "starts with .*MMIDIDX or TNTIDX"),
    "idx header cut short": (".idx", mmap_index()[:20], "cut short"),
    "idx body cut short": (".idx", mmap_index()[:-8], "cut short"),
    "idx too long": (".idx", mmap_index() + b"12", "too long"),
    "idx version": (".idx", mmap_index(version=2), "version 2; expected version 1"),
    "idx float": (".idx", mmap_index(code=7), r"type code 7 \(float32\); expected an integer"),
    "idx unknown type": (".idx", mmap_index(code=99), "type code 99"),
    "idx claims 2^60 sequences": (".idx", b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2**60, 1), "cut short"),
    "idx pointers": (".idx", mmap_index()[:59] + b"\1" + mmap_index()[60:], "sequence 0 starts at .*expected 0"),
    "idx of another corpus": (".idx", mmap_index(lens=LENS + 1), "add up to 12 tokens but .*bin holds 7"),
    "bin of half an id": (".bin", IDS.tobytes()[:-1], "13 bytes; expected a multiple of 2"),
    "bin empty": (".bin", b"", "0 bytes"),
    "lazy cut short": (".idx", lazy_index()[:-1], "cut short"),
    "lazy header cut short": (".idx", lazy_index()[:30], "cut short"),
    "lazy claims 2^60": (".idx", b"TNTIDX\0\0" + struct.pack("<6Q", 1, 8, 2, 2**60, 2**60, 2), "cut short"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_named(tmp_path, case):
    ending, content, words = MALFORMED[case]
    prefix = tmp_path / "c"
    write_npy(prefix) if ending in ("_ids.npy", "_idx.npz") else write_bin(prefix, mmap_index())
    Path(f"{prefix}{ending}").write_bytes(content)
    with pytest.raises(ValueError, match=words) as error:
        open_tokens(prefix)
    assert f"{prefix}{ending}" in str(error.value) and "; expected " in str(error.value)


@pytest.mark.parametrize("ending", ["_ids.npy", "_idx.npz", ".bin", ".idx"])
def test_a_missing_half_is_named(tmp_path, ending):
    prefix = tmp_path / "c"
    write_npy(prefix) if "." not in ending[0] else write_bin(prefix, mmap_index())
    os.remove(f"{prefix}{ending}")
    for read in (open_tokens, find_prefixes, lambda _: find_prefixes(tmp_path)):
        with pytest.raises(ValueError, match=f"but {prefix}{ending} is not"):
            read(prefix)


def test_a_folder_in_place_of_a_file_is_named(tmp_path):
    (tmp_path / "c_ids.npy").mkdir()
    np.savez(tmp_path / "c_idx.npz", lens=LENS, docs=DOCS)
    with pytest.raises(ValueError, match="c_ids.npy: cannot be read"):
        open_tokens(tmp_path / "c")


@pytest.mark.parametrize("ids, limit, words", [
    (IDS, 65000, "id 65000 at token 6, in sequence 4; expected ids within 0..64999"),
    (IDS, 9, "id 9 at token 4, in sequence 1; expected ids within 0..8"),
    (IDS.astype(np.int32) - 5, None, "id -1 at token 5, in sequence 3; expected 0 or more"),
])  # fmt: skip
def test_ids_outside_the_vocabulary_are_placed(tmp_path, ids, limit, words):
    write_npy(tmp_path / "c", ids=ids)
    with pytest.raises(ValueError, match=words):
        open_tokens(tmp_path / "c").check(limit)


def test_find_prefixes(tmp_path):
    for name in ("b", "a b", "0.5"):
        write_npy(tmp_path / name)
    write_bin(tmp_path / "m", mmap_index())
    (tmp_path / ".hidden_ids.npy").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("")
    expected = [str(tmp_path / name) for name in ("0.5", "a b", "b", "m")]
    assert find_prefixes(tmp_path) == find_prefixes(f"{tmp_path}") == expected
    assert [find_prefixes(prefix) for prefix in expected] == [[prefix] for prefix in expected]
    assert (
        find_prefixes(tmp_path / "b_idx.npz")
        == find_prefixes(tmp_path / "b_ids.npy")
        == [str(tmp_path / "b")]
    )


def test_wrong_folder_lists_what_is_there(tmp_path):
    (tmp_path / "corpus.jsonl").write_text("{}")
    for path in (tmp_path, tmp_path / "corpus"):
        with pytest.raises(
            ValueError, match="_ids.npy and .*_idx.npz, or .*holds corpus.jsonl.*create_pretraining_data"
        ):
            find_prefixes(path)
    with pytest.raises(ValueError, match="holds corpus.jsonl"):
        open_tokens(tmp_path / "c")
    with pytest.raises(ValueError, match="does not exist"):
        find_prefixes(tmp_path / "nowhere" / "c")


@pytest.mark.parametrize("vocab_size", [1, 300, 65499, 65500, 70000])
def test_writer_round_trip(tmp_path, vocab_size):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, vocab_size, n) for n in rng.integers(1, 40, 57)]
    with TokenFileWriter(tmp_path / "new folder" / "c", vocab_size) as writer:
        for ids in documents:
            writer.add_document(ids)
    tokens = open_tokens(tmp_path / "new folder" / "c")
    assert sorted(os.listdir(tmp_path / "new folder")) == ["c_ids.npy", "c_idx.npz"]
    assert tokens.dtype == token_dtype(vocab_size) == (np.uint16 if vocab_size < 65500 else np.int32)
    assert [tokens.document(i).tolist() for i in range(57)] == [ids.tolist() for ids in documents]
    assert (np.load(f"{tokens.prefix}_ids.npy") == np.concatenate(documents)).all()  # as numpy reads it, too
    with np.load(f"{tokens.prefix}_idx.npz") as index:
        assert index["lens"].tolist() == [len(ids) for ids in documents] and index["lens"].dtype == np.int32
        assert index["docs"].tolist() == list(range(58)) and index["docs"].dtype == np.int64


def test_writer_keeps_sequences(tmp_path):
    with TokenFileWriter(tmp_path / "c", 70000) as writer:
        for i in range(3):
            writer.add_document(IDS[[0, 3, 5][i] : [3, 5, 7][i]], lens=LENS[DOCS[i] : DOCS[i + 1]])
    tokens = open_tokens(tmp_path / "c")
    assert tokens.lens.tolist() == LENS.tolist() and tokens.docs.tolist() == DOCS.tolist()
    assert tokens.ids.tolist() == IDS.tolist()


@pytest.mark.parametrize("ids, words", [
    ([1, 2, 10], "document 1 for .*id 10; expected ids within 0..9"),
    ([-1, 2], "id -1"),
    ([], "float64 values|no values"),
    (np.array([], int), "no values"),
    ([[1]], "2 dimensions"),
    ([0.5], "float64 values"),
])  # fmt: skip
def test_writer_refuses_and_leaves_nothing(tmp_path, ids, words):
    with pytest.raises(ValueError, match=words):
        with TokenFileWriter(tmp_path / "out" / "c", 10) as writer:
            writer.add_document([1, 2])
            writer.add_document(ids)
    assert os.listdir(tmp_path) == []


def test_writer_without_documents_or_with_a_bad_place(tmp_path):
    with pytest.raises(ValueError, match="no document"):
        with TokenFileWriter(tmp_path / "c", 10):
            pass
    with pytest.raises(ValueError, match="a folder; expected a prefix"):
        TokenFileWriter(tmp_path, 10)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written to"):
        with TokenFileWriter(tmp_path / "file" / "c", 10):
            pass
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("fault", ["body", "os.fsync", "numpy.savez"] + [f"os.replace {n}" for n in range(4)])
def test_a_fault_leaves_the_old_file(tmp_path, monkeypatch, fault):
    write_npy(tmp_path / "c")
    function, _, calls_before = fault.partition(" ")
    if function != "body":
        module = os if function.startswith("os") else np
        real, count = getattr(module, function.split(".")[1]), iter(range(9))

        def fail(*args, **kwargs):
            if next(count) == int(calls_before or 0):
                raise OSError("disk full")
            return real(*args, **kwargs)

        monkeypatch.setattr(function, fail)
    with pytest.raises(OSError, match="disk full"):
        with TokenFileWriter(tmp_path / "c", 10) as writer:
            writer.add_document([1, 2, 3])
            if function == "body":
                raise OSError("disk full")
    assert sorted(os.listdir(tmp_path)) == ["c_ids.npy", "c_idx.npz"]
    assert open_tokens(tmp_path / "c").ids.tolist() == IDS.tolist()


def test_writer_replaces_the_old_file(tmp_path):
    write_npy(tmp_path / "c")
    with TokenFileWriter(tmp_path / "c", 10) as writer:
        writer.add_document([1, 2, 3])
    assert open_tokens(tmp_path / "c").ids.tolist() == [1, 2, 3]
    assert sorted(os.listdir(tmp_path)) == ["c_ids.npy", "c_idx.npz"]


def test_writer_memory_is_constant(tmp_path):
    document = np.arange(2000) % 300
    tracemalloc.start()
    with TokenFileWriter(tmp_path / "c", 300) as writer:
        for _ in range(6000):
            writer.add_document(document, lens=np.ones(2000, int))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # numpy.savez copies in parts of 16 MB.
    assert os.path.getsize(tmp_path / "c_idx.npz") > 48_000_000 and peak < 24_000_000


@settings(max_examples=400, deadline=None, database=None)
@given(data=st.data())
def test_damaged_files_raise_only_value_errors(tmp_path_factory, data):
    """Any damage to any file of any form is either harmless to every read, or a ValueError."""
    prefix = tmp_path_factory.mktemp("damaged") / "c"
    FORMS[data.draw(st.sampled_from(sorted(FORMS)))](prefix)
    file = data.draw(st.sampled_from(sorted(prefix.parent.iterdir())))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content)))
        what = data.draw(st.sampled_from(["cut", "insert", "overwrite"]))
        if what == "cut":
            del content[place : place + data.draw(st.integers(1, len(content) + 1))]
        else:
            new = data.draw(
                st.one_of(st.binary(min_size=1, max_size=9), st.sampled_from([b"\xff" * 8, bytes(8)]))
            )
            content[place : place + (0 if what == "insert" else len(new))] = new
    file.write_bytes(content)
    try:
        tokens = open_tokens(prefix)
        tokens.check(70000)
    except ValueError as error:
        assert str(prefix) in str(error)
        return
    joined = [tokens.document(i) for i in range(tokens.num_documents)]
    assert (
        sum(map(len, joined))
        == tokens.num_tokens
        == sum(len(tokens.read(i)) for i in range(tokens.num_sequences))
    )
