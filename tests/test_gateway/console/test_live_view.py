"""The view of one watcher: states, bounds, and nothing of other tenants' requests."""

import json
from typing import Any

import pytest

from headrace_common.protocol.base import QueueDepth
from headrace_common.protocol.live import EngineSight, EngineStart, ScalingDecision
from headrace_gateway.console.live_view import (
    MAX_SEQUENCES,
    EngineView,
    LiveView,
    ModelView,
    Watcher,
    live_content,
    state_of,
)
from headrace_testing.gateway import MODEL, engine_status
from headrace_testing.live import make_sequence, make_snapshot

EVERYBODY = Watcher(models=frozenset({MODEL}), tenant=None)
SEQUENCES = (
    make_sequence(request_id="0.a", tenant="a"),
    make_sequence(request_id="0.b", tenant="b"),
)


def engine(
    age: float = 0.1, *, sequences: Any = (), detail: bool = True, **fields: Any
) -> EngineView:
    snapshot = make_snapshot(*sequences) if detail else None
    return EngineView(status=engine_status(**fields), sight=EngineSight(age=age, snapshot=snapshot))


def shown(*engines: EngineView, watcher: Watcher = EVERYBODY, **fields: Any) -> dict[str, Any]:
    view = LiveView(time=1.0, engines=engines, **fields)
    return live_content(view, watcher, limit_requests=7, max_step_age=60.0)


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (engine(), "ready"),
        (engine(draining=True), "draining"),
        (engine(sleep_level=1), "asleep"),
        (engine(draining=True, sleep_level=2), "draining"),
        (engine(last_step_age=61.0), "hung"),
        (engine(2.5), "silent"),
        (engine(2.5, draining=True), "silent"),
        (engine(2.5, detail=False), "ready"),
        (engine(7.5, detail=False), "silent"),
    ],
)
def test_an_engine_s_state(found: EngineView, state: str) -> None:
    assert state_of(found, 60.0) == state


def test_ids_of_requests_are_shown_to_their_tenant_only() -> None:
    found = engine(sequences=SEQUENCES)
    ids = {
        tenant: [
            one["request"]
            for one in shown(found, watcher=Watcher(models=frozenset({MODEL}), tenant=tenant))[
                "engines"
            ][0]["sequences"]
        ]
        for tenant in ("a", "b", "c", None)
    }
    assert ids == {
        "a": ["0.a", None],
        "b": [None, "0.b"],
        "c": [None, None],
        None: ["0.a", "0.b"],
    }


def test_only_the_watcher_s_own_tenant_is_named() -> None:
    found = engine(sequences=SEQUENCES)
    watcher = Watcher(models=frozenset({MODEL}), tenant="b")
    named = [one["tenant"] for one in shown(found, watcher=watcher)["engines"][0]["sequences"]]

    assert named == [None, "b"]
    secret = engine(sequences=(make_sequence(tenant="secret tenant"),))
    assert "secret tenant" not in json.dumps([shown(secret), shown(secret, watcher=watcher)])


def test_models_that_a_key_does_not_allow_are_not_shown() -> None:
    depth = QueueDepth(waiting=1, waiting_tokens=2, pending=3, oldest_age=0.0)
    model = ModelView(name=MODEL, depth=depth, oldest_wait=4.0)
    watcher = Watcher(models=frozenset({"another"}), tenant=None)
    found = shown(engine(sequences=SEQUENCES), watcher=watcher, models=(model,))
    assert (found["models"], found["engines"]) == ([], [])


def test_a_model_with_its_queue_the_operator_s_decision_and_starting_engines() -> None:
    depth = QueueDepth(waiting=1, waiting_tokens=2, pending=3, oldest_age=0.0)
    scaling = ScalingDecision(desired=2, ready=1, reason="Backlog", message="Requests wait.")
    start = EngineStart(engine_id="e.1", name="", phase="weights", seconds=12.5)
    model = ModelView(name=MODEL, depth=depth, oldest_wait=4.0, scaling=scaling, starts=(start,))
    assert shown(models=(model,))["models"] == [
        {
            "name": MODEL,
            "waiting": 1,
            "running": 3,
            "oldest_wait": 4.0,
            "waiting_tokens": 2,
            "limit_requests": 7,
            "scaling": {
                "desired": 2,
                "ready": 1,
                "reason": "Backlog",
                "message": "Requests wait.",
            },
            "starts": [{"id": "e.1", "name": None, "phase": "weights", "seconds": 12.5}],
        }
    ]


def test_blocks_add_up() -> None:
    kv = shown(engine())["engines"][0]["kv"]
    assert kv["used"] + kv["cached"] + kv["free"] == kv["total"]


def test_many_engines_share_the_sequences_of_one_event() -> None:
    full = [make_sequence(request_id=f"0.{number}") for number in range(128)]
    engines = [engine(sequences=full, engine_id=f"e.{number}") for number in range(64)]
    found = shown(*engines)["engines"]
    assert sum(len(one["sequences"]) for one in found) == MAX_SEQUENCES
    assert all(len(one["sequences"]) + one["sequences_left_out"] == 128 for one in found)
