"""Small models with weights that anyone can rebuild, and the same network written in numpy float64."""

from __future__ import annotations

import zlib

import numpy as np

from ernie35se.configuration import Ernie35Config
from ernie35se.modeling import Ernie35ForCausalLM


def tiny_config(**overrides) -> Ernie35Config:
    """Odd sizes, so that no two axes can be mistaken for one another."""
    settings = dict(
        vocab_size=37,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=4,
        num_attention_heads=3,
        max_position_embeddings=256,
    )
    return Ernie35Config(**{**settings, **overrides})


def rebuilt_weight(name: str, shape) -> np.ndarray:
    """The reference values' weights: seeded by the parameter's name."""
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype("float32")
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.1 * noise
    return (0.1 if name.endswith("bias") else 0.08) * noise


def build_model(config: Ernie35Config) -> Ernie35ForCausalLM:
    """A model in eval mode with the rebuilt weights."""
    model = Ernie35ForCausalLM(config)
    for name, parameter in model.named_parameters():
        parameter.set_value(rebuilt_weight(name, parameter.shape))
    model.eval()
    return model


def numpy_logits(config: Ernie35Config, weights: dict, input_ids, position_ids, allowed) -> np.ndarray:
    """The network of design.md, token by token where that is clearer, in float64.

    Args:
        weights: state-dict name -> array. input_ids: (B, T). position_ids: (B, T). allowed: (B, T, T) booleans.
    """
    w = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    hidden, ffn, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    size = hidden // heads

    def linear(x, name):
        return x @ w[name + ".weight"] + w.get(name + ".bias", 0.0)

    def norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config.layer_norm_eps)
        return scaled * w[name + ".weight"] + w[name + ".bias"]

    def silu(x):
        return x / (1 + np.exp(-x))

    def turn(vector, position):  # (D,): pairs (i, i + D/2) as complex numbers
        half = size // 2
        angle = position * 10000.0 ** (-2 * np.arange(half) / size)
        z = (vector[:half] + 1j * vector[half:]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag])

    def attention(query, key, value, row):  # each (T, H, D)
        length = len(query)
        out = np.zeros((length, hidden))
        for head in range(heads):
            q = [turn(query[t, head], position_ids[row, t]) for t in range(length)]
            k = [turn(key[t, head], position_ids[row, t]) for t in range(length)]
            for t in range(length):
                seen = [s for s in range(t + 1) if allowed[row, t, s]]
                if not seen:
                    continue
                scores = np.array([q[t] @ k[s] / np.sqrt(size) for s in seen])
                p = np.exp(scores - scores.max())
                p /= p.sum()
                out[t, head * size : (head + 1) * size] = sum(pi * value[s, head] for pi, s in zip(p, seen))
        return out

    def row_logits(row):
        x = w["ernie.embed_tokens.weight"][input_ids[row]]
        length = len(x)
        for layer in range(config.num_hidden_layers):
            prefix = f"ernie.layers.{layer}."
            if config.parallel_attn_hatf and layer == 0:
                h = norm(x, prefix + "input_layernorm")
                q, k, v = (linear(h, f"{prefix}self_attn.{p}_proj").reshape(length, heads, size) for p in "qkv")
                x = x + linear(attention(q, k, v, row), prefix + "self_attn.o_proj")
            elif config.parallel_attn_hatf and layer == config.num_hidden_layers - 1:
                h = norm(x, prefix + "post_attention_layernorm")
                gated = silu(linear(h, prefix + "mlp.gate_proj")) * linear(h, prefix + "mlp.up_proj")
                x = x + linear(gated, prefix + "mlp.down_proj")
            else:
                fused = linear(norm(x, prefix + "input_layernorm"), prefix + "self_attn_mlp.qkv_gate_up_proj")
                gate, up = fused[:, 3 * hidden : 3 * hidden + ffn], fused[:, 3 * hidden + ffn :]
                by_head = fused[:, : 3 * hidden].reshape(length, heads, 3, size)
                out = attention(by_head[:, :, 0], by_head[:, :, 1], by_head[:, :, 2], row)
                x = x + linear(np.concatenate([silu(gate) * up, out], -1), prefix + "self_attn_mlp.o_proj")
        x = norm(x, "ernie.norm")
        head = w["ernie.embed_tokens.weight"].T if config.tie_word_embeddings else w["lm_head.weight"]
        return x @ head + w.get("lm_head.bias", 0.0)

    return np.stack([row_logits(row) for row in range(len(input_ids))])
