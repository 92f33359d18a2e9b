"""Counts the launches of one decode step on a GPU, without a GPU: every kernel of ours and every
operator of torch's, by a model without memory.

    PYTHONPATH=engine:common python benchmarks/step_launches.py [--shape 8b] [--adapters 4]
        [--fewest]

Without measured kernels, or with --fewest as if those that save a launch had all been the fastest.
Fails where a step would wait for the device or copy from the host, as recorded steps must not.
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from compiled.layers import decode_metadata, lora_rows
from compiled.meta import META, made
from compiled.recording import record
from gpu_benchmark.shapes import SHAPES
from headrace_engine.attention.triton import TritonBackend
from headrace_engine.checkpoints.checkpoint import load_checkpoint
from headrace_engine.checkpoints.config import ModelConfig
from headrace_engine.core.attention_backend import KVSpec
from headrace_engine.kernels.triton.dependent_launch import StepLaunch
from headrace_engine.kernels.triton.launch import AttentionLaunches
from headrace_engine.lora.batch import LoRABatch
from headrace_engine.lora.slots import LoRASlots
from headrace_engine.models.base import ForwardBatch
from headrace_engine.models.decoder.decoder import Decoder
from headrace_engine.models.decoder.decoder_weights import read_weights
from headrace_engine.models.decoder.norm_fusion import make_decoder
from headrace_engine.models.decoder.positions import PositionTables
from headrace_engine.models.weights.random_weights import RandomReader
from headrace_engine.operators.triton import TritonOps

# Operations that would make the host wait or copy from it.
HOST = ("tensor", "new_tensor", "as_tensor", "from_numpy", "item", "tolist", "cpu", "nonzero")
# They only allocate memory.
FREE = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


class _MetaReader(RandomReader):
    def _load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self._expected[name], dtype=dtype, device=META)


class HostCalls(TorchFunctionMode):
    """Refuses calls that make the host wait or read values of a tensor."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.__name__ in HOST:
            raise RuntimeError(f"{function.__name__} needs the host within a step")
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators that launch something."""

    def __init__(self) -> None:
        make: Any = super().__init__
        make()
        self.launched: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name not in FREE and not _is_view(function):
            self.launched[name] += 1
        return function(*args, **(kwargs or {}))


def _is_view(function: Any) -> bool:
    """Whether a result is a view of an argument, so that nothing is launched."""
    results = [one.alias_info for one in function._schema.returns]
    return any(info is not None and not info.is_write for info in results)


@dataclass(frozen=True)
class StepLaunches:
    """Launches of a step by name, and how many each layer repeats."""

    layers: int
    launched: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.launched.values())

    @property
    def per_layer(self) -> int:
        return sum(count // self.layers for count in self.launched.values())


def decode_step(
    config: Mapping[str, Any], batch: int, context: int, adapters: int = 0, fewest: bool = False
) -> StepLaunches:
    """Counts the launches of a decode step of the native decoder on a GPU, in bfloat16.

    `config` is the model's config.json; rows use `adapters` different adapters. With `fewest`,
    attention merges its own parts, and norms are fused into products where possible.
    """
    attention = TritonBackend((9, 0))
    model, layers = _model(config, attention)
    if fewest:
        decodes = attention.decode_launch(2, model.heads.head_dim, batch)
        attention.use(AttentionLaunches(decodes=((batch, replace(decodes, merges=True)),)))
    caches = [
        attention.allocate(2, KVSpec(one.num_kv_heads, one.head_dim, 16, torch.bfloat16, META))
        for one in model.kv_shapes
    ]
    ids = made(batch, dtype=torch.int64)
    lora = _adapted(model, batch, adapters) if adapters else None
    step = ForwardBatch(ids, ids, ids, decode_metadata(batch, context), lora)
    operators, launches = Operators(), model.dependent_launches
    assert launches is not None

    def run() -> torch.Tensor:
        with launches.during(StepLaunch(fused_norms=fewest)):
            return model.forward(step, caches)

    with torch.inference_mode(), HostCalls():
        record(run)  # allocates scratch memory, as the steps before a capture do
        with operators:
            kernels = record(run)
    counts = Counter(one.name for one in kernels)
    return StepLaunches(layers, dict((counts + operators.launched).most_common()))


def _adapted(model: Decoder, batch: int, adapters: int) -> LoRABatch:
    slots = LoRASlots(model.lora_shapes, adapters, 16, torch.bfloat16, META)
    rows = lora_rows(batch, adapters, torch.bfloat16)
    return LoRABatch(slots.layers, rows, rows)


def _model(raw: Mapping[str, Any], attention: TritonBackend) -> tuple[Decoder, int]:
    with _folder(raw) as folder:
        config = ModelConfig.from_hf(load_checkpoint(str(folder)))
    ops = TritonOps()
    weights = read_weights(config, _MetaReader(torch.bfloat16, META), ops)
    positions = PositionTables(config, 8192, META)
    return make_decoder(config, weights, positions, ops, attention), config.num_layers


@contextmanager
def _folder(config: Mapping[str, Any]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(config))
        yield Path(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--adapters", type=int, default=0, help="LoRA adapters that rows have")
    parser.add_argument("--fewest", action="store_true", help="with all that saves a launch")
    wanted = parser.parse_args()
    config = SHAPES[wanted.shape].config()
    found = decode_step(config, wanted.batch, wanted.context, wanted.adapters, wanted.fewest)
    for name, count in found.launched.items():
        print(f"{name:20}{count:5}")
    print(f"{found.total} launches, {found.per_layer} of them in each of {found.layers} layers")


if __name__ == "__main__":
    main()
