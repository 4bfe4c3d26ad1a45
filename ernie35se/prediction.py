"""What scripts/predict.py and scripts/serve.py are made of: their settings, and the file of answers that an
interrupted run continues."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Optional, Sequence

import paddle
from paddlenlp.utils.log import logger

from . import parallel, peft
from .predictor import (
    DTYPES,
    Decoding,
    Predictor,
    check_can_be_cut,
    check_degree,
    check_model_folder,
    join_tensor_parallel_group,
    load_tokenizer,
    set_device,
    setting,
    write_single_device,
)
from .training.arguments import SettingError, parse_arguments


@dataclass(frozen=True)
class _Source:
    """Which model predicts, and how it is loaded."""

    model_name_or_path: Optional[str] = setting(
        None, "Folder of the model: config.json, weights and, as a rule, tokenizer."
    )
    tokenizer_name_or_path: Optional[str] = setting(
        None, "Folder of the tokenizer. Left out: the model's or the adapter's."
    )
    batch_size: int = setting(1, "Prompts that run through the model together.")
    src_length: Optional[int] = setting(
        None, "Most tokens of a prompt. Left out: as in fine-tuning, else 128."
    )
    tgt_length: Optional[int] = setting(
        None, "Most tokens of an answer. Left out: as in fine-tuning, else 160."
    )
    template: Optional[str] = setting(
        None,
        "What stands around a prompt: plain, alpaca, chatml, tokenizer, or a jinja file. Left out: as fine-tuned.",
    )
    device: Optional[str] = setting(None, "cpu, gpu or gpu:N. Left out: a GPU where there is one.")
    dtype: Optional[str] = setting(
        None, f"{', '.join(DTYPES)}. Left out: bfloat16 on a GPU; on CPU always float32."
    )
    lora_path: Optional[str] = setting(
        None, "Folder of LoRA adapters (rsLoRA, PiSSA, MoRA and kin), used unmerged."
    )
    prefix_path: Optional[str] = setting(None, "Folder of a learnt prefix.")
    vera_path: Optional[str] = setting(None, "Folder of VeRA adapters.")
    lokr_path: Optional[str] = setting(None, "Folder of LoKr adapters.")
    dislora_path: Optional[str] = setting(None, "Folder of DisLoRA adapters.")
    reft_path: Optional[str] = setting(None, "Folder of ReFT interventions.")
    tare_path: Optional[str] = setting(None, "Folder of TARE editors.")
    merge_tensor_parallel_path: Optional[str] = setting(
        None, "Folder to write a checkpoint to that one device loads, with the tokenizer, before predicting."
    )

    def __post_init__(self):
        if not self.model_name_or_path:
            raise SettingError(
                "model_name_or_path", self.model_name_or_path, "expected the folder of a trained model"
            )
        self._check_counts("batch_size", "src_length", "tgt_length")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise SettingError("dtype", self.dtype, f"expected one of {', '.join(DTYPES)}")
        given = [name for name in self.adapter_flags() if getattr(self, name)]
        if len(given) > 1:
            raise SettingError(
                given[1], getattr(self, given[1]), f"one adapter at a time; --{given[0]} is given too"
            )

    def _check_counts(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise SettingError(name, value, "expected a whole number of at least 1")

    @classmethod
    def adapter_flags(cls) -> list:
        """One for each method of peft."""
        return [f"{method}_path" for method in peft.METHODS]

    @property
    def adapter_path(self) -> Optional[str]:
        """The folder of adapters, or None.

        Raises:
            ValueError: it holds none of the method that its flag names.
        """
        for flag in self.adapter_flags():
            folder = getattr(self, flag)
            if folder:
                found = peft.saved_method(folder)
                if found != flag.removesuffix("_path"):
                    held = f"{found} adapters; pass it as --{found}_path" if found else "no adapters"
                    raise SettingError(flag, folder, f"it holds {held}")
                return folder
        return None


@dataclass(frozen=True)
class PredictArguments(_Source):
    """Settings of scripts/predict.py: which model answers which prompts, and where the answers go."""

    _argument_group_name = "prediction"

    data_file: Optional[str] = setting(
        None,
        "Prompts: JSON lines or a list of records with src, instruction (input, system, history) or "
        "messages. Left out: some examples.",
    )
    predict_file: str = setting(
        "prediction.json", 'Answers, a line {"src": ..., "output": ...} for each prompt, in order.'
    )
    resume: bool = setting(False, "Continue the predict_file of a run that was interrupted.")
    stream: bool = setting(False, "Print answers as they come, one prompt at a time.")
    interactive: bool = setting(False, "Answer lines of the standard input, as they come.")
    tensor_parallel_degree: int = setting(
        1, "Processes that share each layer, all those of the job (scripts/launch/predict_tp.sh)."
    )

    def __post_init__(self):
        super().__post_init__()
        self._check_counts("tensor_parallel_degree")
        self._check_processes()
        for other in ("resume", "data_file"):
            if self.interactive and getattr(self, other):
                raise SettingError(
                    "interactive", True, f"answers the standard input and writes no file; leave out --{other}"
                )

    def _check_processes(self) -> None:
        processes = self.tensor_parallel_degree
        check_degree(processes)
        if processes == 1:
            return
        for name in ("stream", "interactive"):
            if getattr(self, name):
                raise SettingError(
                    name,
                    True,
                    f"needs a terminal, which the {processes} processes of a launched job do not have; leave it "
                    "out, or predict with one process",
                )
        if self.device and self.device.startswith("gpu:"):
            raise SettingError(
                "device", self.device, f"each of the {processes} processes has its own GPU; expected cpu or gpu"
            )


@dataclass(frozen=True)
class ServeArguments(_Source):
    """Settings of scripts/serve.py."""

    _argument_group_name = "server"

    batch_size: int = setting(16, "Most prompts that run through the model together.")
    host: str = setting(
        "127.0.0.1", "Address to listen on; 0.0.0.0 for every machine that can reach this one."
    )
    port: int = setting(8000, "Port to listen on; 0 for any free one.")
    served_model_name: Optional[str] = setting(None, "Name that clients ask for. Left out: the folder's.")
    max_waiting: int = setting(256, "Most prompts that wait; more are refused with status 429.")

    def __post_init__(self):
        super().__post_init__()
        self._check_counts("max_waiting")
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port < 65536:
            raise SettingError("port", self.port, "expected a whole number from 0 to 65535")


def parse_predict_arguments(argv: Optional[Sequence[str]] = None) -> tuple[PredictArguments, Decoding]:
    """Read `[file.json] [--flag value ...]`; errors as in `training.arguments.parse_arguments`."""
    return parse_arguments(argv, (PredictArguments, Decoding), "predict.py", _reconcile)


def parse_serve_arguments(argv: Optional[Sequence[str]] = None) -> ServeArguments:
    """As `parse_predict_arguments`, for the server; how tokens are chosen is up to each request."""
    return parse_arguments(argv, (ServeArguments,), "serve.py", lambda settings: settings)


def _reconcile(settings: PredictArguments, decoding: Decoding):
    if settings.stream and decoding.decode_strategy == "beam_search":
        raise SettingError(
            "stream", True, "beam search knows its answer only at the end; choose another --decode_strategy"
        )
    if decoding.decode_strategy != "sampling":
        default = Decoding(decode_strategy=decoding.decode_strategy)
        ignored = [f.name for f in fields(Decoding) if f.name in ("top_k", "top_p", "temperature")
                   and getattr(decoding, f.name) != getattr(default, f.name)]  # fmt: skip
        if ignored:
            logger.warning(
                f"{', '.join(ignored)} have no effect with decode_strategy {decoding.decode_strategy}."
            )
    return settings, decoding


def load_predictor(settings: _Source, tensor_parallel_degree: int = 1) -> Predictor:
    """The predictor that the settings describe; first the checkpoint in one piece, where that is asked
    for, which the first process writes."""
    model, adapter = settings.model_name_or_path, settings.adapter_path
    check_model_folder(model)
    check_can_be_cut(model, adapter, tensor_parallel_degree)
    if settings.merge_tensor_parallel_path:
        join_tensor_parallel_group(tensor_parallel_degree, set_device(settings.device))
        if is_first_process():
            tokenizer = load_tokenizer(settings.tokenizer_name_or_path, (model, adapter))
            write_single_device(model, settings.merge_tensor_parallel_path, tokenizer)
        if tensor_parallel_degree > 1:
            paddle.distributed.barrier()
        model = settings.merge_tensor_parallel_path
    return Predictor.load(
        model,
        settings.tokenizer_name_or_path,
        adapter,
        settings.device,
        settings.dtype,
        settings.src_length,
        settings.tgt_length,
        settings.template,
        tensor_parallel_degree,
    )


def is_first_process() -> bool:
    """Whether this process is the one of its job that writes and shows the answers."""
    return paddle.distributed.get_rank() == 0


class AnswerFile:
    """A file of lines {"src": ..., "output": ...}, in the prompts' order, each written whole as soon as those
    before it are.

    Nothing is changed on disk before the file is entered (`with`).

    Args:
        sources: the prompts' texts. resume: keep the answers that are there, which must belong to these
            prompts. writes: whether this process is the job's first; the others touch no file and count along.

    Attributes:
        done: number of prompts answered in the file.

    Raises:
        ValueError: a file to resume that holds answers to other prompts.
    """

    def __init__(self, path: str, sources: Sequence[str], resume: bool, writes: bool = True):
        self.path, self.sources, self.writes = Path(path), list(sources), writes
        self.done, self._end, self._waiting = 0, 0, {}
        if not writes:
            return
        if self.path.is_dir() or not (self.path.parent).is_dir():
            raise SettingError("predict_file", path, "expected a file in a folder that exists")
        if resume and self.path.exists():
            self._read()

    def _read(self) -> None:
        content = self.path.read_bytes()
        for number, line in enumerate(content.splitlines(keepends=True)):
            place = f"{self.path}:{number + 1}"
            if not line.endswith(b"\n"):
                logger.warning(f"{place}: cut off in the middle; that prompt is answered again.")
                break
            try:
                source = json.loads(line)["src"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{place}: no answer that predict.py wrote; resume another file, or leave --resume out."
                ) from None
            expected = self.sources[number] if number < len(self.sources) else None
            if source != expected:
                raise ValueError(
                    f"{place}: answers {source[:60]!r}, but prompt {number + 1} is "
                    f"{'missing' if expected is None else repr(expected[:60])}; the file belongs to other "
                    "prompts. Give the same --data_file, or leave --resume out to start over."
                )
            self._end += len(line)
            self.done = number + 1
        logger.info(
            f"{self.path}: {self.done} of {len(self.sources)} prompts are answered; goes on with the rest."
        )

    def agree(self, model) -> None:
        """Count from where the first process's file ends; the processes that share the model call this together."""
        self.done = parallel.all_pieces(model.config, paddle.to_tensor([self.done]))[0].item()

    def __enter__(self) -> AnswerFile:
        if not self.writes:
            return self
        if not self.done and self.path.exists() and self.path.stat().st_size:
            logger.warning(f"{self.path}: is written anew (--resume would have continued it).")
        self._file = open(self.path, "ab")
        self._file.truncate(self._end)
        return self

    def __exit__(self, *_) -> None:
        if self.writes:
            self._file.close()

    def put(self, number: int, output: str) -> None:
        """Take an answer; write it, and those that waited for it, if all before are written."""
        self._waiting[number] = output
        while self.done in self._waiting:
            record = {"src": self.sources[self.done], "output": self._waiting.pop(self.done)}
            if self.writes:
                self._file.write(_line(record))
                self._file.flush()
            self.done += 1

    def lines(self) -> list[tuple[str, str]]:
        """(source, output) of what is written."""
        records = map(json.loads, self.path.read_text(encoding="utf-8").split("\n")[: self.done])
        return [(record["src"], record["output"]) for record in records]


def _line(record: dict) -> bytes:
    try:
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair, from a broken escape in the data
        return json.dumps(record).encode() + b"\n"
