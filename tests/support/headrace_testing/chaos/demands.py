"""What tests say to an engine that shall fail."""

import signal

# A token that no other prompt holds, and signals.
POISON = 3
HANG, RAISE = signal.SIGUSR1, signal.SIGUSR2
