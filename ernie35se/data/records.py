"""Instruction records out of JSON files: whichever of four forms a file has, conversations come out.

    Alpaca     {"instruction": "swap", "input": "three moon", "output": "moon three"}, perhaps with
               "history": [["hi", "hello"]]
    src/tgt    {"src": "swap three moon", "tgt": "moon three"}; lists of equal length are the turns
    SQuAD      {"context": "...", "question": "...", "answers": {"text": ["..."]} or ["..."]}: asks for the
               question
    chat       {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}

A file is JSON lines or one list of records, plain or `.gz`, UTF-8 with or without a byte order mark. Its
first record says which form it has; a record of another form is an error that names file, line and field. A
record with nothing to learn (an empty response, a SQuAD question without an answer) is skipped and counted.
Standard library alone.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import Iterator, NamedTuple

SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
SPLITS = ("train", "dev", "test")
_FORMS = "instruction/output, src/tgt, context/question/answers, or messages"
_PROMPT_FORMS = "src, instruction (with input, system, history), or messages"
_SPACE = re.compile(r"[ \t\n\r]*")
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")  # JSON may spell such; json joins the halves of whole characters


class Conversation(NamedTuple):
    """Turns of (prompt, response), oldest first, and where they come from (`file:line`)."""

    turns: tuple[tuple[str, str], ...]
    system: str | None
    place: str


class Empty(Exception):
    """A record with nothing to learn; the argument is the reason it is counted under."""


def find_split_files(path: str | Path) -> dict[str, list[Path]]:
    """Files of each split: a folder's `train.json`, `dev.jsonl`, ... or `train/*.json`; a single file is all
    train.

    Raises:
        ValueError: no such path, or nothing of the kind in it.
    """
    path = Path(path)
    if path.is_file():
        return {"train": [path]}
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder or file; expected instruction data. {_expected_files()}")
    found = {}
    for split in SPLITS:
        files = [path / (split + suffix) for suffix in SUFFIXES if (path / (split + suffix)).is_file()]
        if (path / split).is_dir():
            files += sorted(file for file in (path / split).iterdir() if file.name.endswith(SUFFIXES))
        if files:
            found[split] = files
    if not found:
        seen = ", ".join(sorted(file.name for file in path.iterdir())[:8]) or "nothing"
        raise ValueError(f"{path}: holds {seen}. {_expected_files()}")
    return found


def read_conversations(files, skipped: Counter | None = None) -> list[Conversation]:
    """All conversations of the files, in order.

    Args:
        skipped: counts of records left out, by reason, are added here.

    Raises:
        ValueError: a file that cannot be read, or a record that is not of its file's form.
    """
    skipped = Counter() if skipped is None else skipped
    conversations = []
    for file in files:
        numbered = ((f"{file}:{line}", record) for line, record in _records(Path(file)))
        conversations += parse_records(numbered, skipped)
    return conversations


def read_prompts(file) -> Iterator[Conversation]:
    """Conversations of a file whose last response is yet to come (it is empty): records as above but for
    SQuAD's, where `tgt`, `output` or the last assistant's message may be missing and is ignored. Records may
    be of different forms.

    Raises:
        ValueError: a file that cannot be read, or a record without a prompt; with file, line and field.
    """
    for line, record in _records(Path(file)):
        place = f"{file}:{line}"
        form, filled = _with_placeholder(record, place)
        try:
            conversation = _PARSERS[form](filled, place)
        except Empty:
            raise ValueError(
                f"{place}: an earlier response is empty; expected text in every turn but the last."
            ) from None
        *earlier, (prompt, _) = conversation.turns
        yield conversation._replace(turns=(*earlier, (prompt, "")))


def _with_placeholder(record, place: str) -> tuple[str, dict]:
    """The record's form, and the record with some last response."""
    to_come = "..."
    if not isinstance(record, dict):
        raise ValueError(f"{place}: a JSON {type(record).__name__}; expected an object with {_PROMPT_FORMS}.")
    if isinstance(record.get("messages"), list):
        messages = record["messages"]
        answered = messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant"
        messages = messages[:-1] if answered else messages
        return "messages", {"messages": [*messages, {"role": "assistant", "content": to_come}]}
    if "instruction" in record:
        return "alpaca", {**record, "output": to_come}
    if "src" not in record:
        seen = ", ".join(map(repr, record)) or "of nothing"
        raise ValueError(f"{place}: has the fields {seen}; expected {_PROMPT_FORMS}.")
    if not isinstance(record["src"], list):
        return "src/tgt", {**record, "tgt": to_come}
    earlier = record.get("tgt") or []
    earlier = earlier if isinstance(earlier, list) else [earlier]
    return "src/tgt", {**record, "tgt": [*earlier[: len(record["src"]) - 1], to_come]}


