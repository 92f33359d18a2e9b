"""The order in which waiting sequences are admitted and, backwards, running ones are preempted."""

from .base import Policy
from .fcfs import Fcfs
from .registry import POLICIES, make_policy

__all__ = ["POLICIES", "Fcfs", "Policy", "make_policy"]
