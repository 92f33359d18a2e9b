"""The state of all models and engines that a console shows, and its JSON for one watcher.

Has no side effects. A watcher sees the models that its key allows, and of other tenants
neither request ids nor names.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from headrace_common.protocol.base import EngineStatus, QueueDepth
from headrace_common.protocol.live import (
    EngineSight,
    EngineSnapshot,
    EngineStart,
    ScalingDecision,
    SequenceSnapshot,
)

# Seconds after which an engine counts as silent: without a snapshot, or without a heartbeat if it
# writes no snapshots.
SILENT_SNAPSHOTS_S, SILENT_BEATS_S = 2.0, 7.0
# Sequences of all engines in one event, so that its size is bounded.
MAX_SEQUENCES = 1024
MAX_STARTS = 16  # engines of a model that are shown while they start
_DIGITS = 4  # in seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """One model's queue. `oldest_wait` is in seconds."""

    name: str
    depth: QueueDepth
    oldest_wait: float = field(compare=False)
    scaling: ScalingDecision | None = None
    starts: tuple[EngineStart, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """One engine: its heartbeat, and its latest snapshot in Redis."""

    status: EngineStatus
    sight: EngineSight


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveView:
    """All models and engines. Two views are equal if they differ only in ages.

    `stale`: Redis is unreachable, and this is the last known state. `engines_left_out` is the
    number of engines that are not shown.
    """

    time: float = field(compare=False)
    models: tuple[ModelView, ...] = ()
    engines: tuple[EngineView, ...] = ()
    engines_left_out: int = 0
    stale: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Watcher:
    """The models that a console may see, and its tenant; None if API keys are off."""

    models: frozenset[str]
    tenant: str | None


def state_of(engine: EngineView, max_step_age: float) -> str:
    """Returns the engine's state: ready, asleep, draining, hung or silent."""
    detailed = engine.sight.snapshot is not None
    if engine.sight.age > (SILENT_SNAPSHOTS_S if detailed else SILENT_BEATS_S):
        return "silent"
    if engine.status.draining:
        return "draining"
    if engine.status.sleep_level:
        return "asleep"
    return "hung" if engine.status.last_step_age > max_step_age else "ready"


def live_content(
    view: LiveView, watcher: Watcher, *, limit_requests: int, max_step_age: float
) -> dict[str, Any]:
    """Returns the models and engines that a watcher sees, as JSON's content."""
    engines = [engine for engine in view.engines if engine.status.model in watcher.models]
    share = MAX_SEQUENCES // max(1, sum(e.sight.snapshot is not None for e in engines))
    return {
        "time": round(view.time, _DIGITS),
        "stale": view.stale,
        "models": [
            _model(model, limit_requests) for model in view.models if model.name in watcher.models
        ],
        "engines": [
            {
                "id": engine.status.engine_id,
                "name": engine.status.name or None,
                "model": engine.status.model,
                "state": state_of(engine, max_step_age),
                "age": round(engine.sight.age, 1),
                **_detail(engine, watcher, share),
            }
            for engine in engines
        ],
        "engines_left_out": view.engines_left_out,
    }


def _model(model: ModelView, limit_requests: int) -> dict[str, Any]:
    return {
        "name": model.name,
        "waiting": model.depth.waiting,
        "running": model.depth.pending,
        "oldest_wait": round(model.oldest_wait, _DIGITS),
        "waiting_tokens": model.depth.waiting_tokens,
        "limit_requests": limit_requests,
        "scaling": None if model.scaling is None else asdict(model.scaling),
        "starts": [
            {
                "id": start.engine_id,
                "name": start.name or None,
                "phase": start.phase,
                "seconds": start.seconds,
            }
            for start in model.starts[:MAX_STARTS]
        ],
    }


def _detail(engine: EngineView, watcher: Watcher, share: int) -> dict[str, Any]:
    snapshot = engine.sight.snapshot
    if snapshot is None:
        return {"detail": False, "running": engine.status.running}
    shown = snapshot.sequences[:share]
    return {
        "detail": True,
        "steps": snapshot.steps,
        "step_seconds": round(snapshot.step_seconds, 6),
        "output_tokens_per_s": round(snapshot.output_rate, 1),
        "prompt_tokens_per_s": round(snapshot.prompt_rate, 1),
        "running": snapshot.running,
        "waiting": snapshot.waiting,
        "preemptions": snapshot.preemptions,
        "kv": asdict(snapshot.kv),
        "sequences": [_sequence(sequence, watcher) for sequence in shown],
        "sequences_left_out": _left_out(snapshot, len(shown)),
    }


def _left_out(snapshot: EngineSnapshot, shown: int) -> int:
    return snapshot.sequences_left_out + len(snapshot.sequences) - shown


def _sequence(sequence: SequenceSnapshot, watcher: Watcher) -> dict[str, Any]:
    own = watcher.tenant in (None, sequence.tenant)
    return {
        "request": sequence.request_id if own else None,
        "tenant": sequence.tenant if sequence.tenant == watcher.tenant else None,
        "choice": sequence.choice,
        "state": sequence.state,
        "prompt": sequence.prompt,
        "computed": sequence.computed,
        "output": sequence.output,
        "max_output": sequence.max_output,
        "step_tokens": sequence.step_tokens,
    }
