"""Instruction data: reading, templates, encoding, packing, batches."""

from __future__ import annotations

import gzip
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ernie35se.data import sft
from ernie35se.data.records import Conversation, find_split_files, read_conversations
from ernie35se.data.sft import IGNORED, Encoder, Limits
from ernie35se.data.templates import Template, encode_segments, load_template

BOS, EOS, PAD = 1, 2, 0


def words_to_ids(text: str) -> list[int]:
    """One id a character, away from the special ids."""
    return [ord(letter) + 10 for letter in text]


def ids_to_words(ids) -> str:
    return "".join({BOS: "<s>", EOS: "</s>"}.get(i) or chr(i - 10) for i in ids)


def conversation(*turns, system=None) -> Conversation:
    return Conversation(tuple(turns), system, "here:1")


def encoder(template="plain", **limits) -> Encoder:
    return Encoder(
        words_to_ids, load_template(template), EOS, BOS, Limits.of(**limits), {"<s>": BOS, "</s>": EOS}
    )


def write(path, records, lines=True, bom=False):
    text = "\n".join(map(json.dumps, records)) if lines else json.dumps(records, indent=1)
    path.write_text(("\ufeff" if bom else "") + text, encoding="utf-8")
    return path


# -------------------------------------------------------------------------------------------------------
# records


@pytest.mark.parametrize(
    "record, turns, system",
    [
        (
            {"instruction": "swap", "input": "three moon", "output": "moon three"},
            [("swap\nthree moon", "moon three")],
            None,
        ),
        ({"instruction": "a", "output": "b", "history": [["q", "r"]]}, [("q", "r"), ("a", "b")], None),
        ({"src": "a", "tgt": "b"}, [("a", "b")], None),
        ({"src": ["a", "c"], "tgt": ["b", "d"]}, [("a", "b"), ("c", "d")], None),
        (
            {"context": "x y", "question": "why?", "answers": {"text": ["y", "z"], "answer_start": [2]}},
            [("answer: y context: x y", "question: why?")],
            None,
        ),
        (
            {"context": "x", "question": "q", "answers": ["y"]},
            [("answer: y context: x", "question: q")],
            None,
        ),
        (
            {
                "messages": [
                    {"role": r, "content": c} for r, c in (("system", "s"), ("user", "u"), ("assistant", "v"))
                ]
            },
            [("u", "v")],
            "s",
        ),
    ],
)
@pytest.mark.parametrize("lines, bom", [(True, False), (False, True)])
def test_each_form_becomes_a_conversation(tmp_path, record, turns, system, lines, bom):
    file = write(tmp_path / "train.json", [record, record], lines, bom)
    read = read_conversations([file])
    assert [list(c.turns) for c in read] == [turns, turns]
    assert read[0].system == system
    assert read[1].place.startswith(f"{file}:") and read[1].place != read[0].place


def test_gz_and_skipped_records(tmp_path):
    records = [{"src": "a", "tgt": "b"}, {"src": "a", "tgt": " "}]
    with gzip.open(tmp_path / "train.jsonl.gz", "wt", encoding="utf-8") as stream:
        stream.write("\n".join(map(json.dumps, records)) + "\n\n")
    questions = [{"context": "c", "question": "q", "answers": {"text": []}}, {"context": "c", "question": "q", "answers": [" "]}]
    squad = write(tmp_path / "dev.json", [*questions, {"context": "c", "question": "", "answers": ["a"]}])
    skipped = Counter()
    assert len(read_conversations([tmp_path / "train.jsonl.gz", squad], skipped)) == 1
    assert skipped == {"empty response": 2, "no answer": 2}


