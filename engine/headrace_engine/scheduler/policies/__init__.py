"""Scheduling policies: which waiting request is next, which running one is preempted."""

from .base import Policy
from .fcfs import Fcfs
from .registry import POLICIES, make_policy

__all__ = ["POLICIES", "Fcfs", "Policy", "make_policy"]
