"""Prediction: load a model once, answer many prompts.

    predictor = Predictor.load("output/demo/model")
    predictor.predict(["Return the number of", "True if"])          list of texts
    for piece in predictor.stream("Return the number of"): ...      text as it comes

All prompts of a Predictor share one spacing of positions, that of `src_length + tgt_length` tokens, so a
prompt is answered alike whichever prompts it shares a batch with. Prompts are what fine-tuning made of them:
plain text after a BOS, or the template that stands in the checkpoint's `template.json`. Text never becomes a
special token.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterator, NamedTuple, Optional, Sequence, Union

import paddle
from paddlenlp.trainer import TrainingArguments
from paddlenlp.utils.log import logger

from . import conversion, parallel, peft, weight_files
from .configuration import BUILT_IN_CONFIGS, Ernie35Config
from .data import sft
from .data.records import Conversation
from .data.templates import Template, load_template
from .modeling import Ernie35ForCausalLM
from .positions import position_interval
from .tokenizer import MODEL_FILE, Ernie35Tokenizer
from .training.arguments import SettingError, gpu_count
from .training.build import WEIGHT_FILES, has_weights
from .training.finetune import TEMPLATE_FILE

STRATEGIES = ("sampling", "greedy_search", "beam_search")
DTYPES = ("float32", "bfloat16", "float16")
WINDOW_BATCHES = 8  # prompts of so many batches are sorted by length at a time
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


def setting(default, help: str, **extra):
    """A dataclass field whose `help` documents it."""
    return field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True)
class Decoding:
    """How the next token is chosen."""

    _argument_group_name = "decoding"

    decode_strategy: str = setting(
        "sampling", "sampling, greedy_search or beam_search.", choices=list(STRATEGIES)
    )
    top_k: int = setting(3, "Sampling: only the k likeliest tokens; 0 for all.")
    top_p: float = setting(
        0.8, "Sampling: only the fewest likeliest tokens that together exceed this probability."
    )
    temperature: float = setting(0.95, "Sampling: divides the logits; higher is more random.")
    repetition_penalty: float = setting(
        1.0, "Divides (or multiplies, below 0) the logits of tokens seen before."
    )
    num_beams: int = setting(4, "Beam search: beams a prompt.")
    seed: int = setting(0, "Of the sampling. The same prompts, settings and seed give the same answers.")

    def __post_init__(self):
        def check(name, holds, expected):
            value = getattr(self, name)
            kind = (int,) if name in ("top_k", "num_beams", "seed") else (int, float)
            if isinstance(value, bool) or not isinstance(value, kind) or not holds(value):
                raise SettingError(name, value, f"expected {expected}")

        if self.decode_strategy not in STRATEGIES:
            raise SettingError(
                "decode_strategy", self.decode_strategy, f"expected one of {', '.join(STRATEGIES)}"
            )
        check("top_k", lambda v: v >= 0, "a whole number of at least 0; 0 keeps all tokens")
        check("top_p", lambda v: 0 < v <= 1, "a number in (0, 1]")
        check(
            "temperature",
            lambda v: 0 < v < 1e6,
            "a number above 0 (for the likeliest token use greedy_search)",
        )
        check("repetition_penalty", lambda v: 0 < v < 1e6, "a number above 0; 1 changes nothing")
        check("num_beams", lambda v: 1 < v < 1000, "at least 2 and below 1000")
        check("seed", lambda v: 0 <= v < 2**31, "a whole number from 0 to 2147483647")

    def for_generate(self) -> dict:
        """Arguments of `generate()`."""
        chosen = {"decode_strategy": self.decode_strategy, "repetition_penalty": self.repetition_penalty}
        if self.decode_strategy == "sampling":
            chosen.update(top_k=self.top_k, top_p=self.top_p, temperature=self.temperature)
        if self.decode_strategy == "beam_search":
            chosen.update(num_beams=self.num_beams)
        return chosen


class Prompt(NamedTuple):
    """A prompt's ids, cut to src_length; `full_length` is the number of tokens before that."""

    ids: list
    full_length: int

    @property
    def truncated(self) -> bool:
        return len(self.ids) < self.full_length


