"""Train a SentencePiece BPE tokenizer with byte fallback: ids 0 <unk>, 1 <s>, 2 </s>, 256 bytes, pieces.

Reads .jsonl, .json, .txt, plain or with .gz or .zst, or folders of them, and writes a folder that
Ernie35Tokenizer and the other tools load: sentencepiece.bpe.model, tokenizer_config.json,
special_tokens_map.json.

The choices are those of ERNIE-3.5-SE's own tokenizer: text is taken as it is (no Unicode normalisation),
every digit is a piece of its own, and line ends, tabs and other control characters stay single byte pieces,
so they survive encoding. Runs of spaces become one space, and spaces at a document's ends go;
--keep_whitespace keeps every one of them (for code). Characters rarer than --character_coverage allows are
spelt in bytes. Equal text and settings give an equal model.
"""

from __future__ import annotations

import io
import itertools
import re
import sys
from pathlib import Path
from typing import Iterable, Iterator, Sequence

from _common import TOKENIZER_FILE, make_parser, positive, progress_bar, run_tool, write_json, written_whole

from ernie35se.data.documents import TXT_DOCUMENTS, DocumentReader

# SentencePiece leaves out longer sentences without a word: 1,024 characters are at most 4,096 bytes, below
# its 4,192.
MAX_SENTENCE_CHARS = 1024
SAMPLING_SEED = 0
_CONTROL = re.compile(r"[\x00-\x1f\x7f]+")
EXAMPLE = (
    "  python tools/train_tokenizer.py --input_path data/demo/corpus.jsonl --vocab_size 4096 "
    "--output_dir data/demo/tokenizer"
)


def sentences(texts: Iterable[str]) -> Iterator[str]:
    """The stretches between control characters, cut where they are over-long. Those characters thus never
    become part of a piece, which leaves them to the byte pieces."""
    for text in texts:
        for stretch in _CONTROL.split(text):
            for start in range(0, len(stretch), MAX_SENTENCE_CHARS):
                yield stretch[start : start + MAX_SENTENCE_CHARS]


def train(
    texts: Iterable[str],
    vocab_size: int,
    character_coverage: float = 0.9995,
    keep_whitespace: bool = False,
    max_sentences: int = 0,
) -> bytes:
    """The serialized model. Raises ValueError for a vocabulary that the text cannot fill, or that cannot hold
    the characters; the message has the bound."""
    import sentencepiece

    sentencepiece.set_random_generator_seed(SAMPLING_SEED)
    model = io.BytesIO()
    faults: list[Exception] = []  # of `texts`: SentencePiece turns them into text of its own
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(_noted(texts, faults)),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=character_coverage,
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=not keep_whitespace,
            allow_whitespace_only_pieces=keep_whitespace,
            input_sentence_size=max_sentences,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise faults[0] if faults else ValueError(_explained(str(error), vocab_size)) from None
    return model.getvalue()


def _noted(texts: Iterable[str], faults: list[Exception]) -> Iterator[str]:
    """The texts; an exception of theirs joins `faults` on its way out."""
    try:
        yield from texts
    except Exception as error:
        faults.append(error)
        raise


def _explained(error: str, vocab_size: int) -> str:
    """SentencePiece's error in a user's words."""
    if found := re.search(r"Vocabulary size too high .*<= (\d+)", error):
        return (
            f"--vocab_size {vocab_size} is more than this text can fill: at most {found[1]}; lower it, or "
            "train on "
            "more text"
        )
    if found := re.search(r"smaller than required_chars. \d+ vs (\d+)", error):
        return (
            f"--vocab_size {vocab_size} is too small: the characters of this text need {found[1]} at least; "
            "raise it, "
            "or lower --character_coverage"
        )
    if "sentences_.empty()" in error:
        return "the input holds nothing but control characters"
    return f"SentencePiece could not train: {error}"


