"""The trained tokenizer: its ids, that nothing is lost in it, that it is always the same, what it refuses."""

import gzip
import json
import re

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from train_tokenizer import main, sentences, train

SPACES_AND_WORDS = st.text(max_size=60).filter(lambda text: "\u2581" not in text)


@pytest.fixture(scope="module")
def processor(tokenizer_dir):
    return sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_dir / "sentencepiece.bpe.model"))


@pytest.fixture(scope="module")
def lossless(texts):
    return sentencepiece.SentencePieceProcessor(model_proto=train(texts, 600, keep_whitespace=True))


def test_ids(processor):
    assert processor.vocab_size() == 600
    assert [processor.id_to_piece(number) for number in range(5)] == [
        "<unk>",
        "<s>",
        "</s>",
        "<0x00>",
        "<0x01>",
    ]
    assert (processor.unk_id(), processor.bos_id(), processor.eos_id(), processor.pad_id()) == (0, 1, 2, -1)
    assert [processor.is_byte(number) for number in (2, 3, 258, 259)] == [False, True, True, False]
    pieces = processor.encode("new\nline\ttab", out_type=str)
    assert pieces.count("<0x0A>") == pieces.count("<0x09>") == 1


def test_no_piece_holds_a_control_character_or_two_digits(processor):
    pieces = [processor.id_to_piece(number) for number in range(259, 600)]
    assert not [piece for piece in pieces if re.search(r"[\x00-\x1f]|\d.|.\d", piece)]


@settings(max_examples=150, deadline=None)
@given(SPACES_AND_WORDS)
def test_every_text_is_spelt_without_unknown_pieces(processor, text):
    ids = processor.encode(text)
    assert not {0, 1, 2} & set(ids)
    assert processor.decode(ids) == re.sub(" +", " ", text).strip(" ")


@settings(max_examples=150, deadline=None)
@given(SPACES_AND_WORDS)
def test_keep_whitespace_loses_nothing(lossless, text):
    assert lossless.decode(lossless.encode(text)) == text


def test_keep_whitespace_has_pieces_for_indentation(lossless):
    assert len(lossless.encode("        return")) < 6


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=50), max_size=5), st.integers(0, 3))
def test_sentences_keep_all_but_control_characters(texts, long):
    texts = [*texts, "long " * 1000 * long]
    made = list(sentences(texts))
    assert all(len(sentence.encode("utf-8")) <= 4192 for sentence in made)  # SentencePiece drops longer ones
    assert "".join(made) == re.sub(r"[\x00-\x1f\x7f]", "", "".join(texts))


def test_a_long_line_is_not_dropped(texts):
    line = " ".join(texts).replace("\n", " ")
    assert sentencepiece.SentencePieceProcessor(model_proto=train([line], 600)).vocab_size() == 600


def test_the_same_text_gives_the_same_files(tmp_path, tokenizer_dir, write_jsonl, texts, tool):
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    done = tool(
        "train_tokenizer", "--input_path", source, "--output_dir", tmp_path / "t", "--vocab_size", 600
    )
    assert (
        done.returncode == 0
        and done.stderr == ""
        and f"600 pieces from {len(texts)} documents" in done.stdout
    )
    for name in ("sentencepiece.bpe.model", "tokenizer_config.json", "special_tokens_map.json"):
        assert (tmp_path / "t" / name).read_bytes() == (tokenizer_dir / name).read_bytes()


def test_sampling_is_the_same_each_time(texts):
    assert train(texts, 400, max_sentences=300) == train(texts, 400, max_sentences=300) != train(texts, 400)


def test_the_settings_have_the_public_form(tokenizer_dir, reference):
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        ours, public = (
            json.loads((folder / name).read_text())
            for folder in (tokenizer_dir, reference / "ernie-tokenizer")
        )
        assert ours.pop("model_max_length", 0) >= public.pop("model_max_length", 0)
        assert ours == public


def test_our_tokenizer_class_loads_it(tokenizer_dir, processor):
    from ernie35se.tokenizer import Ernie35Tokenizer

    tokenizer = Ernie35Tokenizer.from_pretrained(str(tokenizer_dir))
    text = "def f(x):\n    return é"
    assert tokenizer(text)["input_ids"] == [1, *processor.encode(text)]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)


def test_a_vocabulary_that_the_text_cannot_fill(texts):
    with pytest.raises(
        ValueError, match="--vocab_size 900000 is more than this text can fill: at most"
    ) as caught:
        train(texts, 900_000)
    most = int(re.search(r"at most (\d+)", str(caught.value))[1])
    assert sentencepiece.SentencePieceProcessor(model_proto=train(texts, most)).vocab_size() == most
    with pytest.raises(ValueError, match="is too small: the characters of this text need"):
        train(texts, 100)


def test_mistakes(tmp_path, write_jsonl, tool):
    source = write_jsonl(tmp_path / "a.jsonl", ["words"])
    (tmp_path / "file").write_text("x")

    def refused(*flags) -> str:
        with pytest.raises(ValueError) as caught:
            main(["--input_path", str(source), "--output_dir", str(tmp_path / "t"), *map(str, flags)])
        return str(caught.value)

    assert "keys seen: text" in refused("--json_key", "body")
    assert "is a file, expected a folder" in refused("--output_dir", tmp_path / "file")
    assert "expected 0.9 to 1" in refused("--character_coverage", 2)
    assert "no such file" in refused("--input_path", tmp_path / "gone")
    assert "a path is empty" in refused("--input_path", "")
    assert "--output_dir is empty" in refused("--output_dir", "")
    assert not (tmp_path / "t").exists()
    done = tool("train_tokenizer", "--input_path", source, "--output_dir", tmp_path / "t")
    assert (
        done.returncode == 2
        and "more than this text can fill" in done.stderr
        and "Traceback" not in done.stderr
    )


def test_a_file_that_breaks_off_is_told_in_its_own_words(tmp_path, texts):
    """SentencePiece would wrap the message in its own and add places in our sources."""
    whole = gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    flags = ["--input_path", str(tmp_path / "cut.jsonl.gz"), "--output_dir", str(tmp_path / "t"), "--vocab_size", "400"]
    with pytest.raises(ValueError) as caught:
        main(flags)
    assert str(caught.value).startswith(f"{tmp_path}/cut.jsonl.gz: cannot be read past line")
    assert "--skip_broken_files" in str(caught.value) and "documents.py" not in str(caught.value)
    assert not (tmp_path / "t").exists()
    assert main([*flags, "--skip_broken_files"]) == 0