class Predictor:
    """A model with its tokenizer, template and lengths.

    Args:
        model: Ernie35ForCausalLM, with or without adapters. tokenizer: Ernie35Tokenizer.
        src_length: most tokens of a prompt, BOS included. tgt_length: most tokens of an answer.
        template: what stands around a prompt; None: nothing.

    Raises:
        ValueError: lengths that do not fit the model's positions, or a tokenizer larger than its vocabulary.
    """

    def __init__(
        self,
        model,
        tokenizer,
        src_length: int = sft.DEFAULT_SRC_LENGTH,
        tgt_length: int = sft.DEFAULT_TGT_LENGTH,
        template: Optional[Template] = None,
    ):
        if len(tokenizer) > model.config.vocab_size:
            raise ValueError(
                f"the tokenizer has {len(tokenizer)} tokens, the model rows for {model.config.vocab_size}; "
                "take the model's own."
            )
        for name, length in (("src_length", src_length), ("tgt_length", tgt_length)):
            if isinstance(length, bool) or not isinstance(length, int) or length < 1:
                raise SettingError(name, length, "expected a whole number of at least 1")
        table = model.config.max_position_embeddings
        if src_length + tgt_length > table:
            raise ValueError(
                f"src_length {src_length} + tgt_length {tgt_length} = {src_length + tgt_length} tokens, but the model "
                f"has {table} positions (max_position_embeddings). Lower one of them."
            )
        self.model, self.tokenizer, self.template = model, tokenizer, template
        self.src_length, self.tgt_length = src_length, tgt_length
        spaced = model.config.enable_random_position_ids
        self.interval = position_interval(src_length + tgt_length, table) if spaced else 1
        self._encode = _encoder(tokenizer, template, sft.Limits.of(src_length, tgt_length))
        self._encode_whole = _encoder(tokenizer, template, sft.Limits.of(2**30, tgt_length))
        self.model.eval()

    @classmethod
    def load(
        cls,
        model_name_or_path: str,
        tokenizer_name_or_path: Optional[str] = None,
        adapter_path: Optional[str] = None,
        device: Optional[str] = None,
        dtype: Optional[str] = None,
        src_length: Optional[int] = None,
        tgt_length: Optional[int] = None,
        template: Optional[str] = None,
        tensor_parallel_degree: int = 1,
    ) -> Predictor:
        """Load from folders.

        Args:
            tokenizer_name_or_path: None: the model's folder, else the adapter's.
            adapter_path: adapters of any method, used unmerged.
            device: `cpu`, `gpu`, `gpu:1`, ...; None: a GPU where there is one. A GPU asked for in vain is
                said, and the CPU used.
            dtype: `float32`, `bfloat16` or `float16`; None: float32 on CPU, bfloat16 on GPU. On CPU it is
                float32, which is said.
            src_length, tgt_length, template: None: as the checkpoint or the adapter was fine-tuned, else 128,
                160, plain.
            tensor_parallel_degree: processes that share each layer, all those of the job. Each of them makes
                the same calls and gets the same answers.

        Raises:
            ValueError: a folder without model, tokenizer or adapter, or settings that do not fit them.
        """
        check_model_folder(model_name_or_path)
        tokenizer = load_tokenizer(tokenizer_name_or_path, (model_name_or_path, adapter_path))
        trained = _trained_template(adapter_path or model_name_or_path)
        check_can_be_cut(model_name_or_path, adapter_path, tensor_parallel_degree)
        device = set_device(device)
        join_tensor_parallel_group(tensor_parallel_degree, device)
        model = load_model(model_name_or_path, _usable_dtype(dtype, device), tensor_parallel_degree)
        if adapter_path is not None:
            peft.load(model, adapter_path)
            logger.info(f"{model.adapter_config.name()} adapters of {adapter_path}, unmerged.")
        chosen = load_template(template, getattr(tokenizer, "chat_template", None)) if template else None
        if chosen is None and trained:
            chosen = Template(trained["template"], trained["source"])
        return cls(
            model,
            tokenizer,
            src_length or trained.get("src_length") or sft.DEFAULT_SRC_LENGTH,
            tgt_length or trained.get("tgt_length") or sft.DEFAULT_TGT_LENGTH,
            chosen,
        )

    def encode(self, prompt: Union[str, Conversation]) -> Prompt:
        """Ids of a prompt; one longer than src_length loses old turns, then its middle."""
        if isinstance(prompt, str):
            prompt = Conversation(((prompt, ""),), None, "")
        whole, _ = self._encode_whole.prompt_ids(prompt)
        ids = whole if len(whole) <= self.src_length else self._encode.prompt_ids(prompt)[0]
        return Prompt(ids or [self.tokenizer.eos_token_id], len(whole))

    def predict(
        self,
        prompts: Sequence[Union[str, Conversation]],
        decoding: Decoding = Decoding(),
        batch_size: int = 8,
    ) -> list:
        """Answers, in the prompts' order; prompts that were cut are said."""
        encoded = [self.encode(prompt) for prompt in prompts]
        say_truncated([(f"prompt {n}", prompt) for n, prompt in enumerate(encoded, 1)], self.src_length)
        answers = dict(self.answers([prompt.ids for prompt in encoded], decoding, batch_size))
        return [answers[number] for number in range(len(encoded))]

    def answers(
        self, prompts: Sequence[list], decoding: Decoding, batch_size: int, done: int = 0
    ) -> Iterator[tuple[int, str]]:
        """(number, answer) of each prompt, as batches are ready. Prompts of similar length share a batch:
        they are sorted within windows of some batches, so that no answer waits for long.

        Args:
            done: so many prompts at the start have answers already. Batches and seeds are those of a run from
                the start.
        """
        window = batch_size * (WINDOW_BATCHES if batch_size > 1 else 1)
        for start in range(0, len(prompts), window):
            order = sorted(
                range(start, min(start + window, len(prompts))), key=lambda n: (-len(prompts[n]), n)
            )
            for first in range(0, len(order), batch_size):
                batch = order[first : first + batch_size]
                if max(batch) < done:
                    continue
                paddle.seed((decoding.seed + start + first) % 2**31)
                for number, text in zip(batch, self.answer_batch([prompts[n] for n in batch], decoding)):
                    if number >= done:
                        yield number, text

    def answer_batch(self, prompts: Sequence[list], decoding: Decoding) -> list[str]:
        """Answers to prompts that run through the model together."""
        inputs = self._inputs(prompts, self.tgt_length)
        rows, _ = self.model.generate(**inputs, **decoding.for_generate())
        return [self.text(row) for row in rows.tolist()]

    def stream(
        self, prompt: Union[str, Conversation], decoding: Decoding = Decoding(), seed: Optional[int] = None
    ) -> Iterator[str]:
        """Text of one answer as it comes; the pieces together are the answer. Characters arrive whole. A seed
        goes before the decoding's.

        Raises:
            ValueError: beam search, which knows its answer only at the end.
        """
        encoded = self.encode(prompt)
        say_truncated([("the prompt", encoded)], self.src_length)
        paddle.seed(decoding.seed if seed is None else seed)
        steps = self.steps([encoded.ids], decoding, self.tgt_length)
        text = TextStream(self.tokenizer)

        def pieces():
            for step in steps:
                if step[0] != self.eos_id and (piece := text.put(step[0])):
                    yield piece
            if piece := text.end():
                yield piece

        return pieces()

    def steps(self, prompts: Sequence[list], decoding: Decoding, max_new_tokens: int) -> Iterator[dict]:
        """`generate_steps` of a batch: {row: token} after each token; rows sent in end."""
        return self.model.generate_steps(**self._inputs(prompts, max_new_tokens), **decoding.for_generate())

    @property
    def eos_id(self) -> int:
        """Ends an answer."""
        return self.tokenizer.eos_token_id

    def text(self, ids: Sequence[int]) -> str:
        """An answer's text: up to its EOS, without special tokens."""
        ids = list(ids)
        ids = ids[: ids.index(self.eos_id)] if self.eos_id in ids else ids
        stream = TextStream(self.tokenizer)
        return "".join(map(stream.put, ids)) + stream.end()

    def _inputs(self, prompts, max_new_tokens: int) -> dict:
        batch = sft.collate_prompts(prompts, self.tokenizer.pad_token_id)
        return {
            **{name: paddle.to_tensor(array) for name, array in batch.items()},
            "max_new_tokens": max_new_tokens,
            "position_interval": self.interval,
            "eos_token_id": self.eos_id,
            "pad_token_id": self.eos_id,  # the tokenizer's is unk, which may stand in an answer
        }


