"""Commands of tests to a process that is to fail, or to act like another version."""

import signal
from enum import Enum

# A token that no other prompt holds, and signals.
POISON = 3
HANG, RAISE = signal.SIGUSR1, signal.SIGUSR2
# In the environment of a process that speaks the protocol's next version.
NEWER_PROTOCOL = "CHAOS_NEWER_PROTOCOL"


class Moment(Enum):
    """The moment at which an engine kills itself, on demand, when it next reaches it."""

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
