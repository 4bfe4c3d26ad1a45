#!/usr/bin/env python3
"""Write a checkpoint as safetensors with a config.json that says how the layout maps, for tools of other
frameworks.

OUTPUT gets model.safetensors, config.json, the SentencePiece model as tokenizer.model and the tokenizer's
settings. Linear weights are transposed to (out, in), as torch.nn.Linear has them, and carry the names of this
codebase with `ernie.` as `model.`. config.json's key `layout` holds, for each kind of weight, its shape and
the segments of the fused ones; the blocks' formulas are in its `blocks`. transformers has no class for this
model; what reads the file needs these formulas. """

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Sequence

import numpy as np
from _common import TOKENIZER_FILE, make_parser, run_tool, write_json

EXAMPLE = "  python tools/export_hf.py output/demo/model output/demo/hf"
BLOCKS = {
    "head (layer 0 with parallel_attn_hatf)": "x + o_proj(attention(q_proj(h), k_proj(h), v_proj(h))), h = input_layernorm(x)",
    "fused": "x + o_proj(concat[silu(gate) * up, attention(q, k, v)]), [qkv | gate | up] = qkv_gate_up_proj(h), "
    "h = input_layernorm(x)",
    "tail (last layer with parallel_attn_hatf)": "x + down_proj(silu(gate_proj(h)) * up_proj(h)), "
    "h = post_attention_layernorm(x)",
    "attention": "causal softmax(q k^T / sqrt(head_dim)) v; rotary embedding, base 10000, halves rotated: "
    "(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)",
    "positions": "interval - 1, 2 * interval - 1, ... with enable_random_position_ids, where interval is 8 up to 4096 tokens "
    "in all, max_position_embeddings // tokens beyond, always within max_position_embeddings; else 0, 1, 2, ...",
    "norm": "LayerNorm with bias, epsilon layer_norm_eps",
}


def main(argv: Sequence[str] | None) -> int:
    parser = make_parser(__doc__, EXAMPLE)
    parser.add_argument("input", type=Path, help="folder of the model")
    parser.add_argument("output", type=Path, help="folder to write; made where it is missing")
    arguments = parser.parse_args(argv)

    from ernie35se import conversion, weight_files
    from ernie35se.configuration import Ernie35Config
    from ernie35se.predictor import check_model_folder

    if arguments.output.resolve() == arguments.input.resolve():
        raise ValueError(f"{arguments.output} is the input itself; name another folder")
    check_model_folder(str(arguments.input))
    config = Ernie35Config.from_pretrained(str(arguments.input))
    pieces = weight_files.Folder(arguments.input).pieces()
    names = list(pieces)
    lacking = sorted(set(conversion.parameter_names(config)) - set(names))
    if lacking:
        raise ValueError(f"{arguments.input}: its weights lack {lacking[0]!r} ({len(lacking)} in all)")

    def array(name: str) -> np.ndarray:
        whole = conversion.merge(name, [piece.values for piece in pieces[name]], config)
        return whole.T if is_transposed(name) else whole

    shapes = {exported_name(name): (array(name).shape, pieces[name][0].kind) for name in names}
    own = {exported_name(name): name for name in names}
    arguments.output.mkdir(parents=True, exist_ok=True)
    weight_files.write_arrays(arguments.output / "model.safetensors", shapes, lambda name: array(own[name]))
    write_json(arguments.output / "config.json", exported_config(config, shapes))
    copied = copy_tokenizer(arguments.input, arguments.output)
    print(
        f"{arguments.output}: {len(shapes)} weights{', tokenizer' if copied else ', no tokenizer (there was none)'}"
    )
    return 0


def exported_name(name: str) -> str:
    """`ernie.layers.0...` -> `model.layers.0...`; `lm_head.*` stays."""
    return re.sub(r"^ernie\.", "model.", name)


def is_transposed(name: str) -> bool:
    """Whether the weight is a linear layer's, stored (in, out) here."""
    return name.endswith("_proj.weight") or name == "lm_head.weight"


def exported_config(config, shapes: dict) -> dict:
    """The settings that define the network, and how its weights lie."""
    keys = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings layer_norm_eps "
        "parallel_attn_hatf enable_random_position_ids use_bias weight_share_add_bias tie_word_embeddings pad_token_id "
        "bos_token_id eos_token_id"
    )
    hidden, ffn, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    fused = {
        "qkv_gate_up_proj": {
            "rows": [["qkv", 3 * hidden], ["gate", ffn], ["up", ffn]],
            "qkv": f"interleaved by head: ({heads} heads, [q, k, v], {hidden // heads})",
        },
        "self_attn_mlp.o_proj": {"columns": [["silu(gate) * up", ffn], ["attention", hidden]]},
    }
    return {
        "architectures": ["Ernie35ForCausalLM"],
        "model_type": "ernie35",
        **{key: getattr(config, key) for key in keys.split()},
        "rope_theta": 10000.0,
        "layout": {"linear weights": "(out, in)", "fused": fused, "blocks": BLOCKS},
        "weights": {name: list(shape) for name, (shape, _) in shapes.items()},
    }


def copy_tokenizer(source: Path, target: Path) -> bool:
    """The SentencePiece model, with settings in the words of Hugging Face's LlamaTokenizer, which reads it
    alike."""
    if not (source / TOKENIZER_FILE).is_file():
        return False
    shutil.copyfile(source / TOKENIZER_FILE, target / "tokenizer.model")
    settings_file = source / "tokenizer_config.json"
    ours = json.loads(settings_file.read_text(encoding="utf-8")) if settings_file.is_file() else {}
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": True,
        "add_bos_token": ours.get("add_bos_token", True),
        "add_eos_token": ours.get("add_eos_token", False),
        "padding_side": "left",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<unk>",
    }
    write_json(target / "tokenizer_config.json", settings)
    return True


if __name__ == "__main__":
    run_tool(main)
