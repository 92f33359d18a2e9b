"""Snapshots of engines' batches, for tests of consoles."""

from typing import Any

from headrace_common.protocol.live import EngineSnapshot, KVBlocks, SequenceSnapshot

BLOCKS = KVBlocks(total=100, used=40, shared=8, cached=25, free=35, block_tokens=16)


def make_sequence(**changes: Any) -> SequenceSnapshot:
    fields: dict[str, Any] = {
        "request_id": "0.a",
        "tenant": "default",
        "choice": 0,
        "state": "decode",
        "prompt": 12,
        "computed": 20,
        "output": 9,
        "max_output": 64,
        "step_tokens": 1,
        "age": 0.5,
    }
    return SequenceSnapshot(**{**fields, **changes})


def make_snapshot(*sequences: SequenceSnapshot, **changes: Any) -> EngineSnapshot:
    fields: dict[str, Any] = {
        "time": 1_700_000_000.25,
        "steps": 123,
        "step_seconds": 0.01,
        "output_rate": 500.0,
        "prompt_rate": 0.0,
        "running": len(sequences),
        "waiting": 0,
        "preemptions": 0,
        "kv": BLOCKS,
        "sequences": sequences,
    }
    return EngineSnapshot(**{**fields, **changes})
