"""An HTTP server for a Predictor: OpenAI-style completions, requests that arrive together answered together.

    Engine   one thread that owns the model: takes waiting jobs with the same settings, runs them as one
        batch, and
             hands each new token to the job it belongs to; rows that end, or whose client left, leave the
             batch
    App      FastAPI on an event loop: checks requests, refuses what does not fit, turns tokens into answers

    POST /v1/completions   GET /v1/models   GET /healthz   GET /   (a page to try prompts)

Text in a request never becomes a special token. All positions have the spacing of src_length + tgt_length, so
an answer does not depend on what it shares a batch with.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass, replace
from typing import AsyncIterator, Callable, Optional, Union

import paddle
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from paddlenlp.utils.log import logger
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from .predictor import Decoding, Predictor, TextStream

GATHERING = 0.005  # seconds that the first job of a batch waits for company
FEATURES = {  # of OpenAI's, fields that are taken only with the value that changes nothing
    "suffix": (None, ""),
    "logprobs": (None, 0),
    "best_of": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
}


@dataclass(frozen=True)
class Limits:
    """What the server takes at a time: rows in one batch, rows waiting, bytes of a request."""

    batch: int = 16
    queue: int = 256
    body: int = 2**20


# ------------------------------------------------------------------------------------------------------------ engine


@dataclass(eq=False)
class Job:
    """One prompt on its way through the model. `send` gets (token, reason): a token with reason None; then
    None with `stop` (the model ended), `length`, or an exception."""

    ids: list
    decoding: Decoding
    max_tokens: int
    seeded: bool  # its answer must repeat, so it runs alone
    send: Callable
    made: int = 0
    cancelled: bool = False


class Engine:
    """Runs jobs in batches on a thread of its own.

    Args:
        predictor: it is used by this thread alone from `start` on.
    """

    def __init__(self, predictor: Predictor, limits: Limits):
        self.predictor, self.limits = predictor, limits
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._seed = int(time.time())
        self.running = 0
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish what was submitted, then end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, jobs: list[Job]) -> bool:
        """Queue all of the jobs, or none where there is no room for all."""
        with self._changed:
            if self._stopping or len(self._waiting) + len(jobs) > self.limits.queue:
                return False
            self._waiting.extend(jobs)
            self._changed.notify()
            return True

    def _work(self) -> None:
        while (batch := self._next_batch()) is not None:
            self.running = len(batch)
            try:
                self._run(batch)
            except Exception as error:  # told to those who wait; the next batch may do better
                logger.error(f"a batch of {len(batch)} failed: {type(error).__name__}: {error}")
                for job in batch:
                    job.send(None, error)
            self.running = 0

    def _next_batch(self) -> Optional[list[Job]]:
        """Jobs that may run together, the longest waiting first; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopping)
            if not self._waiting:
                return None
        time.sleep(GATHERING)
        with self._changed:
            first = self._waiting.popleft()
            batch, others = [first], deque()
            while self._waiting:
                job = self._waiting.popleft()
                fits = len(batch) < self.limits.batch and job.decoding == first.decoding
                (batch if fits and not (job.seeded or first.seeded) else others).append(job)
            self._waiting = others
        return [job for job in batch if not job.cancelled]

    def _run(self, batch: list[Job]) -> None:
        if not batch:
            return
        first = batch[0]
        self._seed += 1
        paddle.seed(first.decoding.seed if first.seeded else self._seed % 2**31)
        going = dict(enumerate(batch))
        longest = max(job.max_tokens for job in batch)
        steps = self.predictor.steps([job.ids for job in batch], first.decoding, longest)
        dropped: Optional[set] = None
        while going:
            try:
                step = steps.send(dropped)
            except StopIteration:
                break
            dropped = set()
            for row, token in step.items():
                job = going.get(row)
                if job is not None and (reason := self._take(job, token)):
                    dropped.add(row)
                    del going[row]
                    job.send(None, reason)
        for job in going.values():  # the model ended rows that had more to come: nobody waits for them forever
            job.send(None, RuntimeError("the model's steps ended before the answer"))

    def _take(self, job: Job, token: int) -> Optional[str]:
        """Hand a token on; the reason to end with, if this was the last."""
        if job.cancelled or token == self.predictor.eos_id:
            return "stop"
        job.made += 1
        job.send(token, None)
        return "length" if job.made >= job.max_tokens else None


