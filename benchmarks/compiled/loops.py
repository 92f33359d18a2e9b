"""Estimates the cost of a compiled kernel's loops from its machine code, without a device.

Instructions are those of one warp and one iteration. Clocks are those of a quarter of a
multiprocessor that never waits: a lower bound. Rates are those of compute capability 9.0 in CUDA's
programming guide; `mma` reaches less there than `wgmma`, for which `tensor` is.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import triton

# Bytes per clock that memory delivers to one multiprocessor: 4.3 TB/s over 132 at 1.75 GHz (H200).
MEMORY_BYTES = 18.6
# Bytes per clock that a multiprocessor's shared memory delivers.
SHARED_BYTES = 128
SCHEDULERS = 4
WARP = 32
# Products of two-byte elements that a quarter of a multiprocessor computes per clock.
TENSOR_RATE = 512
# (kind, opcodes); the first match counts.
KINDS = (
    ("tensor", r"[HIQB]G?MMA"),
    ("copy", r"LDGSTS|UTMA|UBLK"),
    ("global", r"LDG|STG|LD\.|ST\.|ATOM|RED"),
    ("local", r"LDL|STL"),
    ("shared", r"LDS|STS|SHFL"),
    ("mufu", r"MUFU"),
    ("convert", r"F2|I2F|PRMT"),
    ("float", r"F[A-Z]|HADD|HMUL|HFMA|HMNMX|HSET"),
    ("wait", r"BAR|DEPBAR|LDGDEPBAR|WARP|MEMBAR|FENCE|SYNCS|CCTL"),
    ("uniform", r"U[A-Z]|R2UR|S2UR|VOTE"),
    ("integer", r"[A-Z]"),
)
# Threads per clock and multiprocessor, for instructions that not all threads can execute at once.
LANES = (
    (r"MUFU", 16),
    (r"F2|I2F|PRMT|FMNMX|FSEL|FSET|I[A-Z]|LOP|SHF|LEA|SEL|VI|PLOP|SGXT", 64),
)


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction.

    `target` is the address that a branch jumps to; None for other instructions.
    """

    address: int
    opcode: str
    target: int | None

    @property
    def kind(self) -> str:
        return next(kind for kind, pattern in KINDS if re.match(pattern, self.opcode))

    @property
    def thread_bytes(self) -> int:
        """The bytes that one thread loads or stores."""
        if matrices := re.search(r"SM\.16\.MT?88(?:\.(\d))?", self.opcode):
            return 4 * int(matrices[1] or 1)
        sizes = {".U8": 1, ".S8": 1, ".U16": 2, ".S16": 2, ".64": 8, ".128": 16}
        return next((size for mark, size in sizes.items() if mark in self.opcode), 4)

    @property
    def products(self) -> int:
        """Multiplications and additions of a warp, counted as if elements had two bytes."""
        if wide := re.search(r"GMMA\.(\d+)x(\d+)x(\d+)", self.opcode):
            made = int(wide[1]) * int(wide[2]) * int(wide[3]) // SCHEDULERS
        elif small := re.search(r"MMA\.(16)(8)(\d+)", self.opcode):
            made = int(small[1]) * int(small[2]) * int(small[3])
        else:
            return 0
        return made // 2 if self.opcode[0] in "IQ" else made

    @property
    def clocks(self) -> float:
        """Cycles that an instruction of a warp takes on a quarter of a multiprocessor."""
        found = (count for pattern, count in LANES if re.match(pattern, self.opcode))
        return WARP * SCHEDULERS / next(found, WARP * SCHEDULERS)


