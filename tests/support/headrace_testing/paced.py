"""A scheduling policy that makes an engine slow and leaves the processors to others, so that a
person or a browser can follow a short stream."""

import os
import time
from pathlib import Path
from typing import ClassVar

from headrace_engine.core.step_plan import SchedulerOutput
from headrace_engine.scheduler.policies import Fcfs

# Where `headrace up` finds this module.
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(
        filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")))
    )
}


def flags(milliseconds: int) -> tuple[str, ...]:
    """The engine's flags for steps that take at least this long."""
    options = f'{{"milliseconds": {milliseconds}}}'
    return ("--policy", f"{__name__}:Paced", "--policy-options", options, "--lookahead", "0")


class Paced(Fcfs):
    """First come, first served, with a pause after each step."""

    name: ClassVar[str] = "paced"

    def __init__(self, milliseconds: int) -> None:
        self._pause_s = milliseconds / 1000

    def stepped(self, scheduler_output: SchedulerOutput) -> None:
        time.sleep(self._pause_s)
