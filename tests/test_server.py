"""scripts/serve.py over real sockets: answers, streams, many clients at once, malformed requests, a graceful stop."""

import asyncio
import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import uvicorn
from predict_helpers import write_checkpoint

from ernie35se.predictor import Decoding, Predictor
from ernie35se.server import Limits, Server, StopFilter

ROOT = Path(__file__).resolve().parents[1]
GREEDY = Decoding(decode_strategy="greedy_search")
BROWSER_FLAGS = [  # works as root and without a network; playwright gives each browser a user folder of its own
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
LIMITS = Limits(batch=8, queue=64, body=20_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("serve") / "tiny")


@pytest.fixture(scope="module")
def predictor(folder):
    return Predictor.load(str(folder), device="cpu", src_length=40, tgt_length=24)


class Running:
    """A server on a thread."""

    def __init__(self, predictor, limits=LIMITS):
        self.server = Server(
            predictor, "tiny", limits, (ROOT / "scripts" / "serve.html").read_text(encoding="utf-8")
        )
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.uvicorn = uvicorn.Server(uvicorn.Config(self.server.app, log_level="error", timeout_graceful_shutdown=20))
        self.thread = threading.Thread(target=self.uvicorn.run, kwargs={"sockets": [self.socket]})

    def __enter__(self):
        self.thread.start()
        while not self.uvicorn.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_):
        self.uvicorn.should_exit = True
        self.thread.join()
        self.socket.close()

    def ask(self, method, path, body=None, raw=None):
        """(status, text)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, text

    def complete(self, **body):
        status, text = self.ask("POST", "/v1/completions", {"model": "tiny", "temperature": 0, **body})
        return status, json.loads(text)

    def stream(self, **body):
        body = {"model": "tiny", "temperature": 0, "stream": True, **body}
        status, text = self.ask("POST", "/v1/completions", body)
        assert status == 200
        *events, done, rest = text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.fixture(scope="module")
def running(predictor):
    with Running(predictor) as server:
        yield server


def expected(predictor, prompt, max_tokens=24, decoding=GREEDY):
    """(text, tokens, reason) by the bare model, with the space that a text in the middle may begin with."""
    ids = predictor.encode(prompt).ids
    made = [step[0] for step in predictor.steps([ids], decoding, max_tokens)]
    reason = "stop" if made[-1] == predictor.eos_id else "length"
    made = made[:-1] if reason == "stop" else made
    before = predictor.text(ids)
    return predictor.text(ids + made)[len(before) :], len(made), reason


def test_a_completion(running, predictor):
    text, tokens, reason = expected(predictor, "swap three moon")
    status, answer = running.complete(prompt="swap three moon", max_tokens=24)
    assert status == 200 and answer["object"] == "text_completion" and answer["model"] == "tiny"
    assert answer["choices"] == [{"text": text, "index": 0, "logprobs": None, "finish_reason": reason}]
    length = len(predictor.encode("swap three moon").ids)
    assert answer["usage"] == {
        "prompt_tokens": length,
        "completion_tokens": tokens,
        "total_tokens": length + tokens,
    }
    assert (
        running.complete(prompt="swap three moon", max_tokens=3)[1]["choices"][0]["finish_reason"] == "length"
    )


def test_several_prompts_several_answers_and_token_prompts(running, predictor):
    prompts = ["moon", "lazy dog"]
    answer = running.complete(prompt=prompts, n=2, echo=True, max_tokens=24)[1]
    texts = [prompt + expected(predictor, prompt)[0] for prompt in prompts for _ in range(2)]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    ids = [predictor.encode(prompt).ids for prompt in prompts]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    for given in (ids, ids[0]):
        choices = running.complete(prompt=given, max_tokens=24)[1]["choices"]
        assert [c["text"] for c in choices] == [
            expected(predictor, p)[0] for p in (prompts if given is ids else prompts[:1])
        ]


def test_a_stream_is_the_completion(running):
    whole = running.complete(prompt=["moon", "jumps"], max_tokens=24)[1]
    events = running.stream(prompt=["moon", "jumps"], max_tokens=24, stream_options={"include_usage": True})
    assert events[-1]["usage"] == whole["usage"] and events[-1]["choices"] == []
    for choice in whole["choices"]:
        mine = [
            event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == choice["index"]
        ]
        assert "".join(piece["text"] for piece in mine) == choice["text"] and len(mine) > 3
        assert [piece["finish_reason"] for piece in mine] == [None] * (len(mine) - 1) + [
            choice["finish_reason"]
        ]


def test_stop_strings_and_seeds(running, predictor):
    text, _, _ = expected(predictor, "moon")
    stop = text[4:7]
    for ask in (running.complete, lambda **body: (200, running.stream(**body))):
        _, answer = ask(prompt="moon", max_tokens=24, stop=[stop, "never"])
        choices = [e["choices"][0] for e in answer] if isinstance(answer, list) else answer["choices"]
        assert (
            "".join(c["text"] for c in choices) == text[: text.index(stop)]
            and choices[-1]["finish_reason"] == "stop"
        )
    sampled = dict(prompt="moon", max_tokens=24, temperature=1.5)
    repeated = [running.complete(seed=seed, n=2, **sampled)[1]["choices"] for seed in (1, 1, 2)]
    assert repeated[0] == repeated[1] != repeated[2] and repeated[0][0]["text"] != repeated[0][1]["text"]
    assert running.complete(**sampled)[1]["choices"] != running.complete(**sampled)[1]["choices"]


def test_stop_filter_holds_back_what_may_become_a_stop_string():
    for stops, text in (
        (["abc"], "xxababcyy"),
        (["b", "ab"], "xab"),
        (["aab"], "aaab"),
        ([], "abc"),
        (["zz"], "xz"),
    ):
        for size in (1, 2, 3, 20):
            filtered = StopFilter(stops)
            got = (
                "".join(filtered.put(text[i : i + size]) for i in range(0, len(text), size)) + filtered.end()
            )
            ends = [text.index(stop) for stop in stops if stop in text]
            assert got == text[: min(ends)] if ends else got == text
            assert filtered.hit == bool(ends)


BAD = [
    (b"", 400, "not JSON"),
    (b'{"model": "tiny", ', 400, "not JSON"),
    (b"\xff\xfe", 400, "not JSON"),
    (b"[1]", 400, "JSON list"),
    (b"[" * 15_000, 400, "not JSON"),
    (b'{"model": "tiny"}', 400, "prompt"),
    ({"prompt": 3}, 400, "prompt"),
    ({"prompt": []}, 400, "at least one"),
    ({"prompt": [[]]}, 400, "at least one"),
    ({"prompt": [999999]}, 400, "no token 999999"),
    ({"prompt": [-1]}, 400, "no token -1"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": 25}, 400, "up to 24"),
    ({"prompt": "a", "max_tokens": "5"}, 400, "max_tokens"),
    ({"prompt": "a", "temperature": -1}, 400, "temperature"),
    ({"prompt": "a", "top_p": 0}, 400, "top_p"),
    ({"prompt": "a", "n": 9}, 400, "up to 8"),
    ({"prompt": "a", "stop": ["a"] * 5}, 400, "stop"),
    ({"prompt": "a", "stop": ""}, 400, "stop"),
    ({"prompt": "a", "logprobs": 3}, 400, "logprobs is not available"),
    ({"prompt": "a", "best": 3}, 400, "best"),
    ({"prompt": "a", "model": "gpt"}, 404, "'gpt' is not here"),
    ({"prompt": "moon " * 60}, 400, "this server takes up to 40"),
    ({"prompt": "moon" * 9000}, 413, "20000 bytes"),
]


@pytest.mark.parametrize("body, status, message", BAD)
def test_malformed_requests_are_told_what_is_wrong(running, body, status, message):
    raw = body if isinstance(body, bytes) else json.dumps({"model": "tiny", **body}).encode()
    got, text = running.ask("POST", "/v1/completions", raw=raw)
    assert got == status, text
    error = json.loads(text)["error"]
    assert message in error["message"] and set(error) == {"message", "type", "param", "code"}


def test_the_other_endpoints(running):
    status, text = running.ask("GET", "/v1/models")
    (model,) = json.loads(text)["data"]
    assert status == 200 and (model["id"], model["max_prompt_tokens"], model["max_tokens"]) == (
        "tiny",
        40,
        24,
    )
    assert json.loads(running.ask("GET", "/v1/models/tiny")[1]) == model
    assert running.ask("GET", "/v1/models/other")[0] == 404
    assert running.ask("GET", "/healthz") == (200, '{"status":"ok","waiting":0,"running":0}')
    assert running.ask("GET", "/nothing")[0] == 404 and running.ask("GET", "/v1/completions")[0] == 405
    status, page = running.ask("GET", "/")
    assert status == 200 and "<textarea" in page


LOAD = [  # what the clients ask for in turn: one settings for a batch, another for another, answers of many lengths
    dict(prompt=" ".join(["moon", "three", "dog", "hills"][: 1 + n % 4]) + f" {n}", max_tokens=6 + n,
         repetition_penalty=(1.0, 1.5)[n % 3 == 0])
    for n in range(18)
]  # fmt: skip


def load(running, predictor, clients=32, turns=3):
    """(request, right answer, what came) of clients that all ask at once, half of them streams; a fifth of their
    requests come behind a malformed one."""

    def client(number):
        seen = []
        for turn in range(turns):
            body = LOAD[(number * 5 + turn) % len(LOAD)]
            if (number + turn) % 5 == 0:
                bad, status, _ = BAD[(number + turn) % len(BAD)]
                raw = bad if isinstance(bad, bytes) else json.dumps({"model": "tiny", **bad}).encode()
                assert running.ask("POST", "/v1/completions", raw=raw)[0] == status
            choices = (
                [event["choices"][0] for event in running.stream(**body)]
                if number % 2
                else running.complete(**body)[1]["choices"]
            )
            seen.append((body, "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]))
        return seen

    right = {}
    for body in LOAD:
        decoding = Decoding(decode_strategy="greedy_search", repetition_penalty=body["repetition_penalty"])
        text, _, reason = expected(predictor, body["prompt"], body["max_tokens"], decoding)
        right[body["prompt"]] = (text, reason)
    assert len(set(right.values())) > len(LOAD) - 4
    with ThreadPoolExecutor(clients) as pool:
        answers = [answer for seen in pool.map(client, range(clients)) for answer in seen]
    assert len(answers) == clients * turns
    return [(body, right[body["prompt"]], (text, reason)) for body, text, reason in answers]


def test_32_clients_at_once_and_malformed_requests_between_them(running, predictor):
    answers = load(running, predictor)
    assert [right for _, right, _ in answers] == [came for _, _, came in answers]
    assert json.loads(running.ask("GET", "/healthz")[1]) == {"status": "ok", "waiting": 0, "running": 0}


class MixingPredictor:
    """A predictor that takes the rows of a batch for each other."""

    def __init__(self, predictor):
        self._predictor, self.mixed = predictor, 0

    def __getattr__(self, name):
        return getattr(self._predictor, name)

    def steps(self, prompts, decoding, max_new_tokens):
        self.mixed += len(prompts) > 1
        steps, last, dropped = self._predictor.steps(prompts, decoding, max_new_tokens), len(prompts) - 1, None
        while True:
            try:
                step = steps.send(dropped)
            except StopIteration:
                return
            dropped = {last - row for row in (yield {last - row: token for row, token in step.items()}) or ()}


def test_the_load_test_would_notice_answers_that_are_mixed_up(predictor):
    mixing = MixingPredictor(predictor)
    with Running(mixing, LIMITS) as server:
        answers = load(server, predictor, clients=16, turns=1)
    assert mixing.mixed and any(right != came for _, right, came in answers)


class SlowPredictor:
    """A predictor whose steps wait for a permit."""

    def __init__(self, predictor):
        self._predictor, self.permits, self.batches, self.steps_made = (
            predictor,
            threading.Semaphore(0),
            [],
            0,
        )

    def __getattr__(self, name):
        return getattr(self._predictor, name)

    def steps(self, prompts, decoding, max_new_tokens):
        self.batches.append(len(prompts))
        steps, dropped = self._predictor.steps(prompts, decoding, max_new_tokens), None
        while True:
            self.permits.acquire()
            self.steps_made += 1
            try:
                dropped = yield steps.send(dropped)
            except StopIteration:
                return


def test_a_full_queue_is_refused_and_what_waits_shares_a_batch(predictor):
    slow = SlowPredictor(predictor)
    with Running(slow, Limits(batch=4, queue=3)) as server, ThreadPoolExecutor(8) as pool:
        first = pool.submit(server.complete, prompt="moon", max_tokens=5)
        while not slow.batches:
            time.sleep(0.01)
        others = [pool.submit(server.complete, prompt="moon", max_tokens=5) for _ in range(3)]
        while server.server.engine.waiting < 3:
            time.sleep(0.01)
        status, answer = server.complete(prompt="moon")
        assert status == 429 and "3 prompts are waiting" in answer["error"]["message"]
        slow.permits.release(1000)
        assert {future.result()[0] for future in [first, *others]} == {200}
    assert slow.batches == [1, 3]


def test_a_client_that_leaves_frees_its_place(predictor):
    slow = SlowPredictor(predictor)
    with Running(slow) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        body = {"model": "tiny", "prompt": "moon", "temperature": 0, "max_tokens": 24, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        slow.permits.release(2)
        assert b"data: " in connection.getresponse().readline()
        connection.close()
        deadline = time.time() + 20
        while server.server.engine.running and time.time() < deadline:
            slow.permits.release(1)
            time.sleep(0.1)
        assert server.server.engine.running == 0 and slow.steps_made < 24


def test_a_failing_batch_is_told_and_the_next_one_works(predictor, monkeypatch):
    class Failing(SlowPredictor):
        def steps(self, prompts, *rest):
            if len(self.batches) < 2:
                self.batches.append(1)
                raise RuntimeError("out of memory")
            return self._predictor.steps(prompts, *rest)

    with Running(Failing(predictor)) as server:
        assert server.complete(prompt="moon")[0] == 500
        status, text = server.ask(
            "POST", "/v1/completions", {"model": "tiny", "prompt": "moon", "stream": True}
        )
        assert status == 200 and '"server_error"' in text and "DONE" not in text
        assert server.complete(prompt="moon")[0] == 200


def test_an_answer_that_the_model_breaks_off_is_told(predictor):
    class Short(SlowPredictor):
        def steps(self, *arguments):
            yield next(self._predictor.steps(*arguments))

    with Running(Short(predictor)) as server:
        status, answer = server.complete(prompt="moon", max_tokens=5)
        assert status == 500 and answer["error"]["type"] == "server_error"
        assert server.complete(prompt="moon", max_tokens=1)[0] == 200


def start_script(folder, *words):
    command = [sys.executable, str(ROOT / "scripts" / "serve.py"), "--model_name_or_path", str(folder), "--device", "cpu",
               "--src_length", "40", "--tgt_length", "200", *words]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_script_serves_and_stops_gracefully(folder, predictor):
    process = start_script(folder, "--port", "0", "--served_model_name", "mine")
    line = process.stdout.readline()
    assert line.startswith("Serving 'mine' on http://127.0.0.1:"), process.stderr.read()
    port = int(line.rsplit(":", 1)[1])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = {"model": "mine", "prompt": "moon", "temperature": 0, "max_tokens": 200, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.readline()
    process.send_signal(signal.SIGTERM)  # in the middle of an answer
    assert response.read().decode().rstrip().endswith("[DONE]")
    assert process.wait(60) == 0
    process.stdout.close()
    process.stderr.close()


def test_a_port_in_use_ends_with_status_2(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start_script(folder, "--port", str(taken.getsockname()[1]))
        _, error = process.communicate(timeout=120)
    assert process.returncode == 2 and "cannot listen there" in error


def test_the_public_openai_client_completes_and_streams(running, predictor):
    openai = pytest.importorskip("openai", reason="pip install openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none")
    text = expected(predictor, "moon")[0]
    settings = dict(model="tiny", prompt="moon", max_tokens=24, temperature=0)
    assert client.completions.create(**settings).choices[0].text == text
    pieces = [chunk.choices[0].text for chunk in client.completions.create(stream=True, **settings)]
    assert "".join(pieces) == text and len(pieces) > 3
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.BadRequestError, match="up to 24"):
        client.completions.create(**{**settings, "max_tokens": 500})
    with pytest.raises(openai.NotFoundError):
        client.completions.create(**{**settings, "model": "other"})

    async def many():
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none") as asynchronous:
            return await asyncio.gather(*(asynchronous.completions.create(**settings) for _ in range(12)))

    assert {answer.choices[0].text for answer in asyncio.run(many())} == {text}


def test_the_page_in_a_browser(running, predictor):
    browser = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))),
        None,
    )
    if browser is None:
        pytest.skip("needs chromium (apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    text, tokens, _ = expected(predictor, "moon")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser, args=BROWSER_FLAGS)
        page = chromium.new_page()
        faults = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(f"http://127.0.0.1:{running.port}/")
        page.wait_for_function("document.getElementById('model').textContent === 'tiny'")
        assert page.input_value("#max_tokens") == "24"
        page.fill("#prompt", "moon")
        page.fill("#temperature", "0")
        page.click("#go")
        page.wait_for_function("!document.getElementById('go').disabled")
        assert page.text_content("#output") == "moon" + text
        assert page.text_content("#state").startswith(
            f"{tokens} tokens, "
        ) and "per second" in page.text_content("#state")
        page.fill("#temperature", "5")
        page.evaluate("document.getElementById('form').noValidate = true")
        page.click("#go")
        page.wait_for_function("document.getElementById('state').textContent.startsWith('Error')")
        chromium.close()
    assert faults == []
