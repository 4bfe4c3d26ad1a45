"""Generation against full recomputation, brute force, and itself row by row."""

import itertools

import numpy as np
import paddle
import pytest
from model_helpers import build_model, tiny_config
from paddlenlp.generation import GenerationConfig

from ernie35se import cpu_ops, positions
from ernie35se.generation import InPlaceForward, KVCache, Request, likeliest, sample

PROMPTS = [
    [5, 6, 7, 8, 9, 10],
    [11, 0, 12],
    [13],
]  # 0 is unk and pad: in the middle of a prompt it is a token


def left_padded(prompts, pad=0):
    width = max(map(len, prompts))
    ids = paddle.to_tensor([[pad] * (width - len(p)) + p for p in prompts])
    mask = paddle.to_tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def lively_model(**settings):
    """Weights large enough for answers that depend on everything before."""
    model = build_model(tiny_config(**settings))
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.set_value(parameter * 4.0)
    return model


def recomputed_greedy(model, prompt, new_tokens, position_ids=None):
    """The slow form: the whole sequence again for each token, positions written out by hand."""
    ids, config = list(prompt), model.config
    total = len(prompt) + new_tokens
    interval = (
        positions.position_interval(total, config.max_position_embeddings)
        if config.enable_random_position_ids
        else 1
    )
    where = positions.interval_position_ids(total, interval) if position_ids is None else position_ids
    for _ in range(new_tokens):
        (logits,) = model(paddle.to_tensor([ids]), position_ids=paddle.to_tensor(where[: len(ids)]))
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("settings", [{}, {"enable_random_position_ids": False}, {"parallel_attn_hatf": False},
                                      {"tie_word_embeddings": True}, {"max_position_embeddings": 20}])  # fmt: skip
@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_equals_full_recomputation_for_each_row(settings, use_cache):
    model = lively_model(**settings)
    ids, mask = left_padded(PROMPTS)
    got, _ = model.generate(ids, attention_mask=mask, max_new_tokens=12, decode_strategy="greedy_search", eos_token_id=-1,
                            use_cache=use_cache)  # fmt: skip
    assert got.shape == [3, 12]
    for row, prompt in zip(got.tolist(), PROMPTS):
        assert row == recomputed_greedy(model, prompt, 12)
        alone, _ = model.generate(
            paddle.to_tensor([prompt]), max_new_tokens=12, decode_strategy="greedy_search", eos_token_id=-1
        )
        assert alone.tolist() == [row]
    assert (
        len(set(map(tuple, got.tolist()))) == 3 and len(set(got[0].tolist())) > 2
    )  # answers that differ and move


def test_given_positions_go_on_at_their_own_distance():
    model = lively_model()
    for where in ([4, 9, 14, 19], [0, 1, 2, 3]):
        distance = where[1] - where[0]
        goes_on = np.array(where + [where[-1] + distance * (i + 1) for i in range(8)])
        got, _ = model.generate(
            paddle.to_tensor([[5, 6, 7, 8]]), position_ids=paddle.to_tensor([where]), max_new_tokens=8,
            decode_strategy="greedy_search", eos_token_id=-1,
        )  # fmt: skip
        assert got[0].tolist() == recomputed_greedy(model, [5, 6, 7, 8], 8, goes_on)


def test_answers_end_at_eos_and_are_padded():
    model = lively_model()
    ids, mask = left_padded(PROMPTS)
    free, _ = model.generate(
        ids, attention_mask=mask, max_new_tokens=12, decode_strategy="greedy_search", eos_token_id=-1
    )
    free = free.tolist()
    eos = free[0][4]
    got, scores = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=12,
        decode_strategy="greedy_search",
        eos_token_id=eos,
        pad_token_id=36,
    )
    assert scores.shape == [3, 1] and (scores.numpy() < 0).all() and model.config.eos_token_id == 2
    ends = [eos, free[1][1], free[2][2]]
    several, _ = model.generate(
        ids, attention_mask=mask, max_new_tokens=12, decode_strategy="greedy_search", eos_token_id=ends
    )
    for answers, pad, stop in ((got.tolist(), 36, {eos}), (several.tolist(), 0, set(ends))):
        for row, whole in zip(answers, free):
            length = next((i + 1 for i, token in enumerate(whole) if token in stop), 12)
            assert row == (whole[:length] + [pad] * 12)[: len(row)]


