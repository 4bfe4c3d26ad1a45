"""The document reader: formats agree, malformed input is counted or refused, memory stays bounded."""

import gzip
import io
import json
import tracemalloc

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ernie35se.data import documents
from ernie35se.data.documents import BrokenFile, DocumentReader, batches, check_text, find_files, read_json

TEXTS = ["one", "two\n\nlines", "中文 🙂", "a\u2028b", '"quoted" \\ </s>', "x" * 5000]
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def jsonl(texts, **options) -> bytes:
    return "".join(json.dumps({"text": text}, **options) + "\n" for text in texts).encode("utf-8")


def read(path, **options) -> list[str]:
    return list(DocumentReader([path], **options))


def zstd_frames(*parts: bytes) -> bytes:
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in parts)


# --- formats --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.jsonl", jsonl(TEXTS)),
        ("a.JSONL", jsonl(TEXTS, ensure_ascii=False)),
        ("bom.jsonl", b"\xef\xbb\xbf" + jsonl(TEXTS)),
        ("crlf.jsonl", jsonl(TEXTS).replace(b"\n", b"\r\n")),
        ("unended.jsonl", jsonl(TEXTS).rstrip(b"\n")),
        ("a.jsonl.gz", gzip.compress(jsonl(TEXTS))),
        ("members.jsonl.gz", gzip.compress(jsonl(TEXTS[:2])) + gzip.compress(jsonl(TEXTS[2:]))),
        ("a.jsonl.zst", zstd_frames(jsonl(TEXTS))),
        ("frames.jsonl.zst", zstd_frames(jsonl(TEXTS)[:40], jsonl(TEXTS)[40:100], b"", jsonl(TEXTS)[100:])),
        ("list.json", json.dumps([{"text": text} for text in TEXTS]).encode()),
        (
            "pretty.json",
            json.dumps([{"text": text} for text in TEXTS], indent=4, ensure_ascii=False).encode(),
        ),
        ("lines.json", jsonl(TEXTS)),
        ("list.json.gz", gzip.compress(json.dumps([{"text": text} for text in TEXTS]).encode())),
    ],
)
def test_every_format_gives_the_same_documents(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    reader = DocumentReader([tmp_path / name])
    assert list(reader) == TEXTS
    assert reader.documents == len(TEXTS) and reader.skipped.total == 0
    assert reader.bytes_done == reader.total_bytes == len(content)


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("blank_line", ["first\nsecond", "third", " fourth\u2028still"]),
        ("line", ["first", "second", "third", " fourth\u2028still"]),
        ("file", ["first\nsecond\n\n \nthird\n\n fourth\u2028still"]),
    ],
)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_plain_text_documents(tmp_path, mode, expected, line_end):
    content = "\ufeff\n\nfirst\nsecond\n\n \nthird\n\n fourth\u2028still\n\n".replace("\n", line_end)
    (tmp_path / "a.txt").write_bytes(content.encode())
    assert read(tmp_path / "a.txt", txt_documents=mode) == expected


def test_a_folder_is_read_recursively_and_sorted(tmp_path):
    (tmp_path / "b").mkdir()
    for name, text in (
        ("b/z.jsonl", "third"),
        ("a.jsonl", "first"),
        ("b/a.txt", "second"),
        (".hidden.txt", "no"),
        ("notes.md", "no"),
    ):
        (tmp_path / name).write_bytes(jsonl([text]) if name.endswith("jsonl") else text.encode())
    reader = DocumentReader([tmp_path])
    assert list(reader) == ["first", "second", "third"]
    assert [path.name for path in reader.ignored] == [".hidden.txt", "notes.md"]


