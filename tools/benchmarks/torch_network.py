"""The same network in PyTorch, module for module and name for name: what a PyTorch user would write.

Attention is PyTorch's fused `scaled_dot_product_attention`, which skips the masked half and keeps no (T, T) matrix on CPU;
projections are `nn.Linear`. `load` takes this project's weights, so that losses and gradients can be compared.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding (Su et al. 2021, arXiv:2104.09864) of x (B, H, T, D); the tables are (T, D / 2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend(query, key, value, tables) -> torch.Tensor:
    """Causal attention of (B, H, T, D); returns (B, T, C)."""
    context = F.scaled_dot_product_attention(rotate(query, *tables), rotate(key, *tables), value, is_causal=True)
    return context.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, width = config.num_attention_heads, config.hidden_size
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, tables):
        query, key, value = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, D)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(attend(query, key, value, tables))


class ParallelAttentionMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, self.width, self.ffn = config.num_attention_heads, config.hidden_size, config.intermediate_size
        self.qkv_gate_up_proj = nn.Linear(self.width, 3 * self.width + 2 * self.ffn)
        self.o_proj = nn.Linear(self.ffn + self.width, self.width)

    def forward(self, x, tables):
        qkv, gate, up = self.qkv_gate_up_proj(x).split([3 * self.width, self.ffn, self.ffn], dim=-1)
        query, key, value = qkv.unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, dim=-1)  # (B, H, T, D)
        return self.o_proj(torch.cat([F.silu(gate) * up, attend(query, key, value, tables)], dim=-1))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x, tables):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """x + part(norm(x)), whichever the part is; the names of norm and part are those of the state dict."""

    def __init__(self, config, norm: str, name: str, part: type[nn.Module]):
        super().__init__()
        self.names = norm, name
        self.add_module(norm, nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps))
        self.add_module(name, part(config))

    def forward(self, x, tables):
        norm, part = (self.get_submodule(name) for name in self.names)
        return x + part(norm(x), tables)


def make_block(config, layer: int) -> Block:
    if config.parallel_attn_hatf and layer == 0:
        return Block(config, "input_layernorm", "self_attn", Attention)
    if config.parallel_attn_hatf and layer == config.num_hidden_layers - 1:
        return Block(config, "post_attention_layernorm", "mlp", MLP)
    return Block(config, "input_layernorm", "self_attn_mlp", ParallelAttentionMLP)


class Network(nn.Module):
    """Takes the fields of an Ernie35Config with biases and an LM head of its own; returns the mean loss."""

    def __init__(self, config):
        super().__init__()
        if config.tie_word_embeddings or not (config.use_bias and config.weight_share_add_bias):
            raise ValueError("the PyTorch network has biases and an LM head of its own; expected a config with both")
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.ernie = nn.Module()
        self.ernie.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.ernie.layers = nn.ModuleList([make_block(config, i) for i in range(config.num_hidden_layers)])
        self.ernie.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """ids and labels (B, T), positions (T,)."""
        rates = 10000.0 ** -(torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim)
        angles = positions.float()[:, None] * rates  # (T, D / 2)
        tables = angles.cos(), angles.sin()
        x = self.ernie.embed_tokens(ids)
        for block in self.ernie.layers:
            x = block(x, tables)
        return F.cross_entropy(self.lm_head(self.ernie.norm(x)).flatten(0, 1), labels.flatten())


def turned(name: str, array: np.ndarray) -> np.ndarray:
    """A weight as the other framework has it: a linear layer's is (in, out) in Paddle, (out, in) in PyTorch."""
    return array.T if array.ndim == 2 and "embed_tokens" not in name else array


def load(network: Network, weights: dict[str, np.ndarray]) -> None:
    """Put this project's weights into the network. Raises RuntimeError where names or shapes differ."""
    network.load_state_dict({name: torch.from_numpy(turned(name, array).copy()) for name, array in weights.items()})


def gradients(network: Network) -> dict[str, np.ndarray]:
    """The gradients after a backward pass, named and laid out as this project's."""
    return {name: turned(name, parameter.grad.numpy()) for name, parameter in network.named_parameters()}
