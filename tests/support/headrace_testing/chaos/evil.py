"""What is wrong with the processes of the faults, installed before they begin."""

import os

from .demands import NEWER_PROTOCOL


def install(module: str) -> None:
    """In a process that is to become `python -m module`."""
    if os.environ.pop(NEWER_PROTOCOL, None):
        from . import newer_protocol

        newer_protocol.install()
    if module == "headrace_engine":
        from . import evil_runner, fate

        doom = fate.Fate()
        fate.install(doom)
        evil_runner.install(doom)
