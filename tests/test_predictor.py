"""The Predictor: same answers alone and in batches, with every adapter, streamed and whole; what it refuses
and says."""

import json
import shutil

import numpy as np
import paddle
import pytest
from paddlenlp.utils.log import logger
from predict_helpers import write_checkpoint
from test_generation import recomputed_greedy

from ernie35se import conversion, peft, positions
from ernie35se.data.records import read_prompts
from ernie35se.predictor import Decoding, Predictor, TextStream, write_single_device

GREEDY = Decoding(decode_strategy="greedy_search")
PROMPTS = ["moon", "the quick moon jumps over three dogs", "", "swap \u6708 <unk> </s> three"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("predict") / "base")


@pytest.fixture(scope="module")
def predictor(folder):
    return Predictor.load(str(folder), device="cpu", src_length=40, tgt_length=12)


@pytest.fixture
def said(monkeypatch):
    lines = []
    for level in ("info", "warning"):
        monkeypatch.setattr(logger, level, lambda text, *rest: lines.append(str(text)))
    return lines


def ids_until_eos(predictor, ids):
    return ids[: ids.index(predictor.eos_id)] if predictor.eos_id in ids else ids


def test_answers_are_full_recomputation_at_one_spacing_whatever_the_batch(predictor):
    interval = positions.position_interval(52, 256)
    assert predictor.interval == interval == 4
    expected = []
    for prompt in PROMPTS:
        ids = predictor.encode(prompt).ids
        assert ids[0] == 1 and 2 not in ids
        where = positions.interval_position_ids(len(ids) + 12, interval)
        answer = ids_until_eos(predictor, recomputed_greedy(predictor.model, ids, 12, where))
        expected.append(
            predictor.tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )
    for batch_size in (1, 2, 4):
        assert predictor.predict(PROMPTS, GREEDY, batch_size) == expected
    assert len(set(expected)) == len(PROMPTS)


def test_batches_hold_prompts_of_similar_length_and_a_resumed_run_repeats_them(predictor, monkeypatch):
    rng = np.random.default_rng(0)
    prompts = [predictor.encode("moon " * int(n)).ids for n in rng.integers(1, 12, 40)]
    batches = []
    whole = type(predictor).answer_batch
    monkeypatch.setattr(
        predictor, "answer_batch", lambda ps, d: batches.append(list(map(len, ps))) or whole(predictor, ps, d)
    )
    decoding = Decoding(seed=5)
    answers = dict(predictor.answers(prompts, decoding, 4))
    assert sorted(answers) == list(range(40)) and len(batches) == 10
    assert np.mean([max(batch) - min(batch) for batch in batches]) < 2
    assert dict(predictor.answers(prompts, decoding, 4, done=33)) == {n: answers[n] for n in range(33, 40)}
    assert dict(predictor.answers(prompts, Decoding(seed=6), 4)) != answers


def test_a_stream_is_the_answer_in_whole_characters(predictor):
    for prompt in PROMPTS:
        for decoding in (GREEDY, Decoding(seed=3), Decoding(seed=8, top_k=0, top_p=1.0)):
            pieces = list(predictor.stream(prompt, decoding))
            assert "".join(pieces) == predictor.predict([prompt], decoding)[0]
            assert all(pieces)
    with pytest.raises(ValueError, match="beam search"):
        predictor.stream("moon", Decoding(decode_strategy="beam_search"))


@pytest.mark.parametrize(
    "text", ["moon \u6708\u4eae \U0001f319!", "\u0301", " two  spaces", "a\nb\tc", "\ufffd", "\u6708"]
)
def test_text_stream_gives_back_what_was_encoded(predictor, text):
    ids = predictor.tokenizer.encode_plain(text)
    stream = TextStream(predictor.tokenizer)
    pieces = [stream.put(token) for token in ids] + [stream.end()]
    assert "".join(pieces) == predictor.tokenizer.sp_model.decode(ids)
    assert pieces[-1] == ""
    if text == "\u6708":
        assert [piece for piece in pieces if piece] == ["\u6708"]  # three bytes, one piece


