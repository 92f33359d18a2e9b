"""Ranks as processes: their logs, the signals that they leave to rank 0, and how they end."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from queue import SimpleQueue
from threading import Thread, Timer

import pytest

from headrace_engine.core.errors import RankFailed
from headrace_engine.distributed.process import RankProcess
from headrace_engine.distributed.rank_failure import RankFailure
from headrace_engine.distributed.rank_logs import RankLogHandler, write_rank_logs
from headrace_engine.distributed.rank_processes import RankProcesses
from headrace_engine.engine.engine import Engine
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.serving.worker import WorkerFailed
from headrace_testing.backends import InMemory
from headrace_testing.checkpoints import GreedyPath, Reference
from headrace_testing.engine import make_config
from headrace_testing.engines import engine_config, greedy, request, run
from headrace_testing.fake_runner import FakeRunner
from headrace_testing.pids import alive
from headrace_testing.processes import until
from headrace_testing.workers import make_worker

LENGTH = 8
LIMIT_S = 120.0
PARENT = """
import time
from headrace_engine.distributed.process import RankProcess
rank = RankProcess(1, 2, print)
print(rank.pid, flush=True)
time.sleep(600)
"""

CheckpointMaker = Callable[[str], Path]
ReferenceMaker = Callable[[str], Reference]


def tokens(engine: Engine, path: GreedyPath, name: str = "r") -> tuple[int, ...]:
    outputs = run(engine, [request(name, path.prompt, greedy(LENGTH))])
    return tuple(outputs[name, 0].token_ids)


def pid_of(runner: ModelRunner) -> int:
    assert isinstance(runner.peers, RankProcesses)
    handle = runner.peers.handles[0]
    assert isinstance(handle, RankProcess) and handle.pid is not None
    return handle.pid


def test_an_engine_and_its_ranks_start_and_end_together(
    checkpoint: CheckpointMaker, reference: ReferenceMaker, caplog: pytest.LogCaptureFixture
) -> None:
    path = reference("llama").clear_paths(1, LENGTH)[0]
    config = engine_config(checkpoint("llama"), tensor_parallel_size=2, threads=1)
    with caplog.at_level(logging.INFO):
        runner = ModelRunner(config)
    logged = [record.message for record in caplog.records if getattr(record, "rank", None) == 1]
    assert "weights loaded" in logged, "its progress is in rank 0's log"

    engine, pid = Engine(config, runner), pid_of(runner)
    for number in (signal.SIGINT, signal.SIGTERM):  # as a terminal does to a whole process group
        os.kill(pid, number)
    assert tokens(engine, path) == path.output

    failures: SimpleQueue[Exception] = SimpleQueue()
    assert runner.peers is not None
    runner.peers.watch(failures.put)
    os.kill(pid, signal.SIGSTOP)  # a step waits for this rank, and so for its end
    killer = Timer(0.1, os.kill, (pid, signal.SIGKILL))
    killer.start()
    for name in ("first", "second"):
        with pytest.raises(RankFailed, match="rank 1 of the engine was killed by signal 9"):
            tokens(engine, path, name)
    killer.join()
    assert "rank 1 of the engine was killed" in str(failures.get(timeout=LIMIT_S))
    assert "a rank of the engine ended" in caplog.messages


def test_a_ranks_log_record_keeps_its_fields_and_the_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    received, sent = Pipe()
    with sent:
        handler = RankLogHandler(sent)
        try:
            raise ValueError("no such block")
        except ValueError:
            error = sys.exc_info()
        origin = {"name": "ranks", "levelno": logging.ERROR, "created": 1.5}
        content = {"msg": "%s failed", "args": ("copy",), "exc_info": error, "blocks": 7}
        handler.emit(logging.makeLogRecord({**origin, **content}))
        handler.emit(logging.makeLogRecord({"name": "ranks", "levelno": logging.DEBUG}))
    write_rank_logs(received, 2)
    (written,) = caplog.records
    assert (written.name, written.levelno, written.created) == ("ranks", logging.ERROR, 1.5)
    assert written.getMessage() == "copy failed"
    fields = vars(written)
    assert fields["rank"] == 2 and fields["blocks"] == 7
    assert "ValueError: no such block" in fields["stacktrace"]


def test_no_rank_outlives_the_first_one() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    until(lambda: not alive(pid), "the rank's end", LIMIT_S)


async def test_an_idle_engine_ends_with_its_rank() -> None:
    backend, runner = InMemory(), FakeRunner()
    engine = Engine(make_config(), runner)
    worker = make_worker(engine, backend.engine(), runner.block_size)
    failure = RankFailure(abort=lambda: None)
    failure.watch(worker.fail)
    Thread(target=failure.ended, args=(1, "was killed by signal 9")).start()
    with pytest.raises(WorkerFailed, match="RankFailed: rank 1 of the engine was killed"):
        await worker.run()
