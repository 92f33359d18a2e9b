"""Compiles every Triton kernel for GPUs, without a GPU, and prints the resources that each needs.

    PYTHONPATH=engine:common python benchmarks/triton_aot.py [--capability 80 89 90]
        [--shape 8b ...] [--only TEXT] [--brief] [--candidates] [--dependent]
        [--loops [TEXT ...]] [--json]

Each launch has the arguments that the engine gives it. Printed are its registers, spilled bytes,
shared memory and the programs that fit a multiprocessor; asynchronous copies by size, and the
number of groups of them in flight while the kernel computes; other loads by size; and the product
instructions. With --loops also the cost of an iteration of its loops.
Exits with 1 if a kernel spills much in a loop or does not fit, but not for --candidates, which an
engine measures on the device and refuses there.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# The interpreter's kernels cannot be compiled; Triton reads this when it is first imported.
os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from compiled.hazards import READING_WEIGHTS, hazards
from compiled.launches import candidate_launches, dependent_launches, model_launches
from compiled.layers import ModelShape
from compiled.loops import Loop, describe_loop, loops
from compiled.recording import KernelLaunch
from headrace_engine.checkpoints.config import ClampedSwiGLU, ExpertsConfig
from headrace_engine.core.attention_backend import LayerParams
from headrace_engine.models.hybrid.mamba import MambaShape
from headrace_engine.operators.recurrent import DeltaShape, Mamba2Shape

# The compute capability from which kernels may be launched early.
DEPENDENT = 90
POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
}
LLAMA_8B = ModelShape()
QWEN_30B = ModelShape(
    hidden=2048, inner=6144, kv_heads=4, qk_norm=True,
    experts=ExpertsConfig(128, 8, 768, True, None, (True,)),
)  # fmt: skip
# The queries, keys and values of other operators are those of one KV head.
DEEPSEEK_V3 = ModelShape(
    hidden=7168, inner=18432, heads=128, kv_heads=1, head_dim=576, latent=512, rotated=64,
    interleaved=True,
    experts=ExpertsConfig(
        256, 8, 2048, True, 2048, (True,), sigmoid=True, correction=True, groups=8, kept_groups=4,
        group_best=2, factor=2.5, shared_gate=False,
    ),
)  # fmt: skip
QWEN3_NEXT = ModelShape(
    hidden=2048, inner=5632, heads=16, kv_heads=2, head_dim=256, qk_norm=True, rotated=64,
    recurrent=DeltaShape(16, 32, 128, 128),
)  # fmt: skip
NEMOTRON_H = ModelShape(hidden=4096, inner=21504, recurrent=Mamba2Shape(128, 64, 8, 128, 4))
SHAPES = {
    "8b": LLAMA_8B,
    "8b-fp8": replace(LLAMA_8B, cache_dtype=torch.float8_e4m3fn),
    "8b-int4": replace(LLAMA_8B, weight_bits=4),
    "8b-int8": replace(LLAMA_8B, weight_bits=8),
    "1b": ModelShape(hidden=2048, inner=8192, head_dim=64),
    "qwen3": replace(LLAMA_8B, qk_norm=True),
    "glm4": replace(LLAMA_8B, inner=13696, kv_heads=2, rotated=64, interleaved=True),
    "gemma2": ModelShape(
        hidden=2304, inner=9216, heads=8, kv_heads=4, head_dim=256,
        params=LayerParams(256**-0.5, 50.0, 4096),
    ),
    "gemma2-fp8": ModelShape(
        heads=8, kv_heads=4, head_dim=256, cache_dtype=torch.float8_e4m3fn,
        params=LayerParams(256**-0.5, 50.0),
    ),
    "head-80": ModelShape(hidden=2560, inner=10240, kv_heads=32, head_dim=80),
    "head-96": ModelShape(hidden=3072, inner=8192, kv_heads=32, head_dim=96),
    "head-192": ModelShape(heads=16, kv_heads=2, head_dim=192),
    "multi-query": ModelShape(hidden=6144, inner=24576, heads=48, kv_heads=1),
    "head-64-float32": ModelShape(hidden=2048, inner=8192, head_dim=64, dtype=torch.float32),
    "8b-float32": replace(LLAMA_8B, dtype=torch.float32),
    "gemma2-float32": ModelShape(
        heads=8, kv_heads=4, head_dim=256, dtype=torch.float32, params=LayerParams(256**-0.5)
    ),
    "mixtral": replace(
        LLAMA_8B, weight_bits=4, experts=ExpertsConfig(8, 2, 14336, True, None, (True,))
    ),
    "qwen2-moe": ModelShape(
        hidden=3584, inner=18944, heads=28, kv_heads=4,
        experts=ExpertsConfig(64, 8, 2560, False, 20480, (True,)),
    ),
    "qwen3-moe": QWEN_30B,
    "qwen3-moe-fp8": replace(QWEN_30B, cache_dtype=torch.float8_e4m3fn),
    "qwen3-moe-int4": replace(QWEN_30B, weight_bits=4),
    "gpt-oss": ModelShape(
        hidden=2880, inner=2880, heads=64, kv_heads=8, head_dim=64,
        params=LayerParams(0.125, None, 128, sinks=torch.empty(64, device="meta")),
        experts=ExpertsConfig(
            32, 4, 2880, True, None, (True,), bias=True, swiglu=ClampedSwiGLU(1.702, 7.0)
        ),
    ),
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3-fp8": replace(DEEPSEEK_V3, cache_dtype=torch.float8_e4m3fn),
    "deepseek-v3-float32": replace(DEEPSEEK_V3, dtype=torch.float32),
    "qwen3-moe-float32": replace(QWEN_30B, dtype=torch.float32),
    "qwen3-next": QWEN3_NEXT,
    "qwen3-next-float32": replace(QWEN3_NEXT, dtype=torch.float32),
    "kimi-linear": ModelShape(hidden=2304, recurrent=DeltaShape(32, 32, 128, 128)),
    "nemotron-h": NEMOTRON_H,
    "nemotron-h-float32": replace(NEMOTRON_H, dtype=torch.float32),
    "falcon-h1": ModelShape(recurrent=Mamba2Shape(24, 128, 1, 256, 4)),
    "jamba": ModelShape(recurrent=MambaShape(8192, 16, 256, 4)),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Device:
    """Limits of one multiprocessor; one program has at most `program_shared` bytes of shared
    memory."""

    shared: int
    program_shared: int
    warps: int
    programs: int


KIB = 1024
REGISTERS = 65536
DEVICES = {
    80: Device(164 * KIB, 163 * KIB, 64, 32),
    86: Device(100 * KIB, 99 * KIB, 48, 16),
    89: Device(100 * KIB, 99 * KIB, 48, 24),
    90: Device(228 * KIB, 227 * KIB, 64, 32),
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """`spilled` is in bytes per thread; `resident` programs fit a multiprocessor; `products` are
    named as in PTX. `copy_sizes` counts a thread's asynchronous copies by their bytes, and
    `in_flight` groups of them may be outstanding when a wait is over; `loads` counts the other
    global loads. A `dependent` kernel may run before earlier kernels end; `hazards` are its errors
    then. `loops` are found where they were asked for, and where something is spilled."""

    kernel: str
    variant: str
    capability: int
    target: str
    registers: int
    spilled: int
    shared: int
    warps: int
    resident: int
    products: str
    copy_sizes: dict[int, int]
    in_flight: int
    loads: dict[int, int]
    dependent: bool
    hazards: list[str]
    loops: list[Loop]

    @property
    def fits(self) -> bool:
        """Whether the kernel fits.

        Spilling outside of loops costs nothing, and one spilling instruction in a hundred costs
        little.
        """
        spills = any(loop.kinds.get("local", 0) * 100 > loop.instructions for loop in self.loops)
        return not spills and self.resident > 0 and not self.hazards


def compile_launch(launch: KernelLaunch, capability: int, with_loops: bool) -> Compiled:
    signature, constants, aligned = describe(launch)
    source = ASTSource(launch.kernel, signature, constants, aligned)
    target = GPUTarget("cuda", capability, 32)
    binary = triton.compile(source, target=target, options=launch.options)
    ptx = binary.asm["ptx"]
    registers, spilled = resources(binary.asm["cubin"])
    shared, warps = binary.metadata.shared, binary.metadata.num_warps
    copies = re.findall(r"cp\.async\.c[ag]\.[^;]*?, 0x([0-9a-f]+)", ptx)
    waits = re.findall(r"cp\.async\.wait_group\s+(\w+)", ptx)
    return Compiled(
        kernel=launch.name,
        variant=variant(launch),
        capability=capability,
        target=re.findall(r"\.target (\w+)", ptx)[0],
        registers=registers,
        spilled=spilled,
        shared=shared,
        warps=warps,
        resident=resident(DEVICES[capability], registers, shared, warps),
        products=", ".join(sorted(set(re.findall(r"(?:wgmma|mma)\.\w+[\w.]*?m\d+n\d+k\d+", ptx)))),
        copy_sizes=_counts(int(size, 16) for size in copies),
        in_flight=max((int(one, 0) for one in waits), default=0),
        loads=_loads(ptx),
        dependent="griddepcontrol" in ptx,
        hazards=hazards(
            ptx, bool(launch.options.get("launch_pdl")), launch.name in READING_WEIGHTS
        ),
        loops=loops(binary.asm["cubin"], warps) if with_loops or spilled else [],
    )


def describe(
    launch: KernelLaunch,
) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[list[Any]]]]:
    """Signature, constants and alignments of a launch, as Triton's launcher derives them."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.bound[parameter.name]
        general = parameter.do_not_specialize
        signature[parameter.name] = kind = _kind(value, parameter.is_constexpr, general)
        if kind == "constexpr":
            constants[parameter.name] = value
        elif not general and _is_aligned(value):
            aligned[(index,)] = [["tt.divisibility", 16]]
    assert set(launch.bound) == set(signature), "arguments that the kernel does not take"
    return signature, constants, aligned