def test_text_stream_marks_bytes_that_are_no_character(predictor):
    def byte(value):
        return predictor.tokenizer.convert_tokens_to_ids(f"<0x{value:02X}>")

    moon = predictor.tokenizer.encode_plain("moon")
    stream = TextStream(predictor.tokenizer)
    assert stream.put(byte(0xE6)) == "" and stream.put(moon[0]).startswith("\ufffd")
    assert stream.put(byte(0xE6)) == stream.put(byte(0x9C)) == "" and stream.put(byte(0x88)) == "\u6708"
    assert stream.put(byte(0xFF)) == "\ufffd" and stream.put(byte(0xF0)) == "" and stream.end() == "\ufffd"
    assert TextStream(predictor.tokenizer, context=[1]).put(moon[0]).startswith(" ")


CONFIGS = {
    "lora": peft.LoRAConfig(r=4, lora_alpha=16),
    "vera": peft.VeRAConfig(r=4),
    "lokr": peft.LoKrConfig(),
    "dislora": peft.DisLoRAConfig(),
    "reft": peft.ReFTConfig(position="f2+l1", rank=2),
    "tare": peft.TareConfig(tare_n=3, tare_k=2),
    "prefix": peft.PrefixConfig(num_prefix_tokens=3),
}


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory):
    """method -> folder of adapters that do something."""
    made = {}
    for method, config in CONFIGS.items():
        model = Predictor.load(str(folder), device="cpu", src_length=40, tgt_length=12).model
        peft.wrap(model, config)
        paddle.seed(4)
        for parameter in peft.adapter_state(model).values():
            parameter.set_value(parameter + 0.2 * paddle.randn(parameter.shape))
        made[method] = tmp_path_factory.mktemp(method)
        peft.save(model, made[method])
    return made


@pytest.mark.parametrize("method", list(peft.METHODS))
def test_every_adapter_answers_unmerged_alike_alone_and_in_a_batch(folder, adapters, predictor, method):
    adapted = Predictor.load(
        str(folder), adapter_path=str(adapters[method]), device="cpu", src_length=40, tgt_length=12
    )
    batch = adapted.predict(PROMPTS, GREEDY, 4)
    assert batch == [adapted.predict([prompt], GREEDY)[0] for prompt in PROMPTS]
    assert batch != predictor.predict(PROMPTS, GREEDY)
    beams = Decoding(decode_strategy="beam_search", num_beams=2)
    assert adapted.predict(PROMPTS, beams, 4) == [adapted.predict([prompt], beams)[0] for prompt in PROMPTS]
    if method == "reft":
        return  # edits the prompt only: recomputation must know where that ends
    for prompt, answer in zip(PROMPTS, batch):
        ids = adapted.encode(prompt).ids
        where = positions.interval_position_ids(len(ids) + 12, adapted.interval)
        assert answer == adapted.text(recomputed_greedy(adapted.model, ids, 12, where))


def test_reft_edits_the_prompt_and_not_the_answer(folder, adapters):
    adapted = Predictor.load(
        str(folder), adapter_path=str(adapters["reft"]), device="cpu", src_length=40, tgt_length=12
    )
    ids = adapted.encode(PROMPTS[1]).ids
    where, answer = positions.interval_position_ids(len(ids) + 12, adapted.interval), []
    for _ in range(12):
        everything = ids + answer
        labels = [-100] * (len(ids) - 1) + [5] * (len(answer) + 1)  # tells the model where the prompt ends
        _, logits = adapted.model(
            paddle.to_tensor([everything]),
            position_ids=paddle.to_tensor(where[: len(everything)]),
            labels=paddle.to_tensor([labels]),
        )
        answer.append(int(logits[0, -1].argmax()))
    assert adapted.predict([PROMPTS[1]], GREEDY) == [adapted.text(answer)]


