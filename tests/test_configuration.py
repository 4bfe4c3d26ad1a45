"""The configuration: built-in sizes, files, validation; loading and saving models; the Auto classes."""

import json
import os

import numpy as np
import paddle
import pytest
from model_helpers import build_model, tiny_config
from paddlenlp.transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, ErnieConfig

import ernie35se.auto  # noqa: F401  registers the Auto classes
from ernie35se.configuration import BUILT_IN_CONFIGS, Ernie35Config
from ernie35se.modeling import Ernie35ForCausalLM, Ernie35Model


@pytest.mark.parametrize(
    "name, sizes",
    [
        ("baidu/ernie-3.5-se-3b", (3072, 8192, 32, 24, 32768, True)),
        ("ernie/tiny-random-ernie", (768, 2048, 3, 12, 4096, False)),
    ],
)
@pytest.mark.parametrize("loader", [Ernie35Config, AutoConfig])
def test_built_in_configurations_resolve_offline(name, sizes, loader):
    config = loader.from_pretrained(name)
    assert isinstance(config, Ernie35Config)
    assert sizes == (
        config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads,
        config.max_position_embeddings, config.use_progressive_seq_len,
    )  # fmt: skip
    assert (config.vocab_size, config.pad_token_id, config.bos_token_id, config.eos_token_id) == (32000, 0, 1, 2)
    assert config.parallel_attn_hatf and config.enable_random_position_ids and config.use_bias
    assert config.weight_share_add_bias and config.use_flash_attention and config.tensor_parallel_output
    assert not (config.tie_word_embeddings or config.fuse_ln or config.fuse_linear or config.use_recompute)


def test_reading_a_built_in_configuration_does_not_change_it():
    before = json.dumps(BUILT_IN_CONFIGS, sort_keys=True)
    config = Ernie35Config.from_pretrained("ernie/tiny-random-ernie", vocab_size=99)
    assert config.vocab_size == 99 and json.dumps(BUILT_IN_CONFIGS, sort_keys=True) == before


@pytest.mark.parametrize("file, name", [("tiny", "ernie/tiny-random-ernie"), ("3b", "baidu/ernie-3.5-se-3b")])
def test_model_files_are_the_built_in_configurations(file, name):
    path = os.path.join(os.path.dirname(__file__), "..", "configs", "model", f"{file}.json")
    got, built_in = (Ernie35Config.from_pretrained(p).to_dict() for p in (path, name))
    assert got.pop("architectures") == ["Ernie35ForCausalLM"] and built_in.pop("architectures") is None
    assert got == built_in


def test_a_saved_configuration_loads_equal(tmp_path):
    config = tiny_config(tie_word_embeddings=True, use_bias=False, layer_norm_eps=1e-5, enable_random_position_ids=False)
    config.save_pretrained(tmp_path)
    loaded = Ernie35Config.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()


def test_old_spellings_of_tied_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ernie", "weight_share": True}))
    assert Ernie35Config.from_pretrained(tmp_path).tie_word_embeddings is True
    assert Ernie35Config(weight_share=True).tie_word_embeddings is True
    assert Ernie35Config(weight_share=False).tie_word_embeddings is False
    assert Ernie35Config(tie_word_embeddings=True).weight_share is True


@pytest.mark.parametrize(
    "settings, scope",
    [
        ({}, "none"),
        ({"use_recompute": True}, "full"),
        ({"recompute": True}, "full"),
        ({"use_recompute": True, "recompute_granularity": "core_attn"}, "core_attn"),
        ({"use_recompute_attn": True}, "core_attn"),
        ({"use_recompute_attn": True, "use_recompute": True}, "core_attn"),
    ],
)
def test_recompute_settings(settings, scope):
    config = tiny_config(**settings)
    assert config.recompute_scope == scope
    assert not (config.use_recompute and config.use_recompute_attn)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_attention_heads": 5}, "hidden_size is 24.*num_attention_heads 5"),
        ({"hidden_size": 9, "num_attention_heads": 3}, "multiple of 6"),
        ({"num_hidden_layers": 1}, "num_hidden_layers is 1.*parallel_attn_hatf"),
        ({"layer_norm_eps": 0.01}, "layer_norm_eps is 0.01"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps is 0.0"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"recompute_granularity": "full_attn"}, "recompute_granularity"),
        ({"layer_norm_eps": "1e-6"}, "layer_norm_eps is '1e-6'"),
        ({"use_bias": "no"}, "use_bias is 'no'; expected true or false"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings is None"),
        ({"eos_token_id": 37}, "eos_token_id is 37"),
        ({"pad_token_id": "0"}, "pad_token_id is '0'"),
    ],
)
def test_impossible_values_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**settings)


