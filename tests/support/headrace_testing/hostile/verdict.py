"""Judges the effects of an attack on the processes and on the other tenant."""

from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .attack import Answer, Attack
from .limits import (
    ANSWER_LIMIT_S,
    LATENCY_ALLOWANCE_S,
    LATENCY_FACTOR,
    MAX_MEMORY_SHARE,
    MIB,
    PROBE_LIMIT_S,
    STALL_LIMIT_S,
)
from .watch import Event
from .world import Watched

# The part of an answer's time that matters; longer than the pause between two samples of a
# process's children.
SLICE_S = 0.5
# Violations of memory limits begin with this.
MEMORY_PREFIX = "memory: "


@dataclass(frozen=True, slots=True)
class Result:
    """The effects of an attack.

    `memory` is the most bytes that each process used. In seconds, `stall` is the longest wait of
    the other tenant, and `work` the time that the gateway's event loop ran. `violations` are the
    broken limits.
    """

    attack: Attack
    answer: Answer
    memory: Mapping[str, int]
    stall: float
    work: float
    violations: tuple[str, ...] = field(default=())

    @property
    def badness(self) -> tuple[float, ...]:
        """A sort key: the larger, the worse."""
        stalled, slow = self.stall / STALL_LIMIT_S, self.answer.seconds / ANSWER_LIMIT_S
        return (len(self.violations), max(stalled, slow, self.memory.get("gateway", 0) / 2**30))


def judge(
    attack: Attack,
    answer: Answer,
    events: Sequence[Event],
    watched: Iterable[Watched],
    dead: Sequence[str],
    settled: bool,
    ended: float,
) -> Result:
    """Judges an attack. `ended` is the monotonic time at which the attack had its answer."""
    memory = {
        each.name: max((e.value for e in events if _is(e, "memory", each.name)), default=0)
        for each in watched
    }
    machine = Machine(events)
    probes = [event for event in events if event.kind in ("light", "gap", "first")]
    stall = max((machine.own_seconds(event) for event in probes), default=0.0)
    return Result(
        attack,
        answer,
        memory,
        stall,
        _work(events),
        (
            *(f"{name} died" for name in dead),
            *_too_much(memory, watched),
            *_probes(events, machine),
            *_others(events, stall, settled),
            *_answered(answer, machine.free_seconds(ended - answer.seconds, ended)),
            *_refused(attack, answer),
        ),
    )


def _is(event: Event, kind: str, name: str) -> bool:
    return event.kind == kind and event.name == name


class Machine:
    """The times in which the processes could not run because others used the processors."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._totals: dict[str, tuple[list[float], list[float]]] = {"watch": ([], [])}
        for event in events:
            if event.kind == "waited":
                times, totals = self._totals.setdefault(event.name, ([], []))
                times.append(event.began)
                totals.append(event.value / 1e9)
            elif event.kind == "lag":
                times, totals = self._totals["watch"]
                before = totals[-1] if totals else 0.0
                times += [event.began, event.began + event.seconds]
                totals += [before, before + event.seconds]

    def own_seconds(self, event: Event) -> float:
        """The duration of an event, without the time in which the processes that it needs, or the
        watching process, had no processor."""
        names = ["watch", "gateway"]
        if event.kind in ("gap", "first") or event.name == "engine":
            names += ["engine", "redis"]
        end = event.began + event.seconds
        return max(0.0, event.seconds - sum(self._lost(name, event.began, end) for name in names))

    def free_seconds(self, began: float, ended: float) -> float:
        """The seconds between two times, without those in which a process had no processor.

        Processes wait one after another, or at once: of each slice of time, the longest wait of one
        process counts.
        """
        found = 0.0
        while began < ended:
            until = min(began + SLICE_S, ended)
            lost = max(self._lost(name, began, until) for name in self._totals)
            found += max(0.0, until - began - lost)
            began = until
        return found

    def fair(self, event: Event) -> bool:
        """Whether the processes had a processor for nearly all of the event's time."""
        return self.own_seconds(event) >= 0.8 * event.seconds

    def _lost(self, name: str, began: float, end: float) -> float:
        times, totals = self._totals.get(name, ([], []))
        return max(0.0, _at(times, totals, end) - _at(times, totals, began))