def test_long_prompts_are_cut_and_said(predictor, said):
    long = " ".join(f"moon {i}" for i in range(60))
    encoded = predictor.encode(long)
    assert len(encoded.ids) == 40 and encoded.truncated and encoded.full_length > 100
    whole = predictor._encode_whole.prompt_ids(next(iter([encoded and _conversation(long)])))[0]
    assert encoded.ids == whole[:20] + whole[-20:]
    predictor.predict(["moon", long], GREEDY)
    assert [
        line
        for line in said
        if "1 of 2 prompts" in line and f"prompt 2 ({encoded.full_length} tokens)" in line
    ]


def _conversation(text):
    from ernie35se.data.records import Conversation

    return Conversation(((text, ""),), None, "")


def test_a_fine_tuned_checkpoint_brings_template_and_lengths(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "tuned")
    described = {
        "template": "alpaca",
        "source": "Q: {{ prompt }}\nA:",
        "src_length": 30,
        "tgt_length": 7,
        "max_length": 37,
    }
    (tmp_path / "tuned" / "template.json").write_text(json.dumps(described))
    tuned = Predictor.load(str(tmp_path / "tuned"), device="cpu")
    assert (tuned.src_length, tuned.tgt_length) == (30, 7)
    assert tuned.encode("moon").ids == [1, *tuned.tokenizer.encode_plain("Q: moon\nA:")]
    plain = Predictor.load(str(tmp_path / "tuned"), device="cpu", template="plain", tgt_length=9)
    assert plain.encode("moon").ids == [1, *plain.tokenizer.encode_plain("moon")] and plain.tgt_length == 9
    (tmp_path / "tuned" / "template.json").write_text("{}")
    with pytest.raises(ValueError, match="template.json: not what fine-tuning writes"):
        Predictor.load(str(tmp_path / "tuned"), device="cpu")


def test_prompts_of_a_file(tmp_path, folder, predictor):
    records = [
        {"src": "moon"},
        {"src": "moon", "tgt": "ignored"},
        {"instruction": "swap", "input": "three moon"},
        {"instruction": "swap", "output": "ignored", "history": [["hi", "hello"]], "system": "be brief"},
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
            ]
        },
        {"src": ["a", "c"], "tgt": ["b", "ignored"]},
    ]
    for name, text in (("a.jsonl", "\n".join(map(json.dumps, records))), ("a.json", json.dumps(records))):
        (tmp_path / name).write_text(text)
        prompts = list(read_prompts(tmp_path / name))
        assert [p.turns for p in prompts] == [
            (("moon", ""),), (("moon", ""),), (("swap\nthree moon", ""),), (("hi", "hello"), ("swap", "")),
            (("a", "b"), ("c", "")), (("a", "b"), ("c", "")),
        ]  # fmt: skip
        assert (
            prompts[3].system == "be brief"
            and prompts[1].place == f"{tmp_path / name}:{2 if name == 'a.jsonl' else 1}"
        )
    assert predictor.encode(prompts[4]).ids == predictor.encode(prompts[5]).ids
    for text, message in (
        ('{"src": "a"}\n{"text": "b"}', ":2: has the fields 'text'; expected src"),
        ('{"src": 3}', ":1: field 'src' is 3"),
        ("[1]", ":1: a JSON int"),
        ('{"src": "a"', ":1: not JSON"),
        ('{"instruction": "a", "history": [["b", ""]]}', ":1: an earlier response is empty"),
        ('{"messages": []}', ":1: the roles are assistant"),
    ):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(ValueError, match="bad.jsonl" + message):
            list(read_prompts(tmp_path / "bad.jsonl"))


def test_device_and_dtype_fall_back_to_the_cpu_and_say_so(folder, said):
    loaded = Predictor.load(str(folder), device="gpu:3", dtype="bfloat16", src_length=9, tgt_length=9)
    assert paddle.get_device() == "cpu" and loaded.model.lm_head.weight.dtype == paddle.float32
    assert any("device gpu:3" in line for line in said) and any("dtype bfloat16" in line for line in said)