def test_scores_are_mean_log_probabilities():
    model = lively_model()
    got, scores = model.generate(
        paddle.to_tensor([PROMPTS[0]]), max_new_tokens=5, decode_strategy="greedy_search", eos_token_id=-1
    )
    ids = PROMPTS[0] + got[0].tolist()
    where = positions.interval_position_ids(11, positions.position_interval(11, 256))
    (logits,) = model(paddle.to_tensor([ids]), position_ids=paddle.to_tensor(where))
    wide = logits.numpy()[0].astype(np.float64)
    log_p = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    expected = np.mean([log_p[5 + i, token] for i, token in enumerate(got[0].tolist())])
    assert scores.item() == pytest.approx(expected, rel=1e-4)


def brute_force_beams(model, prompt, width, steps, ends, penalty):
    """Beam search by the definition, one full forward for each beam and step."""
    total = len(prompt) + steps
    where = positions.interval_position_ids(
        total, positions.position_interval(total, model.config.max_position_embeddings)
    )
    beams, finished = [(0.0, [])], []
    for step in range(steps):
        candidates = []
        for score, tokens in beams:
            ids = prompt + tokens
            (logits,) = model(paddle.to_tensor([ids]), position_ids=paddle.to_tensor(where[: len(ids)]))
            log_p = paddle.nn.functional.log_softmax(logits[0, -1]).numpy()
            candidates += [(score + float(p), tokens + [token]) for token, p in enumerate(log_p)]
        candidates.sort(key=lambda c: -c[0])
        beams = []
        for rank, (score, tokens) in enumerate(candidates[: 2 * width]):
            if tokens[-1] in ends:
                if rank < width:
                    finished.append((score / len(tokens) ** penalty, tokens))
            elif len(beams) < width:
                beams.append((score, tokens))
    finished += [(score / len(tokens) ** penalty, tokens) for score, tokens in beams]
    return max(finished)


@pytest.mark.parametrize("width, penalty", [(2, 0.0), (3, 1.0), (4, 0.6)])
def test_beam_search_equals_brute_force_for_each_row(width, penalty):
    model = lively_model()
    greedy = recomputed_greedy(model, PROMPTS[0], 6)
    ends = [greedy[3], greedy[1]]
    ids, mask = left_padded(PROMPTS)
    got, scores = model.generate(ids, attention_mask=mask, max_new_tokens=6, decode_strategy="beam_search", num_beams=width,
                                 length_penalty=penalty, eos_token_id=ends)  # fmt: skip
    for row, score, prompt in zip(got.tolist(), scores.flatten().tolist(), PROMPTS):
        expected_score, expected = brute_force_beams(model, prompt, width, 6, ends, penalty)
        assert score == pytest.approx(expected_score, rel=1e-4)
        assert row == (expected + [0] * 6)[: got.shape[1]]


def test_beams_come_best_first_and_may_end_early():
    model = lively_model()
    ids, mask = left_padded(PROMPTS)
    settings = dict(
        attention_mask=mask, max_new_tokens=5, decode_strategy="beam_search", num_beams=3, eos_token_id=7
    )
    got, scores = model.generate(ids, num_return_sequences=3, **settings)
    assert got.shape[0] == 9 and (np.diff(scores.numpy().reshape(3, 3)) <= 0).all()
    one, best = model.generate(ids, **settings)
    np.testing.assert_allclose(best.numpy(), scores.numpy()[::3], rtol=1e-5)
    early, _ = model.generate(ids, early_stopping=True, **settings)
    assert early.shape[0] == 3


@pytest.mark.parametrize(
    "top_k, top_p, temperature", [(0, 1.0, 1.0), (3, 1.0, 0.7), (0, 0.6, 1.5), (4, 0.5, 0.9), (100, 0.9, 1.0)]
)
def test_sampling_follows_its_distribution(top_k, top_p, temperature):
    paddle.seed(1)
    logits = np.array([[1.0, 2.0, 0.5, -1.0, 1.5, 0.0]])
    p = np.exp(logits[0] / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    keep = np.zeros(6, dtype=bool)
    mass = 0.0
    for rank, token in enumerate(order):
        keep[token] = (not top_k or rank < top_k) and (rank == 0 or mass <= top_p)
        mass += p[token]
    expected = np.where(keep, p, 0) / p[keep].sum()
    drawn, _ = sample(paddle.to_tensor(np.repeat(logits, 20000, 0).astype("float32")), temperature, top_k, top_p)
    counts = np.bincount(drawn.numpy().flatten(), minlength=6) / 20000
    assert (counts[~keep] == 0).all()
    np.testing.assert_allclose(counts, expected, atol=0.015)


def test_sampling_repeats_under_a_seed_and_can_return_several():
    model = lively_model()
    ids, mask = left_padded(PROMPTS)
    settings = dict(
        attention_mask=mask, max_new_tokens=6, decode_strategy="sampling", top_k=0, eos_token_id=-1
    )
    answers = []
    for seed in (1, 1, 2):
        paddle.seed(seed)
        answers.append(model.generate(ids, num_return_sequences=2, **settings)[0].tolist())
    assert answers[0] == answers[1] != answers[2] and len(answers[0]) == 6
    paddle.seed(0)
    greedy, _ = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, decode_strategy="greedy_search", eos_token_id=-1
    )
    narrow, _ = model.generate(ids, **{**settings, "top_k": 1})
    assert narrow.tolist() == greedy.tolist()


