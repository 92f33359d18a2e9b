"""The table of the attacks' effects, the worst first, and the commands that repeat the bad ones."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from .limits import MIB
from .verdict import Latency, Result

PROGRAM = "python -m tests.test_hostile"
# The number of lines on a screen; the rest is in a file.
SHOWN = 40
_NAME = 70


def repeat(result: Result) -> str:
    """The command that repeats the attack."""
    name = result.attack.name
    first = name.split(" ", 1)[0]
    return f'{PROGRAM} --attack "{first if first[:1].isdigit() and "/" in first else name}"'


def table(results: Iterable[Result]) -> Iterator[str]:
    numbers = f"{'answer':>6} {'s':>5} {'gateway':>8} {'loop':>5} {'stall':>7}"
    yield f"{'attack':{_NAME}} {'from':9} {numbers}"
    for result in sorted(results, key=lambda each: each.badness, reverse=True):
        yield line(result)


def line(result: Result) -> str:
    name = result.attack.name.encode("ascii", "backslashreplace").decode()
    memory = result.memory.get("gateway", 0) // MIB
    return (
        f"{name[:_NAME]:{_NAME}} {result.attack.client:9} {result.answer.outcome:>6} "
        f"{result.answer.seconds:5.1f} {memory:4} MiB {result.work:5.1f} "
        f"{result.stall * 1000:4.0f} ms"
    )


def violations(results: Iterable[Result]) -> Iterator[str]:
    for result in results:
        if result.violations:
            yield f"VIOLATED by {result.attack.name}: {'; '.join(result.violations)}"
            yield f"  again: {repeat(result)}"


def summary(
    results: Sequence[Result], undisturbed: Latency, latency: Latency, folder: Path
) -> Iterator[str]:
    """Returns the part of the table that fits on a screen; writes the whole table into `folder`."""
    whole = list(table(results))
    bad = list(violations(results))
    file = folder / "attacks.txt"
    file.write_text("\n".join([*whole, *bad, ""]), encoding="utf-8")
    yield from whole[: SHOWN + 1]
    yield f"{len(results)} attacks; all of them: {file}"
    for name, now, before in (
        ("between tokens", latency.gap, undisturbed.gap),
        ("until the first token", latency.first, undisturbed.first),
    ):
        yield f"the other tenant's p99 {name}: {now * 1000:.0f} ms, undisturbed {before * 1000:.0f}"
    yield from bad[-SHOWN:]
    yield from latency.violations(undisturbed)
