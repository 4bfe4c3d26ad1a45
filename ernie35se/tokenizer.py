"""Ernie35Tokenizer: SentencePiece BPE (Kudo & Richardson 2018, arXiv:1808.06226) in PaddleNLP's tokenizer
interface.

The model file is `sentencepiece.bpe.model` in the tokenizer's folder: ids 0 unk, 1 bos, 2 eos. A
beginning-of-sequence id is added, an end is not (`add_bos_token`, `add_eos_token`); padding is on the left,
with unk, which has no token of its own to spare; a padded row's position_ids start at 0 at its first real
token.

Text that spells a special token ("</s>") becomes that token, as in PaddleNLP's other tokenizers. Text that
comes from users or corpora must not: `encode_plain` knows no special tokens at all (nor does a call with
`split_special_tokens=True`).
"""

from __future__ import annotations

import json
import os

import sentencepiece
from paddlenlp.transformers import PretrainedTokenizer

MODEL_FILE = "sentencepiece.bpe.model"
_WHERE_FROM = (
    "Train one with tools/train_tokenizer.py, or take the public one from PaddleNLP's repository, "
    "llm/experimental/ernie-3.5-se/ernie-tokenizer."
)


class Ernie35Tokenizer(PretrainedTokenizer):
    """Tokenizer of ERNIE-3.5-SE.

    Args: `vocab_file`, the SentencePiece model; the spelling of the special tokens (`pad_token` None means
    unk); `add_bos_token`, `add_eos_token`; `sp_model_kwargs` for `SentencePieceProcessor`.

    Raises ValueError when the model file is missing or corrupt, or lacks one of the special tokens.
    """

    resource_files_names = {"vocab_file": MODEL_FILE}
    pretrained_resource_files_map: dict = {}
    pretrained_init_configuration: dict = {}
    model_input_names = ["input_ids", "attention_mask", "position_ids"]
    padding_side = "left"

    def __init__(
        self,
        vocab_file=None,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token=None,
        add_bos_token=True,
        add_eos_token=False,
        sp_model_kwargs=None,
        **kwargs,
    ):
        super().__init__(
            unk_token=unk_token,
            bos_token=bos_token,
            eos_token=eos_token,
            pad_token=pad_token or unk_token,
            **kwargs,
        )
        for path in ("special_tokens_map_file", "added_tokens_file", "chat_template_file", "name_or_path"):
            self.init_kwargs.pop(path, None)  # of this machine: save_pretrained would write them down
        self.vocab_file = vocab_file
        self.add_bos_token = add_bos_token
        self.add_eos_token = add_eos_token
        self.sp_model = _load_model(vocab_file, sp_model_kwargs or {})
        for token in (unk_token, bos_token, eos_token):
            if self.sp_model.id_to_piece(self.sp_model.piece_to_id(str(token))) != str(token):
                raise ValueError(
                    f"{vocab_file}: no piece {str(token)!r}; expected the special tokens <unk>, <s> and "
                    f"</s>, or the spelling that unk_token, bos_token and eos_token give. {_WHERE_FROM}"
                )
        self.sanitize_special_tokens()  # so that they are found in text however the tokenizer was made

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Load from a folder. Raises ValueError when it is none, or a file in it is missing or corrupt."""
        if not (kwargs.get("from_hf_hub") or kwargs.get("from_aistudio")):
            _check_folder(
                os.path.join(str(pretrained_model_name_or_path), kwargs.get("subfolder") or "").rstrip("/")
            )
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    @property
    def vocab_size(self) -> int:
        """Pieces of the model, without added tokens."""
        return self.sp_model.get_piece_size()

    def get_vocab(self) -> dict[str, int]:
        """Piece -> id, added tokens included."""
        pieces = {self.sp_model.id_to_piece(i): i for i in range(self.vocab_size)}
        return {**pieces, **self.added_tokens_encoder}

    def encode_plain(self, text: str | list[str], num_threads: int = 1) -> list[int] | list[list[int]]:
        """Ids of a text (or of each text of a list) as plain text: no bos, no eos, and no spelling of a
        special or added token is recognised. The fast way to encode a corpus, and the safe one for what users
        write."""
        if isinstance(text, str):
            return self.sp_model.encode(_valid_unicode(text), out_type=int)
        return self.sp_model.encode([_valid_unicode(t) for t in text], out_type=int, num_threads=num_threads)

    def build_inputs_with_special_tokens(self, token_ids_0, token_ids_1=None):
        """bos + first + second + eos, as far as the flags ask for them."""
        bos = [self.bos_token_id] if self.add_bos_token else []
        eos = [self.eos_token_id] if self.add_eos_token else []
        return bos + list(token_ids_0) + list(token_ids_1 or []) + eos

    def build_offset_mapping_with_special_tokens(self, offset_mapping_0, offset_mapping_1=None):
        """Offsets in the form of `build_inputs_with_special_tokens`; special tokens get (0, 0)."""
        bos, eos = [(0, 0)] * self.add_bos_token, [(0, 0)] * self.add_eos_token
        return bos + list(offset_mapping_0) + list(offset_mapping_1 or []) + eos

    def get_special_tokens_mask(self, token_ids_0, token_ids_1=None, already_has_special_tokens=False):
        """1 where `build_inputs_with_special_tokens` puts a special token, else 0."""
        if already_has_special_tokens:
            return super().get_special_tokens_mask(token_ids_0, token_ids_1, already_has_special_tokens=True)
        length = len(token_ids_0) + len(token_ids_1 or [])
        return [1] * self.add_bos_token + [0] * length + [1] * self.add_eos_token

    def create_token_type_ids_from_sequences(self, token_ids_0, token_ids_1=None):
        """Zeros: the model knows no token types."""
        return [0] * len(self.build_inputs_with_special_tokens(token_ids_0, token_ids_1))

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Text of pieces; special tokens are spelled out, a space before each run of them."""
        text, pieces, special = "", [], set(self.all_special_tokens)
        for i, token in enumerate(tokens):
            if token not in special:
                pieces.append(token)
                continue
            space = " " if i and tokens[i - 1] not in special else ""
            text += self.sp_model.decode(pieces) + space + token
            pieces = []
        return text + self.sp_model.decode(pieces)

    def save_resources(self, save_directory):
        """Write the model file; also when the one it was loaded from is gone by now."""
        if not os.path.isfile(self.vocab_file):
            self.vocab_file = os.path.join(save_directory, MODEL_FILE)
            with open(self.vocab_file, "wb") as stream:
                stream.write(self.sp_model.serialized_model_proto())
        self.init_kwargs["vocab_file"] = self.vocab_file
        super().save_resources(save_directory)

    def _tokenize(self, text: str) -> list[str]:
        return self.sp_model.encode(_valid_unicode(text), out_type=str)

    def _convert_token_to_id(self, token: str) -> int:
        return self.sp_model.piece_to_id(token)

    def _convert_id_to_token(self, index: int) -> str:
        # A model's vocabulary may be rounded up past the pieces.
        return self.sp_model.id_to_piece(index) if index < self.vocab_size else str(self.unk_token)


