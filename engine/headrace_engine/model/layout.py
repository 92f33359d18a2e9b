"""Where a checkpoint keeps a tensor that the decoder knows by its usual (Llama's) name.

Phi-3 keeps Q, K, V as one matrix, and gate and up as one; Mixtral calls its experts otherwise.
"""

import re
from dataclasses import dataclass

from .config import ModelConfig

_PHI3 = re.compile(r"(.*)\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.(weight|bias)$")
_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, stop) of a stored tensor of `rows` rows; where `rows` is None, all of it."""

    stored: str
    start: int = 0
    stop: int = 0
    rows: int | None = None


class TensorLayout:
    """The same for all layers of one checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        self._layout, self._text_part = config.layout, config.text_part
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        inner = config.intermediate_size
        qkv, gate_up = ("qkv_proj", q + 2 * kv), ("gate_up_proj", 2 * inner)
        self._slices: dict[str, tuple[str, int, int, int]] = {
            "q_proj": (qkv[0], 0, q, qkv[1]),
            "k_proj": (qkv[0], q, q + kv, qkv[1]),
            "v_proj": (qkv[0], q + kv, q + 2 * kv, qkv[1]),
            "gate_proj": (gate_up[0], 0, inner, gate_up[1]),
            "up_proj": (gate_up[0], inner, 2 * inner, gate_up[1]),
        }

    def locate(self, name: str) -> Piece:
        """Where the tensor of this usual name lies."""
        if self._layout == "phi3":
            return self._phi3(name)
        if self._layout == "mixtral" and ".mlp." in name:
            head, _, tail = name.partition(".mlp.")
            for usual, stored in _MIXTRAL.items():
                tail = tail.replace(usual, stored)
            return Piece(f"{head}.block_sparse_moe.{tail}")
        return Piece(self._text_part + name)

    def _phi3(self, name: str) -> Piece:
        found = _PHI3.match(name)
        if found is None:
            return Piece(name)
        matrix, start, stop, rows = self._slices[found[2]]
        return Piece(f"{found[1]}.{matrix}.{found[3]}", start, stop, rows)


def plain_layout(name: str) -> Piece:
    """Every tensor under its own name, whole."""
    return Piece(name)