def test_paths_that_cannot_be_read(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    for paths, message in (
        ([tmp_path / "missing"], "no such file"),
        ([tmp_path / "a.csv"], "unknown kind"),
        ([tmp_path / "empty"], "it holds: nothing"),
        ([tmp_path / "a.txt", tmp_path], "given twice"),
        ([""], "a path is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            find_files(paths)


# --- malformed records ----------------------------------------------------------------------------------

BAD_LINES = [
    (b'{"text": "cut', "bad JSON", '{"text": "cut'),
    (b"[" * 100_000, "bad JSON", "nested too deeply"),
    (b"1" * 5000, "bad JSON", "digits"),
    (b'{"content": "x", "id": 3}', "missing key", "keys seen: content, id"),
    (b"{}", "missing key", "keys seen: none"),
    (b'{"text": 7}', "not a string", "a number"),
    (b'{"text": null}', "not a string", "null"),
    (b'{"text": ["x"]}', "not a string", "a list"),
    (b'["text"]', "not an object", "a list"),
    (b'{"text": ""}', "empty document", ""),
    (b'{"text": " \\n\\t "}', "empty document", ""),
    (b'{"text": "a\xff"}', "invalid UTF-8", "byte 0xff"),
    (b'{"text": "a\\ud800"}', "invalid UTF-8", "\\ud800"),
    (b"  ", "blank line", ""),
]


@pytest.mark.parametrize(
    "line, reason, detail", BAD_LINES, ids=lambda value: value[:14] if isinstance(value, bytes) else ""
)
def test_bad_lines_are_counted_with_their_place(tmp_path, line, reason, detail):
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(["good"]) + line + b"\n" + jsonl(["also good"]))
    reader = DocumentReader([path])
    assert list(reader) == ["good", "also good"]
    assert dict(reader.skipped.counts) == {reason: 1}
    assert f"{path}:2" in str(reader.skipped) and detail in str(reader.skipped)
    strict = DocumentReader([path], strict=True)
    if reason in documents.HARMLESS:
        assert list(strict) == ["good", "also good"]
    else:
        with pytest.raises(ValueError, match=f"a.jsonl:2: {reason}"):
            list(strict)


def test_skipped_keeps_the_first_places_only(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"{}\n" * 10)
    reader = DocumentReader([tmp_path / "a.jsonl"])
    assert list(reader) == []
    assert str(reader.skipped).startswith("10 x missing key") and str(reader.skipped).count("a.jsonl:") == 3
    assert "and 7 more" in str(reader.skipped) and "keys seen: none" in str(reader.found_nothing())


def test_invalid_bytes_in_another_field_do_no_harm(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"title": "\xff", "text": "kept"}\n')
    assert read(tmp_path / "a.jsonl") == ["kept"]


# --- broken files ---------------------------------------------------------------------------------------


def broken_files():
    lines = jsonl([f"{number} " + "y" * (number % 97) for number in range(20_000)])
    return {
        "cut.jsonl.gz": gzip.compress(lines)[:-2000],
        "no.jsonl.gz": b"this is not gzip data",
        "flipped.jsonl.gz": gzip.compress(lines)[:3000] + b"\0" * 50 + gzip.compress(lines)[3050:],
        "cut.jsonl.zst": zstd_frames(lines)[:-2000],
        "no.jsonl.zst": b"this is not zstd data",
        "tail.jsonl.zst": zstd_frames(lines) + b"rubbish",
        "utf16.txt": "text".encode("utf-16"),
        "open.json": b'[{"text": "a"}, {"text": "b"}',
        "comma.json": b'[{"text": "a"} {"text": "b"}]',
        "trailing.json": b'[{"text": "a"}, ]',
        "more.json": b'[{"text": "a"}] {"text": "b"}',
        "string.json": b'[{"text": "a"}, {"text": "never closed',
    }


@pytest.mark.parametrize(
    "name, content", broken_files().items(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_broken_files_are_errors_or_counted(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=name) as caught:
        read(path)
    assert "--skip_broken_files" in str(caught.value)
    (tmp_path / "z.jsonl").write_bytes(jsonl(["behind"]))
    reader = DocumentReader([tmp_path], skip_broken_files=True)
    kept = list(reader)
    assert kept[-1] == "behind" and reader.skipped.counts["rest of a broken file"] == 1
    if name.startswith("cut"):
        assert len(kept) > 1000 and kept[5] == "5 yyyyy"


def test_an_empty_file_is_counted(tmp_path):
    for name, content in (("a.txt", b""), ("b.json", b" \n"), ("c.jsonl", b""), ("d.json", b"[]")):
        (tmp_path / name).write_bytes(content)
    reader = DocumentReader([tmp_path])
    assert list(reader) == [] and reader.skipped.counts["empty file"] == 4


def test_an_endless_line_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_DOCUMENT_CHARS", 1000)
    (tmp_path / "a.jsonl").write_bytes(jsonl(["x"]) + b"y" * 5000)
    with pytest.raises(ValueError, match="line 2 is longer than 1,000"):
        read(tmp_path / "a.jsonl")
    (tmp_path / "a.txt").write_text("line\n" * 500)
    with pytest.raises(ValueError, match="the document from line 1 on"):
        read(tmp_path / "a.txt")
    with pytest.raises(BrokenFile, match="never closed"):
        list(read_json(io.StringIO('[{"text": "' + "z" * 5000), chunk=100))


# --- the streaming JSON reader --------------------------------------------------------------------------


@QUICK
@given(
    st.lists(json_values, min_size=1, max_size=6),
    st.integers(1, 40),
    st.sampled_from([None, 1, "\t"]),
    st.booleans(),
)
def test_a_list_in_pieces_equals_the_list_whole(values, chunk, indent, ascii_only):
    text = json.dumps(values, indent=indent, ensure_ascii=ascii_only)
    assert [value for _, value in read_json(io.StringIO(text), chunk)] == json.loads(text)


def test_items_are_placed_by_line():
    text = '[\n{"a": 1},\n\n  {"a":\n 2}\n, 3]'
    for chunk in (1, 3, 1000):
        assert list(read_json(io.StringIO(text), chunk)) == [("2", {"a": 1}), ("4", {"a": 2}), ("6", 3)]


@QUICK
@given(
    st.lists(json_values, min_size=1, max_size=6), st.integers(1, 40), st.sampled_from([" ", "\n", "\r\n\n"])
)
def test_values_one_after_another(values, chunk, separator):
    text = separator.join(map(json.dumps, values))
    if text.startswith("["):  # a list comes first: then that list is the file
        text = "0 " + text
        values = [0, *values]
    assert [value for _, value in read_json(io.StringIO(text), chunk)] == values


@QUICK
@given(st.text(alphabet='[]{}",:0tn.\\ue -\n', max_size=40), st.integers(1, 20))
def test_any_rubbish_ends_the_same_way_whatever_the_chunks(text, chunk):
    def outcome(size):
        found = []
        try:
            for item in read_json(io.StringIO(text), size):
                found.append(item)
        except BrokenFile as error:
            found.append(str(error).split(": ")[:2])  # the line; the column depends on the window
        return repr(found)

    assert outcome(chunk) == outcome(10_000)


class Endless(io.TextIOBase):
    """A JSON list as long as asked, made as it is read; counts what was taken."""

    def __init__(self, item: str, items: int, start: str = "["):
        self.left = (f"{start}" if number == 0 else "," + item for number in range(items))
        self.buffer = ""
        self.taken = 0

    def read(self, size: int) -> str:
        while len(self.buffer) < size and (part := next(self.left, None)) is not None:
            self.buffer += part
        out, self.buffer = self.buffer[:size], self.buffer[size:]
        self.taken += len(out)
        return out


def test_a_long_list_needs_little_memory():
    item = json.dumps({"text": "word " * 200})
    stream = Endless(item, 20_000, start="[" + item)  # 20 MB
    tracemalloc.start()
    try:
        with pytest.raises(BrokenFile):  # the list is not closed
            for _ in read_json(stream, chunk=2**16):
                pass
        assert stream.taken > 19_000_000 and tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_a_malformed_item_is_found_at_once():
    stream = Endless('{"text": "x"}', 1_000_000, start='[{"text": oops}')
    with pytest.raises(BrokenFile, match="line 1: bad JSON: Expecting value"):
        list(read_json(stream, chunk=1000))
    assert stream.taken <= 2000


# --- whatever the bytes ---------------------------------------------------------------------------------

fragments = st.sampled_from(
    [
        b'{"text": "a b"}',
        b"\n",
        b"\r\n",
        b"[",
        b"]",
        b",",
        b"{",
        b'"',
        b"\xff",
        b"\xef\xbb\xbf",
        b'"text"',
        b":",
        b"\x00",
        b" ",
        b"\\u",
        b"d800",
        b"1e999",
        b"NaN",
        b"\x1f\x8b",
        b"\x28\xb5\x2f\xfd",
    ]
)
contents = st.lists(fragments | st.binary(max_size=8), max_size=25).map(b"".join)


@QUICK
@given(
    contents,
    st.sampled_from([".jsonl", ".json", ".txt", ".jsonl.gz", ".jsonl.zst", ".txt.zst"]),
    st.booleans(),
    st.sampled_from(documents.TXT_DOCUMENTS),
    st.booleans(),
)
def test_any_bytes_give_documents_counts_or_a_value_error(
    tmp_path, content, suffix, strict, txt_documents, compress
):
    if compress:
        content = gzip.compress(content) if suffix.endswith("gz") else zstd_frames(content)
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    reader = DocumentReader([path], txt_documents=txt_documents, strict=strict)
    try:
        found = list(reader)
    except ValueError as error:
        assert path.name in str(error)
    else:
        assert len(found) == reader.documents and (found or reader.skipped.total)
        assert all(check_text(text) == text for text in found)


@QUICK
@given(contents)
def test_each_line_is_a_document_or_counted(tmp_path, content):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{}\n" + content)  # never UTF-16
    reader = DocumentReader([path])
    found = list(reader)
    lines = (b"{}\n" + content).split(b"\n")
    assert len(found) + reader.skipped.total == len(lines) - (lines[-1] == b"")


@QUICK
@given(st.lists(st.text(max_size=30), max_size=50), st.integers(1, 60), st.integers(1, 10))
def test_batches_keep_order_and_bounds(texts, max_chars, max_texts):
    made = list(batches(texts, max_chars, max_texts))
    assert [text for batch in made for text in batch] == texts
    assert all(0 < len(batch) <= max_texts and sum(map(len, batch[:-1])) < max_chars for batch in made)
