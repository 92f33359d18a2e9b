"""Runs one attack after the other against running processes, and judges the harm of each."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from .attack import PATIENCE_S, Answer, Attack
from .document import read_document
from .verdict import MEMORY_PREFIX, Latency, Result, judge
from .watch import Event, Watch, watching
from .world import HostileStack

# Long enough for a hundred streams, of which a p99 can be taken.
BASELINE_S = 30.0
# A violation counts if it occurs in this many of the attempts, each alone on new processes.
CONFIRMATIONS, ATTEMPTS = 2, 3


class Campaign:
    """The processes under attack; they are restarted after an attack that harmed them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stacks_started = 0
        self._exit_stack = ExitStack()
        self._events: list[Event] = []
        self._latency_since = 0.0
        self._restart()
        self.document = read_document(self._stack.target)
        self.undisturbed = self._measure_baseline()

    def strike(self, attack: Attack) -> Result:
        """Runs an attack. If it violated a limit, repeats it alone on new processes: violations
        that do not occur again are noise."""
        result = self._strike(attack)
        if not result.violations:
            if attack.spoils:
                self._restart()
            return result
        first, worst, seen = result, result, 1
        for attempt in range(1, ATTEMPTS):
            self._restart()
            result = self._strike(attack)
            seen += bool(result.violations)
            worst = max(worst, result, key=lambda each: each.badness)
            if seen == CONFIRMATIONS or attempt - seen + 1 > ATTEMPTS - CONFIRMATIONS:
                break
        self._restart()
        return worst if seen >= CONFIRMATIONS else _without_noise(first, result)

    def _strike(self, attack: Attack) -> Result:
        began = time.monotonic()
        try:
            answer = asyncio.run(asyncio.wait_for(attack.play(self._stack.target), 10 * PATIENCE_S))
        except (TimeoutError, OSError):
            answer = Answer("none", time.monotonic() - began)
        ended = time.monotonic()
        settled = self._watch.settled(time.monotonic())
        events = self._watch.since(began)
        return judge(attack, answer, events, self._stack.watched, self._stack.dead, settled, ended)

    def latency(self) -> Latency:
        """Returns the other tenant's latency under all attacks so far."""
        return Latency.of([*self._events, *self._watch.since(self._latency_since)])

    def _measure_baseline(self) -> Latency:
        began = time.monotonic()
        time.sleep(BASELINE_S)
        self._latency_since = time.monotonic()
        return Latency.of(self._watch.since(began))

    def _restart(self) -> None:
        if self._stacks_started:
            self._events += self._watch.since(self._latency_since)
        self._exit_stack.close()
        self._stacks_started += 1
        self._stack = HostileStack(self._folder / str(self._stacks_started))
        self._exit_stack.callback(self._stack.close)
        self._stack.until_ready()
        stack = watching(self._stack.target, self._stack.watched)
        self._watch: Watch = self._exit_stack.enter_context(stack)
        if not self._watch.settled(time.monotonic(), 60):
            raise AssertionError("the other tenant is not served by new processes")
        self._latency_since = time.monotonic()

    def close(self) -> None:
        self._exit_stack.close()


def _without_noise(first: Result, alone: Result) -> Result:
    """Returns the result with only its violations of memory, which earlier attacks may have
    caused; other violations did not occur again, so they are dropped."""
    left = tuple(each for each in first.violations if each.startswith(MEMORY_PREFIX))
    violations = tuple(
        f"{each} (not when the attack runs alone: earlier attacks used this memory)"
        for each in left
    )
    return replace(first if left else alone, violations=violations)


@contextmanager
def campaign(folder: Path) -> Iterator[Campaign]:
    made = Campaign(folder)
    try:
        yield made
    finally:
        made.close()