# -------------------------------------------------------------------------------------------------------------- text


class StopFilter:
    """Passes text on up to the first of some stop strings, and holds back what may be the beginning of
    one."""

    def __init__(self, stops: list[str]):
        self.stops, self._held, self.hit = stops, "", False

    def put(self, text: str) -> str:
        """What can be passed on now. `hit` is true once a stop string was seen."""
        if self.hit:
            return ""
        text = self._held + text
        found = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)]
        held = max(
            (n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
        )
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """What is still held."""
        held, self._held = self._held, ""
        return "" if self.hit else held


class Answer:
    """One prompt's answer while it comes: a queue of pieces of text, filled from the engine's thread.

    Attributes:
        tokens: new tokens so far. reason: `stop` or `length` at the end.
    """

    def __init__(
        self, server: Server, ids: list, decoding: Decoding, max_tokens: int, seeded: bool, stops: list[str]
    ):
        self._loop, self._queue = asyncio.get_running_loop(), asyncio.Queue()
        context = ids if server.predictor.template is None else ()  # behind a template an answer starts anew
        self._text, self._filter = TextStream(server.predictor.tokenizer, context), StopFilter(stops)
        self.prompt_tokens, self.tokens, self.reason = len(ids), 0, None
        self.job = Job(ids, decoding, max_tokens, seeded, self._send)

    def _send(self, token, reason) -> None:  # on the engine's thread
        with contextlib.suppress(
            RuntimeError
        ):  # the loop has ended, and with it everyone who could read this
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (token, reason))

    async def pieces(self) -> AsyncIterator[str]:
        """Pieces of text that are not empty."""
        try:
            while not self._filter.hit:
                token, reason = await self._queue.get()
                if isinstance(reason, Exception):
                    raise ServerError(500, "the model failed on this request", "server_error") from reason
                if reason is not None:
                    self.reason = reason
                    text = self._filter.put(self._text.end()) + self._filter.end()
                    if text:
                        yield text
                    return
                self.tokens += 1
                if text := self._filter.put(self._text.put(token)):
                    yield text
            self.reason = "stop"
        finally:
            self.job.cancelled = True


# ---------------------------------------------------------------------------------------------------------- requests


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class CompletionRequest(BaseModel):
    """OpenAI's fields, and top_k and repetition_penalty. What is not known, or asks for what is not there, is
    refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    prompt: Union[str, list[str], list[int], list[list[int]]]
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    n: int = Field(1, ge=1)
    stream: bool = False
    stream_options: Optional[StreamOptions] = None
    stop: Union[None, str, list[str]] = None
    seed: Optional[int] = Field(None, ge=0, lt=2**31)
    echo: bool = False
    user: Optional[str] = None
    suffix: Optional[str] = None
    logprobs: Optional[int] = None
    best_of: Optional[int] = None
    presence_penalty: Optional[float] = None
    frequency_penalty: Optional[float] = None
    logit_bias: Optional[dict] = None

    def decoding(self) -> Decoding:
        """Temperature 0 asks for the likeliest token."""
        if self.temperature == 0:
            return Decoding(decode_strategy="greedy_search", repetition_penalty=self.repetition_penalty)
        return Decoding(
            temperature=float(self.temperature),
            top_p=self.top_p,
            top_k=self.top_k,
            repetition_penalty=self.repetition_penalty,
        )

    def stops(self) -> list[str]:
        """Stop strings, at most 4 and none empty."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > 4 or not all(stops):
            raise ServerError(400, "stop: expected up to 4 strings that are not empty", param="stop")
        return stops


