"""An engine and traces with round numbers, for simulations compared with hand calculations."""

import numpy as np

from headrace_operator.simulation.engine_profile import EngineProfile
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