def tokenizer_config(model_max_length: int) -> tuple[dict, dict]:
    """(tokenizer_config.json, special_tokens_map.json) in the form of the public ERNIE-3.5-SE tokenizer."""

    def token(content: str) -> dict:
        return {
            "content": content,
            "lstrip": False,
            "normalized": True,
            "rstrip": False,
            "single_word": False,
        }

    special = {"bos_token": token("<s>"), "eos_token": token("</s>"), "unk_token": token("<unk>")}
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "model_max_length": model_max_length,
        "pad_token": None,
        "sp_model_kwargs": {},
        "tokenizer_class": "Ernie35Tokenizer",
        "clean_up_tokenization_spaces": False,
        **{name: {"__type": "AddedToken", **value} for name, value in special.items()},
    }
    return config, special


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, EXAMPLE)
    parser.add_argument("--input_path", required=True, nargs="+", help="files and folders of text")
    parser.add_argument(
        "--output_dir", required=True, help="folder to write the tokenizer into (made if missing)"
    )
    parser.add_argument(
        "--vocab_size", type=positive, default=32000, help="pieces in all (default: %(default)s)"
    )
    parser.add_argument(
        "--json_key", default="text", help="field of a JSON record that holds the text (default: text)"
    )
    parser.add_argument(
        "--txt_documents",
        choices=TXT_DOCUMENTS,
        default="blank_line",
        help="what separates the documents of a .txt file (default: %(default)s)",
    )
    parser.add_argument(
        "--character_coverage",
        type=float,
        default=0.9995,
        help="share of the text's characters that get a piece of their own (default: %(default)s)",
    )
    parser.add_argument("--keep_whitespace", action="store_true", help="keep runs of spaces and outer spaces")
    parser.add_argument(
        "--max_sentences",
        type=positive,
        default=5_000_000,
        help="train on a random sample of so many lines, which bounds the memory (default: %(default)s)",
    )
    parser.add_argument(
        "--skip_broken_files",
        action="store_true",
        help="keep what can be read of truncated and damaged files, instead of stopping there",
    )
    parser.add_argument(
        "--model_max_length",
        type=positive,
        default=4096,
        help="tokens a model takes, for tokenizer_config.json (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    if not 0.9 <= args.character_coverage <= 1:
        raise ValueError(f"--character_coverage {args.character_coverage}: expected 0.9 to 1")

    if not args.output_dir:
        raise ValueError("--output_dir is empty; expected a folder to write the tokenizer into")
    folder = Path(args.output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir {folder}: is a file, expected a folder")
    reader = DocumentReader(
        args.input_path, args.json_key, args.txt_documents, skip_broken_files=args.skip_broken_files
    )
    documents = iter(reader)
    if (first := next(documents, None)) is None:
        raise reader.found_nothing()
    with progress_bar(reader.total_bytes, "reading") as bar:
        texts = itertools.chain([first], _watched(documents, reader, bar))
        model = train(
            texts, args.vocab_size, args.character_coverage, args.keep_whitespace, args.max_sentences
        )
    if reader.skipped.total:
        print(f"skipped:\n{reader.skipped}", file=sys.stderr)

    config, special = tokenizer_config(args.model_max_length)
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "special_tokens_map.json", special)
    with written_whole(folder / TOKENIZER_FILE, "wb") as stream:
        stream.write(model)
    print(f"{folder}: {args.vocab_size} pieces from {reader.documents:,} documents")
    return 0


def _watched(documents: Iterator[str], reader: DocumentReader, bar) -> Iterator[str]:
    """The reader's documents, shown on a progress bar; afterwards it says that the training proper begins."""
    for text in documents:
        yield text
        if reader.documents % 64 == 0:
            bar.update(reader.bytes_done - bar.n)
    bar.update(reader.bytes_done - bar.n)
    shown = bar.format_dict["elapsed"] > bar.delay
    bar.set_description("read; merging pairs", refresh=shown)


if __name__ == "__main__":
    run_tool(main)
