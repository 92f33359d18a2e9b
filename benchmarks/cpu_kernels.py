"""Compares each native CPU kernel with the torch operations that it replaces, in turns, and with
this machine's measured rooflines.

    python benchmarks/cpu_kernels.py [--threads N] [--rounds 9] [--dtype bfloat16] [--isa NAME]
        [--kv-cache-dtype fp8] [--only TEXT] [--json FILE]

The roofs are measured in the same run: the rate at which all threads read memory (`bandwidth`) and
the rate of a large matrix product (`products`). Its dtype is the one asked for or float32, the
faster on this CPU. A kernel's work is the memory it must move, or the products it must
form. Every measurement walks over several layers' tensors, so that they come from memory and not
from a cache, as in a real step. Figures are medians.
"""

import argparse
import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path

import torch
from torch.nn import functional as F

from headrace_engine.attention.cpu import CpuBackend
from headrace_engine.core.attention_backend import AttentionMetadata, KVSpec, LayerParams
from headrace_engine.core.recurrent_state import StateBatch, StateLayout, StateRun
from headrace_engine.kernels.cpu import library
from headrace_engine.kernels.cpu.executor import Executor
from headrace_engine.layers.fp8_cache import CACHE_DTYPES
from headrace_engine.operators.base import HeadShape, TorchOps
from headrace_engine.operators.cpu import NativeOps
from headrace_engine.operators.recurrent import (
    Convolution,
    DeltaShape,
    DeltaWeights,
    GatedDelta,
    TorchRecurrences,
    conv_state,
)
from headrace_engine.operators.state_memory import StateMemory

BLOCK_SIZE = 16
COPIES = 4  # tensors of each kind that a measurement walks over, so that none stays in a cache
# What the roofs are measured with: memory that no cache holds, and a product.
MEMORY_FLOATS = 2**27
SQUARE_ROWS, SIDE = 512, 2048
ELEMENTWISE_ROWS = (1, 64, 2048)
STATE_BLOCK = 2**15  # bytes of a KV block that holds a piece of a state
RUNS = (("16 decodes", (1,) * 16), ("prefill, 512", (512,)), ("mixed", (1,) * 12 + (128,) * 4))
Call = Callable[[], object]


@dataclass(frozen=True)
class Kernel:
    """A kernel.

    `native` and `torch` do the same work `calls` times. `amount` is the work of one call: bytes for
    the roof `bandwidth`, floating-point operations for `products`.
    """

    name: str
    native: Call
    torch: Call
    calls: int
    amount: float
    roof: str


@dataclass(frozen=True)
class Roofs:
    """The machine's rooflines: GB/s that all threads read together; GFLOP/s of a large product, and
    which library computed it."""

    bandwidth: float
    products: float
    products_by: str

    def rate(self, name: str) -> float:
        return self.bandwidth if name == "bandwidth" else self.products


@dataclass(frozen=True)
class Result:
    name: str
    native_us: float
    torch_us: float
    speedup: float
    rate_g_per_s: float
    roof: str
    share_of_roof: float


@dataclass(frozen=True)
class Shape:
    """The shape of one layer's attention: sequences of (new tokens, total keys)."""

    name: str
    runs: tuple[tuple[int, int], ...]
    heads: int = 8
    kv_heads: int = 4
    dim: int = 64


SHAPES = (
    Shape("decode, 64 of 330 keys", ((1, 330),) * 64),
    Shape("decode, 1 of 8000 keys", ((1, 8000),)),
    Shape("decode, 16 of 512 keys, 32/8 heads of 128", ((1, 512),) * 16, 32, 8, 128),
    Shape("prefill, 8 of 256", ((256, 256),) * 8),
    Shape("prefill, 512 after 3584", ((512, 4096),)),
    Shape("mixed, 32 decodes and 2 prefills", ((1, 330),) * 32 + ((256, 256),) * 2),
)


