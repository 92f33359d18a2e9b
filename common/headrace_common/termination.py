"""Ends a starting process at SIGTERM or SIGINT immediately, with exit code 0.

The first process of a container ignores a signal without a handler, and its supervisor sends each
signal only once. So a program calls `exit_on_signal` before slow imports; its event loop replaces
the handlers later. Imports only the standard library.
"""

import os
import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def exit_on_signal() -> None:
    """Ends the process at the first signal, until other handlers are set. For the main thread."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, _end)
    # Python runs handlers in the main thread between bytecodes: a library that loads weights or
    # waits for another rank would delay them.
    threading.Thread(target=_watch, args=(read,), name="termination", daemon=True).start()


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(0)


def _watch(read: int) -> None:
    """Waits for the byte of a signal. Event loops replace the descriptor with their own."""
    while number := os.read(read, 1):
        if number[0] in SIGNALS and signal.getsignal(number[0]) is _end:
            os._exit(0)
