"""Ranks in threads of this process: with real weights and real collectives, and no processes to
start."""

from contextlib import suppress
from multiprocessing import Pipe
from threading import Thread

from headrace_engine.distributed import commands
from headrace_engine.distributed.process import OnEnd
from headrace_engine.distributed.rank import serve

LIMIT_S = 60.0


class RankThread:
    """Starts ranks as threads: `ModelRunner(config, launch=RankThread)`."""

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
