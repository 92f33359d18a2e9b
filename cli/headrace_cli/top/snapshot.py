"""A gateway's description of its deployment at one moment, as sent by /console/live."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Part(BaseModel):
    """A part of a snapshot. Fields that this version does not know are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Scaling(_Part):
    """The operator's latest decision for a model."""

    desired: int
    ready: int
    reason: str
    message: str = ""


class Start(_Part):
    """An engine that starts: the phase that it is in, and the seconds so far."""

    id: str
    name: str | None = None
    phase: str
    seconds: float


class ModelRow(_Part):
    """A model's queue. `oldest_wait` is in seconds."""

    name: str
    waiting: int
    running: int
    oldest_wait: float
    waiting_tokens: int
    limit_requests: int
    scaling: Scaling | None = None
    starts: tuple[Start, ...] = ()


class KvBlocks(_Part):
    """Blocks of a KV cache; `shared` ones are a part of those that are used."""

    total: int
    used: int
    shared: int
    cached: int
    free: int


class Sequence(_Part):
    """A sequence in an engine's batch. `tenant` is None if it is not the caller's.

    `computed` positions have KV.
    """

    state: Literal["waiting", "prefill", "decode", "preempted", "swapped"] | str
    tenant: str | None = None
    computed: int = 0


class EngineRow(_Part):
    """An engine. Without `detail` it has only what its heartbeats say."""

    id: str
    name: str | None = None
    model: str
    state: str
    age: float
    detail: bool = False
    running: int | None = None
    waiting: int | None = None
    step_seconds: float | None = None
    output_tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    preemptions: int | None = None
    kv: KvBlocks | None = None
    sequences: tuple[Sequence, ...] = ()


class Snapshot(_Part):
    """One event of the stream.

    `stale` says that the gateway cannot reach Redis and repeats old data.
    """

    time: float
    models: tuple[ModelRow, ...] = ()
    engines: tuple[EngineRow, ...] = ()
    engines_left_out: int = 0
    stale: bool = False

    @property
    def detailed(self) -> bool:
        """Whether every reachable engine has reported its batch."""
        return all(engine.detail or engine.state != "ready" for engine in self.engines)
