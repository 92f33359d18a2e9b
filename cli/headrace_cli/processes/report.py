"""Reports of `up` to a person at a terminal: one status line per process, then events.

A separate thread writes, so that a stopped terminal (Ctrl-S, a full pipe) never stops the
supervisor. If lines come faster than they can be written, the newest are dropped.
"""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

_MAX_QUEUED = 1000
_CLOSE_SECONDS = 2.0


class Report(Protocol):
    """Where progress and events go."""

    def status(self, name: str, text: str, *, done: bool = False) -> None:
        """Reports the present activity of a process that is starting."""

    def event(self, text: str) -> None:
        """Reports something worth a line."""

    def alarm(self, name: str, text: str) -> None:
        """Reports a warning or error of a process."""

    def block(self, text: str) -> None:
        """Prints several lines, unchanged."""


class TerminalReport:
    """Rich status lines on a terminal, plain lines elsewhere. Used as a context manager."""

    def __init__(self, console: Console) -> None:
        self._view: _View = _LiveView(console) if console.is_terminal else _PlainView(console)
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(_MAX_QUEUED)
        self._thread = threading.Thread(target=self._work, name="report", daemon=True)

    def __enter__(self) -> "TerminalReport":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._put(None)
        self._thread.join(_CLOSE_SECONDS)

    def status(self, name: str, text: str, *, done: bool = False) -> None:
        self._put(lambda: self._view.status(name, text, done))

    def event(self, text: str) -> None:
        self._put(lambda: self._view.line(escape(text)))

    def alarm(self, name: str, text: str) -> None:
        self._put(lambda: self._view.line(f"[yellow]{escape(name)}[/]: {escape(text)}"))

    def block(self, text: str) -> None:
        self._put(lambda: self._view.line(f"\n{escape(text)}\n"))

    def _put(self, job: Callable[[], None] | None) -> None:
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            return  # the terminal accepts no lines now; the log files have them

    def _work(self) -> None:
        # The terminal or pipe may go away (rich turns that into SystemExit); the log files stay.
        with suppress(OSError, SystemExit):
            while (job := self._queue.get()) is not None:
                job()
            self._view.close()


class _View(Protocol):
    def status(self, name: str, text: str, done: bool) -> None: ...
    def line(self, markup: str) -> None: ...
    def close(self) -> None: ...


class _PlainView:
    """Prints a line whenever a status changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: dict[str, str] = {}

    def status(self, name: str, text: str, done: bool) -> None:
        if self._last.get(name) != text:
            self._last[name] = text
            self.line(escape(f"{name}: {text}"))

    def line(self, markup: str) -> None:
        self._console.print(markup, highlight=False, soft_wrap=True)

    def close(self) -> None:
        pass


class _LiveView:
    """Shows a spinner for each process that is starting; when it has started, its line stays."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def status(self, name: str, text: str, done: bool) -> None:
        if done:
            self._finish(name)
            self.line(f"[green]✓[/] {escape(name)}: {escape(text)}")
            return
        progress = self._started()
        described = f"{escape(name)}: {escape(text)}"
        if name in self._tasks:
            progress.update(self._tasks[name], description=described)
        else:
            self._tasks[name] = progress.add_task(described, total=None)

    def line(self, markup: str) -> None:
        self._console.print(markup, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._tasks.clear()

    def _started(self) -> Progress:
        if self._progress is None:
            columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.start()
        return self._progress

    def _finish(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        if self._progress is not None and task is not None:
            self._progress.remove_task(task)
        if not self._tasks:
            self.close()
