"""Commands by which tests make a process fail, or behave like another version."""

import signal
from enum import Enum

# A token that crashes the engine; no other prompt contains it.
POISON = 3
# Signals that make an engine hang or raise an error.
HANG, RAISE = signal.SIGUSR1, signal.SIGUSR2
# An environment variable; a process that has it speaks the next version of the protocol.
NEWER_PROTOCOL = "CHAOS_NEWER_PROTOCOL"


class Moment(Enum):
    """A place in the code.

    After the signal, an engine kills itself when it next reaches this place.
    """

    TAKEN = "requests taken, not known to the engine"
    EXECUTING = "requests noted as running, none begun"
    PREFILL = "in a step with prompts"
    DECODE = "in a step with decodes only"
    SILENT = "tokens made, not sent"
    TOLD = "tokens sent, not in the journal"
    LAST_FRAME = "last tokens sent, the end not stored"
    FINISHED = "the end stored, not known to the engine"
    RESUMED = "taken over from another engine, no new token made"

    @property
    def signal(self) -> int:
        return signal.SIGRTMIN + list(Moment).index(self)
