"""Where a checkpoint stores a tensor, given Llama's name for it.

Phi-3 and GLM store Q, K, V as one matrix, and gate and up as one. Mixtral, DeepSeek, ERNIE and
Hunyuan have other names for parts of mixtures, GLM-4 and Hunyuan for norms, MiMo-V2 for sinks.
LongCat numbers two layers as parts of one. gpt-oss and Llama 4 store all experts of a layer as one
tensor; gpt-oss with gates and ups interleaved.
"""

import re
from collections.abc import Container
from dataclasses import dataclass

import torch

from ..checkpoints.config import ModelConfig
from ..checkpoints.tensor_files import WHOLE, Portion, Shape

_GLM = re.compile(r"(.*)\.(gate_proj|up_proj)\.(weight|bias)$")
_MERGED = {
    "phi3": re.compile(r"(.*)\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.(weight|bias)$"),
    "glm": _GLM,
    "glm4": _GLM,
}
_GLM4 = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
_MIXTRAL = {
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
    "gate.e_score_correction_bias": "e_score_correction_bias",
}
_SHARED = (".mlp.shared_expert.", ".mlp.shared_experts.")
_CORRECTION = ("e_score_correction_bias", "moe_statics.e_score_correction_bias")
_RENAMED = {
    "deepseek": dict([_SHARED]),
    "hunyuan": {
        ".mlp.shared_expert.": ".mlp.shared_mlp.",
        ".mlp.gate.weight": ".mlp.gate.wg.weight",
        ".q_norm.": ".query_layernorm.",
        ".k_norm.": ".key_layernorm.",
    },
    "mimo": {".self_attn.sinks": ".self_attn.attention_sink_bias"},
    "ernie": dict([_SHARED, (f".mlp.gate.{_CORRECTION[0]}", f".mlp.{_CORRECTION[1]}")]),
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_PARTS = {"mlp": "mlps"}
_LONGCAT = {"gate.e_score": "router.e_score", "gate.weight": "router.classifier.weight"}
_GPT_OSS = {".mlp.gate.": ".mlp.router."}
_LLAMA4 = {".mlp.gate.": ".feed_forward.router.", ".mlp.": ".feed_forward."}
_STACKED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|bias)$")

