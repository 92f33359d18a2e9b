"""What a kernel must not do before its turn, where it may be launched while others still run.

Reads assembly, and neither compiles nor runs anything.
"""

import re

# Statements of PTX that reach memory other than arguments and a program's own, or change where a
# program goes on.
UNORDERED = (
    r"\b(?:ld|st|cp|atom|red)\.(?!param|shared|async\.bulk\.prefetch\.L2)"
    r"|\b(?:ret|exit|call|brx)\b"
)


def hazards(ptx: str, early: bool) -> list[str]:
    """What is wrong with a kernel that may be launched `early`: what it does before it waits for
    all kernels before it, other than prefetches, or that it does not wait in each program."""
    ahead, wait, _ = ptx.partition("griddepcontrol.wait")
    if not early:
        return ["waits, but is not launched early"] if wait else []
    if not wait:
        return ["does not wait"]
    _, _, body = ahead.partition(".entry")
    statements = [line.partition("//")[0].strip() for line in body.splitlines()]
    return [line for line in statements if re.search(UNORDERED, line) or _passes(line, body)]


def _passes(line: str, ahead: str) -> bool:
    """Whether it may go on somewhere that is not `ahead` of the wait: a loop before it does not."""
    target = re.search(r"\bbra(?:\.uni)?\s+([$\w]+)", line)
    return target is not None and f"{target[1]}:" not in ahead
