"""Finds statements that a kernel, launched while earlier kernels still run, executes before it has
waited for them.

Reads assembly, and neither compiles nor runs anything.
"""

import re

# Statements of PTX that may come only after the wait: they access global memory, or leave the
# program.
NEEDS_WAIT = (
    r"\b(?:ld|st|cp|atom|red)\.(?!param|shared|async\.bulk\.prefetch\.L2)"
    r"|\b(?:ret|exit|call|brx)\b"
)


def hazards(ptx: str, early: bool) -> list[str]:
    """Returns the errors of a kernel that may be launched `early`: statements before the wait,
    except prefetches, or a missing wait."""
    ahead, wait, _ = ptx.partition("griddepcontrol.wait")
    if not early:
        return ["waits, but is not launched early"] if wait else []
    if not wait:
        return ["does not wait"]
    _, _, body = ahead.partition(".entry")
    statements = [line.partition("//")[0].strip() for line in body.splitlines()]
    return [line for line in statements if re.search(NEEDS_WAIT, line) or _skips_wait(line, body)]


def _skips_wait(line: str, ahead: str) -> bool:
    """Whether the line jumps to a target after the wait, unlike a loop `ahead` of the wait."""
    target = re.search(r"\bbra(?:\.uni)?\s+([$\w]+)", line)
    return target is not None and f"{target[1]}:" not in ahead