def _load_model(file: str | None, options: dict) -> sentencepiece.SentencePieceProcessor:
    if not file or not os.path.isfile(file):
        raise ValueError(f"{file or MODEL_FILE}: no such file; expected a SentencePiece model. {_WHERE_FROM}")
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(file), **options)
    except (RuntimeError, OSError, ValueError) as error:
        raise ValueError(
            f"{file}: {os.path.getsize(file)} bytes that are not a SentencePiece model; expected a whole "
            f"one. Copy it again. {_WHERE_FROM}"
        ) from error


def _check_folder(folder: str) -> None:
    if not os.path.isdir(folder):
        raise ValueError(
            f"{folder}: no such folder; expected a tokenizer's folder, with {MODEL_FILE} in it. No tokenizer "
            f"is downloaded by name. {_WHERE_FROM}"
        )
    if not os.path.isfile(os.path.join(folder, MODEL_FILE)):
        found = ", ".join(sorted(os.listdir(folder))[:10]) or "nothing"
        raise ValueError(f"{folder}: holds {found}; expected {MODEL_FILE}. {_WHERE_FROM}")
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            continue
        try:
            with open(path, encoding="utf-8") as stream:
                content = json.load(stream)
        except ValueError as error:
            raise ValueError(f"{path}: not JSON ({error}); expected a JSON object. Copy it again.") from error
        if not isinstance(content, dict):
            raise ValueError(
                f"{path}: a JSON {type(content).__name__}; expected a JSON object. Copy it again."
            )


def _valid_unicode(text: str) -> str:
    """The text with lone surrogates (half of a character, from broken JSON escapes) as U+FFFD."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