def cut(folder, target, degree):
    """The checkpoint as tensor-parallel ranks would write it."""
    shutil.copytree(folder, target)
    from ernie35se.configuration import Ernie35Config

    config = Ernie35Config.from_pretrained(str(folder))
    (weights,) = target.glob("model*.pdparams")
    state = paddle.load(str(weights), return_numpy=True)
    weights.unlink()
    for rank in range(degree):
        piece = {name: conversion.split(name, array, config, degree, rank) for name, array in state.items()}
        paddle.save(piece, str(target / f"model_state.tp{rank:02d}.pdparams"))
    values = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**values, "tensor_parallel_degree": degree}))
    return target


def test_weights_in_pieces_are_joined_and_may_be_written_whole(tmp_path):
    folder = write_checkpoint(tmp_path / "base", num_attention_heads=4, intermediate_size=16, hidden_size=24)
    whole = Predictor.load(str(folder), device="cpu", src_length=20, tgt_length=8)
    expected = whole.predict(PROMPTS, GREEDY)
    pieces = cut(folder, tmp_path / "pieces", 2)
    assert (
        Predictor.load(str(pieces), device="cpu", src_length=20, tgt_length=8).predict(PROMPTS, GREEDY)
        == expected
    )
    for source in (pieces, folder):
        target = tmp_path / "single" / source.name
        write_single_device(str(source), str(target), whole.tokenizer)
        alone = Predictor.load(str(target), device="cpu", src_length=20, tgt_length=8)
        assert (
            alone.predict(PROMPTS, GREEDY) == expected
            and alone.tokenizer.get_vocab() == whole.tokenizer.get_vocab()
        )
    with pytest.raises(ValueError, match="is the checkpoint itself"):
        write_single_device(str(folder), str(folder), whole.tokenizer)


def broken(folder, tmp_path, change):
    target = tmp_path / "broken"
    shutil.copytree(folder, target)
    change(target)
    return target


def without_a_weight(folder):
    (weights,) = folder.glob("model*.pdparams")
    state = paddle.load(str(weights))
    del state["ernie.norm.weight"]
    paddle.save(state, str(weights))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: not JSON"),
        (lambda f: (f / "config.json").write_text("{}"), "describes no ERNIE-3.5-SE"),
        (lambda f: next(f.glob("model*.pdparams")).unlink(), "holds no weights"),
        (lambda f: next(f.glob("model*.pdparams")).write_bytes(b"xx"), "is it whole"),
        (lambda f: (f / "sentencepiece.bpe.model").unlink(), "holds no tokenizer"),
        (lambda f: without_a_weight(f), "weights lack 'ernie.norm.weight' .1 in all"),
        (shutil.rmtree, "no such folder"),
    ],
)
def test_checkpoints_that_are_not_whole_are_refused(folder, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        Predictor.load(str(broken(folder, tmp_path, change)), device="cpu", src_length=9, tgt_length=9)


def test_settings_that_do_not_fit_are_refused(folder, predictor):
    for settings, message in (
        (dict(src_length=200, tgt_length=57), "257 tokens, but the model has 256 positions"),
        (dict(device="tpu"), "device = 'tpu'"),
        (dict(dtype="int8"), "dtype = 'int8'"),
        (dict(adapter_path="nowhere"), "holds no adapter"),
    ):
        with pytest.raises(ValueError, match=message):
            Predictor.load(str(folder), **{"device": "cpu", "src_length": 9, "tgt_length": 9, **settings})
    with pytest.raises(ValueError, match="no weights of it were ever released"):
        Predictor.load("ernie/tiny-random-ernie")
    for settings, message in (
        (dict(top_p=0), "top_p = 0"), (dict(temperature=0.0), "temperature = 0.0"),
        (dict(num_beams=1), "num_beams = 1"),
        (dict(decode_strategy="best"), "decode_strategy = 'best'"),
        (dict(repetition_penalty=-1), "repetition_penalty = -1"),
        (dict(seed=-1), "seed = -1"), (dict(top_k=1.5), "top_k = 1.5"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            Decoding(**settings)