@pytest.mark.parametrize(
    "strategy", [dict(decode_strategy="greedy_search"), dict(decode_strategy="beam_search", num_beams=2)]
)
@pytest.mark.parametrize("processor", [dict(repetition_penalty=3.0), dict(min_new_tokens=4), dict(no_repeat_ngram_size=2),
                                       dict(forced_eos_token_id=9)])  # fmt: skip
def test_logits_processors_treat_a_padded_row_as_a_single_one(strategy, processor):
    model = lively_model()
    ids, mask = left_padded(PROMPTS)
    eos = recomputed_greedy(model, PROMPTS[1], 2)[0]
    settings = dict(max_new_tokens=6, eos_token_id=eos, **strategy, **processor)
    batch, _ = model.generate(ids, attention_mask=mask, **settings)
    plain, _ = model.generate(ids, attention_mask=mask, max_new_tokens=6, eos_token_id=eos, **strategy)
    for row, prompt in zip(batch.tolist(), PROMPTS):
        single = model.generate(paddle.to_tensor([prompt]), **settings)[0][0].tolist()
        assert row == (single + [0] * 6)[: len(row)]
    if "min_new_tokens" in processor and "greedy_search" in strategy.values():
        assert plain[1].tolist()[0] == eos and eos not in batch[1].tolist()[:4]
    if "forced_eos_token_id" in processor:
        assert any(row[-1] == 9 for row in batch.tolist())


def test_streamed_tokens_are_the_answer():
    class Collect:
        def __init__(self):
            self.steps, self.ended = [], False

        def put(self, tokens):
            self.steps.append(tokens.tolist())

        def end(self):
            self.ended = True

    model, streamer = lively_model(), Collect()
    ids, mask = left_padded(PROMPTS)
    eos = recomputed_greedy(model, PROMPTS[0], 3)[2]
    got, _ = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=7,
        decode_strategy="greedy_search",
        eos_token_id=eos,
        streamer=streamer,
    )
    assert np.array(streamer.steps).T.tolist() == got.tolist() and streamer.ended


