"""An observation of one model: its queue, its engines and its replica counts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSignals:
    """The model's queue, as every gateway reports it (take the maximum over gateways).

    `waiting_tokens` are prompt plus maximal output tokens of the waiting requests, `pending` the
    requests that engines have taken and not ended, `oldest_age` the seconds that the oldest waiting
    request has waited. `arrival_rate` is the number of requests recently admitted per second,
    summed over gateways; None if unknown.
    """

    waiting: int
    waiting_tokens: int = 0
    pending: int = 0
    oldest_age: float = 0.0
    arrival_rate: float | None = None


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
