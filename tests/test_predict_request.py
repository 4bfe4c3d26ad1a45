"""What one request computes, counted: every attention core, tables made once, tokens that reach the LM head, rows that leave."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from model_helpers import build_model, tiny_config
from test_generation import PROMPTS, brute_force_beams, left_padded, lively_model, recomputed_greedy

from ernie35se import attention, generation, modeling
from ernie35se.generation import Request, sample

GREEDY = dict(decode_strategy="greedy_search", eos_token_id=-1)
CORES = [attention.eager_attention, attention.flash_attention, attention.blockwise_attention]


def choose(monkeypatch, core):
    for module in (generation, modeling):
        monkeypatch.setattr(module, "choose_core", lambda *_: core)


@pytest.mark.parametrize("core", CORES, ids=lambda core: core.__name__)
@pytest.mark.parametrize("use_cache", [True, False])
def test_every_attention_core_gives_the_answers_of_full_recomputation(core, use_cache, monkeypatch):
    """Greedy and beams, in a padded batch and alone; the recomputation is eager."""
    model = lively_model()
    answers = [recomputed_greedy(model, prompt, 7) for prompt in PROMPTS]
    beams = [brute_force_beams(model, prompt, 2, 4, [], 0.0)[1] for prompt in PROMPTS]
    choose(monkeypatch, core)
    ids, mask = left_padded(PROMPTS)
    batches = [(ids, mask, range(3)), *((paddle.to_tensor([prompt]), None, [i]) for i, prompt in enumerate(PROMPTS))]
    for tokens, seen, rows in batches:
        settings = dict(attention_mask=seen, use_cache=use_cache)
        got, _ = model.generate(tokens, max_new_tokens=7, **GREEDY, **settings)
        assert got.tolist() == [answers[row] for row in rows]
        settings.update(decode_strategy="beam_search", num_beams=2, eos_token_id=-1)
        got, _ = model.generate(tokens, max_new_tokens=4, **settings)
        assert got.tolist() == [beams[row] for row in rows]


class Counted:
    """Calls of a function, by what `of` makes of their arguments."""

    def __init__(self, monkeypatch, owner, name, of):
        self.calls, function = [], getattr(owner, name)

        def counting(*arguments, **named):
            self.calls.append(of(*arguments))
            return function(*arguments, **named)

        monkeypatch.setattr(owner, name, counting)


def test_tables_are_made_once_and_each_key_is_turned_once(monkeypatch):
    model = lively_model()
    ids, mask = left_padded(PROMPTS)
    tables = Counted(monkeypatch, generation, "rope_tables", lambda where, _: where.shape[1])
    turned = [Counted(monkeypatch, module, "rotate", lambda x, *_: x.shape[1]) for module in (generation, modeling)]
    made = Counted(monkeypatch, generation, "prepare_mask", lambda core, mask, queries, keys: (queries, keys))
    model.generate(ids, attention_mask=mask, max_new_tokens=9, **GREEDY)
    width, layers = ids.shape[1], 3  # the tail has no attention
    assert tables.calls == [width + 9]  # all of the request's positions at once
    assert sum(sum(count.calls) for count in turned) <= 2 * layers * (width + 8)  # query and key, each token once
    assert made.calls == [(width, width), (1, width)]  # the prompt's, and the last layer's for its last token


def test_only_last_positions_reach_the_lm_head_and_ended_rows_leave(monkeypatch):
    model = lively_model()
    ids, mask = left_padded(PROMPTS)
    free = model.generate(ids, attention_mask=mask, max_new_tokens=9, **GREEDY)[0].tolist()
    ends = [free[0][2], free[1][5]]
    lengths = [next((i + 1 for i, token in enumerate(row) if token in ends), 9) for row in free]
    assert len(set(lengths)) > 1
    heads = Counted(monkeypatch, model, "lm_logits", lambda x: x.shape[:2])
    embeds = Counted(monkeypatch, model.ernie.embed_tokens, "forward", lambda tokens: tokens.shape)
    model.generate(ids, attention_mask=mask, max_new_tokens=9, decode_strategy="greedy_search", eos_token_id=ends)
    rows = [sum(length > step for length in lengths) for step in range(max(lengths))]
    assert heads.calls == [[count, 1] for count in rows]
    assert embeds.calls == [list(ids.shape), *([count, 1] for count in rows[1:])]


def test_a_small_top_k_never_sorts_the_vocabulary(monkeypatch):
    monkeypatch.setenv("ERNIE35SE_CPU_OPS", "0")  # the op looks at each score once
    asked = []
    topk = paddle.Tensor.topk
    monkeypatch.setattr(paddle.Tensor, "topk", lambda x, k, *rest, **named: asked.append(k) or topk(x, k, *rest, **named))
    for name in ("sort", "argsort"):
        monkeypatch.setattr(paddle.Tensor, name, lambda *_, **__: pytest.fail("sorted"))
        monkeypatch.setattr(paddle, name, lambda *_, **__: pytest.fail("sorted"))
    sample(paddle.randn([2, 500]), 0.95, 3, 0.8)
    assert asked == [3]


@pytest.mark.parametrize("prompt, new, table, interval", [(3000, 1096, 32768, 8), (3000, 1097, 32768, 7),
                                                          (4000, 1000, 65536, 13), (60, 40, 256, 2)])  # fmt: skip
def test_the_distance_is_fixed_for_the_whole_request(prompt, new, table, interval):
    """8 up to 4096 tokens in all, then what the table holds, the answer's positions included."""
    config = tiny_config(max_position_embeddings=table)
    request = Request(config, paddle.ones([1, prompt], dtype="int64"), None, None, new, None)
    np.testing.assert_array_equal(request.positions, [np.arange(1, prompt + new + 1) * interval - 1])
    assert request.positions.max() < table


def test_the_spacing_of_a_request_does_not_change_while_it_grows(monkeypatch):
    """Each token gets the position it has in the whole request, from the first step to the last."""
    model = build_model(tiny_config(max_position_embeddings=200))
    seen = []
    core = generation.WholeForward.logits
    monkeypatch.setattr(
        generation.WholeForward,
        "logits",
        lambda self, request: seen.append(request.positions[0, : request.length].tolist()) or core(self, request),
    )
    model.generate(paddle.to_tensor([[5, 6, 7]]), max_new_tokens=30, use_cache=False, **GREEDY)
    whole = (np.arange(1, 34) * 6 - 1).tolist()  # 200 // 33
    assert seen == [whole[:length] for length in range(3, 33)]
