"""Ranks in threads of this process: with real weights and real collectives, and no processes to
start."""

from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Any

from headrace_engine.distributed import commands
from headrace_engine.distributed.process import OnEnd
from headrace_engine.distributed.rank import serve
from headrace_engine.engine.engine import Engine
from headrace_engine.model_runner.model_runner import ModelRunner

from .engines import engine_config

LIMIT_S = 60.0


class RankThread:
    """Starts ranks as threads: `ModelRunner(config, launch=RankThread)`."""

    host: str | None = None
    settings: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, rank: int, size: int, on_end: OnEnd) -> None:
        self.rank, self._size, self._on_end = rank, size, on_end
        self.commands, self._own = Pipe()
        self._thread = Thread(target=self._run, name=f"rank-{rank}", daemon=True)
        self._thread.start()

    def end(self, timeout: float) -> None:
        """Closes the thread's connection. A thread cannot be killed, so it must end by itself."""
        self._thread.join(timeout)
        self.commands.close()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), f"rank {self.rank} does not end"

    def _run(self) -> None:
        code = 0
        with suppress(commands.Disconnected):
            greeting = commands.introduction(self._own)
            code = serve(self.rank, self._size, self._own, greeting)
        self._own.close()
        self._on_end(self.rank, f"ended with exit code {code}")


def make_engine(folder: Path, size: int, **options: Any) -> tuple[Engine, ModelRunner]:
    """An engine with `size` ranks in threads, which `close` ends."""
    config = engine_config(folder, tensor_parallel_size=size, threads=1, **options)
    runner = ModelRunner(config, launch=RankThread)
    return Engine(config, runner), runner


def close(runner: ModelRunner) -> None:
    assert runner.peers is not None
    runner.peers.close()