class TextStream:
    """Ids to text, one at a time, never a part of a character.

    A character outside the vocabulary comes as several byte pieces; they are held back until it is whole.
    Bytes that are no character become U+FFFD. Special tokens have no text.

    Args:
        context: ids before the text, so that a space in front of its first word is kept; without them it
            goes.
    """

    def __init__(self, tokenizer, context: Sequence[int] = ()):
        self._piece = tokenizer.convert_ids_to_tokens
        self._silent = set(tokenizer.all_special_tokens)
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = not context

    def put(self, token: int) -> str:
        """The text that this token completes, perhaps none."""
        piece = self._piece(int(token))
        if piece in self._silent:
            return ""
        byte = _BYTE_PIECE.fullmatch(piece)
        text = (
            self._bytes.decode(bytes([int(byte[1], 16)]))
            if byte
            else self._flushed() + piece.replace("\u2581", " ")
        )
        if self._at_start and text:
            text, self._at_start = text.removeprefix(" "), False
        return text

    def end(self) -> str:
        """What was held back."""
        return self._flushed()

    def _flushed(self) -> str:
        return self._bytes.decode(b"", final=True)


def say_truncated(prompts: Sequence[tuple[str, Prompt]], src_length: int) -> None:
    """One warning about the prompts that were cut, by name; it names the first three."""
    cut = [(name, prompt) for name, prompt in prompts if prompt.truncated]
    if cut:
        named = ", ".join(f"{name} ({prompt.full_length} tokens)" for name, prompt in cut[:3])
        logger.warning(
            f"{len(cut)} of {len(prompts)} prompts were longer than src_length {src_length} and cut: {named}"
            f"{', ...' if len(cut) > 3 else ''}. Their start and end were kept; raise src_length."
        )


