"""A request inside the engine, its sequences (one a choice) and the states they go through."""

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from headrace_common.sampling import SamplingParams

from .errors import IllegalTransition


class State(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    FINISHED = "finished"


# Every legal change of state. SWAPPED keeps its KV in host memory; PREEMPTED recomputes it.
TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.FINISHED}),
    State.RUNNING: frozenset({State.PREEMPTED, State.SWAPPED, State.FINISHED}),
    State.PREEMPTED: frozenset({State.RUNNING, State.FINISHED}),
    State.SWAPPED: frozenset({State.RUNNING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What the engine is asked to run. `seed` is drawn by the caller when the user gave none.

    `resume` holds, for a request that another engine began, the output tokens that the client
    already has, one tuple a choice: they are kept apart from the prompt, so that penalties, length
    limits and random numbers go on as if nothing had happened. `cache_salt` parts prefix caches.
    `arrival` and `deadline` are seconds of one clock. `priority` 0 is normal, lower is sooner.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    arrival: float = 0.0
    priority: int = 0
    deadline: float = inf
    tenant: str = "default"
    cache_salt: bytes = b""
    resume: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request. Owned by the scheduler; the runner only reads it.

    Token positions: [0, computed) have their KV in `block_table`; [computed, len(token_ids)) are
    known but not run yet (one token while decoding, more while prefilling or recomputing).
    `block_hashes` are the prefix-cache keys of its leading full blocks, as far as asked for.
    """

    request: EngineRequest
    choice: int
    token_ids: list[int]
    computed: int = 0
    block_table: list[int] = field(default_factory=list)
    state: State = State.WAITING
    cached_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def output_length(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    def transition(self, to: State) -> None:
        """Changes the state. Raises IllegalTransition where TRANSITIONS has no such change."""
        if to not in TRANSITIONS[self.state]:
            raise IllegalTransition(
                f"{self.request.request_id}/{self.choice}: {self.state} -> {to} is not allowed"
            )
        self.state = to