def test_line_numbers_in_a_list_are_those_of_the_records(tmp_path):
    file = tmp_path / "train.json"
    file.write_text('[\n{"src": "a",\n"tgt": "b"},\n\n{"src": 3, "tgt": "b"}]', encoding="utf-8")
    with pytest.raises(ValueError, match=r"train\.json:5: field 'src' is 3"):
        read_conversations([file])


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"src": "a", "tgt": "b"}\n{"src": "a"}', r":2: field 'tgt' is missing"),
        ('{"text": "a"}', r":1: has the fields 'text'"),
        ('{"src": ["a"], "tgt": ["b", "c"]}', "'src' has 1 turns and 'tgt' 2"),
        ('{"src": "a", "tgt": "b"', ":1: not JSON"),
        ('[{"src": "a", "tgt": "b"} {"src": "a", "tgt": "b"}]', "comma or the list's end"),
        ('[{"src": "a", "tgt": "b"}', "cut off"),
        ("[1]", "a JSON int"),
        ('[{"src": "a", "tgt": "b"}]\n\n[{"src": "a", "tgt": "b"}]', r":3: '\[.*' follows the list's end"),
        ('[{"src": "a", "tgt": "b"}] x', r":1: 'x' follows the list's end"),
        ('{"src": "a", "tgt": "b"}\n{"src": "moon\\ud83c", "tgt": "b"}', r":2: 'moon' is followed by '\\ud83c', half of"),
        ('{"instruction": "a", "output": "b", "system": "\\udf1a"}', r":1: '' is followed by '\\udf1a', half of"),
        ('{"instruction": "a", "output": "b", "history": [["q"]]}', "'history' holds"),
        ('{"context": "a", "question": "b", "answers": 3}', "'answers' is 3"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "the roles are user"),
        ('{"messages": [{"role": "user"}]}', "message 1: field 'content' is missing"),
    ],
)
def test_a_bad_record_is_named(tmp_path, text, message):
    file = tmp_path / "train.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_conversations([file])


def test_a_character_spelt_as_two_halves_is_whole(tmp_path):
    (tmp_path / "train.json").write_text('{"src": "\\ud83c\\udf1a", "tgt": "b"}\n', encoding="utf-8")
    assert read_conversations([tmp_path / "train.json"])[0].turns == (("\U0001f31a", "b"),)


def test_split_files(tmp_path):
    (tmp_path / "train").mkdir()
    for name in ("train/b.json", "train/a.jsonl", "train/notes.txt", "dev.json"):
        write(tmp_path / name, [])
    found = find_split_files(tmp_path)
    assert [file.name for file in found["train"]] == ["a.jsonl", "b.json"] and [
        f.name for f in found["dev"]
    ] == ["dev.json"]
    assert find_split_files(tmp_path / "dev.json") == {"train": [tmp_path / "dev.json"]}
    with pytest.raises(ValueError, match="holds a.jsonl, b.json, notes.txt"):
        find_split_files(tmp_path / "train")
    with pytest.raises(ValueError, match="no such folder"):
        find_split_files(tmp_path / "absent")


# -----------------------------------------------------------------------------------------------------
# templates


def test_users_text_never_becomes_a_special_token():
    made = encoder()(conversation(("a</s>b<s>", "c</s>")))
    assert Counter(made["input_ids"])[EOS] == 0 and made["input_ids"].count(BOS) == 1
    assert made["labels"].count(EOS) == 1 and made["labels"][-1] == EOS
    chat = Template("t", "<|x|>{{ prompt }}<|x|>")
    segments = chat.prompts([("<|x|>", "")], None)[0]
    assert encode_segments(segments, words_to_ids, {"<|x|>": 5}) == [5, *words_to_ids("<|x|>"), 5]


def test_text_between_special_tokens_is_tokenised_as_one_piece():
    seen = []
    segments = Template("t", "Q: {{ prompt }} A:<|x|>end").prompts([("why", "")], None)[0]
    encode_segments(segments, lambda text: seen.append(text) or [9], {"<|x|>": 5})
    assert seen == ["Q: why A:", "end"]


MESSAGES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_chatml_equals_the_messages_template():
    """The named template and the Hugging Face form of it render a conversation alike, when EOS is
    <|im_end|>."""
    turns = [("u1", "r1"), ("u2", "r2")]

    def rendered(template):
        prompts = template.prompts(turns, "sys", "<|im_end|>")
        texts = ["".join(segment.text for segment in prompt) for prompt in prompts]
        return "".join(text + response + "<|im_end|>" for text, (_, response) in zip(texts, turns))

    whole = rendered(load_template("chatml"))
    assert rendered(load_template("tokenizer", MESSAGES)) == whole
    assert whole == (
        "<|im_start|>system\nsys<|im_end|>\n<|im_start|>user\nu1<|im_end|>\n<|im_start|>assistant\nr1<|im_end|>"
        "\n"
        "<|im_start|>user\nu2<|im_end|>\n<|im_start|>assistant\nr2<|im_end|>"
    )


