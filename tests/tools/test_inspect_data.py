"""Looking at token files: numbers against brute force, samples against the dataset, the exit status."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece
from inspect_data import decode_visibly, describe, draw_histogram, ending_share, main, parts_of, show_sample

from ernie35se.data.indexed import TokenFileWriter, open_tokens
from ernie35se.data.pretrain import build_train_valid_test_datasets

EOS = 2


@pytest.fixture(scope="module")
def processor(tokenizer_dir):
    return sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_dir / "sentencepiece.bpe.model"))


@pytest.fixture(scope="module")
def prefix(tmp_path_factory, processor, texts) -> str:
    """A token file of the session's texts; every third document lacks its eos."""
    prefix = str(tmp_path_factory.mktemp("tokens") / "corpus")
    with TokenFileWriter(prefix, 600) as writer:
        for number, text in enumerate(texts):
            writer.add_document(np.array(processor.encode(text) + [EOS] * (number % 3 != 0)))
    return prefix


def test_statistics_by_hand(tmp_path):
    np.save(tmp_path / "a_ids.npy", np.array([5, 2, 6, 7, 2, 8, 9, 9, 9], np.uint16))
    np.savez(tmp_path / "a_idx.npz", lens=np.array([2, 2, 1, 4, 0], np.int32), docs=np.array([0, 1, 3, 4, 5]))
    tokens = open_tokens(tmp_path / "a")  # documents: [5 2] [6 7 | 2] [8 9 9 9] []
    assert describe(tokens, EOS) == [
        "documents 4 in 5 sequences; tokens 9; uint16, 0.0 MB",
        "tokens a document: min 0, mean 2.2, median 2, max 4; 1 empty",
        "documents that end in eos (id 2): 50.0%",
    ]


def test_ending_share_equals_brute_force(prefix):
    tokens = open_tokens(prefix)
    ends = [int(tokens.document(number)[-1]) for number in range(tokens.num_documents)]
    assert ending_share(tokens, EOS) == ends.count(EOS) / len(ends) < 1


@pytest.mark.parametrize("length", [7, 64, 1000])
def test_parts_are_what_training_sees(prefix, tmp_path, length):
    dataset = build_train_valid_test_datasets([prefix], "9,1,0", [3000, 0, 0], length, 3, str(tmp_path))[0]
    for index in range(0, len(dataset), 1 + len(dataset) // 50):
        parts = [
            dataset.tokens.read(part.sequence, part.start, part.length) for part in parts_of(dataset, index)
        ]
        assert np.array_equal(np.concatenate(parts), dataset[index]["text"])


def test_boundaries_are_shown(prefix, tmp_path, processor):
    dataset = build_train_valid_test_datasets([prefix], "1,0,0", [1, 0, 0], 300, 3, str(tmp_path))[0]
    lines = list(show_sample(dataset, 0, processor))
    parts = parts_of(dataset, 0)
    assert len(parts) > 1 and len(lines) == 2 * len(parts)
    assert f"document {parts[1].sequence}, tokens 0.." in lines[2]
    inner = "".join(lines[1::2]).count("</s>")
    assert inner == np.count_nonzero(dataset[0]["text"] == EOS) > 0
    bare = list(show_sample(dataset, 0, None))
    assert str(dataset[0]["text"][:4].tolist())[:-1] in bare[1]


def test_control_pieces_and_foreign_ids_are_visible(processor):
    words = processor.encode("two words")
    ids = np.array([1, *words, EOS, *words, 0, 600, 13])
    assert decode_visibly(processor, ids) == "<s>two words</s>two words \u2047 <?600>\n"


def arguments(prefix, *flags) -> list[str]:
    return ["--input_path", str(prefix), *map(str, flags)]


def test_the_samples_shown_are_those_of_training(prefix, tokenizer_dir, processor, tmp_path, capsys):
    flags = [
        "--samples",
        3,
        "--show",
        "valid",
        "--split",
        "8,2",
        "--seed",
        5,
        "--max_seq_length",
        40,
        "--train_samples",
        900,
    ]
    before = sorted(os.listdir(os.path.dirname(prefix)))
    assert main(arguments(prefix, "--tokenizer_name_or_path", tokenizer_dir, *flags)) == 0
    said = capsys.readouterr().out
    dataset = build_train_valid_test_datasets([prefix], "8,2", [0, 900, 0], 40, 5, str(tmp_path))[1]
    for index in range(3):
        assert "\n".join(show_sample(dataset, index, processor)) in said
    assert "valid: lengths, documents and ids within 0..599" in said
    assert sorted(os.listdir(os.path.dirname(prefix))) == before  # nothing is left beside the data


def test_histogram(prefix, tmp_path):
    assert main(arguments(prefix, "--samples", 0, "--histogram", tmp_path / "new" / "h.png")) == 0
    assert (tmp_path / "new" / "h.png").read_bytes().startswith(b"\x89PNG")
    from matplotlib import image

    assert image.imread(tmp_path / "new" / "h.png")[..., :3].std() > 0.05
    for lengths in ([1], [0, 5, 5], [7] * 3 + [1_000_000]):
        draw_histogram(np.array(lengths), "title", str(tmp_path / "h.png"))


def test_exit_status(prefix, tokenizer_dir, tmp_path, tool):
    done = tool("inspect_data", *arguments(prefix, "--vocab_size", 300))
    assert done.returncode == 1 and "invalid: " in done.stderr and "expected ids within 0..299" in done.stderr
    assert "documents" in done.stdout and "Traceback" not in done.stderr
    for name in ("gone", "none"):
        assert tool("inspect_data", *arguments(tmp_path / name)).returncode == 2
    with TokenFileWriter(tmp_path / "a", 600) as writer:
        writer.add_document(np.arange(5))
    data = (tmp_path / "a_ids.npy").read_bytes()
    (tmp_path / "a_ids.npy").write_bytes(data[:-2])
    done = tool("inspect_data", *arguments(tmp_path))
    assert done.returncode == 1 and "a_ids.npy" in done.stderr and "Traceback" not in done.stderr
    assert tool("inspect_data", *arguments(prefix, "--tokenizer_name_or_path", tmp_path)).returncode == 2


def test_a_corpus_too_short_for_the_samples(tmp_path, capsys):
    with TokenFileWriter(tmp_path / "a", 600) as writer:
        writer.add_document(np.arange(5))
    with pytest.raises(ValueError, match="a"):
        main(arguments(tmp_path / "a", "--max_seq_length", 100))
    assert main(arguments(tmp_path / "a", "--show", "test", "--split", "1,0,0")) == 0
    assert "the test split of --split 1,0,0 has no documents" in capsys.readouterr().out


def test_parts_of_a_single_sequence():
    maps = SimpleNamespace(
        shuffle_idx=np.array([1, 0]), sample_idx=np.array([[0, 0], [0, 4], [1, 1]]), doc_idx=np.array([3, 2])
    )
    dataset = SimpleNamespace(maps=maps, tokens=SimpleNamespace(lens=np.array([0, 0, 9, 7])))
    assert parts_of(dataset, 1) == [(3, 0, 5)]
    assert parts_of(dataset, 0) == [(3, 4, 3), (2, 0, 2)]