_PREFIX, _EMBEDDING = "model.", "embed_tokens.weight"
# Where multimodal checkpoints keep their decoder: instead of the names' own prefix, or before it,
# where the head is in the same part.
_INSTEAD = (
    *("model.language_model.", "model.text_model.", _PREFIX),
    *("vlm.language_model.", "vlm.model.language_model.", "vlm.model."),
)
_BEFORE = "language_model."


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows start, start + step, ... below `stop` of a stored tensor with `rows` rows.

    `rows` None: the whole tensor. `stacked` above 0: the tensor has the matrices of that many
    experts, as [experts, inputs, outputs], or their biases [experts, outputs]; rows are outputs,
    counted through all experts.
    """

    stored: str
    start: int = 0
    stop: int = 0
    rows: int | None = None
    step: int = 1
    stacked: int = 0

    def whole_shape(self, shape: Shape) -> Shape:
        """The shape of the stored tensor, if this piece of it has `shape`."""
        if self.rows is None:
            return shape
        if not self.stacked:
            return (self.rows, *shape[1:])
        return (self.stacked, *shape[1:], self.rows // self.stacked)

    @property
    def portion(self) -> Portion:
        """The expert's portion of a tensor with several; else the whole tensor."""
        if self.rows is None or not self.stacked:
            return WHOLE
        expert = self.start * self.stacked // self.rows
        return Portion(expert, expert + 1, self.stacked)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This piece of the stored tensor, as a view."""
        if self.rows is None:
            return tensor
        if not self.stacked:
            return tensor[self.start : self.stop]
        expert, start = divmod(self.start, self.rows // self.stacked)
        own = tensor[expert]
        outputs = own.T if own.ndim > 1 else own
        return outputs[start : start + self.stop - self.start : self.step]


class TensorLayout:
    """The layout of all layers of one checkpoint. `stored` are the names in its files, where the
    decoder of a multimodal model is looked for."""

    def __init__(self, config: ModelConfig, stored: Container[str] = ()) -> None:
        self._layout = config.layout
        self._instead, self._before = _PREFIX, ""
        if config.multimodal:
            self._find_text_part(stored)
        self._experts, self._hidden = config.experts, config.hidden_size
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

    def _find_text_part(self, stored: Container[str]) -> None:
        found = [prefix for prefix in _INSTEAD if prefix + _EMBEDDING in stored]
        if found:
            self._instead = found[0]
        else:
            self._before = _BEFORE

    def _in_text_part(self, name: str) -> str:
        """The name of a decoder's tensor in the files of the whole model."""
        if self._instead != _PREFIX and name.startswith(_PREFIX):
            return self._instead + name.removeprefix(_PREFIX)
        return self._before + name

    def locate(self, name: str) -> Piece:
        """Where the tensor with Llama's name `name` is stored."""
        if self._layout in _MERGED:
            return self._merged(name)
        if self._layout == "longcat":
            return Piece(_longcat(name))
        if self._layout == "gptoss":
            return self._stacked(name, _GPT_OSS, 2)
        if self._layout == "llama4":
            return self._stacked(name, _LLAMA4, 1)
        if self._layout == "mixtral" and ".mlp." in name:
            head, _, tail = name.partition(".mlp.")
            for usual, stored in _MIXTRAL.items():
                tail = tail.replace(usual, stored)
            return Piece(f"{head}.block_sparse_moe.{tail}")
        for usual, stored in _RENAMED.get(self._layout, {}).items():
            name = name.replace(usual, stored)
        return Piece(self._in_text_part(name))

    def _merged(self, name: str) -> Piece:
        found = _MERGED[self._layout].match(name)
        if found is None:
            return Piece(self._in_text_part(_glm4(name) if self._layout == "glm4" else name))
        matrix, start, stop, rows = self._slices[found[2]]
        return Piece(self._in_text_part(f"{found[1]}.{matrix}.{found[3]}"), start, stop, rows)

    def _stacked(self, name: str, renamed: dict[str, str], step: int) -> Piece:
        """With a `step` of 2 gates and ups alternate, otherwise all gates come first."""
        found, experts = _EXPERT.match(name), self._experts
        stored = name if found is None else f"{found[1]}.{_STACKED[found[3]]}"
        for usual, other in renamed.items():
            stored = stored.replace(usual, other)
        stored = self._in_text_part(stored)
        if found is None or experts is None:
            return Piece(stored)
        gated, inner = found[3] != "down_proj", experts.intermediate_size
        outputs = 2 * inner if gated else self._hidden
        start = int(found[2]) * outputs
        stop = start + outputs
        # Of alternating rows the last one is an up.
        between = inner if step == 1 else 1
        if found[3] == "up_proj":
            start += between
        elif gated:
            stop -= between
        return Piece(
            stored if found[4] == "weight" else f"{stored}_bias",
            start=start,
            stop=stop,
            rows=experts.count * outputs,
            step=step if gated else 1,
            stacked=experts.count,
        )


def _longcat(name: str) -> str:
    """LongCat has two parts of every kind in a layer, except for the mixture."""
    found = _LAYER.match(name)
    if found is None:
        return name
    layer, part = divmod(int(found[1]), 2)
    module, _, rest = found[2].partition(".")
    for usual, stored in _LONGCAT.items():
        rest = rest.replace(usual, stored) if module == "shortcut" else rest
    where = "mlp" if module == "shortcut" else f"{_PARTS.get(module, module)}.{part}"
    return f"model.layers.{layer}.{where}.{rest}"


def _glm4(name: str) -> str:
    """GLM-4 has other names than Gemma for the same norms."""
    for usual, stored in _GLM4.items():
        if usual in name:
            return name.replace(usual, stored)
    return name


def plain_layout(name: str) -> Piece:
    """Every tensor under its own name, whole."""
    return Piece(name)