def parse_records(records, skipped: Counter) -> Iterator[Conversation]:
    """Conversations of (place, record) pairs that all have the form of the first.

    Raises:
        ValueError: a record that is of no form, or of another.
    """
    form = None
    for place, record in records:
        if not isinstance(record, dict):
            raise ValueError(f"{place}: a JSON {type(record).__name__}; expected an object with {_FORMS}.")
        form = form or _detect(record, place)
        try:
            yield _PARSERS[form](record, place)
        except Empty as reason:
            skipped[str(reason)] += 1


def _records(file: Path) -> Iterator[tuple[int, object]]:
    """(line number, value) of each record."""
    text = _read_text(file)
    start = _SPACE.match(text).end()
    in_list = text[start : start + 1] == "["
    if not in_list:
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield number, _decode(line, 0, f"{file}:{number}", whole=True)[0]
        return
    position, line, counted = _SPACE.match(text, start + 1).end(), 1, 0
    while text[position : position + 1] != "]":
        line, counted = line + text.count("\n", counted, position), position
        value, position = _decode(text, position, f"{file}:{line}")
        yield line, value
        position = _SPACE.match(text, position).end()
        if text[position : position + 1] == ",":
            position = _SPACE.match(text, position + 1).end()
        elif text[position : position + 1] != "]":
            line += text.count("\n", counted, position)
            raise ValueError(
                f"{file}:{line}: expected a comma or the list's end after a record. Is the file cut off?"
            )
    rest = _SPACE.match(text, position + 1).end()
    if rest < len(text):
        line += text.count("\n", counted, rest)
        raise ValueError(
            f"{file}:{line}: {text[rest : rest + 20]!r} follows the list's end; expected one list of records and nothing "
            "else. Join lists into one, or write JSON lines."
        )


def _decode(text: str, position: int, place: str, whole: bool = False):
    try:
        if whole:
            return json.loads(text), len(text)
        return json.JSONDecoder().raw_decode(text, position)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = getattr(error, "msg", "nested too deeply")
        raise ValueError(
            f"{place}: not JSON ({reason}); expected JSON lines (one record a line) or one list of records."
        ) from None


def _read_text(file: Path) -> str:
    try:
        data = file.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: byte {error.start} is not UTF-8; save the file as UTF-8.") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file}: cannot be read ({error}). Copy it again.") from None


def _detect(record: dict, place: str) -> str:
    for form, keys in (
        ("messages", {"messages"}),
        ("alpaca", {"instruction", "output"}),
        ("src/tgt", {"src", "tgt"}),
        ("squad", {"context", "question", "answers"}),
    ):
        if keys <= set(record):
            return form
    raise ValueError(
        f"{place}: has the fields {', '.join(map(repr, record)) or 'of nothing'}; expected {_FORMS}."
    )


def _text(record: dict, field: str, place: str, default: str | None = None) -> str:
    """The string under `field`. A default stands in for a missing field or null."""
    value = record.get(field)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        seen = "is missing" if field not in record else f"is {json.dumps(value, ensure_ascii=False)[:80]}"
        raise ValueError(
            f"{place}: field {field!r} {seen}; expected a string, as in the file's first record."
        )
    return value