class ServerError(Exception):
    """An answer in OpenAI's form of errors."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", param=None, code=None):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return JSONResponse(self.body, self.status, headers)


class Server:
    """The endpoints. `app` is the ASGI application.

    Args:
        name: of the model, as clients ask for it. page: HTML of `/`.
    """

    def __init__(self, predictor: Predictor, name: str, limits: Limits = Limits(), page: str = ""):
        self.predictor, self.name, self.limits, self.page = predictor, name, limits, page
        self.engine, self.started = Engine(predictor, limits), int(time.time())
        self.closing = False
        self.app = self._make_app()

    def _make_app(self) -> FastAPI:
        @contextlib.asynccontextmanager
        async def lifespan(app):
            self.engine.start()
            yield
            self.closing = True
            await asyncio.to_thread(self.engine.stop)

        app = FastAPI(title="ernie35se", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
        app.add_exception_handler(ServerError, lambda request, error: error.response())
        app.add_exception_handler(RequestValidationError, _tell_validation)
        app.add_exception_handler(HTTPException, _tell_http)
        app.get("/", response_class=HTMLResponse)(self.index)
        app.get("/healthz")(self.health)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.one_model)
        app.post("/v1/completions")(self.completions)
        return app

    async def index(self) -> str:
        return self.page

    async def health(self) -> JSONResponse:
        state = {"status": "stopping" if self.closing else "ok", "waiting": self.engine.waiting}
        return JSONResponse({**state, "running": self.engine.running}, 503 if self.closing else 200)

    async def models(self) -> dict:
        return {"object": "list", "data": [self._model()]}

    async def one_model(self, name: str) -> dict:
        self._check_model(name)
        return self._model()

    def _model(self) -> dict:
        return {
            "id": self.name,
            "object": "model",
            "created": self.started,
            "owned_by": "ernie35se",
            "max_prompt_tokens": self.predictor.src_length,
            "max_tokens": self.predictor.tgt_length,
        }

    def _check_model(self, name: str) -> None:
        if name != self.name:
            message = f"model {name!r} is not here; this server has {self.name!r}"
            raise ServerError(404, message, param="model", code="model_not_found")

    async def completions(self, request: Request):
        body = await self._read(request)
        prompts = self._prompts(body)
        answers = self._submit(body, prompts)
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.name}
        head = {"id": head["id"], "object": "text_completion", **head}
        if body.stream:
            lines = self._events(body, head, answers)
            return StreamingResponse(
                lines, media_type="text/event-stream", headers={"Cache-Control": "no-store"}
            )
        return await self._whole(request, body, head, answers)

    async def _read(self, request: Request) -> CompletionRequest:
        content = b""
        async for chunk in request.stream():
            content += chunk
            if len(content) > self.limits.body:
                raise ServerError(413, f"the request has more than {self.limits.body} bytes")
        try:
            values = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ServerError(400, f"the request is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ServerError(400, f"the request is a JSON {type(values).__name__}; expected an object")
        try:
            body = CompletionRequest.model_validate(values)
        except ValueError as error:
            raise _validation_error(error.errors()) from None
        for name, harmless in FEATURES.items():
            if getattr(body, name) not in harmless:
                raise ServerError(400, f"{name} is not available here; leave it out", param=name)
        self._check_model(body.model)
        if body.max_tokens > self.predictor.tgt_length:
            message = (
                f"max_tokens is {body.max_tokens}; this server answers with up to {self.predictor.tgt_length}"
            )
            raise ServerError(400, message, param="max_tokens")
        return body

    def _prompts(self, body: CompletionRequest) -> list[tuple[str, list]]:
        """(text, ids) of each prompt."""
        given = body.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not given or [] in given:
            raise ServerError(
                400, "prompt: expected at least one, and no empty list of tokens", param="prompt"
            )
        if len(given) * body.n > self.limits.batch:
            message = (
                f"{len(given)} prompts x n {body.n}: this server takes up to {self.limits.batch} at a time"
            )
            raise ServerError(400, message, param="prompt")
        return [self._prompt(prompt) for prompt in given]

    def _prompt(self, prompt) -> tuple[str, list]:
        predictor = self.predictor
        if isinstance(prompt, str):
            text, encoded = prompt, predictor.encode(prompt)
            ids, length = encoded.ids, encoded.full_length
        else:
            wrong = [token for token in prompt if not 0 <= token < predictor.model.config.vocab_size]
            if wrong:
                raise ServerError(400, f"prompt: there is no token {wrong[0]}", param="prompt")
            text, ids, length = predictor.text(prompt), prompt, len(prompt)
        if length > predictor.src_length:
            message = f"the prompt has {length} tokens; this server takes up to {predictor.src_length}"
            raise ServerError(400, message, param="prompt", code="context_length_exceeded")
        return text, ids

    def _submit(self, body: CompletionRequest, prompts) -> list[tuple[str, Answer]]:
        """(text to echo, answer) of each prompt, n times."""
        decoding, stops = body.decoding(), body.stops()
        seeded = body.seed is not None and decoding.decode_strategy == "sampling"
        decoding = replace(decoding, seed=body.seed) if seeded else decoding
        answers = [
            (
                text if body.echo else "",
                Answer(self, ids, _nth(decoding, i, seeded), body.max_tokens, seeded, stops),
            )
            for text, ids in prompts
            for i in range(body.n)
        ]
        if self.closing:
            raise ServerError(503, "the server is stopping", "server_error")
        if not self.engine.submit([answer.job for _, answer in answers]):
            raise ServerError(
                429, f"{self.engine.waiting} prompts are waiting already; try again soon", "rate_limit_error"
            )
        return answers

    async def _whole(self, request: Request, body, head: dict, answers) -> JSONResponse:
        async def text_of(echo, answer):
            return echo + "".join([piece async for piece in answer.pieces()])

        reading = asyncio.gather(*(text_of(echo, answer) for echo, answer in answers))
        while not (await asyncio.wait([reading], timeout=0.5))[0]:
            if await request.is_disconnected():
                reading.cancel()
                break
        with contextlib.suppress(asyncio.CancelledError):
            texts = await reading
            choices = [
                _choice(i, text, answer.reason) for i, (text, (_, answer)) in enumerate(zip(texts, answers))
            ]
            return JSONResponse({**head, "choices": choices, "usage": _usage(body, answers)})
        return JSONResponse({}, 499)

    async def _events(self, body: CompletionRequest, head: dict, answers) -> AsyncIterator[str]:
        """Server-sent events: pieces of the answers as they come, then a choice with the reason, then [DONE]."""
        queue: asyncio.Queue = asyncio.Queue()

        async def read(index, echo, answer):
            try:
                if echo:
                    queue.put_nowait(_choice(index, echo, None))
                async for piece in answer.pieces():
                    queue.put_nowait(_choice(index, piece, None))
                queue.put_nowait(_choice(index, "", answer.reason))
            except ServerError as error:
                queue.put_nowait(error)

        tasks = [asyncio.ensure_future(read(i, echo, answer)) for i, (echo, answer) in enumerate(answers)]
        left = len(tasks)
        try:
            while left:
                item = await queue.get()
                if isinstance(item, ServerError):
                    yield _event(item.body)
                    return
                left -= item["finish_reason"] is not None
                yield _event({**head, "choices": [item]})
            if body.stream_options and body.stream_options.include_usage:
                yield _event({**head, "choices": [], "usage": _usage(body, answers)})
            yield "data: [DONE]\n\n"
        finally:
            for task in tasks:
                task.cancel()


def _nth(decoding: Decoding, index: int, seeded: bool) -> Decoding:
    """The settings of the index-th answer to one prompt: with a seed, each has its own."""
    return replace(decoding, seed=(decoding.seed + index) % 2**31) if seeded else decoding


def _choice(index: int, text: str, reason: Optional[str]) -> dict:
    return {"text": text, "index": index, "logprobs": None, "finish_reason": reason}


def _usage(body: CompletionRequest, answers) -> dict:
    prompt = sum(answer.prompt_tokens for _, answer in answers[:: body.n])
    made = sum(answer.tokens for _, answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def _event(value: dict) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _validation_error(errors) -> ServerError:
    first = errors[0]
    where = str(first["loc"][0]) if first["loc"] else None
    return ServerError(400, f"{where or 'request'}: {first['msg']}", param=where)


async def _tell_validation(request, error):
    return _validation_error(error.errors()).response()


async def _tell_http(request, error):
    return ServerError(error.status_code, str(error.detail)).response()
