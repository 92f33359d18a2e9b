"""The state of a running system that consoles show, as bytes in Redis: batches, decisions, and
engines that start.

Engines and the operator write it. Gateways do not trust it: they check sizes, types and texts
first. It has no text or token of a request.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import MessageError
from ..wire.decoding import at_least, count, identifier, items_of, versioned
from ..wire.messages import PROTOCOL_VERSION, pack_message

# The maximal number of sequences of one engine in a snapshot, which also counts the others.
MAX_SEQUENCES = 128
MAX_SNAPSHOT_BYTES = 96 * 1024
MAX_DECISION_BYTES = 4096
MAX_REASON_CHARS = 64
MAX_MESSAGE_CHARS = 1024
# Milliseconds: the longest time for which one Watch message makes an engine write snapshots.
MAX_WATCH_MS = 10_000
# Longer than the lifetime of an engine's status, so that the last batch of a dead engine is shown.
SNAPSHOT_TTL_MS = 15_000
DECISION_TTL_MS = 120_000
# Milliseconds after which an engine that started and says nothing more counts as gone.
START_TTL_MS = 10_000
MAX_START_BYTES = 1024

STATES = ("waiting", "prefill", "decode", "preempted", "swapped")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSnapshot:
    """One choice of a request in an engine. Numbers are tokens.

    `state` is one of STATES. `computed` positions have KV, `step_tokens` of them by the last step.
    `age` is the seconds since the engine took the request.
    """

    request_id: str
    tenant: str
    choice: int
    state: str
    prompt: int
    computed: int
    output: int
    max_output: int
    step_tokens: int
    age: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBlocks:
    """The blocks of a KV cache.

    Every block is used, cached or free; shared blocks have several users.
    """

    total: int
    used: int
    shared: int
    cached: int
    free: int
    block_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """An engine's batch at one moment, at `time` in Unix seconds of Redis' clock.

    Rates are tokens per second. `sequences_left_out` counts those beyond MAX_SEQUENCES.
    """

    time: float = field(compare=False)
    steps: int
    step_seconds: float
    output_rate: float
    prompt_rate: float
    running: int
    waiting: int
    preemptions: int
    kv: KVBlocks
    sequences: tuple[SequenceSnapshot, ...]
    sequences_left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """The operator's latest decision about a model: engines that should run, and those that do."""

    desired: int
    ready: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStart:
    """An engine that starts: its phase, and the seconds since its process began.

    `name` is what people call it; it may be empty.
    """

    engine_id: str
    name: str
    phase: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSight:
    """An engine in Redis: seconds since its last sign of life, and its latest snapshot."""

    age: float = field(default=0.0, compare=False)
    snapshot: EngineSnapshot | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSight:
    """A model in Redis: one sight for each engine that was asked for, the operator's latest
    decision (None without an operator), and the engines that start."""

    engines: tuple[EngineSight, ...]
    decision: ScalingDecision | None = None
    starts: tuple[EngineStart, ...] = ()


class SnapshotWriter(Protocol):
    """Where an engine writes its snapshots."""

    async def write(self, snapshot: EngineSnapshot) -> None:
        """Writes it with the time by Redis' clock. Raises BackendUnavailable."""


class DecisionWriter(Protocol):
    """Where the operator writes its decisions."""

    async def write(self, model: str, decision: ScalingDecision) -> None:
        """Replaces the latest one. Raises BackendUnavailable."""


class LiveStore(Protocol):
    """Reads the data of consoles for gateways. Raises BackendUnavailable."""

    async def read(self, model: str, engine_ids: Sequence[str]) -> ModelSight:
        """The known state of a model and of these engines."""

    async def watch(self, model: str, engine_ids: Sequence[str]) -> None:
        """Asks these engines to write snapshots for the next seconds."""


# The order of the numbers in the packed form.
_BLOCKS = ("total", "used", "shared", "cached", "free", "block_tokens")
_LENGTHS = ("prompt", "computed", "output", "max_output", "step_tokens")
_COUNTS = ("running", "waiting", "preemptions", "sequences_left_out")


def encode_snapshot(snapshot: EngineSnapshot) -> bytes:
    """Packs a snapshot; raises MessageError if it exceeds the size limit of messages."""
    tenants = list(dict.fromkeys(one.tenant for one in snapshot.sequences))
    places = {tenant: place for place, tenant in enumerate(tenants)}
    return pack_message(
        [
            PROTOCOL_VERSION,
            [
                snapshot.time,
                snapshot.steps,
                snapshot.step_seconds,
                snapshot.output_rate,
                snapshot.prompt_rate,
                *_of(snapshot, _COUNTS),
            ],
            _of(snapshot.kv, _BLOCKS),
            tenants,
            [
                [
                    one.request_id,
                    places[one.tenant],
                    one.choice,
                    STATES.index(one.state),
                    *_of(one, _LENGTHS),
                    round(one.age, 4),
                ]
                for one in snapshot.sequences
            ],
        ]
    )


