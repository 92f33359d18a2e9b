"""The runs that scheduling.py shows: comparisons of batchings and of policies."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

from headrace_cli.bench.workload import Range
from headrace_engine.scheduler.policies import POLICIES
from headrace_operator.simulation.engine_profile import EngineProfile

from .batching import Batched, Batching, Continuous
from .jobs import Job, exactly, mixed, plain
from .measures import Log, summary
from .run import BLOCK_SIZE, VirtualEngine

STATIC_EXAMPLE = (50, 200, 30, 150)
PROMPTS, OUTPUTS = Range(16, 1024), Range(50, 500)
DYNAMIC_WAIT_STEPS = 20
"""The number of steps of a full batch that dynamic batching waits for further requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Each run has `requests` requests.

    `chunk` is the number of tokens of a step with chunked prefill. `load` and `overload` are the
    arrival rates of batchings and of policies, relative to the engine's capacity.
    """

    profile: EngineProfile
    requests: int = 1000
    chunk: int = 256
    load: float = 0.7
    overload: float = 1.5
    seed: int = 0

    def results(self) -> dict[str, Any]:
        """All results as plain JSON values."""
        rate = self._capacity(plain(self.requests, PROMPTS, OUTPUTS, seed=self.seed))
        return {
            "profile": asdict(self.profile),
            "requests": self.requests,
            "seed": self.seed,
            "chunk": self.chunk,
            "static_waste": {",".join(map(str, STATIC_EXAMPLE)): self.static_waste(STATIC_EXAMPLE)},
            "continuous_gain": self.gain(),
            "batching": {
                "load": self.load,
                "requests_per_second": self.load * rate,
                "runs": self.batchings(self.load * rate),
            },
            "policies": self.policies(),
        }

    def static_waste(self, outputs: Sequence[int]) -> float:
        """The share of a static batch's output slots that compute unneeded tokens."""
        return self._run(exactly(outputs), Batched(len(outputs)), whole=True).output_waste

    def gain(self) -> dict[str, Any]:
        """Output tokens per second by batching, if all requests arrive at once."""
        jobs = plain(self.requests, PROMPTS, OUTPUTS, seed=self.seed)
        speed = {
            name: summary(log)["output_tokens_per_second"] for name, log in self._logs(jobs).items()
        }
        return {
            "requests": self.requests,
            "output_tokens": f"{OUTPUTS.low}-{OUTPUTS.high}",
            "output_tokens_per_second": speed,
            "over_static": speed["continuous, chunked prefill"] / speed["static"],
            "over_dynamic": speed["continuous, chunked prefill"] / speed["dynamic"],
        }

    def batchings(self, rate: float) -> dict[str, dict[str, float]]:
        """Each kind of batching on the same arrivals, first come, first served."""
        jobs = plain(self.requests, PROMPTS, OUTPUTS, rate=rate, seed=self.seed)
        return {name: summary(log) for name, log in self._logs(jobs).items()}

    def policies(self) -> dict[str, Any]:
        """Each policy on the same mixture of tenants, whose load exceeds the engine's capacity."""
        probe = mixed(self.requests, rate=1.0, patience=inf, seed=self.seed)
        capacity = self._capacity([replace(job, arrival=0.0, deadline=inf) for job in probe])
        patience = 0.5 * OUTPUTS.high * self.profile.step_seconds()[-1]
        rate = self.overload * capacity
        jobs = mixed(self.requests, rate=rate, patience=patience, seed=self.seed)
        runs = {
            policy: summary(self._run(jobs, Continuous(), policy=policy)) for policy in POLICIES
        }
        return {"load": self.overload, "requests_per_second": rate, "runs": runs}

    def _capacity(self, jobs: Sequence[Job]) -> float:
        """The requests per second that continuous batching completes if all are waiting."""
        return summary(self._run(jobs, Continuous()))["requests_per_second"]

    def _logs(self, jobs: Sequence[Job]) -> dict[str, Log]:
        size = self._batch_size(jobs)
        wait = DYNAMIC_WAIT_STEPS * self.profile.step_seconds()[-1]
        return {
            "static": self._run(jobs, Batched(size), whole=True),
            "dynamic": self._run(jobs, Batched(size, wait), whole=True),
            "continuous": self._run(jobs, Continuous(), whole=True),
            "continuous, chunked prefill": self._run(jobs, Continuous()),
        }

    def _batch_size(self, jobs: Sequence[Job]) -> int:
        """The largest batch whose KV fits if each slot is reserved for the longest prompt and
        output in it."""
        longest = max(len(job.prompt) for job in jobs) + max(job.max_tokens for job in jobs)
        return max(1, min(self.profile.max_num_seqs, self.profile.kv_tokens // longest))

    def _run(
        self, jobs: Sequence[Job], batching: Batching, *, whole: bool = False, policy: str = "fcfs"
    ) -> Log:
        """Runs one simulation. `whole`: each prompt is computed in one step, however long it is."""
        longest = max(len(job.prompt) for job in jobs) + BLOCK_SIZE
        budget = self.profile.max_num_seqs * longest if whole else self.chunk
        profile = replace(self.profile, max_num_batched_tokens=budget)
        return VirtualEngine(profile, batching, jobs, policy).run()
