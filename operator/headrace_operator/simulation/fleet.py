"""The pods of a simulated fleet: their starts, service, drains and ends, and which takes a request.

A pod costs from its creation to its end. Scaling down first takes pods that are still starting, the
newest first, then those with the fewest running requests, which finish. Scaling up first recalls
those that still finish, the newest victims first, as the operator does.

A request goes to an engine as the queue places it: to the first in an order of its own whose load
is at most a little above its share. All prefixes differ, so these orders are random.
"""

from heapq import heappop, heappush
from math import ceil
from random import Random

from headrace_common.protocol.prefix_routing import MAX_CANDIDATES

from .engine import EngineCosts, SimulatedEngine
from .engine_profile import EngineProfile

LOAD_FACTOR = 1.25
"""The most load that an engine gets by placement, in shares; the gateways' default."""


class Fleet:
    def __init__(self, profile: EngineProfile) -> None:
        self._costs = EngineCosts(profile)
        self._cold_start = profile.cold_start_seconds
        self._numbers = 0
        self._starting: dict[int, float] = {}
        self._loads: list[tuple[int, int]] = []
        self._order = Random(0)  # noqa: S311 - not a secret
        self._gone_tokens = 0.0
        self._draining: dict[int, SimulatedEngine] = {}
        """Victims of scaling down that still run requests, in the order of their choice."""
        self.engines: dict[int, SimulatedEngine] = {}
        self.serving: dict[int, SimulatedEngine] = {}
        self.lifetimes: list[tuple[float, float]] = []
        """Creation and end of each pod that is gone."""

    @property
    def desired(self) -> int:
        return len(self._starting) + len(self.serving)

    @property
    def running(self) -> int:
        return sum(engine.running for engine in self.serving.values())

    @property
    def tokens_out(self) -> float:
        return self._gone_tokens + sum(engine.tokens_out for engine in self.engines.values())

    def kv_utilization(self) -> float:
        used = sum(engine.kv_used for engine in self.serving.values())
        return min(1.0, used / (self._costs.kv_tokens * len(self.serving))) if self.serving else 0.0

    def capacity(self) -> int:
        return self._costs.max_num_seqs * len(self.serving)

    def start_serving(self, count: int, now: float) -> None:
        """Adds engines that serve immediately, for the start of a run."""
        for _ in range(count):
            self._numbers += 1
            self._starting[self._numbers] = now
            self.ready(self._numbers, now)

    def recall(self, count: int) -> int:
        """Lets at most `count` draining engines serve again; returns how many."""
        recalled = min(count, len(self._draining))
        for _ in range(recalled):
            number, engine = self._draining.popitem()
            engine.draining = False
            self.serving[number] = engine
            self.note_load(engine)
        return recalled

    def create(self, count: int, now: float) -> list[tuple[float, int]]:
        """Creates pods; returns each with the time at which it will be ready."""
        made = []
        for _ in range(count):
            self._numbers += 1
            self._starting[self._numbers] = now
            made.append((now + self._cold_start, self._numbers))
        return made

    def ready(self, number: int, now: float) -> bool:
        """Marks a pod as started; False if it was deleted meanwhile."""
        created = self._starting.pop(number, None)
        if created is None:
            return False
        engine = SimulatedEngine(number, self._costs, created, now)
        self.engines[number] = self.serving[number] = engine
        self.note_load(engine)
        return True

    def remove(self, count: int, now: float) -> None:
        while count and self._starting:
            _, created = self._starting.popitem()
            self.lifetimes.append((created, now))
            count -= 1
        victims = sorted(self.serving.values(), key=lambda each: (each.running, -each.number))
        for engine in victims[:count]:
            del self.serving[engine.number]
            engine.draining = True
            self._draining[engine.number] = engine
            self.retire_if_done(engine, now)

    def retire_if_done(self, engine: SimulatedEngine, now: float) -> None:
        if engine.draining and engine.running == 0:
            del self.engines[engine.number], self._draining[engine.number]
            self._gone_tokens += engine.tokens_out
            self.lifetimes.append((engine.started_at, now))

    def note_load(self, engine: SimulatedEngine) -> None:
        """Call it whenever an engine's running count has changed."""
        if not engine.draining:
            heappush(self._loads, (engine.running, engine.number))

    def place_low(self, prompt: int, output: int, share: float) -> SimulatedEngine | None:
        """The engine that takes a request of low priority: the least loaded one with room, if at
        most a `share` of its sequences run then; None if there is none."""
        most = max(1, int(share * self._costs.max_num_seqs))
        engines = [each for each in self.serving.values() if each.running < most]
        free = [each for each in engines if each.has_room(prompt, output)]
        return min(free, key=lambda each: each.running, default=None)

    def place(self, waiting: int, prompt: int, output: int) -> SimulatedEngine | None:
        """The engine that takes a request; None if all are full. `waiting` requests are queued,
        this one included."""
        engines = list(self.serving.values())
        total = sum(engine.running for engine in engines) + waiting
        bound = ceil(LOAD_FACTOR * total / max(1, len(engines)))
        for tried in range(min(MAX_CANDIDATES, len(engines))):
            at = self._order.randrange(tried, len(engines))
            engines[tried], engines[at] = engines[at], engines[tried]
            engine = engines[tried]
            if engine.running < bound and engine.has_room(prompt, output):
                return engine
        return self._least_loaded(prompt, output)

    def _least_loaded(self, prompt: int, output: int) -> SimulatedEngine | None:
        """The engine with room that runs the fewest requests; None if all are full."""
        loads = self._loads
        while loads:
            running, number = loads[0]
            engine = self.serving.get(number)
            if engine is not None and engine.running == running:
                if engine.has_room(prompt, output):
                    return engine
            # The entry is outdated, or the engine is full: its next change of load adds an entry.
            heappop(loads)
        return None

    def engine_seconds(self, until: float) -> float:
        """Seconds of all pods, those alive included, cut at `until`."""
        alive = [(engine.started_at, until) for engine in self.engines.values()]
        alive += [(created, until) for created in self._starting.values()]
        spans = [*self.lifetimes, *alive]
        return sum(max(0.0, min(end, until) - min(begin, until)) for begin, end in spans)