def test_what_does_not_fit_is_refused_before_anything_is_computed(monkeypatch):
    model = lively_model(max_position_embeddings=16)
    monkeypatch.setattr(model.ernie.embed_tokens, "forward", lambda *a, **k: pytest.fail("computed"))
    with pytest.raises(ValueError, match="17 tokens .* 16"):
        model.generate(paddle.to_tensor([PROMPTS[0]]), max_new_tokens=11)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(decode_strategy="magic"), "decode_strategy is 'magic'"),
        (dict(max_new_tokens=0), "max_new_tokens is 0"),
        (dict(temperature=0.0), "temperature is 0.0"),
        (dict(top_p=0.0), "top_p is 0.0"),
        (dict(top_k=-1), "top_k is -1"),
        (dict(decode_strategy="beam_search"), "num_beams is 1"),
        (
            dict(decode_strategy="beam_search", num_beams=2, num_return_sequences=3),
            "num_return_sequences is 3",
        ),
        (dict(decode_strategy="greedy_search", num_return_sequences=2), "num_return_sequences is 2"),
        (dict(top_n=3), "does not know top_n"),
        (dict(attention_mask=paddle.to_tensor([[1, 1, 0]])), "padded on the left"),
        (dict(attention_mask=paddle.to_tensor([[1, 1]])), "attention_mask has shape"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        lively_model().generate(paddle.to_tensor([[5, 6, 7]]), **{"decode_strategy": "sampling", **settings})


def test_a_generation_config_is_taken_and_stays_as_it_was():
    model = lively_model()
    config = GenerationConfig(decode_strategy="greedy_search", max_new_tokens=4, eos_token_id=-1)
    got, _ = model.generate(paddle.to_tensor([[5, 6]]), config, max_new_tokens=3)
    assert got.shape == [1, 3] and config.max_new_tokens == 4
    model.train()
    assert model.generate(paddle.to_tensor([[5, 6]]), config)[0].shape == [1, 4] and model.training


def test_cache_buffers_are_written_in_place_and_grow():
    cache, rng = KVCache(300), np.random.default_rng(0)
    pieces = [paddle.to_tensor(rng.standard_normal((2, n, 3, 4)).astype("float32")) for n in (2, 1, 70, 1)]
    assert cache.append(pieces[0], pieces[0] + 1)[0] is pieces[0]  # a prompt reads its own keys
    for piece in pieces[1:]:
        buffers = cache._key
        key, value = cache.append(piece, piece + 1)
        assert (cache._key is buffers) == (piece.shape[1] == 1)
    whole = paddle.concat(pieces, axis=1).numpy().transpose(0, 2, 1, 3)
    assert (
        cache.length == 74
        and list(key.shape) == [2, 3, cache.room, 4]
        and cache.room == 128 == cache.room_for(128)
    )
    np.testing.assert_array_equal(key.numpy()[:, :, :74], whole)
    np.testing.assert_array_equal(value.numpy()[:, :, :74], whole + 1)
    cache.select(paddle.to_tensor([1, 1, 0]))
    np.testing.assert_array_equal(cache._key.numpy()[:, :, :74], whole[[1, 1, 0]])
    assert cache.room_for(250) == 300


def test_steps_are_the_answer_and_rows_may_be_dropped():
    model = lively_model()
    ids, mask = left_padded(PROMPTS)
    settings = dict(attention_mask=mask, max_new_tokens=9, decode_strategy="greedy_search", eos_token_id=-1)
    whole = model.generate(ids, **settings)[0].tolist()
    steps = model.generate_steps(ids, **settings)
    model.train()
    seen, dropped = [[], [], []], None
    for number in range(9):
        for row, token in steps.send(dropped).items():
            seen[row].append(token)
        dropped = {0: None, 2: {1}, 4: {0}}.get(number)
        assert model.training and paddle.is_grad_enabled()  # between the steps the caller's own
    assert seen == [whole[0][:5], whole[1][:3], whole[2]]
    assert next(steps, None) is None
    with pytest.raises(ValueError, match="beam search"):
        model.generate_steps(ids, **{**settings, "decode_strategy": "beam_search", "num_beams": 2})


def test_one_interval_may_be_set_for_all_rows():
    model = lively_model()
    ids, mask = left_padded(PROMPTS)
    settings = dict(max_new_tokens=8, decode_strategy="greedy_search", eos_token_id=-1, position_interval=5)
    got, _ = model.generate(ids, attention_mask=mask, **settings)
    for row, prompt in zip(got.tolist(), PROMPTS):
        assert row == recomputed_greedy(model, prompt, 8, positions.interval_position_ids(len(prompt) + 8, 5))
    with pytest.raises(ValueError, match="position_interval 40 x 14 tokens .* 256 positions"):
        model.generate(ids, attention_mask=mask, **{**settings, "position_interval": 40})
    with pytest.raises(ValueError, match="go on to 280 .* 256 positions"):
        model.generate(ids[:, :2], position_ids=paddle.to_tensor([[100, 120]]), max_new_tokens=8)


def test_long_answers_outgrow_the_first_buffers():
    """More than one growth of the cache, in a padded batch whose rows leave at different times."""
    model = lively_model(max_position_embeddings=512)
    ids, mask = left_padded(PROMPTS)
    settings = dict(max_new_tokens=150, decode_strategy="greedy_search", eos_token_id=-1)
    free = model.generate(ids, attention_mask=mask, use_cache=False, **settings)[0].tolist()
    ends = [free[0][75], free[1][120]]
    got = model.generate(ids, attention_mask=mask, **{**settings, "eos_token_id": ends})[0].tolist()
    for row, whole in zip(got, free):
        length = next((i + 1 for i, token in enumerate(whole) if token in ends), 150)
        assert row == (whole[:length] + [0] * 150)[: len(row)]


def test_a_cache_is_used_unless_refused(monkeypatch):
    model, lengths = lively_model(), []
    embed = model.ernie.embed_tokens.forward
    monkeypatch.setattr(
        model.ernie.embed_tokens, "forward", lambda ids: lengths.append(ids.shape[1]) or embed(ids)
    )
    settings = dict(max_new_tokens=3, decode_strategy="greedy_search", eos_token_id=-1)
    model.generate(paddle.to_tensor([[5, 6, 7]]), **settings)
    model.generate(paddle.to_tensor([[5, 6, 7]]), use_cache=False, **settings)
    assert lengths == [3, 1, 1, 3, 4, 5] and not model.config.use_cache


@pytest.mark.parametrize("block", [1, 3, 4, 100])
def test_prefill_in_blocks_equals_prefill_at_once(monkeypatch, block):
    model = lively_model()
    ids, mask = left_padded(PROMPTS)
    settings = dict(max_new_tokens=5, decode_strategy="greedy_search", eos_token_id=-1)
    for inputs in (dict(input_ids=ids, attention_mask=mask), dict(input_ids=ids[:1])):
        whole, scores = model.generate(use_cache=False, **inputs, **settings)
        monkeypatch.setattr("ernie35se.attention.BLOCK", block)
        blocks, same = model.generate(**inputs, **settings)
        assert blocks.tolist() == whole.tolist()
        np.testing.assert_allclose(same.numpy(), scores.numpy(), rtol=1e-5)


@pytest.mark.parametrize("ops", ["0", "1"])
@pytest.mark.parametrize("count, temperature", [(1, 1.0), (1, 0.5), (3, 1.0), (2, 2.0)])
def test_likeliest(ops, count, temperature, monkeypatch):
    monkeypatch.setenv("ERNIE35SE_CPU_OPS", ops)
    logits = np.array([[1.0, 2.0, -3.0], [500.0, -500.0, 499.0], [-np.inf, 3.0, -np.inf]])
    values, ids, log_sums = likeliest(paddle.to_tensor(logits.astype("float32")), count, temperature)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    np.testing.assert_array_equal(values.numpy(), np.take_along_axis(logits, order, 1))
    assert ids[:2].tolist() == order[:2].tolist() and ids[2, 0].item() == 1
    expected = [
        [peak / t + np.log(np.exp((row - peak) / t).sum()) for t in (1.0, temperature)]
        for row, peak in zip(logits, logits.max(-1))
    ]
    np.testing.assert_allclose(log_sums.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"parallel_attn_hatf": False}, {"num_hidden_layers": 2}])