def test_plain_and_alpaca_templates():
    texts = [
        "".join(s.text for s in segments)
        for segments in load_template("alpaca").prompts([("a", "b"), ("c", "d")], "S")
    ]
    assert texts == [
        "S\n\n### Instruction:\na\n\n### Response:\n",
        "\n\n### Instruction:\nc\n\n### Response:\n",
    ]
    assert load_template(None).prompts([("a", "b")], None) == [[("a", True)]]


@pytest.mark.parametrize(
    "name, source, message",
    [
        ("nothing", None, "neither a file nor one of plain, alpaca, chatml, tokenizer"),
        ("tokenizer", None, "no chat template of its own"),
        ("tokenizer", "{{ query }}", r"uses \['query'\]"),
        ("tokenizer", "{% if %}", "line 1"),
    ],
)
def test_bad_templates_are_refused(name, source, message):
    with pytest.raises(ValueError, match=message):
        load_template(name, source)


def test_template_file_and_sandbox(tmp_path):
    (tmp_path / "latin.jinja").write_bytes("{{ prompt }} \xfc".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.jinja': byte 13 is not UTF-8; save the file as UTF-8"):
        load_template(str(tmp_path / "latin.jinja"))
    (tmp_path / "t.jinja").write_text("Frage: {{ prompt | trim }}", encoding="utf-8")
    template = load_template(str(tmp_path / "t.jinja"))
    assert "".join(segment.text for segment in template.prompts([("x", "")], None)[0]) == "Frage: x"
    unsafe = Template("t", "{{ prompt.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="unsafe"):
        unsafe.prompts([("x", "")], None)


@pytest.mark.parametrize(
    "source, message",
    [
        ("{{ prompt + 1 }}", "TypeError: can only concatenate"),
        ("{{ prompt }}{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% include 'x' %}{{ prompt }}", "TypeError: no loader"),
        ("{% for i in range(10 ** 9) %}{{ prompt }}{% endfor %}", "OverflowError"),
        ("{{ prompt }}{{ raise_exception('only once') }}", "template 't': only once$"),
        ("{{ prompt[:6] }}<|x|>", "cuts or splits the user's text"),
        ("{{ prompt | truncate(8) }}<|x|>", "cuts or splits the user's text"),
        ("{{ prompt.split(' ')[0] }}", "cuts or splits the user's text"),
        ("{% if index %}{{ prompt }}{% endif %}x", "leaves out the prompt"),
        ("{% for m in messages %}{{ m.content[:3] }}{% endfor %}", "cuts or splits"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "leaves out the prompt"),
    ],
)
def test_templates_that_fail_or_lose_the_users_text_are_refused(source, message):
    with pytest.raises(ValueError, match=message):
        Template("t", source).prompts([("<|x|> one two three", "")], None)


def test_a_messages_template_may_trim_and_break():
    """What ours makes of it, beside jinja itself: text that a template trims is trimmed, responses are as they are."""
    import jinja2

    source = (
        "{% for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}"
        "<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    turns = [(" one\n", " two "), ("three  four ", "five")]
    prompts = Template("t", source).prompts(turns, "  sys ", eos="</>")
    texts = ["".join(segment.text for segment in prompt) for prompt in prompts]
    messages = [{"role": "system", "content": "  sys "}]
    for prompt, response in turns:
        messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    whole = environment.from_string(source).render(messages=messages[:-1], add_generation_prompt=True)
    assert texts[0] + "two</>" + texts[1] == whole
    users = [[segment.text for segment in prompt if segment.from_user] for prompt in prompts]
    assert users == [["sys", "one"], ["three  four"]]


# ------------------------------------------------------------------------------------------------------
# encoding


def test_labels_are_the_next_tokens_of_responses_alone():
    made = encoder()(conversation(("ab", "c"), ("d", "ef")))
    tokens = [BOS, *words_to_ids("ab"), *words_to_ids("c"), EOS, *words_to_ids("d"), *words_to_ids("ef"), EOS]
    learnt = [0, 0, 0, 1, 1, 0, 1, 1, 1]
    assert made["input_ids"] == tokens[:-1]
    assert made["labels"] == [t if k else IGNORED for t, k in zip(tokens[1:], learnt[1:])]
    assert made["lengths"] == [len(tokens) - 1]


def test_an_empty_prompt_is_one_token():
    """BOS, or EOS where there is none: all of the response is learnt, and generation has something to begin with."""
    for bos, first in ((BOS, BOS), (None, EOS)):
        make = Encoder(words_to_ids, load_template(), EOS, bos)
        for talk in (conversation(("", "ab")), conversation(("", "x"), ("", "ab"))):
            *earlier, (_, _) = talk.turns
            tokens = [first, *(token for _, r in earlier for token in [*words_to_ids(r), EOS])]
            made = make(talk)
            assert made["input_ids"] == [*tokens, *words_to_ids("ab")] and made["labels"][-3:] == [*words_to_ids("ab"), EOS]
            assert IGNORED not in made["labels"] and make.prompt_ids(talk)[0] == tokens


def test_prompt_and_response_are_tokenised_apart():
    seen = []
    Encoder(lambda text: seen.append(text) or [9], load_template(), EOS)(conversation(("in", "formation")))
    assert sorted(seen) == ["formation", "in"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), min_size=1, max_size=4),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(0, 30),
)
def test_whatever_the_limits_samples_keep_to_them(sizes, src, tgt, extra):
    turns = [("p" * a, "r" * b) for a, b in sizes]
    limits = dict(src_length=src, tgt_length=tgt, max_length=max(src + 1, src + tgt - extra))
    made = encoder(**limits)(conversation(*turns))
    tokens = [made["input_ids"][0], *made["input_ids"][1:], EOS]
    learnt = [False, *(label != IGNORED for label in made["labels"])]
    assert len(tokens) <= limits["max_length"]
    runs, previous = [], None
    for flag in learnt:
        runs.append(1) if flag != previous else runs.__setitem__(-1, runs[-1] + 1)
        previous = flag
    prompts = runs[0::2]
    assert all(length <= src for length in prompts)
    assert made["labels"][-1] == EOS and tokens[0] == BOS
    fits = (
        all(a + (i == 0) <= src and b + 1 <= tgt for i, (a, b) in enumerate(sizes))
        and sum(a + b + 1 for a, b in sizes) < limits["max_length"]
    )
    whole = encoder(src_length=1000, max_length=5000)(conversation(*turns))
    assert (made == whole) == fits
    dropped = encoder(**limits, strategy="drop")(conversation(*turns))
    assert (dropped is not None) == fits
    if not fits:
        with pytest.raises(ValueError, match="here:1: .*src_length|tgt_length|max_length"):
            encoder(**limits, strategy="raise")(conversation(*turns))


def test_keep_answer_keeps_the_answer_and_both_ends_of_the_prompt():
    make = encoder(src_length=8, max_length=16)
    made = make(conversation(("abcdefghijklmnopqrst", "xyz")))
    assert ids_to_words([*made["input_ids"], made["labels"][-1]]) == "<s>abcqrst" + "xyz</s>"
    assert make.counts == {"records": 1, "kept": 1, "prompts cut": 1}


def test_old_turns_go_first():
    make = encoder(src_length=8, tgt_length=8, max_length=10)
    made = make(conversation(("aaa", "bb"), ("ccc", "dd")))
    assert ids_to_words([*made["input_ids"], EOS]) == "<s>cccdd</s>"
    assert make.counts["turns left out"] == 1


def test_default_lengths():
    assert (Limits.of().src_length, Limits.of().tgt_length, Limits.of().max_length) == (128, 160, 288)
    assert Limits.of(src_length=1024, max_length=2048).tgt_length == 1024
    assert Limits.of(src_length=100, tgt_length=50).max_length == 150
    with pytest.raises(ValueError, match="src_length 20"):
        Limits.of(src_length=20, max_length=20)
    with pytest.raises(ValueError, match="truncation_strategy = 'cut'"):
        Limits.of(strategy="cut")


def test_prompt_for_generation_is_what_training_saw():
    make = encoder()
    talk = conversation(("ab", "c"), ("d", "ef"))
    ids, answer = make.prompt_ids(talk)
    assert ids == make(talk)["input_ids"][: len(ids)] and answer == "ef"
    assert make(talk)["labels"][len(ids) - 1] == words_to_ids("e")[0]
    short, _ = encoder(src_length=5, max_length=8).prompt_ids(conversation(("abcdefgh", "x")))
    assert ids_to_words(short) == "<s>abgh"
    make = encoder(src_length=5, tgt_length=3, max_length=30)  # room for more than one prompt may have
    long = conversation(("abcdefgh", "stuv"), ("ijklmnop", "w"))
    ids, answer = make.prompt_ids(long)
    assert ids_to_words(ids) == "<s>abghst</s>ijkop" and answer == "w"
    assert ids == make(long)["input_ids"][: len(ids)]


# -------------------------------------------------------------------------------------------------------
# packing


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=40), st.booleans())
def test_packing_places_each_sample_once(lengths, greedy):
    rows = sft.pack(lengths, 20, greedy)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[number] for number in row) <= 20 for row in rows)
    if greedy:
        assert len(rows) <= len(sft.pack(lengths, 20)) or len(rows) <= sum(lengths) / 20 * 1.5 + 1