def _at(times: Sequence[float], totals: Sequence[float], time: float) -> float:
    """The total at a time, interpolated between known times."""
    after = bisect(times, time)
    if after in (0, len(times)):
        return totals[min(after, len(totals) - 1)] if totals else 0.0
    since = (time - times[after - 1]) / max(1e-9, times[after] - times[after - 1])
    return totals[after - 1] + since * (totals[after] - totals[after - 1])


def _work(events: Sequence[Event]) -> float:
    totals = [event.value for event in events if _is(event, "ran", "gateway")]
    return (max(totals) - min(totals)) / 1e9 if totals else 0.0


def _too_much(memory: Mapping[str, int], watched: Iterable[Watched]) -> Iterable[str]:
    for each in watched:
        allowed = int(each.limit * MAX_MEMORY_SHARE)
        if memory[each.name] > allowed:
            yield f"{MEMORY_PREFIX}{each.name} {memory[each.name] // MIB} of {allowed // MIB} MiB"


def _probes(events: Sequence[Event], machine: Machine) -> Iterable[str]:
    failed: dict[str, int] = {}
    for event in events:
        # A probe that failed while the machine had no processor for it says nothing.
        if event.kind == "probe" and not event.value and machine.fair(event):
            failed[event.name] = failed.get(event.name, 0) + 1
    for name, count in failed.items():
        yield f"liveness of {name} failed {count} times ({PROBE_LIMIT_S:.0f} s each)"


def _others(events: Sequence[Event], stall: float, settled: bool) -> Iterable[str]:
    if not settled:
        yield "the other tenant was not served again"
    if stall > STALL_LIMIT_S:
        yield f"the other tenant waited {stall:.1f} s"
    refused = {event.name for event in events if event.kind == "error"}
    refused |= {"GET /v1/models failed" for e in events if e.kind == "light" and not e.value}
    yield from sorted(refused)[:3]


def _answered(answer: Answer, free_seconds: float) -> Iterable[str]:
    if free_seconds > ANSWER_LIMIT_S:
        yield f"no answer in {ANSWER_LIMIT_S:.0f} s"
    if answer.outcome == "500":
        yield "an answer of 500"


def _refused(attack: Attack, answer: Answer) -> Iterable[str]:
    if attack.refused and answer.outcome != "none" and not answer.outcome.startswith("4"):
        yield f"an answer of {answer.outcome}, not 4xx"


@dataclass(frozen=True, slots=True)
class Latency:
    """The other tenant's p99 latencies in seconds: between two tokens, and until the first one."""

    gap: float
    first: float

    @staticmethod
    def of(events: Sequence[Event]) -> "Latency":
        machine = Machine(events)
        return Latency(_p99(events, "gap", machine), _p99(events, "first", machine))

    def violations(self, undisturbed: "Latency") -> list[str]:
        found = []
        for name, now, before in (
            ("between tokens", self.gap, undisturbed.gap),
            ("until the first token", self.first, undisturbed.first),
        ):
            allowed = LATENCY_FACTOR * before + LATENCY_ALLOWANCE_S
            if now > allowed:
                found.append(
                    f"the other tenant's p99 {name} is {now * 1000:.0f} ms; undisturbed "
                    f"{before * 1000:.0f} ms, allowed {allowed * 1000:.0f} ms"
                )
        return found


def _p99(events: Sequence[Event], kind: str, machine: Machine) -> float:
    seconds = sorted(machine.own_seconds(event) for event in events if event.kind == kind)
    return seconds[int(len(seconds) * 0.99)] if seconds else 0.0
