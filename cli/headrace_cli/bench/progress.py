"""Shows the progress of a load: a live line on a terminal, else a plain line every few seconds."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .client import Timeline

# Seconds between two plain lines.
_LINE_SECONDS = 10.0


class LoadProgress:
    """Counts and shows the requests of a run. `total` is None if only its duration is known."""

    def __init__(self, console: Console, total: int | None) -> None:
        self._console = console
        self._total = total
        self._started = time.monotonic()
        self._next_line = self._started + _LINE_SECONDS
        self._running = self._done = self._failed = self._tokens = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=4,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(self._text(), total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def begun(self) -> None:
        self._running += 1

    def ended(self, timeline: Timeline) -> None:
        self._running -= 1
        self._done += 1
        self._failed += timeline.error is not None
        self._tokens += timeline.output_tokens
        self._bar.update(self._task, completed=self._done, description=self._text())
        if not self._console.is_terminal and (now := time.monotonic()) >= self._next_line:
            self._next_line = now + _LINE_SECONDS
            self._console.print(self._text(), highlight=False, soft_wrap=True)

    def _text(self) -> str:
        seconds = max(1e-9, time.monotonic() - self._started)
        of = "" if self._total is None else f"/{self._total}"
        failed = f", {self._failed} failed" if self._failed else ""
        return (
            f"{self._done}{of} requests, {self._running} running{failed}, "
            f"{self._tokens / seconds:.0f} tokens/s"
        )
