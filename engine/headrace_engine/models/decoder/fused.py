"""The native decoder for CPUs: a whole step in one call of the native kernels.

It serves the same models as `decoder`, which serves every device and is its reference in tests. The
residual stream and the logits are float32.
"""

import ctypes
from collections.abc import Sequence
from functools import cached_property

import torch

from ...attention.cpu import STORAGES, CpuBackend, LayerBatches, describe
from ...checkpoints.config import ModelConfig
from ...core.attention_backend import AttentionBackend, LayerCache
from ...kernels.cpu import structs
from ...kernels.cpu.executor import LANES
from ...lora.shapes import LayerShapes, lora_shapes
from ...operators.cpu import NativeOps
from ..base import ForwardBatch, kv_shapes
from ..weights.weights import WeightReader
from .decoder import Decoder
from .decoder_tensors import expected_tensors, ignored_tensors
from .fused_layers import layered_weights
from .fused_weights import FusedWeights
from .positions import PositionTables


class FusedDecoder:
    """A decoder that computes a step in one native call. Weights are packed directly from the
    mapped files. Each step overwrites the logits of the one before.

    The kernels do not support adapters and images: a step with adapters, or with rows in images, is
    computed layer by layer, from the same packed weights. With `taps`, ascending, the residual
    stream that these layers read follows the logits in each row; then a step needs the rows of all
    tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        positions: PositionTables,
        ops: NativeOps,
        attention: AttentionBackend,
        quantize: bool = False,
        taps: tuple[int, ...] = (),
    ) -> None:
        reader.check(expected_tensors(config), ignored=ignored_tensors(config))
        self._config, self._ops, self._attention = config, ops, attention
        self._positions = positions
        self.vocab_size = config.vocab_size
        self.kv_shapes = kv_shapes(config)
        self._weights = FusedWeights(config, reader, ops.executor, positions, quantize)
        self._decoder = self._weights.describe()
        self._caches: tuple[Sequence[LayerCache], ctypes.Array[ctypes.c_void_p]] | None = None
        self._logits = torch.empty(0, ops.executor.padded(config.vocab_size))
        self._taps = (ctypes.c_int64 * len(taps))(*taps)
        self._tapped = torch.empty(0, len(taps), config.hidden_size)

    @property
    def lora_shapes(self) -> tuple[LayerShapes, ...]:
        return lora_shapes(self._config)

    @cached_property
    def _layered(self) -> Decoder:
        """The same decoder, computed layer by layer."""
        weights = layered_weights(self._config, self._weights, self._ops)
        return Decoder(self._config, weights, self._positions, self._ops, self._attention)

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        if batch.lora is not None or batch.vision is not None:
            return self._layered.forward(batch, caches)
        self._positions.reserve(batch.positions)
        rows = batch.logits_rows.shape[0]
        logits, layers = self._logits_for(rows), LayerBatches(batch.layers)
        step = structs.Step(
            input_ids=batch.input_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            logits_rows=batch.logits_rows.data_ptr(),
            caches=ctypes.addressof(self._pointers(caches)),
            logits=logits.data_ptr(),
            num_logits=rows,
            logits_stride=logits.stride(0),
            batch=describe(batch.metadata),
            layers=layers.address,
        )
        tapped = self._tap(step, len(batch.input_ids))
        self._ops.executor.forward(self._decoder, step)
        logits = logits[:, : self._config.vocab_size]
        return logits if tapped is None else torch.cat((logits, tapped.flatten(1)), dim=-1)

    def _tap(self, step: structs.Step, tokens: int) -> torch.Tensor | None:
        """The memory [T, taps, H] for a step's residuals; None without taps."""
        if not len(self._taps):
            return None
        if len(self._tapped) < tokens:
            self._tapped = torch.empty(tokens, *self._tapped.shape[1:])
        step.taps, step.num_taps = ctypes.addressof(self._taps), len(self._taps)
        step.tapped = self._tapped.data_ptr()
        return self._tapped[:tokens]

    def _logits_for(self, rows: int) -> torch.Tensor:
        if len(self._logits) < rows:
            self._logits = torch.empty(rows, self._logits.shape[1])
        return self._logits[:rows]

    def _pointers(self, caches: Sequence[LayerCache]) -> ctypes.Array[ctypes.c_void_p]:
        """Addresses of the layers' caches, computed again only if the caches have changed."""
        if self._caches is None or self._caches[0] is not caches:
            pointers = [cache[0].data_ptr() for cache in caches]
            self._decoder.block_size = caches[0][-1].shape[1]
            self._decoder.kv_storage = STORAGES.get(caches[0][0].dtype, 0)
            self._caches = caches, (ctypes.c_void_p * len(pointers))(*pointers)
        return self._caches[1]


def fits(config: ModelConfig, attention: CpuBackend, dtype: torch.dtype) -> bool:
    """Whether the kernels support a decoder of this shape."""
    widths = [config.hidden_size, config.intermediate_size]
    if config.experts is not None:
        widths += [config.experts.intermediate_size, config.experts.shared_size or 0]
    latent, usual = config.latent, not config.rotated_qk_norm and config.has_equal_heads
    if latent is None:
        native = attention.is_native(dtype, config.head_dim)
    else:
        widths += [latent.plain, latent.rotary, latent.value, latent.query_rank or 0]
        usual = latent.index is None and not config.has_shortcut(0)
        native = attention.is_native_latent(dtype, config.head_dim, latent.rank)
    return usual and native and not any(width % LANES for width in widths)
