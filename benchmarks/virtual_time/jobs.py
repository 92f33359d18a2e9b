"""The requests of a run: lengths, arrivals, tenants, priorities, deadlines; all from one seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from headrace_cli.bench.arrivals import poisson
from headrace_cli.bench.workload import Range
from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.request import EngineRequest

EOS = 0
TOKEN = 1
VOCABULARY = 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request. It ends after `output` tokens, but the engine only knows `max_tokens`."""

    name: str
    arrival: float
    prompt: tuple[int, ...]
    output: int
    max_tokens: int
    tenant: str = "default"
    priority: int = 0
    deadline: float = inf

    def request(self) -> EngineRequest:
        return EngineRequest(
            request_id=self.name,
            prompt_token_ids=self.prompt,
            params=SamplingParams(max_tokens=self.max_tokens),
            seed=0,
            arrival=self.arrival,
            priority=self.priority,
            deadline=self.deadline,
            tenant=self.tenant,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A kind of client.

    It sends `share` of all requests; `seconds` is its deadline, None for none.
    """

    name: str
    share: float
    prompts: Range
    outputs: Range
    max_tokens: int
    seconds: float
    urgent: float = 0.0


# People who wait for an answer, agents with long contexts and short answers, and a bulk job that
# asks for most of the work and is not urgent.
TENANTS = (
    Tenant(
        name="chat",
        share=0.3,
        prompts=Range(20, 200),
        outputs=Range(20, 200),
        max_tokens=512,
        seconds=1.0,
        urgent=0.2,
    ),
    Tenant(
        name="agents",
        share=0.2,
        prompts=Range(400, 1200),
        outputs=Range(5, 60),
        max_tokens=512,
        seconds=1.0,
    ),
    Tenant(
        name="bulk",
        share=0.5,
        prompts=Range(50, 400),
        outputs=Range(200, 500),
        max_tokens=512,
        seconds=4.0,
    ),
)


def plain(
    count: int, prompts: Range, outputs: Range, *, rate: float = inf, seed: int = 0
) -> list[Job]:
    """`count` jobs of one tenant, all at once or as a Poisson process of `rate` per second."""
    rng = random.Random(seed)
    return [
        Job(
            name=f"r{number}",
            arrival=at,
            prompt=_prompt(rng, 0, prompts.draw(rng)),
            output=outputs.draw(rng),
            max_tokens=outputs.high,
        )
        for number, at in zip(range(count), poisson(rng, rate), strict=False)
    ]


def exactly(outputs: Sequence[int]) -> list[Job]:
    """One short prompt for each of these output lengths, all at once."""
    return [
        Job(name=f"r{number}", arrival=0.0, prompt=(2,), output=length, max_tokens=max(outputs))
        for number, length in enumerate(outputs)
    ]


def mixed(count: int, *, rate: float, patience: float, seed: int = 0) -> list[Job]:
    """`count` jobs of TENANTS. A deadline of 1.0 stands for `patience` seconds."""
    rng = random.Random(seed)
    shares = [tenant.share for tenant in TENANTS]
    jobs = []
    for number, at in zip(range(count), poisson(rng, rate), strict=False):
        index = rng.choices(range(len(TENANTS)), shares)[0]
        tenant = TENANTS[index]
        jobs.append(
            Job(
                name=f"r{number}",
                arrival=at,
                prompt=_prompt(rng, index, tenant.prompts.draw(rng)),
                output=tenant.outputs.draw(rng),
                max_tokens=tenant.max_tokens,
                tenant=tenant.name,
                priority=-1 if rng.random() < tenant.urgent else 0,
                deadline=at + tenant.seconds * patience,
            )
        )
    return jobs


def _prompt(rng: random.Random, application: int, length: int) -> tuple[int, ...]:
    """Begins with its application's own tokens, as a system prompt does; the rest is random."""
    system = (10 + application,) * 16
    rest = tuple(rng.randrange(100, VOCABULARY) for _ in range(max(0, length - 16)))
    return (*system[:length], *rest)
