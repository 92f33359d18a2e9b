"""The pods of a simulated fleet: their starts, service, drains and ends, and which takes a request.

A pod costs from its creation to its end. Scaling down first takes pods that are still starting, the
newest first, then those with the fewest running requests, which finish.
"""

from heapq import heappop, heappush

from .engine import EngineCosts, SimulatedEngine
from .engine_profile import EngineProfile


class Fleet:
    def __init__(self, profile: EngineProfile) -> None:
        self._costs = EngineCosts(profile)
        self._cold_start = profile.cold_start_seconds
        self._numbers = 0
        self._starting: dict[int, float] = {}
        self._loads: list[tuple[int, int]] = []
        self._gone_tokens = 0.0
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
            self.retire_if_done(engine, now)

    def retire_if_done(self, engine: SimulatedEngine, now: float) -> None:
        if engine.draining and engine.running == 0:
            del self.engines[engine.number]
            self._gone_tokens += engine.tokens_out
            self.lifetimes.append((engine.started_at, now))

    def note_load(self, engine: SimulatedEngine) -> None:
        """Call it whenever an engine's running count has changed."""
        if not engine.draining:
            heappush(self._loads, (engine.running, engine.number))

    def least_loaded(self, prompt: int, output: int) -> SimulatedEngine | None:
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
