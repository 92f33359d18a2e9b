"""A checkpoint's weights as the C structures that describe a decoder to the native step.

Packs linear layers for the kernels, and keeps alive, by name, everything that the structures point
to. Computes nothing.
"""

import ctypes
from dataclasses import dataclass
from functools import partial

import torch

from ...checkpoints.config import ExpertsConfig, LatentConfig, ModelConfig
from ...kernels.cpu import structs
from ...kernels.cpu.blocks import KINDS
from ...kernels.cpu.executor import Executor, PackedLinear, pointer
from ...layers.mxfp4_weight import MXFP4Weight
from ..linear.linear_maker import four_bits
from ..weights.weights import WeightReader
from .decoder_tensors import NormNames, first_product
from .latent import EPSILON, divide_heads
from .positions import PositionTables

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class _MLP:
    gate_up: structs.Linear
    down: structs.Linear


class FusedWeights:
    """Packed weights. `quantize` keeps linear layers in 8 bits, or in 4 if the checkpoint does,
    except the routers of experts. Without it those of a GGUF file stay in its blocks.

    `tensors` are the embedding, norms and gates of shared experts as in the checkpoint, by name;
    `linears` the packed layers by the names of their matrices, among them the embedding if it is in
    blocks. `heads` has each head's layer before and after attention to latents, by the name of the
    matrix of both.
    """

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        executor: Executor,
        positions: PositionTables,
        quantize: bool,
    ) -> None:
        self._config, self._reader, self._executor = config, reader, executor
        self._positions, self._quantize, self.dtype = positions, quantize, reader.dtype
        self.tensors: dict[str, torch.Tensor] = {}
        self.linears: dict[tuple[str, ...], PackedLinear] = {}
        self.heads: dict[str, tuple[list[PackedLinear], list[PackedLinear]]] = {}
        self._kept: list[torch.Tensor | ctypes.Array[structs.Linear] | structs.LatentLayer] = []
        self._layers: ctypes.Array[structs.DecoderLayer] | None = None

    def describe(self) -> structs.Decoder:
        """Reads the weights, once: it ends the use of the reader, and so of the mapped files. The
        result points into this object; `block_size` is left unset."""
        config, dtype = self._config, self.dtype
        blocks = self._blocks((EMBEDDING,), [], gated=False)
        if blocks is not None:
            self.linears[EMBEDDING,] = blocks
        embedding = self._read(EMBEDDING) if blocks is None else None
        layers = [self._layer(index) for index in range(config.num_layers)]
        self._layers = (structs.DecoderLayer * config.num_layers)(*layers)
        described = structs.Decoder(
            layers=ctypes.addressof(self._layers),
            embedding=pointer(embedding),
            embedding_panels=None if blocks is None else blocks.describe().panels,
            norm=self._norm("model.norm.weight", config.logits_divisor or 1.0),
            lm_head=self._head(embedding),
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            inner=_widest_mlp(config),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotated=config.rope.rotated(config.rotary_dim),
            interleaved=config.interleaved,
            wide_qk_norm=config.wide_qk_norm,
            activation=_activation(config),
            is_bfloat16=dtype is torch.bfloat16,
            epsilon=config.rms_norm_eps,
            scale=config.scale,
            latent_epsilon=EPSILON,
            attention_softcap=config.attention_softcap or 0.0,
            logits_softcap=config.logits_softcap or 0.0,
            embedding_scale=_embedding_scale(config, dtype),
        )
        if config.experts is not None:
            described.num_experts = config.experts.count
            described.experts_per_token = config.experts.per_token
            described.expert_inner = config.experts.intermediate_size
            described.renormalize = config.experts.renormalise
            described.plain_routing = config.experts.is_plain
            described.sigmoid = config.experts.sigmoid
            described.expert_groups = config.experts.groups
            described.kept_groups = config.experts.kept_groups
            described.group_best = config.experts.group_best
            described.expert_factor = config.experts.factor
            described.scaled_inputs = config.experts.scaled_inputs
        del self._reader
        return described

    def _head(self, embedding: torch.Tensor | None) -> structs.Linear:
        """Packs the output matrix, which may be the embedding; `embedding` is None if that is
        packed."""
        tied = self._config.tie_word_embeddings
        if tied and embedding is None:
            return self.linears[EMBEDDING,].describe()
        name = EMBEDDING if tied else HEAD
        packed = self._blocks((name,), [], gated=False)
        if packed is None:
            head = embedding if tied and embedding is not None else self._reader.view(name)
            packed = self._executor.pack([head], [], self._quantize)
        return self._linear((name,), packed)

    def _layer(self, index: int) -> structs.DecoderLayer:
        config, prefix = self._config, f"model.layers.{index}."
        attention = f"{prefix}self_attn."
        qkv = tuple(f"{attention}{name}" for name in first_product(config))
        norms = NormNames.of(config)
        rotary = self._positions.rotary(index)
        cos, sin = (None, None) if rotary is None else rotary.tables
        query_norm, key_norm = self._qk_norms(attention, index)
        window = config.windows[index] or 0
        layer = structs.DecoderLayer(
            input_norm=self._norm_of(prefix, norms.before_attention),
            attention_output_norm=self._norm_of(prefix, norms.after_attention),
            mlp_norm=self._norm_of(prefix, norms.before_mlp),
            mlp_output_norm=self._norm_of(prefix, norms.after_mlp),
            query_norm=query_norm,
            key_norm=key_norm,
            query_scales=self._keep_any(self._positions.query_scales_of(index)),
            cos=self._keep_any(cos),
            sin=self._keep_any(sin),
            qkv=self._packed(qkv, config.qkv_bias, self._quantize),
            o=self._packed((f"{attention}o_proj",), config.o_bias, self._quantize),
            window=-window if config.chunked else window,
            key_scale=config.kv_scale(index)[0],
            value_scale=config.kv_scale(index)[1],
            sinks=self._keep(self._read(f"{attention}sinks").float())
            if config.has_sinks(index)
            else None,
            latent=None if config.latent is None else self._latent(attention, config.latent),
        )
        self._add_feed_forward(layer, f"{prefix}mlp.", index)
        return layer

    def _latent(self, attention: str, latent: LatentConfig) -> int:
        name = f"{attention}kv_b_proj.weight"
        keys, values = divide_heads(latent, self._reader.read(name))
        packed = (self._pack_heads(keys.transpose(1, 2)), self._pack_heads(values))
        self.heads[name] = packed
        described = structs.LatentLayer(
            keys=self._array([layer.describe() for layer in packed[0]]),
            values=self._array([layer.describe() for layer in packed[1]]),
            norm=self._norm(f"{attention}kv_a_layernorm.weight", 1 / latent.factor),
        )
        if latent.query_rank is not None:
            described.query = self._packed((f"{attention}q_b_proj",), False, self._quantize)
            described.query_norm = self._norm(f"{attention}q_a_layernorm.weight")
        self._kept.append(described)
        return ctypes.addressof(described)

    def _pack_heads(self, weights: torch.Tensor) -> list[PackedLinear]:
        pack = partial(self._executor.pack, biases=[], quantize=False)
        return [pack([weight]) for weight in weights.contiguous()]

    def _qk_norms(self, attention: str, index: int) -> tuple[int | None, int | None]:
        """The weights of a layer's query and key norms; None if it has none."""
        if self._config.has_unit_qk_norm(index):
            ones = self._keep(torch.ones(self._config.head_dim))
            return ones, ones
        if not self._config.qk_norm:
            return None, None
        return (
            self._norm(f"{attention}q_norm.weight"),
            self._norm(f"{attention}k_norm.weight"),
        )

    def _add_feed_forward(self, layer: structs.DecoderLayer, prefix: str, index: int) -> None:
        experts = self._config.experts
        if experts is not None and experts.sparse[index]:
            self._add_experts(layer, prefix, experts)
            return
        mlp = self._mlp(prefix, self._config.mlp_bias)
        layer.gate_up, layer.down = mlp.gate_up, mlp.down

    def _add_experts(
        self, layer: structs.DecoderLayer, prefix: str, experts: ExpertsConfig
    ) -> None:
        layer.router = self._packed((f"{prefix}gate",), experts.bias, quantize=False)
        if experts.correction:
            name = f"{prefix}gate.e_score_correction_bias"
            self.tensors[name] = self._reader.read_float32(name)
            layer.correction = self._keep(self.tensors[name])
        names = [f"{prefix}experts.{one}." for one in range(experts.count)]
        mlps = [self._mlp(name, experts.bias) for name in names]
        layer.experts_gate_up = self._array([mlp.gate_up for mlp in mlps])
        layer.experts_down = self._array([mlp.down for mlp in mlps])
        if experts.shared_size is None:
            return
        shared = self._mlp(f"{prefix}shared_expert.")
        layer.gate_up, layer.down = shared.gate_up, shared.down
        if not experts.shared_gate:
            return
        gate = self._read(f"{prefix}shared_expert_gate.weight")
        layer.shared_gate = self._keep(gate.float())

    def _mlp(self, prefix: str, bias: bool = False) -> _MLP:
        gated = (f"{prefix}gate_proj", f"{prefix}up_proj")
        gate_up = self._linear(_weights(gated), self._pack_gated(gated, bias))
        return _MLP(gate_up, self._packed((f"{prefix}down_proj",), bias, self._quantize))

    def _pack_gated(self, gated: tuple[str, str], bias: bool) -> PackedLinear:
        biases = self._biases(gated, bias)
        packed = self._few_bits(gated, biases, self._quantize, gated=True)
        if packed is not None:
            return packed
        gate, up = self._views(gated)
        return self._executor.pack_gated(gate, up, biases, self._quantize)

    def _packed(self, names: tuple[str, ...], bias: bool, quantize: bool) -> structs.Linear:
        biases = self._biases(names, bias)
        packed = self._few_bits(names, biases, quantize, gated=False)
        if packed is None:
            packed = self._executor.pack(self._views(names), biases, quantize)
        return self._linear(_weights(names), packed)

    def _few_bits(
        self, names: tuple[str, ...], biases: list[torch.Tensor], quantize: bool, gated: bool
    ) -> PackedLinear | None:
        """Packs matrices stored in few bits, if the kernels support them."""
        blocks = self._blocks(_weights(names), biases, gated)
        if blocks is not None:
            return blocks
        floats = self._floats(names)
        if floats is not None:
            return self._executor.pack_floats(floats.codes(), biases, gated)
        few = four_bits(self._reader, _weights(names)) if quantize else None
        return None if few is None else self._executor.pack_quantized(few, biases, gated)

    def _blocks(
        self, names: tuple[str, ...], biases: list[torch.Tensor], gated: bool
    ) -> PackedLinear | None:
        """Packs matrices of a GGUF file in its blocks."""
        found = None if self._quantize else self._reader.blocks(names, KINDS)
        if found is None:
            return None
        return self._executor.pack_blocks(found, biases, gated, self.dtype)

    def _floats(self, names: tuple[str, ...]) -> MXFP4Weight | None:
        """Weights in 4-bit floats. None in float32, because the kernels for these weights round
        activations to 8 bits."""
        narrow = self._reader.dtype is torch.bfloat16
        return self._reader.mxfp4(_weights(names)) if narrow else None

    def _views(self, names: tuple[str, ...]) -> list[torch.Tensor]:
        return [self._reader.view(name) for name in _weights(names)]

    def _biases(self, names: tuple[str, ...], there: bool) -> list[torch.Tensor]:
        return [self._reader.read(f"{name}.bias") for name in names] if there else []

    def _linear(self, names: tuple[str, ...], packed: PackedLinear) -> structs.Linear:
        self.linears[names] = packed
        return packed.describe()

    def _read(self, name: str) -> torch.Tensor:
        found = self.tensors[name] = self._reader.read(name)
        return found

    def _array(self, linears: list[structs.Linear]) -> int:
        array = (structs.Linear * len(linears))(*linears)
        self._kept.append(array)
        return ctypes.addressof(array)

    def _norm(self, name: str, divisor: float = 1.0) -> int:
        """A norm's weights; offset norms add 1 to them."""
        weight = self._read(name).float()
        return self._keep((weight + 1.0 if self._config.offset_norms else weight) / divisor)

    def _norm_of(self, prefix: str, name: str | None) -> int | None:
        return None if name is None else self._norm(prefix + name)

    def _keep_any(self, tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else self._keep(tensor)

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor)
        found = pointer(tensor)
        assert found is not None
        return found


def _weights(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{name}.weight" for name in names)


def _embedding_scale(config: ModelConfig, dtype: torch.dtype) -> float:
    """The factor of embeddings, rounded to the weights' dtype if the model was trained with
    that."""
    scale = config.embedding_scale or 1.0
    return float(torch.tensor(scale, dtype=dtype)) if config.rounds_embedding_scale else scale


def _activation(config: ModelConfig) -> structs.Activation:
    swiglu = None if config.experts is None else config.experts.swiglu
    if swiglu is not None:
        return structs.Activation(structs.CLAMPED_SWIGLU, swiglu.alpha, swiglu.limit)
    gelu = config.activation == "gelu_tanh"
    return structs.Activation(structs.GELU_TANH if gelu else structs.SILU)


def _widest_mlp(config: ModelConfig) -> int:
    """The largest inner size of MLPs and experts that compute every row; 0 if there are none."""
    experts = config.experts
    if experts is None:
        return config.intermediate_size
    dense = 0 if all(experts.sparse) else config.intermediate_size
    return max(dense, experts.shared_size or 0)
