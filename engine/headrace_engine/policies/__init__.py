"""The order in which waiting sequences are admitted and, backwards, running ones are preempted."""

from .base import Policy
from .fcfs import Fcfs

__all__ = ["Fcfs", "Policy"]
