"""Decides how many engines a model needs: one pure function of observation, policy and history.

Nothing here does I/O, reads a clock or knows Kubernetes; the operator and the simulator call it.
"""

from .decision import Decision, decide
from .history import History
from .observation import EngineSignals, LowPrioritySignals, QueueSignals, ScalingObservation
from .policy import (
    Forecast,
    Objective,
    PolicyError,
    ScalingPolicy,
    ScalingRules,
    StepKind,
    StepLimit,
)
from .reason import Reason, ScalingLimit, Signal
from .signals import Estimate

__all__ = [
    "Decision",
    "EngineSignals",
    "Estimate",
    "Forecast",
    "History",
    "LowPrioritySignals",
    "Objective",
    "ScalingLimit",
    "ScalingObservation",
    "PolicyError",
    "QueueSignals",
    "Reason",
    "ScalingPolicy",
    "ScalingRules",
    "Signal",
    "StepKind",
    "StepLimit",
    "decide",
]