def _conversation(turns, system: str | None, place: str) -> Conversation:
    for text in (text for turn in [*turns, (system or "",)] for text in turn):
        if found := _HALF_CHARACTER.search(text):
            raise ValueError(
                f"{place}: {text[max(found.start() - 20, 0) : found.start()]!r} is followed by {found.group()!r}, half of a "
                "character (an emoji cut in two?), which no UTF-8 text holds; expected whole characters."
            )
    if not turns or not all(response.strip() for _, response in turns):
        raise Empty("empty response")
    return Conversation(tuple((prompt, response) for prompt, response in turns), system or None, place)


def _alpaca(record: dict, place: str) -> Conversation:
    turns = []
    history = record.get("history") or []
    for pair in history if isinstance(history, list) else [history]:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            seen = json.dumps(pair, ensure_ascii=False)[:80]
            raise ValueError(
                f"{place}: field 'history' holds {seen}; expected a list of [prompt, response] strings."
            )
        turns.append(tuple(pair))
    parts = [_text(record, "instruction", place), _text(record, "input", place, default="")]
    prompt = "\n".join(part for part in parts if part)
    turns.append((prompt, _text(record, "output", place)))
    return _conversation(turns, _text(record, "system", place, default=""), place)


def _source_target(record: dict, place: str) -> Conversation:
    sides = []
    for field in ("src", "tgt"):
        value = record.get(field)
        texts = value if isinstance(value, list) else [_text(record, field, place)]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"{place}: field {field!r} holds something that is no string; expected strings only."
            )
        sides.append(texts)
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"{place}: 'src' has {len(sides[0])} turns and 'tgt' {len(sides[1])}; expected as many of one as "
            "of the other."
        )
    return _conversation(list(zip(*sides)), _text(record, "system", place, default=""), place)


def _squad(record: dict, place: str) -> Conversation:
    answers = record.get("answers")
    texts = answers.get("text") if isinstance(answers, dict) else answers
    if isinstance(texts, str):
        texts = [texts]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        seen = json.dumps(answers, ensure_ascii=False)[:80]
        raise ValueError(
            f"{place}: field 'answers' is {seen}; expected a list of strings, or an object with one in "
            "'text'."
        )
    if not texts or not texts[0].strip():
        raise Empty("no answer")
    context, question = _text(record, "context", place), _text(record, "question", place)
    if not question.strip():
        raise Empty("empty response")
    return _conversation([(f"answer: {texts[0]} context: {context}", f"question: {question}")], None, place)


def _messages(record: dict, place: str) -> Conversation:
    messages = record.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(
            f"{place}: field 'messages' is no list of objects; expected [{{'role': ..., 'content': ...}}]."
        )
    texts = [
        (_text(message, "role", f"{place}: message {i}"), _text(message, "content", f"{place}: message {i}"))
        for i, message in enumerate(messages, 1)
    ]
    system = None
    if texts and texts[0][0] == "system":
        system, texts = texts[0][1], texts[1:]
    roles = [role for role, _ in texts]
    if len(texts) % 2 or roles != ["user", "assistant"] * (len(texts) // 2):
        raise ValueError(
            f"{place}: the roles are "
            f"{', '.join(role for role, _ in [*([('system', '')] if system else []), *texts])}; "
            "expected user and assistant in turn, the last an assistant's, perhaps after one system message."
        )
    contents = [content for _, content in texts]
    return _conversation(list(zip(contents[::2], contents[1::2])), system, place)


_PARSERS = {"alpaca": _alpaca, "src/tgt": _source_target, "squad": _squad, "messages": _messages}


def _expected_files() -> str:
    names = ", ".join(SPLITS)
    return (
        f"Expected {names} with {' or '.join(SUFFIXES)} behind, or a folder of such files for each of them."
    )