# ---------------------------------------------------------------- loading


def check_model_folder(name: str) -> None:
    """ValueError unless `name` is a folder with a configuration of this model and weights."""
    if name in BUILT_IN_CONFIGS:
        raise ValueError(
            f"model_name_or_path = {name!r}: no weights of it were ever released; train a model first "
            "(scripts/run_pretrain.py) and name its folder."
        )
    config = Path(name) / "config.json"
    if not config.is_file():
        seen = ", ".join(sorted(os.listdir(name))[:8]) or "nothing" if os.path.isdir(name) else None
        raise ValueError(
            f"model_name_or_path = {name!r}: {f'holds {seen}, no config.json' if seen else 'no such folder'}; "
            "expected a folder with config.json and weights."
        )
    if not has_weights(name):
        raise ValueError(
            f"model_name_or_path = {name!r}: holds no weights; expected one of {', '.join(WEIGHT_FILES)}."
        )
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{config}: not JSON ({error}). Copy it again.") from None
    if not isinstance(content, dict) or "parallel_attn_hatf" not in content:
        raise ValueError(
            f"{config}: describes no ERNIE-3.5-SE (it has no parallel_attn_hatf), which alone predicts here."
        )


def load_tokenizer(name: Optional[str], folders: Sequence[Optional[str]]) -> Ernie35Tokenizer:
    """The tokenizer that is named, else that of the first of the folders that holds one.

    Raises:
        ValueError: there is none.
    """
    holding = [
        folder for folder in (name, *folders) if folder and os.path.isfile(os.path.join(folder, MODEL_FILE))
    ]
    if name is None and not holding:
        raise ValueError(
            f"{folders[0]}: holds no tokenizer ({MODEL_FILE}). Name its folder with --tokenizer_name_or_path."
        )
    return Ernie35Tokenizer.from_pretrained(name or holding[0])


def check_degree(degree: int) -> None:
    """ValueError unless this job has as many processes as share each layer."""
    processes = paddle.distributed.get_world_size()
    if degree != processes:
        raise SettingError(
            "tensor_parallel_degree",
            degree,
            f"expected the number of processes of this job, {processes}; scripts/launch/predict_tp.sh starts "
            "NPROC of them and sets both",
        )


def check_can_be_cut(folder: str, adapter_path: Optional[str], degree: int) -> None:
    """ValueError unless the processes of this job can share the model, and its adapters, by tensor parallel."""
    if degree == 1:
        return
    check_degree(degree)
    conversion.check_divides(Ernie35Config.from_pretrained(folder), degree)
    method = peft.saved_method(adapter_path) if adapter_path else None
    adapter = peft.METHODS[method].config.load(adapter_path) if method else None
    if adapter is not None and not adapter.splits:
        merge = f"merge them into the model (tools/merge_{method}_params.py), or "
        raise SettingError(
            "tensor_parallel_degree",
            degree,
            f"{adapter.name()} is not made for tensor parallel ({adapter_path}); "
            f"{merge if peft.METHODS[method].merges else ''}predict with one process",
        )


def join_tensor_parallel_group(degree: int, device: str) -> None:
    """Make the processes of this job one tensor-parallel group, as a training run does."""
    if degree > 1 and not paddle.distributed.is_initialized():
        TrainingArguments(output_dir=".", tensor_parallel_degree=degree, device=device)  # its making joins the group


