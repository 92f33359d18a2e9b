"""Compiles what the Triton backend and operators would launch, for a GPU that need not be there.

A launch is recorded with its arguments, and the kernel compiled for them as `triton` would. Tensors
are torch's meta tensors, which raise if the host asks for their numbers. Run as a module, in a
process without TRITON_INTERPRET: prints a JSON object for each kernel.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headrace_engine.attention import triton as attention
from headrace_engine.attention.base import AttentionMetadata, KVSpec, LayerParams
from headrace_engine.model import invariant, triton_ops
from headrace_engine.model.ops import HeadShape, QKNorm
from headrace_engine.model.qkv import QKVRows

META = torch.device("meta")
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Compiled:
    """`shared` is the shared memory of a program in bytes, `target` the PTX line that names it."""

    kernel: str
    shared: int
    target: str
    products: bool


class Recorder:
    """Stands where a kernel stands, and compiles it for what it is launched with."""

    def __init__(self, kernel: Any, capability: int, found: list[Compiled]) -> None:
        self._kernel, self._capability, self._found = kernel, capability, found

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(extent > 0 for extent in grid)
        return self._compile

    def _compile(self, *arguments: Any, **named: Any) -> None:
        options = {key: named.pop(key) for key in ("num_warps", "num_stages") if key in named}
        bound = dict(zip(self._kernel.arg_names, arguments, strict=False)) | named
        source = ASTSource(self._kernel, *describe(self._kernel, bound))
        target = GPUTarget("cuda", self._capability, 32)
        binary = triton.compile(source, target=target, options=options)
        ptx = binary.asm["ptx"]
        line = next(one for one in ptx.splitlines() if one.startswith(".target"))
        products = "wgmma" in ptx or "mma.sync" in ptx
        self._found.append(Compiled(self._kernel.__name__, binary.metadata.shared, line, products))


def describe(
    kernel: Any, bound: dict[str, Any]
) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[list[Any]]]]:
    """Signature, constants and alignments of a launch, as Triton's launcher derives them."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = bound[parameter.name]
        general = parameter.do_not_specialize
        signature[parameter.name] = kind = _kind(value, parameter.is_constexpr, general)
        if kind == "constexpr":
            constants[parameter.name] = value
        elif not general and _is_aligned(value):
            aligned[(index,)] = [["tt.divisibility", 16]]
    assert set(bound) == set(signature), "arguments that the kernel does not take"
    return signature, constants, aligned


def _kind(value: Any, constant: bool, general: bool) -> str:
    if constant or value is None or (isinstance(value, int) and value == 1 and not general):
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _is_aligned(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def compile_all(
    capability: int, dtype: torch.dtype, head_dim: int, fp8: bool, params: LayerParams
) -> list[Compiled]:
    """Every kernel that a layer's step launches, long decodes and a prefill among them."""
    found: list[Compiled] = []
    with ExitStack() as stack:
        for module, name in _kernels():
            recorder = Recorder(getattr(module, name), capability, found)
            stack.enter_context(patch.object(module, name, recorder))
        _attend(capability, dtype, head_dim, fp8, params)
        _operate(dtype, head_dim)
    return found


def _kernels() -> Iterator[tuple[Any, str]]:
    for name in ("store_kernel", "decode_kernel", "merge_kernel", "prefill_kernel"):
        yield attention, name
    yield invariant, "linear_kernel"
    for name in ("rotate_kernel", "rms_norm_kernel", "silu_mul_kernel"):
        yield triton_ops, name


def _attend(
    capability: int, dtype: torch.dtype, head_dim: int, fp8: bool, params: LayerParams
) -> None:
    backend = attention.TritonBackend(divmod(capability, 10), fp8)
    deterministic = attention.TritonBackend(divmod(capability, 10), fp8, deterministic=True)
    cache = backend.allocate(2, KVSpec(8, head_dim, 16, dtype, META))
    metadata = AttentionMetadata(
        query_start=torch.empty(3, dtype=torch.int32, device=META),
        seq_lens=torch.empty(2, dtype=torch.int32, device=META),
        block_tables=torch.empty(2, 64, dtype=torch.int32, device=META),
        slots=torch.empty(4, dtype=torch.int64, device=META),
        num_decodes=1,
        max_query_len=3,
        max_seq_len=1024,
    )
    query, key = (made(4, heads, head_dim, dtype=dtype) for heads in (32, 8))
    backend.forward(query, key, key, cache, metadata, params)
    deterministic.forward(query, key, key, cache, metadata, params)
    rows = QKVRows(*_rotation_inputs(4, dtype, head_dim))
    backend.forward_qkv(rows, cache, metadata, params)


def _operate(dtype: torch.dtype, head_dim: int) -> None:
    ops = triton_ops.TritonOps()
    hidden, weight = made(2, 4096, dtype=dtype), made(4096, dtype=dtype)
    ops.rms_norm(hidden, weight, 1e-6)
    ops.add_rms_norm(hidden, made(2, 4096, dtype=dtype), weight, 1e-6)
    ops.silu_mul(hidden)
    invariant.InvariantLinear(made(6144, 4096, dtype=dtype), weight[:1])(hidden)
    ops.rotate_qkv(*_rotation_inputs(2, dtype, head_dim))


def _rotation_inputs(
    tokens: int, dtype: torch.dtype, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, HeadShape, QKNorm]:
    angles = made(tokens, head_dim // 2)
    head = made(head_dim, dtype=dtype)
    qkv = made(tokens, 48 * head_dim, dtype=dtype)
    return qkv, angles, angles, HeadShape(32, 8, head_dim), QKNorm(head, head)


def made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--window", type=int)
    parser.add_argument("--softcap", type=float)
    wanted = parser.parse_args()
    params = LayerParams(0.1, wanted.softcap, wanted.window)
    made = compile_all(wanted.capability, DTYPES[wanted.dtype], wanted.head_dim, wanted.fp8, params)
    for one in made:
        sys.stdout.write(json.dumps(asdict(one)) + "\n")


if __name__ == "__main__":
    main()
