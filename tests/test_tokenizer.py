"""Ernie35Tokenizer: reference values, special tokens in text, round trips, and broken folders.

The model is the reference's where it is there, else a small one trained here; reference values need the
former.
"""

import copy
import json
import pickle
import shutil

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from ernie35se.tokenizer import MODEL_FILE, Ernie35Tokenizer

NOUNS = [(a, b) for a in ("cat", "dog", "house", "model", "token") for b in ("tree", "river", "data", "head")]
TEXT = [f"the {noun} of the {other} is {i} and </s> or <s>\n" for i, (noun, other) in enumerate(NOUNS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of a small model, with byte fallback and ids 0 unk / 1 bos / 2 eos."""
    folder = tmp_path_factory.mktemp("tokenizer")
    with open(folder / MODEL_FILE, "wb") as stream:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT), model_writer=stream, vocab_size=340, model_type="bpe",
            byte_fallback=True, minloglevel=2,
        )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Ernie35Tokenizer.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def public(reference):
    return Ernie35Tokenizer.from_pretrained(str(reference / "ernie-tokenizer"))


def test_reference_values(reference, public):
    entries = json.loads((reference / "tokenizer.json").read_text(encoding="utf-8"))
    assert len(entries) == 10
    for entry in entries:
        if "batch" in entry:
            batch = public(entry["batch"], padding=True, return_attention_mask=True)
            for key in ("input_ids", "attention_mask", "position_ids"):
                assert batch[key] == entry[key]
            continue
        assert public(entry["text"])["input_ids"] == entry["input_ids"]
        assert public.decode(entry["input_ids"], skip_special_tokens=True) == entry["decoded"]
        assert public.decode(entry["input_ids"]) == entry["decoded_raw"]
    assert public.vocab_size == len(public) == 32000


def test_defaults(tokenizer):
    assert tokenizer.model_input_names == ["input_ids", "attention_mask", "position_ids"]
    assert (tokenizer.pad_token, tokenizer.pad_token_id, tokenizer.unk_token_id) == ("<unk>", 0, 0)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.padding_side) == (1, 2, "left")
    assert set(tokenizer("the cat")) == {"input_ids", "attention_mask", "position_ids"}
    vocab = tokenizer.get_vocab()
    assert len(vocab) == len(tokenizer) == tokenizer.vocab_size == 340 and vocab["</s>"] == 2


@pytest.mark.parametrize("bos, eos", [(True, False), (True, True), (False, True), (False, False)])
def test_bos_and_eos_flags(folder, bos, eos):
    tokenizer = Ernie35Tokenizer.from_pretrained(str(folder), add_bos_token=bos, add_eos_token=eos)
    plain, second = tokenizer.encode_plain("the cat"), tokenizer.encode_plain("dog")
    expected = [1] * bos + plain + [2] * eos
    encoded = tokenizer("the cat", return_special_tokens_mask=True, return_token_type_ids=True)
    assert encoded["input_ids"] == expected
    assert encoded["special_tokens_mask"] == [int(i in (1, 2)) for i in expected]
    assert encoded["token_type_ids"] == [0] * len(expected)
    assert tokenizer("the cat", "dog")["input_ids"] == [1] * bos + plain + second + [2] * eos
    assert tokenizer.num_special_tokens_to_add(pair=False) == bos + eos
    assert tokenizer("the cat of the house", max_length=5, truncation=True)["input_ids"][0] == (
        1 if bos else plain[0]
    )
    assert len(tokenizer("the cat of the house", max_length=5, truncation=True)["input_ids"]) == 5


def test_left_padding(tokenizer):
    texts = ["the cat of the house is a model", "dog", ""]
    batch = tokenizer(texts, padding=True, return_attention_mask=True, return_tensors="np")
    longest = max(len(tokenizer(text)["input_ids"]) for text in texts)
    for row, text in enumerate(texts):
        ids = tokenizer(text)["input_ids"]
        pad = longest - len(ids)
        assert batch["input_ids"][row].tolist() == [0] * pad + ids
        assert batch["attention_mask"][row].tolist() == [0] * pad + [1] * len(ids)
        assert batch["position_ids"][row].tolist() == [0] * pad + list(range(len(ids)))
    assert batch["input_ids"].dtype == np.int64
    assert tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True) == texts


def test_special_spellings_in_text(folder, tokenizer):
    text = "the cat</s><s>dog <unk>"
    assert {1, 2} <= set(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert Ernie35Tokenizer(str(folder / MODEL_FILE))(text)["input_ids"] == tokenizer(text)["input_ids"]
    for plain in (tokenizer.encode_plain(text), tokenizer(text, split_special_tokens=True)["input_ids"][1:]):
        assert not {0, 1, 2} & set(plain) and tokenizer.decode(plain) == text
    assert tokenizer.encode_plain([text, "dog"], num_threads=2) == [
        tokenizer.encode_plain(t) for t in (text, "dog")
    ]


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.one_of(
    st.text(max_size=8), st.text(st.characters(codec=None), max_size=3),
    st.sampled_from(["<s>", "</s>", "<unk>", "<0x0A>", "▁", "\ud800", "\0", "</", "s>"]),
), max_size=8))  # fmt: skip
def test_no_text_turns_into_special_ids(tokenizer, parts):
    text = "".join(parts)
    ids = tokenizer.encode_plain(text)
    assert not {0, 1, 2} & set(ids)  # with byte fallback nothing is unknown
    assert max(ids, default=3) < tokenizer.vocab_size
    assert tokenizer(text)["input_ids"][0] == 1  # and the usual call takes any text


def test_added_tokens_are_plain_text_to_encode_plain(folder, tmp_path):
    tokenizer = Ernie35Tokenizer.from_pretrained(str(folder))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    assert 340 in tokenizer("<|user|> cat")["input_ids"] and 340 not in tokenizer.encode_plain("<|user|> cat")
    tokenizer.save_pretrained(str(tmp_path))
    again = Ernie35Tokenizer.from_pretrained(str(tmp_path))
    assert again("<|user|> cat") == tokenizer("<|user|> cat") and len(again) == len(tokenizer) == 341
    assert again.get_vocab()["<|user|>"] == 340


def test_decode(tokenizer):
    ids = tokenizer.encode_plain("the cat")
    assert tokenizer.decode([1, *ids, 2, 2]) == "<s>the cat </s></s>"
    assert tokenizer.decode([1, *ids, 2, 0], skip_special_tokens=True) == "the cat"
    assert (
        tokenizer.decode([*ids, 340, 383]) == "the cat <unk><unk>"
    )  # a model's vocabulary is rounded up past the pieces
    assert tokenizer.decode([]) == ""
    text = "emoji 🙂 and accents: é ü ñ, 中文"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_round_trips(folder, tmp_path):
    tokenizer = Ernie35Tokenizer.from_pretrained(str(folder), add_eos_token=True)
    text = "the model</s> of 🙂"
    tokenizer.save_pretrained(str(tmp_path / "saved"))
    copies = [pickle.loads(pickle.dumps(tokenizer)), copy.deepcopy(tokenizer)]
    copies.append(Ernie35Tokenizer.from_pretrained(str(tmp_path / "saved")))
    for other in copies:
        assert other(text) == tokenizer(text) and other.pad_token_id == 0 and other.padding_side == "left"
        assert other.decode(tokenizer(text)["input_ids"]) == tokenizer.decode(tokenizer(text)["input_ids"])
    saved = (tmp_path / "saved" / "tokenizer_config.json").read_text()
    assert json.loads(saved)["tokenizer_class"] == "Ernie35Tokenizer"
    assert str(folder) not in saved and str(tmp_path) not in saved


def test_saves_after_its_folder_is_gone(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "moved")
    tokenizer = Ernie35Tokenizer.from_pretrained(str(tmp_path / "moved"))
    shutil.rmtree(tmp_path / "moved")
    tokenizer.save_pretrained(str(tmp_path / "saved"))
    assert Ernie35Tokenizer.from_pretrained(str(tmp_path / "saved"))("the cat") == tokenizer("the cat")


def test_missing_folders_and_files(folder, tmp_path):
    for name in ("baidu/ernie-3.5-se-3b", str(tmp_path / "nowhere")):
        with pytest.raises(ValueError, match=f"{name}: no such folder.*{MODEL_FILE}.*train_tokenizer.py"):
            Ernie35Tokenizer.from_pretrained(name)
    (tmp_path / "vocab.txt").write_text("")
    with pytest.raises(ValueError, match=f"holds vocab.txt; expected {MODEL_FILE}"):
        Ernie35Tokenizer.from_pretrained(str(tmp_path))
    for file in (None, str(tmp_path / "nothing.model")):
        with pytest.raises(ValueError, match="no such file; expected a SentencePiece model"):
            Ernie35Tokenizer(file)


@pytest.mark.parametrize("content", [
    lambda whole: b"", lambda whole: b"not a model", lambda whole: b"\xff" * 1000,
    lambda whole: whole[: len(whole) // 2], lambda whole: whole.replace(b"<0x0A>", b"<0\xa50A>"),
])  # fmt: skip
def test_corrupt_models(folder, tmp_path, content):
    (tmp_path / MODEL_FILE).write_bytes(content((folder / MODEL_FILE).read_bytes()))
    with pytest.raises(ValueError, match=f"{MODEL_FILE}: .* bytes that are not a SentencePiece model"):
        Ernie35Tokenizer.from_pretrained(str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"])
@pytest.mark.parametrize(
    "content, words", [("{", "not JSON"), ("[1]", "a JSON list; expected a JSON object")]
)
def test_corrupt_settings(folder, tmp_path, name, content, words):
    shutil.copy(folder / MODEL_FILE, tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name}: {words}"):
        Ernie35Tokenizer.from_pretrained(str(tmp_path))


def test_model_without_the_special_tokens(folder):
    with pytest.raises(ValueError, match="no piece '<end>'; expected the special tokens"):
        Ernie35Tokenizer.from_pretrained(str(folder), eos_token="<end>")
