"""The engine's worker over an engine and a queue, without telemetry."""

from headrace_common.observability.telemetry import disabled
from headrace_common.protocol.base import EngineQueue
from headrace_engine.engine.engine import Engine
from headrace_engine.serving.adapter_loading import AdapterLoading
from headrace_engine.serving.worker import Worker, WorkerConfig

from .backends import MODEL


def make_worker(
    engine: Engine,
    queue: EngineQueue,
    block_size: int,
    *,
    max_num_seqs: int = 8,
    lookahead: int = 0,
    low_priority_share: float = 1.0,
    adapters: AdapterLoading | None = None,
) -> Worker:
    config = WorkerConfig(
        model=MODEL,
        max_model_len=engine.max_model_len,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        lookahead=lookahead,
        low_priority_share=low_priority_share,
        version="test",
    )
    return Worker(config, queue, engine, disabled(), adapters=adapters)
