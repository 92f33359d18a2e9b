"""A request inside the engine, its sequences (one a choice) and the states they go through."""

from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b, sha256
from math import inf
from typing import TYPE_CHECKING

from headrace_common.pooling import PoolingParams
from headrace_common.sampling import SamplingParams

from .errors import IllegalTransition

if TYPE_CHECKING:
    from .grammar.compiled import CompiledGrammar, GrammarCursor


# Stands in `Sequence.token_ids` for the token that a step in flight will have chosen.
PENDING = -1


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
    With `pooling` it ends with the prompt's embedding and makes no tokens. `grammar` is
    `params.structured_outputs`, compiled by the caller. `candidates` is set inside the engine, for
    beams: how many of the most likely tokens the search looks at. `logprobs` is what the sampler
    reads: those, or the user's.
    `lora` names the adapter that it runs with.
    `arrival` and `deadline` are seconds of the monotonic clock. `priority` 0 is normal, lower is
    sooner.
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
    pooling: PoolingParams | None = None
    grammar: "CompiledGrammar | None" = None
    candidates: int | None = None
    lora: str | None = None
    logprobs: int | None = field(init=False)

    def __post_init__(self) -> None:
        logprobs = self.params.logprobs if self.candidates is None else self.candidates
        object.__setattr__(self, "logprobs", logprobs)

    @property
    def forks(self) -> bool:
        """Whether several sequences begin at the end of its prompt."""
        return self.params.n > 1 or self.candidates is not None

    @property
    def prefix_seed(self) -> bytes:
        """What the hashes of its KV begin with: equal tokens have other KV with another adapter."""
        if self.lora is None:
            return sha256(self.cache_salt).digest()
        name = sha256(self.lora.encode()).digest()
        return blake2b(self.cache_salt, digest_size=32, key=name).digest()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One choice of a request. Owned by the scheduler; the runner only reads it.

    Token positions: [0, computed) have their KV in `block_table`; [computed, len(token_ids)) are
    known but not run yet (one token while decoding, more while prefilling or recomputing). While a
    step is in flight that was booked ahead (see lookahead), its work counts as computed and the
    last token is PENDING.
    `block_hashes` are the prefix-cache keys of its leading full blocks, as far as asked for. While
    it is SWAPPED, the KV of [0, computed) is in `host_blocks` and `block_table` is empty. Of the
    first `released` rows of `block_table` (see kv_cache) sliding windows have given theirs back.
    `adjusted`: whether its parameters change logits before a token is chosen.
    """

    request: EngineRequest
    choice: int
    token_ids: list[int]
    computed: int = 0
    block_table: list[int] = field(default_factory=list)
    released: int = 0
    state: State = State.WAITING
    cached_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    grammar_cursor: "GrammarCursor | None" = None
    adjusted: bool = field(init=False)

    def __post_init__(self) -> None:
        # Asked for each row of each step.
        self.adjusted = self.request.params.adjusts_logits

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


@dataclass(frozen=True, slots=True)
class SequenceView:
    """A sequence as it stands, for whoever looks from outside. `computed` tokens have their KV."""

    choice: int
    state: State
    tokens: int
    computed: int
    blocks: int

    @classmethod
    def of(cls, sequence: Sequence) -> "SequenceView":
        return cls(
            sequence.choice,
            sequence.state,
            len(sequence.token_ids),
            sequence.computed,
            len(sequence.block_table),
        )
