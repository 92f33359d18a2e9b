"""The utilization at which engines meet an objective of latency, by the theory of queues.

The sequences of all engines are the servers of one queue. Their number is the load plus a margin
that grows with the root of the load (square-root staffing), so large fleets may be fuller.
"""

from dataclasses import dataclass
from math import exp, sqrt
from statistics import NormalDist

from .pace import Pace
from .policy import Objective

_NORMAL = NormalDist()
_LARGEST_MARGIN = 12.0
_STEPS = 40
_LEAST = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLoad:
    """The load, and what engines were measured to do with it.

    `running` sequences would run on average if none waited. An engine runs `capacity` at once, each
    for `service` seconds.
    """

    running: float
    capacity: float
    service: float
    pace: Pace = Pace()


def utilization_for(objective: Objective, load: MeasuredLoad) -> float:
    """The share of the engines' sequences that may run on average, above 0 and at most 1."""
    needed = load.running / load.capacity
    wait, between = objective.time_to_first_token, objective.time_per_output_token
    if wait is not None:
        patience = max(0.0, wait - (load.pace.prefill or 0.0)) / load.service
        needed = _servers(load.running, 1 - objective.percentile, patience) / load.capacity
    if between is not None:
        # The running sequences vary as independent arrivals do.
        most = load.running + _NORMAL.inv_cdf(objective.percentile) * sqrt(load.running)
        needed = max(needed, most / min(load.capacity, load.pace.sequences_at(between)))
    return min(1.0, max(_LEAST, load.running / load.capacity / needed))


def _servers(load: float, late: float, patience: float) -> float:
    """The fewest servers with which at most the share `late` waits longer than `patience`.

    `patience` is in service times. By the approximation of Halfin and Whitt (1981) for many
    servers: with load + m * sqrt(load) servers, a share of about 1 / (1 + m * cdf(m) / pdf(m)) has
    to wait, and the waits are exponential.
    """
    low, high = 0.0, _LARGEST_MARGIN
    for _ in range(_STEPS):
        margin = (low + high) / 2
        waits = 1 / (1 + margin * _NORMAL.cdf(margin) / _NORMAL.pdf(margin))
        if waits * exp(-margin * sqrt(load) * patience) > late:
            low = margin
        else:
            high = margin
    return load + high * sqrt(load)
