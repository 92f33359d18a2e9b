"""A profile of an LLM's work, written as a Chrome trace."""

import time
from pathlib import Path

import torch


class Profile:
    """Records from its creation until `write`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._profiler = torch.profiler.profile()
        self._profiler.start()

    def write(self) -> Path:
        """Ends the recording and returns the trace's file."""
        self._profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"headrace-{time.time_ns()}.json"
        self._profiler.export_chrome_trace(str(file))
        return file
