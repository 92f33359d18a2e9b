"""An engine and traces with round numbers, for simulations compared with hand calculations."""

from dataclasses import replace

import numpy as np

from headrace_common.protocol.base import QueueLimits
from headrace_operator.simulation.engine_profile import EngineProfile
from headrace_operator.simulation.result import Objectives, SimulationResult
from headrace_operator.simulation.run import Setup, simulate
from headrace_operator.simulation.scalers import FixedScaler
from headrace_operator.simulation.workload import Trace

ROUND = EngineProfile(
    name="round",
    prefill_tokens_per_second=1000.0,
    decode_step={1: 0.1, 4: 0.1},
    max_num_seqs=4,
    max_num_batched_tokens=1004,
    kv_tokens=10_000,
    cold_start_seconds=50.0,
)


def trace(*requests: tuple[float, int, int]) -> Trace:
    """Requests by their arrival and the tokens of prompt and output."""
    arrivals, prompts, outputs = zip(*requests, strict=True)
    return Trace(np.array(arrivals, float), np.array(prompts), np.array(outputs))


def run(given: Trace, replicas: int = 1, **changes: object) -> SimulationResult:
    """Simulates a fixed number of the round engine; `changes` are fields of Setup."""
    setup = Setup(
        trace=given,
        profile=ROUND,
        objectives=Objectives(time_to_first_token=1.0, time_per_output_token=0.11),
        limits=QueueLimits(),
        replicas=replicas,
    )
    return simulate(replace(setup, **changes), FixedScaler("fixed", replicas))  # type: ignore[arg-type]
