"""A thread that samples something at an interval while a block runs."""

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import TracebackType
from typing import ClassVar, Self


@dataclass(kw_only=True)
class Sampling(ABC):
    """Calls `_sample` while its block runs, every INTERVAL_S seconds and first at its start."""

    INTERVAL_S: ClassVar[float]

    _stop: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread = field(init=False)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name=type(self).__name__)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    @abstractmethod
    def _sample(self) -> None: ...

    def _run(self) -> None:
        self._sample()
        while not self._stop.wait(self.INTERVAL_S):
            self._sample()