@dataclass(frozen=True, slots=True)
class Loop:
    """An innermost loop: one warp's instructions by kind, and its barriers. For an iteration of all
    warps: the bytes `loaded`, and the clocks of a multiprocessor's schedulers (`issue`), of its
    busiest arithmetic units, its tensor cores and its shared memory."""

    instructions: int
    kinds: dict[str, int]
    barriers: int
    loaded: int
    issue: float
    arithmetic: float
    tensor: float
    shared: float

    @property
    def memory(self) -> float:
        """The clocks that memory needs to deliver what is loaded."""
        return self.loaded / MEMORY_BYTES

    @property
    def share(self) -> float:
        """The clocks of the busiest unit relative to those of memory; near 1, memory would wait for
        it."""
        busiest = max(self.issue, self.arithmetic, self.tensor, self.shared)
        return busiest / self.memory if self.loaded else 0.0


def loops(cubin: bytes, warps: int) -> list[Loop]:
    """The innermost loops of a kernel whose programs have `warps` warps."""
    return loops_of(disassemble(cubin), warps)


def loops_of(code: Sequence[Instruction], warps: int) -> list[Loop]:
    """The innermost loops that load or multiply, in the order of the code."""
    spans = [(one.target, one.address) for one in code if one.target is not None]
    backwards = [(begin, end) for begin, end in spans if begin < end]
    bodies = (
        [one for one in code if begin <= one.address <= end]
        for begin, end in backwards
        if not any(begin <= a and b <= end and (a, b) != (begin, end) for a, b in backwards)
    )
    return [made for body in bodies if (made := loop(body, warps)).loaded or made.tensor]


def loop(body: Sequence[Instruction], warps: int) -> Loop:
    """The cost of an iteration in which each of `warps` warps executes `body`."""
    kinds = Counter(one.kind for one in body)
    quarter = warps / SCHEDULERS
    shared = [one for one in body if one.kind in ("shared", "copy")]
    slow = Counter[str]()
    for one in body:
        if one.kind in ("float", "integer", "convert", "mufu"):
            slow["mufu" if one.kind == "mufu" else str(one.clocks)] += int(one.clocks)
    return Loop(
        instructions=len(body),
        kinds=dict(kinds),
        barriers=sum(one.opcode.startswith("BAR") for one in body),
        loaded=sum(_loaded(one) for one in body) * WARP * warps,
        issue=len(body) * quarter,
        arithmetic=max(slow.values(), default=0) * quarter,
        tensor=sum(one.products for one in body) / TENSOR_RATE * quarter,
        shared=sum(one.thread_bytes for one in shared) * WARP * warps / SHARED_BYTES,
    )


def _loaded(one: Instruction) -> int:
    """The bytes that a thread loads from global memory."""
    return one.thread_bytes if re.match(r"LDG(?!DEP)", one.opcode) else 0


def disassemble(cubin: bytes) -> list[Instruction]:
    """Disassembles a kernel with the nvdisasm that Triton ships."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True)
    return list(parse(done.stdout))


LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")


def parse(listing: str) -> Iterator[Instruction]:
    """Parses the output of nvdisasm."""
    labels: dict[str, int] = {}
    pending: list[str] = []
    found: list[tuple[int, str, str]] = []
    for line in listing.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            pending.append(label[1])
        elif made := LINE.search(line):
            found.append((int(made[1], 16), made[2], made[3]))
            labels |= dict.fromkeys(pending, found[-1][0])
            pending.clear()
    for address, opcode, operands in found:
        jump = re.search(r"\((\.L\w+)\)", operands) if opcode.startswith("BRA") else None
        yield Instruction(address, opcode, labels[jump[1]] if jump else None)


def describe_loop(one: Loop) -> str:
    """Describes a loop in one line."""
    shown = " ".join(f"{kind} {one.kinds[kind]}" for kind, _ in KINDS if kind in one.kinds)
    return (
        f"{one.instructions:4} instructions, {one.barriers} barriers, {one.loaded:6} bytes; "
        f"clocks: issue {one.issue:.0f}, arithmetic {one.arithmetic:.0f}, "
        f"shared {one.shared:.0f}, tensor {one.tensor:.0f}, memory {one.memory:.0f}; "
        f"share {one.share:.2f}  ({shown})"
    )