def test_only_a_prompts_last_token_asks_the_last_attention_layer(settings, monkeypatch):
    """Logits equal the model's own, in a padded batch; the last attention's o_proj sees one token a row."""
    model = lively_model(**settings)
    ids, mask = left_padded(PROMPTS)
    request = Request(model.config, ids, mask, None, 4, None)
    forward = InPlaceForward(model, request)
    block = model.ernie.layers[forward.last_attention]
    projection = (block.self_attn if hasattr(block, "self_attn") else block.self_attn_mlp).o_proj
    seen, project = [], projection.forward
    monkeypatch.setattr(projection, "forward", lambda x: seen.append(x.shape[1]) or project(x))
    with paddle.no_grad():
        got = forward.logits(request)
        assert seen == [1] and forward.caches[forward.last_attention].length == ids.shape[1]
        where = paddle.to_tensor(request.positions[:, : ids.shape[1]])
        (expected,) = model(ids, position_ids=where, attention_mask=mask)
    np.testing.assert_allclose(got.numpy(), expected[:, -1].numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"parallel_attn_hatf": False}, {"tie_word_embeddings": True}, {"use_bias": False}])
@pytest.mark.parametrize("strategy", [dict(decode_strategy="greedy_search"), dict(decode_strategy="beam_search", num_beams=3)])
def test_steps_by_cpu_ops_give_the_plain_steps_text(settings, strategy, monkeypatch):
    """In a padded batch whose rows leave at different times, past the cache's first buffers."""
    if cpu_ops.usable() is None:
        pytest.skip("not built: pip install ./external_ops/cpu_ops --no-build-isolation")
    model, steps = lively_model(max_position_embeddings=512, **settings), []
    ids, mask = left_padded(PROMPTS)
    step = KVCache._step
    monkeypatch.setattr(KVCache, "_step", lambda self, *rest: steps.append(self.length) or step(self, *rest))
    free = model.generate(ids, attention_mask=mask, max_new_tokens=90, eos_token_id=-1, decode_strategy="greedy_search")[0]
    ends = [free[0, 70].item(), free[2, 30].item()]
    answers = []
    for choice in ("1", "0"):
        monkeypatch.setenv("ERNIE35SE_CPU_OPS", choice)
        steps.clear()
        answers.append(model.generate(ids, attention_mask=mask, max_new_tokens=90, eos_token_id=ends, **strategy))
        assert bool(steps) == (choice == "1")
    assert answers[0][0].tolist() == answers[1][0].tolist()
    np.testing.assert_allclose(answers[0][1].numpy(), answers[1][1].numpy(), rtol=1e-4)
