"""Tiny checkpoints with draft heads, and references for what the heads propose.

transformers computes no heads, so the references are written from the published descriptions, with
transformers' layers.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from headrace_testing.checkpoints import VOCAB, Reference, make_model, make_tokenizer

Tensors = dict[str, torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def causal_mask(length: int, window: int | None = None) -> torch.Tensor:
    """0 where a position sees a key, of which it sees the last `window`."""
    mask = torch.full((length, length), -torch.inf).triu(1)
    if window is not None:
        mask = mask + torch.full((length, length), -torch.inf).tril(-window)
    return mask[None, None]


@dataclass
class MTPReference:
    """A model of transformers whose last layer is the head's, and the head's other tensors by their
    names within that layer."""

    model: Any
    own: Tensors
    _known: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def states(self, ids: list[int]) -> torch.Tensor:
        """The target's hidden states [T, H] after its last norm. Those of a beginning of a known
        sequence are not computed again."""
        for known, states in self._known.items():
            if list(known[: len(ids)]) == ids:
                return states[: len(ids)]
        return self._known.setdefault(tuple(ids), self._states(ids))

    def _states(self, ids: list[int]) -> torch.Tensor:
        inner = self.model.model
        x = inner.embed_tokens(torch.tensor([ids]))
        for layer in inner.layers[:-1]:
            x = self._layer(layer, x)
        return rms_norm(x[0], inner.norm.weight, self._eps)

    def _states_of_model(self, ids: list[int]) -> torch.Tensor:
        """The states as transformers' model without its last layer computes them."""
        inner = self.model.model
        layers = inner.layers
        inner.layers = layers[:-1]
        try:
            states: torch.Tensor = inner(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        finally:
            inner.layers = layers
        return states

    def check(self, proposals: list[tuple[list[int], tuple[int, ...]]]) -> None:
        """Asserts that proposals, each with the tokens that it follows, are the head's."""
        for known, drafts in sorted(proposals, key=lambda each: -len(each[0])):
            assert list(drafts) == self.propose(known, len(drafts)), known

    def propose(self, ids: list[int], count: int) -> list[int]:
        """The head's greedy drafts after `ids`."""
        with torch.inference_mode():
            states, following = self.states(ids[:-1]), ids[1:]
            for _ in range(count):
                made = self._head(following, states)
                states = torch.cat((states, self._next_state(made[-1:])))
                following = [*following, int(self._logits(made[-1]).argmax())]
        return following[-count:]

    def next_token(self, ids: list[int]) -> int:
        """The target's greedy token after `ids`."""
        with torch.inference_mode():
            return int(self.model.lm_head(self._states_of_model(ids)[-1]).argmax())

    def _next_state(self, made: torch.Tensor) -> torch.Tensor:
        """What the next draft reads of the head's result."""
        return made

    @property
    def _eps(self) -> float:
        return float(self.model.config.rms_norm_eps)

    def _head(self, ids: list[int], states: torch.Tensor) -> torch.Tensor:
        embedding = self.own.get("embed_tokens.weight", self.model.model.embed_tokens.weight)
        row = F.linear(self._pair(embedding[ids], states), self.own["eh_proj.weight"])
        return self._layer(self.model.model.layers[-1], row[None])[0]

    def _pair(self, token: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """What the projection reads."""
        pair = (
            rms_norm(token, self.own["enorm.weight"], self._eps),
            rms_norm(states, self.own["hnorm.weight"], self._eps),
        )
        return torch.cat(pair, dim=-1)

    def _logits(self, row: torch.Tensor) -> torch.Tensor:
        head = self.own.get("shared_head.head.weight", self.model.lm_head.weight)
        return F.linear(self._normed(row), head)

    def _normed(self, row: torch.Tensor) -> torch.Tensor:
        return rms_norm(row, self.own["shared_head.norm.weight"], self._eps)

    def _layer(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1])[None]
        mask = causal_mask(x.shape[1])
        made = layer(
            x,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self.model.model.rotary_emb(x, positions),
        )
        return made if isinstance(made, torch.Tensor) else made[0]


def random_mtp(model: Any) -> MTPReference:
    """A head with random tensors around the model's last layer."""
    hidden = model.config.hidden_size
    with torch.random.fork_rng():
        torch.manual_seed(7)
        own = {
            "enorm.weight": 1 + 0.1 * torch.randn(hidden),
            "hnorm.weight": 1 + 0.1 * torch.randn(hidden),
            "eh_proj.weight": torch.randn(hidden, 2 * hidden) / hidden**0.5,
            "shared_head.norm.weight": 1 + 0.1 * torch.randn(hidden),
        }
    return MTPReference(model, own)


def save_mtp(
    folder: Path, name: str, *, own_head: bool = False, layers: int = 3, **changes: Any
) -> MTPReference:
    """Saves a random checkpoint with one layer that predicts further tokens."""
    reference = random_mtp(make_model(name, num_hidden_layers=layers + 1, **changes))
    if own_head:
        with torch.random.fork_rng():
            torch.manual_seed(8)
            shape = reference.model.lm_head.weight.shape
            reference.own["shared_head.head.weight"] = 0.5 * torch.randn(shape)
    write_mtp(folder, reference, layers)
    return reference


def save_perfect_mtp(folder: Path, name: str, *, layers: int = 3) -> MTPReference:
    """Like `save_mtp`, with a head that is always right: each token depends on the one before it
    alone, and the head computes it from that token's embedding."""
    reference = save_mtp(folder, name, layers=layers)
    with torch.no_grad():
        for layer in reference.model.model.layers:
            for parameter_name, parameter in layer.named_parameters():
                if "o_proj" in parameter_name or "down_proj" in parameter_name:
                    parameter.zero_()
        hidden, own = reference.model.config.hidden_size, reference.own
        own["enorm.weight"] = torch.ones(hidden)
        own["eh_proj.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
        own["shared_head.norm.weight"] = reference.model.model.norm.weight.detach().clone()
    write_mtp(folder, reference, layers)
    return reference


def write_mtp(folder: Path, reference: MTPReference, layers: int) -> None:
    reference.model.save_pretrained(folder, save_original_format=True)
    prefix = f"model.layers.{layers}."
    shared = {
        "embed_tokens.weight": reference.model.model.embed_tokens.weight,
        "shared_head.head.weight": reference.model.lm_head.weight,
    }
    add_tensors(folder, {prefix + name: part for name, part in (shared | reference.own).items()})
    kinds = ("layer_types", "mlp_layer_types", "indexer_types")
    config = json.loads((folder / "config.json").read_text())
    own = {name: config[name][:layers] for name in kinds if config.get(name)}
    change_config(folder, num_hidden_layers=layers, num_nextn_predict_layers=1, **own)
    make_tokenizer().save(str(folder / "tokenizer.json"))


def add_tensors(folder: Path, tensors: Tensors) -> None:
    file = folder / "model.safetensors"
    stored = load_file(file) | {
        name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()
    }
    save_file(stored, file, metadata={"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


class MiMoReference(MTPReference):
    """MiMo's layer reads the state before the target's last norm, and before the embedding."""

    def _states(self, ids: list[int]) -> torch.Tensor:
        inner = self.model.model
        x = inner.embed_tokens(torch.tensor([ids]))
        for layer in inner.layers[:-1]:
            x = self._layer(layer, x)
        first: torch.Tensor = x[0]
        return first

    def _pair(self, token: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        first, second = super()._pair(token, states).chunk(2, dim=-1)
        return torch.cat((second, first), dim=-1)


@dataclass(frozen=True, slots=True)
class StoredNames:
    """How a checkpoint names the tensors of an MTP layer.

    Those of its decoder layer begin with `layer`. `renamed` are parts of their names that differ
    from those of the decoder's last layer; tensors of that layer with a part of `absent` in their
    names do not exist. `own` has the names of the other tensors, by DeepSeek's names.
    """

    layer: str
    own: dict[str, str]
    renamed: dict[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()


MIMO = StoredNames(
    "model.mtp_layers.0.",
    {
        "enorm": "model.mtp_layers.0.token_layernorm",
        "hnorm": "model.mtp_layers.0.hidden_layernorm",
        "eh_proj": "model.mtp_layers.0.input_proj",
        "shared_head.norm": "model.mtp_layers.0.final_layernorm",
    },
)
MIMO_V2 = StoredNames(
    "model.mtp.layers.0.",
    {
        "enorm": "model.mtp.layers.0.enorm",
        "hnorm": "model.mtp.layers.0.hnorm",
        "eh_proj": "model.mtp.layers.0.eh_proj",
        "shared_head.norm": "model.mtp.layers.0.final_layernorm",
    },
    {"post_attention_layernorm": "pre_mlp_layernorm"},
)
ERNIE = StoredNames(
    "model.mtp_block.0.",
    {
        "enorm": "model.mtp_emb_norm.0",
        "hnorm": "model.mtp_hidden_norm.0",
        "eh_proj": "model.mtp_linear_proj.0",
    },
)
LONGCAT = StoredNames(
    "model.mtp.layers.0.",
    {
        "enorm": "model.mtp.layers.0.enorm.m",
        "hnorm": "model.mtp.layers.0.hnorm.m",
        "eh_proj": "model.mtp.layers.0.eh_proj",
        "shared_head.norm": "model.mtp.norm",
        "embed_tokens": "model.mtp.embed_tokens",
    },
    {
        "self_attn.0.": "self_attn.",
        "input_layernorm.0.": "input_layernorm.",
        "post_attention_layernorm.0.": "post_attention_layernorm.",
        "mlps.0.": "transformer_layer.mlp.",
    },
    (".1.", "mlp."),
)


def rename_mtp(folder: Path, reference: MTPReference, names: StoredNames, layers: int) -> None:
    """Writes the checkpoint of a reference, whose layer for drafts follows `layers` others, under
    published names."""
    reference.model.save_pretrained(folder, save_original_format=True)
    file, stored = folder / "model.safetensors", {}
    for name, tensor in load_file(file).items():
        before, found, after = name.partition(f"model.layers.{layers}.")
        if not found:
            stored[before] = tensor
        elif not any(part in after for part in names.absent):
            for usual, other in names.renamed.items():
                after = after.replace(usual, other)
            stored[names.layer + after] = tensor
    for usual, other in names.own.items():
        stored[f"{other}.weight"] = reference.own[f"{usual}.weight"].detach().clone()
    save_file(stored, file, metadata={"format": "pt"})
    change_config(folder, num_nextn_predict_layers=1)
    make_tokenizer().save(str(folder / "tokenizer.json"))


def save_mimo(folder: Path) -> MiMoReference:
    """Saves a random checkpoint of MiMo, whose decoder is that of Qwen2."""
    made = save_mtp(folder, "qwen2")
    reference = MiMoReference(made.model, made.own)
    rename_mtp(folder, reference, MIMO, 3)
    code = {"AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"}
    types = ["full_attention"] * 3
    change_config(folder, architectures=["MiMoForCausalLM"], model_type="mimo")
    change_config(folder, num_hidden_layers=3, layer_types=types, auto_map=code)
    return reference


class NormedReference(MTPReference):
    """The next draft reads the layer's normed result."""

    def _states(self, ids: list[int]) -> torch.Tensor:
        return self._states_of_model(ids)

    def _next_state(self, made: torch.Tensor) -> torch.Tensor:
        return self._normed(made)


class MiMoV2Reference(NormedReference):
    """The layer attends to a window."""

    def _layer(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1])[None]
        made: torch.Tensor = layer(
            x,
            attention_mask=causal_mask(x.shape[1], self.model.config.sliding_window),
            position_ids=positions,
            position_embeddings=self.model.model.rotary_emb(x, positions, "sliding_attention"),
        )
        return made


class ErnieReference(MTPReference):
    """The layer reads the state before the target's last norm, which is also its own last norm."""

    def _states(self, ids: list[int]) -> torch.Tensor:
        inner = self.model.model
        norm, inner.norm = inner.norm, torch.nn.Identity()
        try:
            return self._states_of_model(ids)
        finally:
            inner.norm = norm


class LongcatReference(NormedReference):
    """The layer is one half of a decoder's layer, without a mixture, and has an embedding of its
    own."""

    def _layer(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1])[None]
        attended, *_ = layer.self_attn[0](
            hidden_states=layer.input_layernorm[0](x),
            attention_mask=causal_mask(x.shape[1]),
            position_embeddings=self.model.model.rotary_emb(x, positions),
        )
        x = x + attended
        made: torch.Tensor = x + layer.mlps[0](layer.post_attention_layernorm[0](x))
        return made


def save_named_mtp(folder: Path, name: str) -> MTPReference:
    """Saves a random checkpoint of a family with names of its own for the layer for drafts."""
    if name == "mimo-v2":
        types = ["full_attention", *["sliding_attention"] * 2, "full_attention"]
        kinds = ["dense", "sparse", "sparse", "sparse"]
        model = make_model(
            name,
            num_hidden_layers=5,
            layer_types=[*types, "sliding_attention"],
            mlp_layer_types=[*kinds, "dense"],
        )
        reference: MTPReference = MiMoV2Reference(model, random_mtp(model).own)
        rename_mtp(folder, reference, MIMO_V2, 4)
        change_config(folder, num_hidden_layers=4, layer_types=types, mlp_layer_types=kinds)
    elif name == "ernie4_5-moe":
        model = make_model(name, num_hidden_layers=4, moe_layer_end_index=2)
        own = random_mtp(model).own | {"shared_head.norm.weight": model.model.norm.weight}
        reference = ErnieReference(model, own)
        rename_mtp(folder, reference, ERNIE, 3)
        change_config(folder, num_hidden_layers=3)
    else:
        model = make_model(name, num_layers=3)
        own = random_mtp(model).own | {"embed_tokens.weight": model.lm_head.weight.flip(0)}
        reference = LongcatReference(model, own)
        rename_mtp(folder, reference, LONGCAT, 2)
        change_config(folder, num_layers=2)
    return reference


@dataclass
class HybridMTPReference(MTPReference):
    """A model of transformers whose last layer, with attention, is the head's; its norms multiply
    by 1 + weight."""

    def _states(self, ids: list[int]) -> torch.Tensor:
        return self._states_of_model(ids)

    def propose(self, ids: list[int], count: int) -> list[int]:
        with torch.inference_mode():
            states, following = self.states(ids[:-1]), ids[1:]
            for _ in range(count):
                token = self.model.model.embed_tokens(torch.tensor(following))
                pair = (
                    self._norm(token, "pre_fc_norm_embedding"),
                    self._norm(states, "pre_fc_norm_hidden"),
                )
                row = F.linear(torch.cat(pair, dim=-1), self.own["fc.weight"])
                made = self._norm(self._layer(self.model.model.layers[-1], row[None])[0], "norm")
                states = torch.cat((states, made[-1:]))
                following = [*following, int(self.model.lm_head(made[-1]).argmax())]
        return following[-count:]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, 1 + self.own[f"{name}.weight"], self._eps)


def save_hybrid_mtp(folder: Path, name: str) -> HybridMTPReference:
    """Saves a random Qwen checkpoint with three recurrent layers, one with attention, and one that
    predicts further tokens."""
    types = ["linear_attention"] * 3 + ["full_attention"] * 2
    model = make_model(name, num_hidden_layers=5, layer_types=types)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        hidden = model.config.hidden_size
        own = {
            f"{norm}.weight": 0.1 * torch.randn(hidden)
            for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        }
        own["fc.weight"] = torch.randn(hidden, 2 * hidden) / hidden**0.5
    model.save_pretrained(folder, save_original_format=True)
    file, prefix = folder / "model.safetensors", "layers.4."
    stored = {}
    for stored_name, tensor in load_file(file).items():
        before, found, after = stored_name.partition(prefix)
        stored[f"mtp.layers.0.{after}" if found else before] = tensor
    stored |= {f"mtp.{own_name}": tensor for own_name, tensor in own.items()}
    save_file(stored, file, metadata={"format": "pt"})
    change_config(folder, num_hidden_layers=4, layer_types=types[:4])
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return HybridMTPReference(model, own)


# The layers of a target of four that a head reads.
TAPS = (1, 2, 3)


@dataclass
class EagleReference:
    """An EAGLE-3 head: its config.json and tensors, and the target in transformers."""

    target: Any
    config: dict[str, Any]
    tensors: Tensors

    def check(self, proposals: list[tuple[list[int], tuple[int, ...]]]) -> None:
        """Asserts that proposals, each with the tokens that it follows, are the head's."""
        for known, drafts in proposals:
            assert list(drafts) == self.propose(known, len(drafts)), known

    def propose(self, ids: list[int], count: int) -> list[int]:
        """The head's greedy drafts after `ids`."""
        with torch.inference_mode():
            found = self.target(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
            taps = torch.cat([found[tap][0] for tap in TAPS], dim=-1)
            if self.config["norm_before_fc"]:
                taps = self._norm(taps, "input_norm")
            states, following = F.linear(taps, self.tensors["fc.weight"]), ids[1:]
            for _ in range(count):
                made = self._layer(following, states)
                states = torch.cat((states, made[-1:]))
                logits = F.linear(self._norm(made[-1], "norm"), self.tensors["lm_head.weight"])
                best = int(logits.argmax())
                following = [*following, best + int(self.tensors["d2t"][best])]
        return following[-count:]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.config["transformer_layer_config"]["rms_norm_eps"]
        return rms_norm(x, self.tensors[f"{name}.weight"], eps)

    def _layer(self, ids: list[int], states: torch.Tensor) -> torch.Tensor:
        normed = self._norm(states, "layers.0.hidden_norm")
        token = self.tensors["embed_tokens.weight"][ids]
        row = torch.cat((self._norm(token, "layers.0.input_layernorm"), normed), dim=-1)
        x = normed if self.config["norm_before_residual"] else states
        x = x + self._attention(row)
        inner = self._norm(x, "layers.0.post_attention_layernorm")
        gate = F.silu(self._linear(inner, "mlp.gate_proj"))
        return x + self._linear(gate * self._linear(inner, "mlp.up_proj"), "mlp.down_proj")

    def _attention(self, row: torch.Tensor) -> torch.Tensor:
        shape, count = self.config["transformer_layer_config"], len(row)
        heads, kv, dim = (
            shape[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        query, key, value = (
            self._linear(row, f"self_attn.{name}_proj").view(count, -1, dim).transpose(0, 1)
            for name in "qkv"
        )
        query, key = _rotated(query), _rotated(key)
        key, value = (part.repeat_interleave(heads // kv, dim=0) for part in (key, value))
        scores = query @ key.transpose(1, 2) / dim**0.5
        scores += torch.full((count, count), -torch.inf).triu(1)
        attended = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        return self._linear(attended, "self_attn.o_proj")

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.tensors[f"layers.0.{name}.weight"])


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding [H, T, D] with base 10000."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def save_eagle3(folder: Path, target: Path, *, known: int = 100, **changes: Any) -> EagleReference:
    """Saves a random head for a target of four layers; it knows `known` of its tokens."""
    model = Reference(target).model
    hidden, dim, heads, kv, inner = model.config.hidden_size, 32, 4, 2, 96
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": known,
        "eagle_aux_hidden_state_layer_ids": list(TAPS),
        "norm_before_fc": False,
        "norm_before_residual": False,
        "speculators_config": {"algorithm": "eagle3"},
        "speculators_model_type": "eagle3",
        "target_hidden_size": None,
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "head_dim": dim,
            "num_hidden_layers": 1,
            "rms_norm_eps": 1e-5,
            "vocab_size": VOCAB,
            "max_position_embeddings": 64,
        },
        **changes,
    }
    shapes = {
        "self_attn.q_proj": (heads * dim, 2 * hidden),
        "self_attn.k_proj": (kv * dim, 2 * hidden),
        "self_attn.v_proj": (kv * dim, 2 * hidden),
        "self_attn.o_proj": (hidden, heads * dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = ["norm", *(f"layers.0.{name}" for name in ("hidden_norm", "input_layernorm"))]
    with torch.random.fork_rng():
        torch.manual_seed(11)
        tensors = {
            f"layers.0.{name}.weight": 1.5 * torch.randn(shape) / shape[1] ** 0.5
            for name, shape in shapes.items()
        }
        for name in [*norms, "layers.0.post_attention_layernorm"]:
            tensors[f"{name}.weight"] = 1 + 0.1 * torch.randn(hidden)
        if config["norm_before_fc"]:
            tensors["input_norm.weight"] = 1 + 0.1 * torch.randn(3 * hidden)
        tensors["fc.weight"] = torch.randn(hidden, 3 * hidden) / (3 * hidden) ** 0.5
        tensors["lm_head.weight"] = 0.5 * torch.randn(known, hidden)
        chosen = torch.randperm(VOCAB)[:known].sort().values
    tensors["embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
    tensors["d2t"] = chosen - torch.arange(known)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, chosen, True)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return EagleReference(model, config, tensors)