def _kind(value: Any, constant: bool, general: bool) -> str:
    if constant or value is None or (isinstance(value, int) and value == 1 and not general):
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _is_aligned(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def resources(cubin: bytes) -> tuple[int, int]:
    """The registers and the bytes of local memory of each thread, as reported by Triton's own
    cuobjdump."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", done.stdout)
    assert found, done.stdout
    return int(found[1]), int(found[2]) + int(found[3])


def resident(device: Device, registers: int, shared: int, warps: int) -> int:
    """The number of programs that a multiprocessor can hold at once; 0: not even one."""
    if shared > device.program_shared:
        return 0
    # Registers are allocated to a warp in units of 256; each program needs 1 KiB of shared memory
    # in addition.
    by_registers = REGISTERS // (-(-registers * 32 // 256) * 256) // warps
    by_shared = device.shared // (shared + KIB)
    return min(by_registers, by_shared, device.warps // warps, device.programs)


def variant(launch: KernelLaunch) -> str:
    """The constants that distinguish a kernel's launches."""
    names = (
        "ROWS",
        "COLUMNS",
        "DEPTH",
        "SPLIT",
        "MERGE",
        "KEYS",
        "DIM",
        "WHOLE",
        "MASKED",
        "BLOCK",
        "ADD",
        "PARTS",
        "STORE",
        "NORM",
        "INTERLEAVED",
        "TOKENS",
        "WRITE",
    )
    shown = [f"{name.lower()} {launch.bound[name]}" for name in names if name in launch.bound]
    stages = launch.options.get("num_stages")
    return " ".join([*shown, *([f"stages {stages}"] if stages else [])])


def _loads(ptx: str) -> dict[int, int]:
    found = re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+)", ptx)
    return _counts(int(vector or 1) * int(bits) // 8 for vector, bits in found)


def brief_key(launch: KernelLaunch) -> str:
    """A key that is equal for launches that differ little.

    A norm in a product, or scaled weights, change it.
    """
    other = [one for one in ("ADD", "PARTS", "SCALED") if launch.bound.get(one)]
    return " ".join([launch.name, *other])


def _counts(sizes: Iterable[int]) -> dict[int, int]:
    return dict(sorted(Counter(sizes).items()))


def compile_launches(
    capability: int, launches: Iterable[KernelLaunch], wanted: argparse.Namespace
) -> Iterator[Compiled]:
    """Compiles each kernel once for each set of constants and options; with `brief`, only once."""
    seen = set()
    for launch in launches:
        exact = str((launch.name, launch.options, *describe(launch)))
        key = brief_key(launch) if wanted.brief else exact
        if _contains(launch.name, wanted.only) and key not in seen:
            seen.add(key)
            asked = wanted.loops is not None and _contains(launch.name, wanted.loops or [""])
            yield compile_launch(launch, capability, asked)


def _contains(name: str, texts: Sequence[str]) -> bool:
    return any(text in name for text in texts)


HEADER = (
    f"{'sm':3} {'kernel':15} {'variant':42} {'regs':>4} {'spill':>5} {'shared':>7} {'warps':>5} "
    f"{'fit':>3}  {'async, ahead':14} {'loads':16} products"
)


def line(one: Compiled) -> str:
    copies = f"{_shown(one.copy_sizes)}, {one.in_flight}" if one.copy_sizes else "-"
    return (
        f"{one.capability:3} {one.kernel.removesuffix('_kernel'):15} {one.variant:42} "
        f"{one.registers:4} {one.spilled:5} {one.shared:7} {one.warps:5} {one.resident:3}  "
        f"{copies:14} {_shown(one.loads):16} {one.products.replace('.sync.aligned', '')}"
    )


def lines(one: Compiled, with_loops: bool) -> str:
    found = [f"    {describe_loop(loop)}" for loop in one.loops] if with_loops else []
    return "\n".join([line(one), *found])


def _shown(sizes: dict[int, int]) -> str:
    return " ".join(f"{size}:{count}" for size, count in sizes.items())


def _launches(wanted: argparse.Namespace) -> Callable[[int, ModelShape], list[KernelLaunch]]:
    if wanted.dependent:
        return dependent_launches
    return candidate_launches if wanted.candidates else model_launches


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 89, 90], choices=DEVICES)
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="kernels whose name holds one of these texts"
    )
    parser.add_argument(
        "--brief", action="store_true", help="each kernel with one set of constants"
    )
    parser.add_argument(
        "--candidates", action="store_true", help="candidates that are measured at warm-up"
    )
    parser.add_argument(
        "--dependent", action="store_true", help="kernels that may be launched early, on 90 only"
    )
    parser.add_argument(
        "--loops", nargs="*", metavar="TEXT", help="the cost of their loops; TEXT as of --only"
    )
    parser.add_argument("--json", action="store_true", help="an object for each kernel")
    wanted = parser.parse_args(arguments)
    if not wanted.json:
        print(f"Triton {triton.__version__}")
    unfit = 0
    for name in wanted.shape:
        if not wanted.json:
            print(f"\n{name}\n{HEADER}")
        for capability in [DEPENDENT] if wanted.dependent else wanted.capability:
            launches = _launches(wanted)(capability, SHAPES[name])
            for one in compile_launches(capability, launches, wanted):
                unfit += not one.fits and not wanted.candidates
                found = {"shape": name, **asdict(one)}
                shown = json.dumps(found) if wanted.json else lines(one, wanted.loops is not None)
                print(shown, flush=True)
    return 1 if unfit else 0


if __name__ == "__main__":
    sys.exit(main())
