"""Simulates with numpy the PTX instructions that the engine's inline assembly uses."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

Register = npt.NDArray[np.uint32]


def evaluate(code: str, outputs: int, inputs: Sequence[Register]) -> list[Register]:
    """Simulates an inline assembly with `outputs` registers, then `inputs`; returns the outputs."""
    registers = {f"${outputs + place}": value for place, value in enumerate(inputs)}
    for line in code.replace("{", "").replace("}", "").split(";"):
        name, _, rest = line.strip().partition(" ")
        operands = [one.strip() for one in rest.split(",")]
        if name and name != ".reg":
            values = [_value(one, registers) for one in operands[1:]]
            registers[operands[0]] = OPERATIONS[name](*values)
    return [registers[f"${place}"] for place in range(outputs)]


def _value(operand: str, registers: dict[str, Register]) -> Register:
    if operand in registers:
        return registers[operand]
    base = 16 if operand[:2] in ("0x", "0f") else 10
    return np.array(int(operand.removeprefix("0f"), base), np.uint32)


def _permute(low: Register, high: Register, selector: Register) -> Register:
    pair = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
    made = np.zeros(np.broadcast(low, high).shape, np.uint64)
    for place in range(4):
        chosen = int(selector) >> 4 * place & 0xF
        assert chosen < 8, "no sign is repeated"
        made |= (pair >> np.uint64(8 * chosen) & np.uint64(0xFF)) << np.uint64(8 * place)
    return made.astype(np.uint32)


def _logic(a: Register, b: Register, c: Register, table: Register) -> Register:
    assert int(table) == 0xEA, "only (a and b) or c"
    return a & b | c


def _add(a: Register, b: Register) -> Register:
    total: Register = (a.view(np.float32) + b.view(np.float32)).view(np.uint32)
    return total


def _multiplied(dtype: torch.dtype) -> Callable[[Register, Register, Register], Register]:
    """a * b + c of the halves of registers, rounded once."""

    def run(a: Register, b: Register, c: Register) -> Register:
        wide = [_halves(one, dtype).double() for one in np.broadcast_arrays(a, b, c)]
        made = (wide[0] * wide[1] + wide[2]).to(dtype).view(torch.uint16).numpy()
        return np.ascontiguousarray(made).view(np.uint32).reshape(np.broadcast(a, b, c).shape)

    return run


def _halves(register: Register, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(register).reshape(-1).view(np.uint16)).view(dtype)


OPERATIONS: dict[str, Callable[..., Register]] = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": _logic,
    "prmt.b32": _permute,
    "add.rn.f32": _add,
    "fma.rn.bf16x2": _multiplied(torch.bfloat16),
    "fma.rn.f16x2": _multiplied(torch.float16),
}
