"""Strikes running processes with one attack after the other, and sees what each did to them."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from .attack import PATIENCE_S, Answer, Attack
from .document import read_document
from .verdict import TOOK, Latency, Result, judge
from .watch import Event, Watch, watching
from .world import HostileStack

UNDISTURBED_S = 5.0
# A violation must be seen this many times, in this many attempts, alone on new processes.
SEEN, ATTEMPTS = 2, 3


class Campaign:
    """The processes, started anew where an attack has spoiled them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._worlds = 0
        self._open = ExitStack()
        self._events: list[Event] = []
        self._began = 0.0
        self._renew()
        self.document = read_document(self._stack.target)
        self.undisturbed = self._undisturbed()

    def strike(self, attack: Attack) -> Result:
        """Repeats, alone and on new processes, what violated something; noise does not count."""
        result = self._strike(attack)
        if not result.violations:
            if attack.spoils:
                self._renew()
            return result
        first, worst, seen = result, result, 1
        for attempt in range(1, ATTEMPTS):
            self._renew()
            result = self._strike(attack)
            seen += bool(result.violations)
            worst = max(worst, result, key=lambda each: each.badness)
            if seen == SEEN or attempt - seen + 1 > ATTEMPTS - SEEN:
                break
        self._renew()
        return worst if seen >= SEEN else _without_noise(first, result)

    def _strike(self, attack: Attack) -> Result:
        began = time.monotonic()
        try:
            answer = asyncio.run(asyncio.wait_for(attack.play(self._stack.target), 10 * PATIENCE_S))
        except (TimeoutError, OSError):
            answer = Answer("none", time.monotonic() - began)
        settled = self._watch.settled(time.monotonic())
        events = self._watch.since(began)
        return judge(attack, answer, events, self._stack.watched, self._stack.dead, settled)

    def latency(self) -> Latency:
        """Of the other tenant under all attacks so far."""
        return Latency.of([*self._events, *self._watch.since(self._began)])

    def _undisturbed(self) -> Latency:
        began = time.monotonic()
        time.sleep(UNDISTURBED_S)
        self._began = time.monotonic()
        return Latency.of(self._watch.since(began))

    def _renew(self) -> None:
        if self._worlds:
            self._events += self._watch.since(self._began)
        self._open.close()
        self._worlds += 1
        self._stack = HostileStack(self._folder / str(self._worlds))
        self._open.callback(self._stack.close)
        self._stack.until_ready()
        stack = watching(self._stack.target, self._stack.watched)
        self._watch: Watch = self._open.enter_context(stack)
        if not self._watch.settled(time.monotonic(), 60):
            raise AssertionError("the other tenant is not served by new processes")
        self._began = time.monotonic()

    def close(self) -> None:
        self._open.close()


def _without_noise(first: Result, alone: Result) -> Result:
    """What is left of harm that was not seen again: memory that earlier attacks have left."""
    left = tuple(each for each in first.violations if each.startswith(TOOK))
    told = tuple(f"{each}, not alone: it was left by attacks before" for each in left)
    return replace(first if left else alone, violations=told)


@contextmanager
def campaign(folder: Path) -> Iterator[Campaign]:
    made = Campaign(folder)
    try:
        yield made
    finally:
        made.close()