def load_model(folder: str, dtype: str, tensor_parallel_degree: int = 1) -> Ernie35ForCausalLM:
    """The model of a folder in one piece, or this tensor-parallel rank's share of it, whose logits are whole; weights
    in pieces, as tensor-parallel ranks write them, are joined.

    Raises:
        ValueError: weights that cannot be read or lack a parameter.
    """
    files, config = weight_files.Folder(Path(folder)), Ernie35Config.from_pretrained(folder)
    config.tensor_parallel_degree, config.tensor_parallel_output = tensor_parallel_degree, False
    config.tensor_parallel_rank = parallel.tensor_rank(config)
    config.sequence_parallel, config.use_recompute = False, False
    with tempfile.TemporaryDirectory() as joined:
        if is_cut(files):
            weight_files.merge_folder(files, Path(joined), config)
        source = joined if is_cut(files) else folder
        try:
            model = Ernie35ForCausalLM.from_pretrained(source, config=config, dtype=dtype)
        except (RuntimeError, OSError, EOFError, ValueError) as error:
            raise ValueError(
                f"{folder}: cannot be loaded ({type(error).__name__}: {str(error)[:200]})."
            ) from None
    lacking = sorted(set(model.state_dict()) - set(files.pieces()))
    if lacking:
        raise ValueError(
            f"{folder}: its weights lack {lacking[0]!r} ({len(lacking)} in all); is it a whole checkpoint?"
        )
    return model


def is_cut(files: weight_files.Folder) -> bool:
    """Whether the weights lie there in pieces of several ranks."""
    return files.tensor * files.pipeline > 1


def write_single_device(folder: str, target: str, tokenizer: Ernie35Tokenizer) -> None:
    """Write a checkpoint that one device loads: whole weights, configuration, tokenizer.

    Raises:
        ValueError: the target is the folder itself, or cannot be written.
    """
    source, target = Path(folder), Path(target)
    if target.resolve() == source.resolve():
        raise ValueError(
            f"merge_tensor_parallel_path = {str(target)!r}: is the checkpoint itself; name another folder."
        )
    files, config = weight_files.Folder(source), Ernie35Config.from_pretrained(folder)
    target.mkdir(parents=True, exist_ok=True)
    if is_cut(files):
        weight_files.merge_folder(files, target, config)
    else:
        for name in sorted(
            file.name for file in source.iterdir() if any(file.match(kind) for kind in WEIGHT_FILES)
        ):
            shutil.copy(source / name, target / f".tmp-{name}")
            os.replace(target / f".tmp-{name}", target / name)
    tokenizer.save_pretrained(str(target))
    weight_files.copy_beside(source, target, weight_files.WHOLE_CONFIG)
    logger.info(f"{target}: a checkpoint in one piece, with its tokenizer.")


def set_device(name: Optional[str]) -> str:
    """Compute on that device, or on the CPU where there is no such GPU; returns `cpu` or `gpu`."""
    if name is not None and not re.fullmatch(r"cpu|gpu(:\d+)?", name):
        raise SettingError("device", name, "expected cpu, gpu or gpu:N")
    gpus = gpu_count()
    wanted = name or ("gpu" if gpus else "cpu")
    index = int(wanted.partition(":")[2] or 0)
    if wanted != "cpu" and index >= gpus:
        logger.warning(
            f"device {wanted}: this machine (or this build of Paddle) has {gpus} GPUs; the CPU computes."
        )
        wanted = "cpu"
    paddle.set_device(wanted)
    return wanted.partition(":")[0]


def _usable_dtype(name: Optional[str], device: str) -> str:
    if name is not None and name not in DTYPES:
        raise SettingError("dtype", name, f"expected one of {', '.join(DTYPES)}")
    if device == "cpu":
        if name not in (None, "float32"):
            logger.warning(f"dtype {name} computes on GPUs only; on CPU the model runs in float32.")
        return "float32"
    return name or "bfloat16"


def _trained_template(folder: str) -> dict:
    """What fine-tuning wrote about its prompts; empty where it wrote nothing."""
    path = Path(folder) / TEMPLATE_FILE
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {"template": found["template"], "source": found["source"], **found}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: not what fine-tuning writes ({error!r}); copy it again, or name a --template."
        ) from None


def _encoder(tokenizer, template: Optional[Template], limits: sft.Limits) -> sft.Encoder:
    specials = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
    return sft.Encoder(
        tokenizer.encode_plain,
        template or load_template(),
        tokenizer.eos_token_id,
        tokenizer.bos_token_id if tokenizer.add_bos_token else None,
        limits,
        {**specials, **getattr(tokenizer, "added_tokens_encoder", {})},
        str(tokenizer.eos_token),
        str(tokenizer.bos_token),
    )