def test_values_set_while_loading_are_checked_too():
    with pytest.raises(ValueError, match="num_attention_heads 7"):
        Ernie35Config.from_pretrained("ernie/tiny-random-ernie", num_attention_heads=7)


def test_one_layer_without_trimming_is_a_model():
    assert build_model(tiny_config(num_hidden_layers=1, parallel_attn_hatf=False))(paddle.to_tensor([[1]]))[0].shape == [1, 1, 37]


def test_folders_without_a_configuration_are_refused(tmp_path):
    (tmp_path / "weights.bin").write_text("x")
    with pytest.raises(ValueError, match="no config.json found .*weights.bin"):
        Ernie35Config.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="neither a folder nor a built-in model"):
        Ernie35Config.from_pretrained(str(tmp_path / "absent"))
    for text, message in (("{", "not a valid JSON"), ("[1]", "JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            Ernie35Config.from_pretrained(tmp_path)


def test_unknown_keys_are_named(tmp_path, monkeypatch):
    messages = []
    monkeypatch.setattr("ernie35se.configuration.logger.warning", messages.append)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ernie", "hiden_size": 64}))
    Ernie35Config.from_pretrained(tmp_path)
    assert len(messages) == 1 and "'hiden_size'" in messages[0] and "'hidden_size'" in messages[0]


@pytest.mark.parametrize("name", list(BUILT_IN_CONFIGS))
@pytest.mark.parametrize("loader", [Ernie35ForCausalLM, AutoModelForCausalLM, AutoModel])
def test_asking_for_weights_that_were_never_released_says_so(name, loader):
    with pytest.raises(ValueError, match="No weights .* ever released"):
        loader.from_pretrained(name)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_saved_models_load_equal(tmp_path, safe, tied):
    model = build_model(tiny_config(tie_word_embeddings=tied))
    model.save_pretrained(str(tmp_path), safe_serialization=safe)
    ids = paddle.to_tensor([[3, 4, 5, 6]])
    for loader in (Ernie35ForCausalLM, AutoModelForCausalLM):
        loaded = loader.from_pretrained(str(tmp_path))
        loaded.eval()
        assert type(loaded) is Ernie35ForCausalLM and loaded.config.tie_word_embeddings is tied
        names = [name for name, _ in loaded.named_parameters()]
        assert ("lm_head.weight" in names) != tied and names == [name for name, _ in model.named_parameters()]
        np.testing.assert_array_equal(loaded(ids)[0].numpy(), model(ids)[0].numpy())
    if tied:  # one weight, not two equal ones
        loaded(ids, labels=ids)[0].backward()
        model(ids, labels=ids)[0].backward()
        np.testing.assert_allclose(
            loaded.ernie.embed_tokens.weight.grad.numpy(), model.ernie.embed_tokens.weight.grad.numpy(), atol=1e-7
        )


def test_a_checkpoint_in_many_files_loads(tmp_path):
    model = build_model(tiny_config())
    model.save_pretrained(str(tmp_path), safe_serialization=True, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    ids = paddle.to_tensor([[3, 4, 5]])
    loaded = Ernie35ForCausalLM.from_pretrained(str(tmp_path))
    loaded.eval()
    np.testing.assert_array_equal(loaded(ids)[0].numpy(), model(ids)[0].numpy())


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_precision_is_kept(tmp_path, dtype, safe):
    model = Ernie35ForCausalLM.from_config(tiny_config(), dtype=dtype)
    assert {str(p.dtype) for p in model.parameters()} == {f"paddle.{dtype}"}
    model.save_pretrained(str(tmp_path), safe_serialization=safe)
    loaded = Ernie35ForCausalLM.from_pretrained(str(tmp_path))
    assert paddle.get_default_dtype() == "float32"
    for (name, got), (_, expected) in zip(loaded.named_parameters(), model.named_parameters()):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got.astype("float32").numpy(), expected.astype("float32").numpy(), err_msg=name)


@pytest.mark.parametrize("low_memory", [True, False])
def test_weights_that_the_checkpoint_lacks_start_as_in_a_new_model(tmp_path, low_memory):
    model = build_model(tiny_config(hidden_size=96, num_attention_heads=4))
    state = model.state_dict()
    removed = ["ernie.layers.1.self_attn_mlp.o_proj.weight", "ernie.norm.weight", "lm_head.bias"]
    for name in removed if not low_memory else []:
        state.pop(name)
    model.save_pretrained(str(tmp_path), state_dict=state)
    loaded = Ernie35ForCausalLM.from_pretrained(str(tmp_path), low_cpu_mem_usage=low_memory)
    got = dict(loaded.named_parameters())
    if not low_memory:
        assert got[removed[0]].numpy().std() == pytest.approx(np.sqrt(0.3333 / 96 / 8), rel=0.05)
        assert (got[removed[1]].numpy() == 1).all() and (got[removed[2]].numpy() == 0).all()
    for name, expected in model.named_parameters():
        if low_memory or name not in removed:
            np.testing.assert_array_equal(got[name].numpy(), expected.numpy(), err_msg=name)


def test_auto_classes_tell_the_two_ernies_apart(tmp_path):
    ours, theirs, bare = tmp_path / "ours", tmp_path / "theirs", tmp_path / "bare"
    build_model(tiny_config()).save_pretrained(str(ours))
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps({"model_type": "ernie", "parallel_attn_hatf": True}))
    ErnieConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=20,
                architectures=["ErnieModel"]).save_pretrained(str(theirs))  # fmt: skip
    from paddlenlp.transformers import ErnieModel

    assert type(AutoConfig.from_pretrained(str(ours))) is Ernie35Config
    assert type(AutoConfig.from_pretrained(str(bare))) is Ernie35Config
    assert type(AutoConfig.from_pretrained(str(theirs))) is ErnieConfig
    assert type(AutoConfig.from_pretrained("ernie-3.0-medium-zh")) is ErnieConfig
    assert type(AutoModel.from_pretrained(str(ours))) is Ernie35Model
    assert type(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(bare)))) is Ernie35ForCausalLM
    ErnieModel(AutoConfig.from_pretrained(str(theirs))).save_pretrained(str(theirs))
    assert type(AutoModel.from_pretrained(str(theirs))) is ErnieModel


