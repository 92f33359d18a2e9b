"""How many engines a model needs: one pure function of what is seen, wanted and remembered.

Nothing here does I/O, reads a clock or knows Kubernetes; the operator and the simulator call it.
"""

from .decision import Decision, decide
from .history import History
from .observation import EngineSignals, Observation, QueueSignals
from .policy import Forecast, PolicyError, ScalingPolicy, ScalingRules, StepKind, StepLimit
from .reason import Limit, Reason, Signal
from .signals import Estimate

__all__ = [
    "Decision",
    "EngineSignals",
    "Estimate",
    "Forecast",
    "History",
    "Limit",
    "Observation",
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