def test_greedy_packs_tighter_and_overlong_is_refused():
    lengths = [11, 10, 9, 10, 11, 9]
    assert len(sft.pack(lengths, 20)) == 4 and len(sft.pack(lengths, 20, greedy=True)) == 3
    with pytest.raises(ValueError, match="sample 1 has 21 tokens"):
        sft.pack([3, 21], 20)


def brute_force_allowed(lengths, width):
    owner = [number for number, length in enumerate(lengths) for _ in range(length)]
    return [
        [s <= t < len(owner) and s < len(owner) and owner[s] == owner[t] for s in range(width)]
        for t in range(width)
    ]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=3), st.booleans())
def test_masks_and_positions_by_brute_force(rows, flash_mask):
    samples = [{"input_ids": [7] * sum(r), "labels": [8] * sum(r), "lengths": r} for r in rows]
    batch = sft.collate(samples, PAD, flash_mask)
    width = max(map(sum, rows))
    for row, lengths in enumerate(rows):
        positions = [i for length in lengths for i in range(length)]
        real = len(positions)
        assert batch["position_ids"][row].tolist() == positions + [0] * (width - real)
        assert batch["labels"][row].tolist() == [8] * real + [IGNORED] * (width - real)
        assert batch["input_ids"][row].tolist() == [7] * real + [PAD] * (width - real)
        expected = np.array(brute_force_allowed(lengths, width))
        columns, lines = np.arange(width)[None], np.arange(width)[:, None]
        if flash_mask:
            ends = batch["attn_mask_startend_row_indices"][row, 0]
            allowed = (columns <= lines) & (lines < ends[None])
        elif "attention_mask" not in batch:
            allowed = columns <= lines
        elif batch["attention_mask"].ndim == 2:
            allowed = (columns <= lines) & batch["attention_mask"][row].astype(bool)[None]
        else:
            allowed = batch["attention_mask"][row, 0]
        assert (allowed[:real] == expected[:real]).all()


