"""An observation of one model: its queue, its engines and its replica counts."""

from dataclasses import dataclass, replace

MOST_TIME_USED = 0.5
"""The share of its time for which the oldest waiting request of low priority yields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowPrioritySignals:
    """The requests of low priority among all, such as those of batches.

    `time_used` is the share of its time, from admission to deadline, for which the oldest waiting
    one has waited. `batches_behind` are batches that would end too late at their pace.
    `others_oldest_age` is the age of the oldest waiting request of another priority.
    """

    waiting: int = 0
    pending: int = 0
    arrival_rate: float = 0.0
    time_used: float = 0.0
    batches_behind: int = 0
    others_oldest_age: float = 0.0

    @property
    def due(self) -> bool:
        """Whether this work must be done soon, so that it counts like all other work."""
        return self.time_used >= MOST_TIME_USED or self.batches_behind > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSignals:
    """The model's queue, as every gateway reports it (take the maximum over gateways).

    `waiting_tokens` are prompt plus maximal output tokens of the waiting requests, `pending` the
    requests that engines have taken and not ended, `oldest_age` the seconds that the oldest waiting
    request has waited. `arrival_rate` is the number of requests recently admitted per second,
    summed over gateways; None if unknown. `low_priority` None: no requests of low priority.
    """

    waiting: int
    waiting_tokens: int = 0
    pending: int = 0
    oldest_age: float = 0.0
    arrival_rate: float | None = None
    low_priority: LowPrioritySignals | None = None

    def without(self, low: LowPrioritySignals) -> "QueueSignals":
        """Without the requests of low priority; all requests are taken to be of the same length."""
        waiting = max(0, self.waiting - low.waiting)
        rate = self.arrival_rate
        return QueueSignals(
            waiting=waiting,
            waiting_tokens=round(self.waiting_tokens * waiting / max(1, self.waiting)),
            pending=max(0, self.pending - low.pending),
            oldest_age=low.others_oldest_age,
            arrival_rate=None if rate is None else max(0.0, rate - low.arrival_rate),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSignals:
    """The ready engines of the model, together.

    `running` sequences of at most `capacity` (both sums), `kv_utilization` the mean share of KV
    blocks in use, 0 to 1. `requests_per_second` ended and `tokens_per_second` prompt plus output
    tokens are sums of recent measurements, as is `output_tokens_per_second`. `prefill_seconds` is
    the mean time from a request's start to its first token. None if unknown.
    """

    running: int
    capacity: int
    kv_utilization: float = 0.0
    requests_per_second: float | None = None
    tokens_per_second: float | None = None
    output_tokens_per_second: float | None = None
    prefill_seconds: float | None = None

    def without(self, low: LowPrioritySignals) -> "EngineSignals":
        """Without running requests of low priority; all are taken to have as many KV blocks."""
        running = max(0, self.running - low.pending)
        share = running / self.running if self.running else 1.0
        return replace(self, running=running, kv_utilization=self.kv_utilization * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingObservation:
    """An observation at `at`, in Unix seconds of the clock that `decide` gets as `now`.

    `replicas` is the requested count (spec.replicas), `ready` the pods that serve. `queue` or
    `engines` None means that their metrics are missing; engines may be None if no pod is ready.
    `registered`: an engine has registered the model, so that gateways know it.
    """

    at: float
    replicas: int
    ready: int
    queue: QueueSignals | None
    engines: EngineSignals | None = None
    registered: bool = True

    @property
    def starting(self) -> int:
        """Replicas that are requested and do not serve yet."""
        return max(0, self.replicas - self.ready)

    def without_low_priority(self) -> "ScalingObservation":
        """As if there were no requests of low priority, unless they are due."""
        low = None if self.queue is None else self.queue.low_priority
        if self.queue is None or low is None or low.due:
            return self
        engines = None if self.engines is None else self.engines.without(low)
        return replace(self, queue=self.queue.without(low), engines=engines)
