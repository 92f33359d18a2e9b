"""Faults that are installed in processes before they start."""

import os

from .demands import NEWER_PROTOCOL


def install(module: str) -> None:
    """Installs the fault in a process that will become `python -m module`."""
    if os.environ.pop(NEWER_PROTOCOL, None):
        from . import newer_protocol

        newer_protocol.install()
    if module == "headrace_engine":
        from . import fate, faulty_runner

        engine_fate = fate.Fate()
        fate.install(engine_fate)
        faulty_runner.install(engine_fate)
