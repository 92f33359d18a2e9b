"""Finds hazards of kernels that are launched early: statements that run before the kernel has
waited for earlier kernels. Reads assembly; compiles and runs nothing."""

import re

# Kernels that read weights before they wait. No kernel of a step writes weights.
READING_WEIGHTS = ("vector_product_kernel",)
LOADS = r"\bld\.(?!param|shared)"
# Statements of PTX that may only follow the wait: they access global memory, or leave the program.
NEEDS_WAIT = (
    r"\b(?:st|cp|atom|red)\.(?!param|shared|async\.bulk\.prefetch\.L2)"
    r"|\b(?:ret|exit|call|brx)\b"
)


def hazards(ptx: str, early: bool, reads_weights: bool = False) -> list[str]:
    """Returns the hazards of a kernel: a missing wait, or statements before it that are not
    prefetches, nor loads if it `reads_weights`."""
    ahead, wait, _ = ptx.partition("griddepcontrol.wait")
    if not early:
        return ["waits, but is not launched early"] if wait else []
    if not wait:
        return ["does not wait"]
    _, _, body = ahead.partition(".entry")
    statements = [line.partition("//")[0].strip() for line in body.splitlines()]
    needs_wait = NEEDS_WAIT if reads_weights else f"{LOADS}|{NEEDS_WAIT}"
    return [line for line in statements if re.search(needs_wait, line) or _skips_wait(line, body)]


def _skips_wait(line: str, ahead: str) -> bool:
    """Whether the line jumps over the wait. A loop that is `ahead` of the wait does not."""
    target = re.search(r"\bbra(?:\.uni)?\s+([$\w]+)", line)
    return target is not None and f"{target[1]}:" not in ahead