def decode_snapshot(data: bytes) -> EngineSnapshot:
    """Unpacks and checks a snapshot. Raises MessageError."""
    if len(data) > MAX_SNAPSHOT_BYTES:
        raise MessageError(f"engine snapshot of over {MAX_SNAPSHOT_BYTES} bytes")
    _, head, blocks, tenants, sequences, *_ = versioned(data, 5)
    head, blocks = _list(head, 9), _list(blocks, 6)
    if len(items_of(tenants)) > MAX_SEQUENCES or len(items_of(sequences)) > MAX_SEQUENCES:
        raise MessageError(f"engine snapshot: over {MAX_SEQUENCES} sequences or tenants")
    names = [identifier(tenant) for tenant in tenants]
    return EngineSnapshot(
        time=_number(head[0]),
        steps=count(head[1]),
        step_seconds=_number(head[2]),
        output_rate=_number(head[3]),
        prompt_rate=_number(head[4]),
        kv=_blocks(blocks),
        sequences=tuple(_sequence(item, names) for item in sequences),
        **_counts(_COUNTS, head[5:]),
    )


def _of(source: object, names: Sequence[str]) -> list[int]:
    return [getattr(source, name) for name in names]


def _counts(names: Sequence[str], values: Sequence[object]) -> dict[str, int]:
    return {name: count(value) for name, value in zip(names, values, strict=False)}


def _blocks(values: list[object]) -> KVBlocks:
    found = KVBlocks(**_counts(_BLOCKS, values))
    if found.used + found.cached + found.free != found.total or found.shared > found.used:
        raise MessageError("engine snapshot: numbers of KV blocks that contradict each other")
    return found


def _sequence(item: object, tenants: list[str]) -> SequenceSnapshot:
    values = _list(item, 10)
    place, state = count(values[1]), count(values[3])
    if place >= len(tenants) or state >= len(STATES):
        raise MessageError("engine snapshot: a sequence of an unknown tenant or state")
    return SequenceSnapshot(
        request_id=identifier(values[0]),
        tenant=tenants[place],
        choice=count(values[2]),
        state=STATES[state],
        age=_number(values[9]),
        **_counts(_LENGTHS, values[4:]),
    )


def encode_decision(decision: ScalingDecision) -> bytes:
    """Packs a decision, its texts within their bounds."""
    reason, message = decision.reason[:MAX_REASON_CHARS], decision.message[:MAX_MESSAGE_CHARS]
    return pack_message([PROTOCOL_VERSION, decision.desired, decision.ready, reason, message])


def decode_decision(data: bytes) -> ScalingDecision:
    """Unpacks and checks a decision. Raises MessageError."""
    if len(data) > MAX_DECISION_BYTES:
        raise MessageError(f"scaling decision of over {MAX_DECISION_BYTES} bytes")
    _, desired, ready, reason, message, *_ = versioned(data, 5)
    return ScalingDecision(
        desired=count(desired),
        ready=count(ready),
        reason=_text(reason, MAX_REASON_CHARS),
        message=_text(message, MAX_MESSAGE_CHARS),
    )


def encode_start(start: EngineStart) -> bytes:
    return pack_message([PROTOCOL_VERSION, start.engine_id, start.name, start.phase, start.seconds])


def decode_start(data: bytes) -> EngineStart:
    """Unpacks and checks an engine's start. Raises MessageError."""
    if len(data) > MAX_START_BYTES:
        raise MessageError(f"engine start of over {MAX_START_BYTES} bytes")
    _, engine_id, name, phase, seconds, *_ = versioned(data, 5)
    return EngineStart(
        engine_id=identifier(engine_id),
        name=_text(name, MAX_REASON_CHARS),
        phase=_text(phase, MAX_REASON_CHARS),
        seconds=_number(seconds),
    )


def _list(value: object, length: int) -> list[Any]:
    items = items_of(value)
    at_least(items, length)
    return items


def _number(value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(float(value)) or float(value) < 0:  # type: ignore[arg-type]
        raise MessageError(f"must be a finite number from 0 on, not {value!r:.40}")
    return float(value)  # type: ignore[arg-type]


def _text(value: object, most: int) -> str:
    if not isinstance(value, str) or len(value) > most:
        raise MessageError(f"must be a text of at most {most} characters")
    return value