def attention(
    shape: Shape, dtype: torch.dtype, backend: CpuBackend, stored: torch.dtype | None = None
) -> Kernel:
    """Compares attention. `stored` is the cache's dtype; None: `dtype`."""
    generator = torch.Generator().manual_seed(0)
    counts = [-(-length // BLOCK_SIZE) for _, length in shape.runs]
    ids = torch.randperm(sum(counts), generator=generator).int()
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    offsets = itertools.accumulate(counts, initial=0)
    for row, (begin, end) in enumerate(itertools.pairwise(offsets)):
        tables[row, : end - begin] = ids[begin:end]
    positions = [torch.arange(length - new, length) for new, length in shape.runs]
    slots = [
        tables[row, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE
        for row, at in enumerate(positions)
    ]
    starts = list(itertools.accumulate((new for new, _ in shape.runs), initial=0))
    metadata = AttentionMetadata(
        query_start=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor([length for _, length in shape.runs], dtype=torch.int32),
        block_tables=tables,
        slots=torch.cat(slots),
        num_decodes=sum(new == 1 for new, _ in shape.runs),
        max_query_len=max(new for new, _ in shape.runs),
        max_seq_len=max(length for _, length in shape.runs),
    )
    spec = KVSpec(shape.kv_heads, shape.dim, BLOCK_SIZE, dtype, torch.device("cpu"), stored)
    params = LayerParams(shape.dim**-0.5)
    caches = [backend.allocate(sum(counts), spec) for _ in range(COPIES)]
    for cache in caches:
        cache[0].copy_(torch.randn(cache[0].shape))
    query = torch.randn(starts[-1], shape.heads, shape.dim).to(dtype)
    key, value = (torch.randn(starts[-1], shape.kv_heads, shape.dim).to(dtype) for _ in range(2))

    def native() -> None:
        for cache in caches:
            backend.forward(query, key, value, cache, metadata, params)

    pairs = sum(new * (length - new) + new * (new + 1) // 2 for new, length in shape.runs)
    keys = sum(length for _, length in shape.runs)
    flops = 4 * pairs * shape.heads * shape.dim
    moved = 2 * keys * shape.kv_heads * shape.dim * spec.stored.itemsize
    decoding = metadata.max_query_len == 1
    return Kernel(
        f"attention: {shape.name}",
        native,
        _sdpa(shape, dtype),
        COPIES,
        moved if decoding else flops,
        "bandwidth" if decoding else "products",
    )


def _sdpa(shape: Shape, dtype: torch.dtype) -> Call:
    """torch's attention over contiguous keys and values, without blocks."""
    groups = Counter(shape.runs)
    made = []
    for (new, length), count in groups.items():
        query = torch.randn(count, shape.heads, new, shape.dim).to(dtype)
        for _ in range(COPIES):
            key, value = (
                torch.randn(count, shape.kv_heads, length, shape.dim).to(dtype) for _ in range(2)
            )
            mask = torch.ones(new, length, dtype=torch.bool).tril(length - new)
            made.append((query, key, value, mask if 1 < new < length else None, new == length))

    def run() -> None:
        for query, key, value, mask, causal in made:
            F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=causal and mask is None,
                enable_gqa=True,
            )

    return run


def elementwise(rows: int, dtype: torch.dtype, native: NativeOps) -> Iterator[Kernel]:
    """Compares the operators of a decoder of hidden size 512, and argmax over a vocabulary of
    32,000."""
    plain, hidden, inner, size = TorchOps(), 512, 1536, dtype.itemsize
    shape = HeadShape(8, 4, 64)
    count = min(1000, max(COPIES, 2**25 // (rows * 2 * inner * size)))
    weight = torch.ones(hidden, dtype=dtype)

    def many(width: int) -> list[torch.Tensor]:
        return [torch.randn(rows, width).to(dtype) for _ in range(count)]

    xs, residuals, gates, qkvs = many(hidden), many(hidden), many(2 * inner), many(1024)
    logits = [torch.randn(rows, 32_000).to(dtype) for _ in range(2)]
    cos, sin = torch.ones(rows, 32), torch.zeros(rows, 32)

    def kernel(
        name: str, width: int, calls: int, call: Callable[[NativeOps | TorchOps], object]
    ) -> Kernel:
        def call_native() -> None:
            call(native)

        def call_torch() -> None:
            call(plain)

        moved = width * rows * size
        return Kernel(f"{name}, {rows} rows", call_native, call_torch, calls, moved, "bandwidth")

    yield kernel(
        "rms_norm", 2 * hidden, count, lambda ops: [ops.rms_norm(x, weight, 1e-6) for x in xs]
    )
    yield kernel(
        "add_rms_norm",
        4 * hidden,
        count,
        lambda ops: [
            ops.add_rms_norm(x, residual, weight, 1e-6)
            for x, residual in zip(xs, residuals, strict=True)
        ],
    )
    yield kernel(
        "rotate_qkv",
        2 * 768,
        count,
        lambda ops: [ops.rotate_qkv(qkv, cos, sin, shape, None) for qkv in qkvs],
    )
    yield kernel(
        "silu_mul", 3 * inner, count, lambda ops: [ops.silu_mul(gate_up) for gate_up in gates]
    )
    yield kernel("argmax", 32_000, len(logits), lambda ops: [ops.argmax(x) for x in logits])


def gated_delta(name: str, runs: tuple[int, ...], dtype: torch.dtype, ops: NativeOps) -> Kernel:
    """A gated delta net of Qwen 3.5's size: sequences with a state, of `runs` new tokens."""
    shape = DeltaShape(key_heads=16, value_heads=16, key_dim=128, value_dim=128)
    weights = DeltaWeights(
        convolution=Convolution(torch.randn(shape.channels, 4).to(dtype), None),
        a_log=torch.randn(shape.value_heads),
        dt_bias=torch.randn(shape.value_heads),
        norm=torch.ones(shape.value_dim, dtype=dtype),
        eps=1e-6,
        shape=shape,
    )
    tensors = (conv_state(shape.channels, 4, dtype), shape.state)
    layout = StateLayout(tensors, layers=COPIES, places=1, block_bytes=STATE_BLOCK)
    blocks = torch.randperm(len(runs) * layout.blocks).view(len(runs), -1)
    starts = list(itertools.accumulate(runs, initial=0))
    batch = StateBatch(
        sources=blocks,
        fresh=torch.zeros(len(runs), dtype=torch.bool),
        targets=blocks,
        runs=tuple(
            StateRun(row, begin, end, (row,))
            for row, (begin, end) in enumerate(itertools.pairwise(starts))
        ),
    )
    cache = (torch.zeros(blocks.numel(), STATE_BLOCK, dtype=torch.uint8),)
    memory = StateMemory(layout, (cache,), batch)
    mixed = torch.randn(starts[-1], shape.channels).to(dtype)
    gate = torch.randn(starts[-1], shape.value_heads, shape.value_dim).to(dtype)
    beta, decay = torch.randn(2, starts[-1], shape.value_heads).to(dtype)

    def of(part: GatedDelta) -> Call:
        def call() -> None:
            for layer in range(COPIES):
                part(mixed, gate, beta, decay, layer, memory)

        return call

    decoding = max(runs) == 1
    elements = shape.value_heads * shape.key_dim * shape.value_dim
    # A state is read and written; each token multiplies and adds four times an element.
    amount = 2 * len(runs) * shape.state.num_bytes if decoding else 8 * starts[-1] * elements
    return Kernel(
        f"gated delta: {name}",
        of(ops.recurrences.gated_delta(weights)),
        of(TorchRecurrences().gated_delta(weights)),
        COPIES,
        amount,
        "bandwidth" if decoding else "products",
    )


def linear(rows: int, dtype: torch.dtype, executor: Executor, quantize: bool) -> Kernel:
    """Compares layers of 896 x 4864, more than a cache holds, with torch's fastest product."""
    inputs, outputs, count = 896, 4864, 12
    weights = [torch.randn(outputs, inputs).to(dtype) for _ in range(count)]
    products = [product(weight, 256) for weight in weights]
    layers = [executor.pack([weight], [], quantize) for weight in weights]
    x = torch.randn(rows, inputs).to(dtype)

    def native() -> None:
        for layer in layers:
            executor.linear(layer, x)

    def plain() -> None:
        for call in products:
            call(x)

    few = rows < 16
    size = 1 if quantize else dtype.itemsize
    return Kernel(
        f"linear{', int8' if quantize else ''}, {rows} rows",
        native,
        plain,
        count,
        inputs * outputs * size if few else 2 * rows * inputs * outputs,
        "bandwidth" if few else "products",
    )


def product(weight: torch.Tensor, rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """torch's fastest product with a weight [out, in]: oneDNN's, packed for `rows`, if
    supported."""
    if not packs(weight.dtype):
        return lambda x: F.linear(x, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)

    def call(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        return found

    return call


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights on this CPU. In bfloat16 it needs AVX-512 or AVX-NE-CONVERT."""
    if not torch._C._has_mkldnn:
        return False
    return dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def measure(kernel: Kernel, rounds: int, roofs: Roofs) -> Result:
    native, plain = interleaved((kernel.native, kernel.torch), rounds)
    native, plain = native / kernel.calls, plain / kernel.calls
    rate = kernel.amount / native / 1e9
    return Result(
        kernel.name,
        native * 1e6,
        plain * 1e6,
        plain / native,
        rate,
        kernel.roof,
        rate / roofs.rate(kernel.roof),
    )


def interleaved(calls: tuple[Call, ...], rounds: int) -> list[float]:
    """Median seconds of each call; the calls take turns, so that disturbances affect all."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(rounds):
        for call, taken in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begin)
    return [statistics.median(taken) for taken in times]


def measure_roofs(dtype: torch.dtype, rounds: int) -> Roofs:
    """Measures the bandwidth, and a product [SQUARE_ROWS, SIDE] x [SIDE, SIDE]."""
    memory = torch.ones(MEMORY_FLOATS)
    dtypes = list(dict.fromkeys((dtype, torch.float32)))
    reading, *multiplying = interleaved((memory.sum, *map(square, dtypes)), rounds)
    seconds, fastest = min(zip(multiplying, dtypes, strict=True), key=itemgetter(0))
    return Roofs(
        bandwidth=memory.nbytes / reading / 1e9,
        products=2 * SQUARE_ROWS * SIDE * SIDE / seconds / 1e9,
        products_by=f"{'oneDNN' if packs(fastest) else 'torch'} in {fastest}",
    )


def square(dtype: torch.dtype) -> Call:
    x, weight = torch.randn(SQUARE_ROWS, SIDE).to(dtype), torch.randn(SIDE, SIDE).to(dtype)
    call = product(weight, SQUARE_ROWS)
    return lambda: call(x)


def kernels(options: argparse.Namespace, dtype: torch.dtype) -> Iterator[Kernel]:
    loaded = library.load(options.isa)
    print(f"instruction set {loaded.isa}, {dtype}, {torch.get_num_threads()} threads")
    for shape in SHAPES:
        if options.only in f"attention: {shape.name}":
            stored = CACHE_DTYPES[options.kv_cache_dtype]
            yield attention(shape, dtype, CpuBackend(loaded), stored)
    for name, runs in RUNS:
        if options.only in f"gated delta: {name}":
            yield gated_delta(name, runs, dtype, NativeOps(loaded))
    executor = NativeOps(loaded).executor
    for rows, quantize in itertools.product((1, 16, 64, 512), (False, True)):
        if options.only in "linear":
            yield linear(rows, dtype, executor, quantize)
    for rows in ELEMENTWISE_ROWS:
        for kernel in elementwise(rows, dtype, NativeOps(loaded)):
            if options.only in kernel.name:
                yield kernel


def report(result: Result) -> None:
    unit = "GB/s" if result.roof == "bandwidth" else "GFLOP/s"
    print(
        f"{result.name:<54} {result.native_us:9.1f} us  torch {result.torch_us:9.1f} us"
        f"  {result.speedup:6.1f}x  {result.rate_g_per_s:8.1f} {unit:<8}"
        f" {result.share_of_roof:4.0%} of {result.roof}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--kv-cache-dtype", choices=CACHE_DTYPES, default="auto")
    parser.add_argument("--isa", help="an instruction set's name; the best one if not given")
    parser.add_argument("--only", default="", help="kernels whose name holds this text")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[options.dtype]
    with torch.inference_mode():
        roofs = measure_roofs(dtype, options.rounds)
        print(
            f"bandwidth {roofs.bandwidth:.1f} GB/s, "
            f"products {roofs.products:.1f} GFLOP/s ({roofs.products_by})"
        )
        results = []
        for kernel in kernels(options, dtype):
            results.append(measure(kernel, options.rounds, roofs))
            report(results[-1])
    if options.json is not None:
        found = {"roofs": asdict(roofs), "results": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
