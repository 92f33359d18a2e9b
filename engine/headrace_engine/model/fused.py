"""The native decoder for CPUs: the whole step in one call of the native kernels.

The same models as `decoder`, which serves every device and is what this is tested against. The
residual stream is float32, and so are the logits.
"""

import ctypes
from collections.abc import Sequence as Rows

import torch

from ..attention.base import LayerCache
from ..attention.cpu import CpuBackend, describe
from ..kernels import structs
from ..kernels.executor import Executor, PackedLinear, pointer
from .base import ForwardBatch, KVShape
from .config import ModelConfig
from .decoder import expected_tensors, ignored_tensors
from .rotary import RotaryTable
from .weights import WeightReader

# What the kernels' rows must be a multiple of: the widest vector.
LANES = 16


class FusedDecoder:
    """Weights are packed straight from the mapped files. The logits of a step are overwritten by
    the next one."""

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        rotary: RotaryTable,
        executor: Executor,
        quantize: bool,
    ) -> None:
        reader.check(expected_tensors(config), ignored=ignored_tensors(config))
        self._config, self._reader, self._quantize = config, reader, quantize
        self._executor = executor
        self._kept: list[torch.Tensor | PackedLinear] = []
        self._decoder = self._describe(rotary)
        self._caches: tuple[Rows[LayerCache], ctypes.Array[ctypes.c_void_p]] | None = None
        self._logits = torch.empty(0, self._executor.padded(config.vocab_size))

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        shape = KVShape(self._config.num_kv_heads, self._config.head_dim)
        return (shape,) * self._config.num_layers

    def forward(self, batch: ForwardBatch, caches: Rows[LayerCache]) -> torch.Tensor:
        rows = batch.logits_rows.shape[0]
        logits = self._logits_for(rows)
        step = structs.Step(
            input_ids=batch.input_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            logits_rows=batch.logits_rows.data_ptr(),
            caches=ctypes.addressof(self._pointers(caches)),
            logits=logits.data_ptr(),
            num_logits=rows,
            logits_stride=logits.stride(0),
            batch=describe(batch.metadata),
        )
        self._executor.forward(self._decoder, step)
        return logits[:, : self._config.vocab_size]

    def _logits_for(self, rows: int) -> torch.Tensor:
        if len(self._logits) < rows:
            self._logits = torch.empty(rows, self._logits.shape[1])
        return self._logits[:rows]

    def _pointers(self, caches: Rows[LayerCache]) -> ctypes.Array[ctypes.c_void_p]:
        """Where the layers' caches lie: looked up again only if they are others than last time."""
        if self._caches is None or self._caches[0] is not caches:
            pointers = [cache[0].data_ptr() for cache in caches]
            self._decoder.block_size = caches[0][1].shape[1]
            self._caches = caches, (ctypes.c_void_p * len(pointers))(*pointers)
        return self._caches[1]

    def _describe(self, rotary: RotaryTable) -> structs.Decoder:
        config, reader = self._config, self._reader
        layers = (structs.DecoderLayer * config.num_layers)(
            *(self._layer(index) for index in range(config.num_layers))
        )
        self._layers = layers
        embedding = reader.read("model.embed_tokens.weight")
        head = embedding if config.tie_word_embeddings else reader.view("lm_head.weight")
        cos, sin = rotary.tables
        return structs.Decoder(
            layers=ctypes.addressof(layers),
            embedding=self._keep(embedding),
            cos=self._keep(cos),
            sin=self._keep(sin),
            norm=self._norm("model.norm.weight"),
            lm_head=self._linear(self._executor.pack([head], [], self._quantize)),
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            is_bfloat16=embedding.dtype is torch.bfloat16,
            epsilon=config.rms_norm_eps,
        )

    def _layer(self, index: int) -> structs.DecoderLayer:
        config, prefix = self._config, f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        qkv = (f"{attention}q_proj", f"{attention}k_proj", f"{attention}v_proj")
        gated = (f"{mlp}gate_proj", f"{mlp}up_proj")
        gate, up = self._weights(gated)
        return structs.DecoderLayer(
            input_norm=self._norm(f"{prefix}input_layernorm.weight"),
            post_attention_norm=self._norm(f"{prefix}post_attention_layernorm.weight"),
            query_norm=self._norm(f"{attention}q_norm.weight") if config.qk_norm else None,
            key_norm=self._norm(f"{attention}k_norm.weight") if config.qk_norm else None,
            qkv=self._packed(qkv, config.qkv_bias),
            o=self._packed((f"{attention}o_proj",), config.o_bias),
            gate_up=self._linear(
                self._executor.pack_gated(
                    gate, up, self._biases(gated, config.mlp_bias), self._quantize
                )
            ),
            down=self._packed((f"{mlp}down_proj",), config.mlp_bias),
            window=config.windows[index] or 0,
        )

    def _packed(self, names: tuple[str, ...], bias: bool) -> structs.Linear:
        packed = self._executor.pack(
            self._weights(names), self._biases(names, bias), self._quantize
        )
        return self._linear(packed)

    def _weights(self, names: tuple[str, ...]) -> list[torch.Tensor]:
        return [self._reader.view(f"{name}.weight") for name in names]

    def _biases(self, names: tuple[str, ...], there: bool) -> list[torch.Tensor]:
        return [self._reader.read(f"{name}.bias") for name in names] if there else []

    def _linear(self, packed: PackedLinear) -> structs.Linear:
        self._kept.append(packed)
        return packed.describe()

    def _norm(self, name: str) -> int:
        return self._keep(self._reader.read(name).float())

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor)
        found = pointer(tensor)
        assert found is not None
        return found


def fits(config: ModelConfig, attention: CpuBackend, dtype: torch.dtype) -> bool:
    """Whether the kernels can serve a decoder of this shape."""
    widths = (config.hidden_size, config.intermediate_size)
    return attention.is_native(dtype, config.head_dim) and not any(
        width % LANES for width in widths
    )