def test_auto_tokenizer_finds_ours(reference):
    from ernie35se.tokenizer import Ernie35Tokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(reference / "ernie-tokenizer"))
    assert type(tokenizer) is Ernie35Tokenizer and tokenizer("Hello, world!")["input_ids"] == [1, 16644, 31844, 924, 31905]


@pytest.mark.parametrize("field", ["tensor_parallel_degree", "pipeline_parallel_degree", "virtual_pp_degree"])
def test_parallel_degrees_are_refused_with_their_name(field):
    with pytest.raises(ValueError, match=f"{field} is 2"):
        Ernie35ForCausalLM(tiny_config(num_attention_heads=2, vocab_size=38, **{field: 2}))


@pytest.mark.parametrize(
    "sizes, field",
    [
        (dict(num_attention_heads=3), "num_attention_heads 3"),
        (dict(num_attention_heads=2, vocab_size=37), "vocab_size 37"),
        (dict(num_attention_heads=2, vocab_size=38, intermediate_size=21), "intermediate_size 21"),
    ],
)
def test_what_ranks_cannot_share_evenly_is_refused_with_the_numbers(sizes, field):
    with pytest.raises(ValueError, match=f"tensor_parallel_degree 2 does not divide {field}"):
        Ernie35ForCausalLM(tiny_config(tensor_parallel_degree=2, **sizes))