def test_mask_only_where_it_is_needed():
    sample = {"input_ids": [7, 7], "labels": [8, 8], "lengths": [2]}
    longer = {"input_ids": [7] * 3, "labels": [8] * 3, "lengths": [3]}
    assert "attention_mask" not in sft.collate([sample, sample], PAD)
    assert sft.collate([sample, longer], PAD)["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert sft.collate([sft.join([sample, longer])], PAD)["attention_mask"].shape == (1, 1, 5, 5)
    assert sft.padding_share([sample, longer]) == pytest.approx(1 / 6)


def test_prompts_are_padded_on_the_left():
    batch = sft.collate_prompts([[5], [6, 7]], PAD)
    assert batch["input_ids"].tolist() == [[PAD, 5], [6, 7]] and batch["attention_mask"].tolist() == [
        [0, 1],
        [1, 1],
    ]


def test_preview_marks_what_is_learnt():
    make = encoder()
    row = sft.join([make(conversation(("ab", "c"), ("d", "e"))), make(conversation(("f", "g")))])
    assert sft.preview(row, ids_to_words) == "<s>ab[[c</s>]]d[[e</s>]]\n<s>f[[g</s>]]"


def test_histogram_counts_everything():
    lines = sft.length_histogram([1, 1, 9, 16], bins=4)
    assert [int(line.split()[-1]) for line in lines] == [2, 0, 1, 1]
