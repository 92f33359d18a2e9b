"""The parts of gpu.py; each runs in a process of its own and reports as it goes."""

import faulthandler
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import checks, recurrent, steps
from .process import WHERE
from .shapes import Roofs
from .sizes import SIZES, Sizes
from .table import RESULTS, ROOFS, read_results
from .task import Report, Task

PARTS: Mapping[str, Callable[[Task, Report], None]] = {
    "roofs": steps.measure_roofs,
    "steps": steps.measure_steps,
    "serving": steps.measure_serving,
    "peers": steps.measure_peers,
    "lora": steps.measure_lora,
    "deterministic": checks.measure_deterministic,
    "equality": checks.measure_equality,
    "kernels": checks.measure_kernels,
    "recurrent": recurrent.measure_recurrent,
    "profile": checks.measure_profile,
    "tests": checks.measure_tests,
    "compiled": checks.measure_compiled_tests,
}
# Engine options for each kind of try: all features; no autotuning; neither CUDA graphs nor async
# scheduling.
WHOLE, UNTUNED, SAFE = "whole", "untuned", "safe"
TRIES: Mapping[str, Mapping[str, Any]] = {
    WHOLE: {},
    UNTUNED: {"enable_autotuner": False},
    SAFE: {"enforce_eager": True, "async_scheduling": False},
}


@dataclass(frozen=True)
class Part:
    """A part and its folders: results go to `out`, all other files to `work`."""

    name: str
    model: str
    out: Path
    work: Path
    kind: str = WHOLE


class Fields(logging.Formatter):
    """Formats a log record: time, message, and the fields of its `extra`."""

    _known = frozenset(vars(logging.makeLogRecord({})))

    def format(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in vars(record).items() if name not in self._known}
        return f"{record.relativeCreated / 1000:8.2f} s {record.getMessage()} {fields or ''}"


def log_to_stderr() -> None:
    """Writes the engine's log, and each kernel that it measures, to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(Fields())
    logger = logging.getLogger("headrace_engine")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.getChild("tuning").setLevel(logging.DEBUG)


def run_part(part: Part, sizes: str) -> None:
    """Runs a part in this process, then ends the process."""
    log_to_stderr()
    faulthandler.enable()
    # A copy of stderr, since pytest captures what is written to sys.stderr.
    faulthandler.register(WHERE, os.fdopen(os.dup(2), "w"), all_threads=True)
    if sizes == "tiny":
        torch.set_num_threads(1)
    measure_part(part, SIZES[sizes])
    os._exit(0)  # a thread of transformers' manager would keep the process alive


def measure_part(part: Part, sizes: Sizes) -> None:
    """Runs a part; each report is appended to the results at once."""
    found, engine = part.work / ROOFS, TRIES.get(part.kind, {})
    roofs = Roofs(**json.loads(found.read_text())) if found.exists() else None
    done = frozenset(
        one["what"]
        for one in read_results(part.out / RESULTS)
        if (one["part"], one["model"]) == (part.name, part.model)
        or one["what"].startswith(steps.TUNED)
    )

    def report(what: str, **values: Any) -> None:
        line = {"part": part.name, "model": part.model, "what": what, **values}
        if engine:
            line["engine"] = dict(engine)
        with (part.out / RESULTS).open("a") as file:
            file.write(json.dumps(line) + "\n")

    PARTS[part.name](Task(part.model, sizes, part.out, part.work, roofs, engine, done), report)
