"""The demo model in plain torch, shaped like Llama."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from batches import Batch
from optimizer import Optimizer
from tokens import CONTEXT, VOCABULARY

HIDDEN, LAYERS, INNER = 256, 7, 512
HEADS, KV_HEADS, HEAD_SIZE = 8, 4, 32
EPSILON, THETA = 1e-5, 10_000.0
_Q, _KV = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE


class Layer(nn.Module):
    """Attention and a gated feed-forward network. Weights with the same input are one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.Parameter(torch.ones(HIDDEN))
        self.qkv = nn.Parameter(_random(_Q + 2 * _KV, HIDDEN))
        self.out = nn.Parameter(torch.zeros(HIDDEN, _Q))
        self.inner_norm = nn.Parameter(torch.ones(HIDDEN))
        self.gate_up = nn.Parameter(_random(2 * INNER, HIDDEN))
        self.down = nn.Parameter(torch.zeros(HIDDEN, INNER))

    def forward(
        self, hidden: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """The hidden states [rows, width, HIDDEN] after this layer."""
        rows, width, _ = hidden.shape
        normed = functional.rms_norm(hidden, (HIDDEN,), self.attention_norm, EPSILON)
        heads = functional.linear(normed, self.qkv).view(rows, width, -1, HEAD_SIZE)
        turned = _turned(heads[:, :, : HEADS + KV_HEADS], *turns)
        attended = functional.scaled_dot_product_attention(
            turned[:, :, :HEADS].transpose(1, 2),
            turned[:, :, HEADS:].transpose(1, 2),
            heads[:, :, HEADS + KV_HEADS :].transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        joined = attended.transpose(1, 2).reshape(rows, width, _Q)
        hidden = hidden + functional.linear(joined, self.out)
        normed = functional.rms_norm(hidden, (HIDDEN,), self.inner_norm, EPSILON)
        gate, up = functional.linear(normed, self.gate_up).chunk(2, dim=-1)
        return hidden + functional.linear(functional.silu(gate) * up, self.down)


def _random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns) * (0.7 / math.sqrt(columns))


def _turned(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Heads [rows, width, heads, HEAD_SIZE] with rotary positions."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


class Llama(nn.Module):
    """The model. Its embedding is also its output matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, HIDDEN) * 0.02)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.Parameter(torch.ones(HIDDEN))
        rates = THETA ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
        angles = torch.outer(torch.arange(CONTEXT), rates)[:, None, :]
        self.cosines = nn.Buffer(angles.cos(), persistent=False)
        self.sines = nn.Buffer(angles.sin(), persistent=False)

    def logits(self, batch: Batch) -> torch.Tensor:
        """Scores [places, VOCABULARY] of the positions with a label, float32."""
        hidden = functional.embedding(batch.ids, self.embedding)
        width = batch.ids.shape[1]
        turns = (self.cosines[:width], self.sines[:width])
        for layer in self.layers:
            hidden = layer(hidden, turns)
        wanted = hidden.view(-1, HIDDEN).index_select(0, batch.places)
        normed = functional.rms_norm(wanted, (HIDDEN,), self.norm, EPSILON)
        return functional.linear(normed, self.embedding).float()

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean cross entropy over the positions with a label."""
        return functional.cross_entropy(self.logits(batch), batch.labels)


def optimizer(model: Llama, weight_decay: float) -> Optimizer:
    """The optimizer of all weights: Muon for the matrices of the layers."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, weight in model.named_parameters():
        (matrices if "layers" in name and weight.ndim == 2 else others).append(weight)
    return Optimizer(matrices, others, weight_decay, _pieces)


def _pieces(matrix: torch.Tensor) -> Sequence[torch.Tensor]:
    """The matrices that one weight joins."""
    if matrix.shape[0] == _Q + 2 * _KV:
        return matrix.split_with_sizes([_Q, _KV, _KV])
    if matrix.shape[0] == 2 * INNER:
        return matrix.split_with_sizes([INNER, INNER])
    return [matrix]


def save(model: Llama, folder: Path, tokenizer: Path, chat_template: str) -> None:
    """Write weights (bfloat16), configuration and tokenizer as transformers does."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.detach().bfloat16().cpu().contiguous() for name, weight in _named(model)
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    for name, content in _settings(chat_template).items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _named(model: Llama) -> list[tuple[str, torch.Tensor]]:
    named: list[tuple[str, torch.Tensor]] = [
        ("model.embed_tokens.weight", model.embedding),
        ("model.norm.weight", model.norm),
    ]
    for at, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        q, k, v = layer.qkv.split_with_sizes([_Q, _KV, _KV])
        gate, up = layer.gate_up.split_with_sizes([INNER, INNER])
        parts = {
            "input_layernorm": layer.attention_norm,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.out,
            "post_attention_layernorm": layer.inner_norm,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
        }
        named += [(f"model.layers.{at}.{name}.weight", weight) for name, weight in parts.items()]
    return named


def _settings(chat_template: str) -> dict[str, dict[str, Any]]:
    ends = [2, 0]  # <|im_end|>, <|endoftext|>
    return {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "dtype": "bfloat16",
            "eos_token_id": ends,
            "head_dim": HEAD_SIZE,
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "initializer_range": 0.02,
            "intermediate_size": INNER,
            "max_position_embeddings": CONTEXT,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": HEADS,
            "num_hidden_layers": LAYERS,
            "num_key_value_heads": KV_HEADS,
            "pad_token_id": 0,
            "pretraining_tp": 1,
            "rms_norm_eps": EPSILON,
            "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": VOCABULARY,
        },
        "generation_config.json": {"eos_token_id": ends, "pad_token_id": 0},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "chat_template": chat_template,
        },
    }
