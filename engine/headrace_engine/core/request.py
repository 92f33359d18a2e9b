"""A request inside the engine, its sequences (one for each choice) and their states."""

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING

from headrace_common.sampling.params import SamplingParams
from headrace_common.sampling.pooling import PoolingParams
from headrace_common.wire.block_hashes import prefix_seed

from .errors import IllegalTransition
from .images import PromptImage

if TYPE_CHECKING:
    from .compiled_grammar import CompiledGrammar, GrammarCursor
    from .thinking import ThinkingBudget, ThinkingCursor


# In `Sequence.token_ids`: the token that the step in flight is going to sample.
PENDING = -1


class State(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    FINISHED = "finished"


# Every legal change of state. The KV of SWAPPED is in host memory; PREEMPTED recomputes it.
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
    """A request as the engine gets it. The caller chooses a `seed` if the user gave none.

    `resume` has the output tokens of a request that another engine began, one tuple for each
    choice. They are not part of the prompt, so that penalties, length limits and random numbers
    continue correctly. Requests with different `cache_salt` share no prefix cache. A request with
    `pooling` returns the prompt's embedding and no tokens. `grammar` is
    `params.structured_outputs`, compiled by the caller; `thinking` is the limit of
    `params.thinking_token_budget`, made by the caller. The engine sets `candidates` for beams: how
    many of the most likely tokens the search reads. `logprobs` is what the sampler reads:
    `candidates`, or the user's value. `lora` names the adapter to run with. `tenant_weight` is the
    tenant's share relative to other tenants'. `images` are the prompt's, in the order of their
    positions.
    `arrival` and `deadline` are seconds of the monotonic clock. `priority` 0 is normal; lower runs
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
    thinking: "ThinkingBudget | None" = None
    candidates: int | None = None
    lora: str | None = None
    tenant_weight: float = 1.0
    images: tuple[PromptImage, ...] = ()
    logprobs: int | None = field(init=False)

    def __post_init__(self) -> None:
        logprobs = self.params.logprobs if self.candidates is None else self.candidates
        object.__setattr__(self, "logprobs", logprobs)

    @property
    def forks(self) -> bool:
        """Whether several sequences start at the end of its prompt."""
        return self.params.n > 1 or self.candidates is not None

    @property
    def prefix_seed(self) -> bytes:
        """The seed of its block hashes."""
        return prefix_seed(self.cache_salt, self.lora)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One choice of a request. The scheduler owns it; the runner only reads it.

    The first `num_computed_tokens` positions have their KV in `block_table`; the others are known
    but not computed yet (one token while decoding, more while prefilling or recomputing). While an
    asynchronous step is in flight, its work counts as computed and the last token is PENDING.
    `block_hashes` are the prefix-cache keys of the leading full blocks, computed on demand. While
    the sequence is SWAPPED, its KV is in `host_blocks` and `block_table` is empty. `released` is
    the number of first rows of `block_table` whose sliding-window blocks have been released (see
    kv_cache_manager). `adjusted` says whether the request's parameters change logits before a token
    is chosen.

    Models with recurrent layers have a state after `num_computed_tokens`, in `state_blocks`; the
    scheduled step writes it there. It reads the state before its run from `state_source`, or in
    place if that is empty. `saved_state` is the state before drafts that are not verified yet.
    `snapshots` are positions and blocks in which steps that are not finished leave copies of the
    state.
    """

    request: EngineRequest
    choice: int
    token_ids: list[int]
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    released: int = 0
    state: State = State.WAITING
    cached_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    state_blocks: list[int] = field(default_factory=list)
    state_source: list[int] = field(default_factory=list)
    saved_state: list[int] = field(default_factory=list)
    snapshots: list[tuple[int, list[int]]] = field(default_factory=list)
    grammar_cursor: "GrammarCursor | None" = None
    thinking_cursor: "ThinkingCursor | None" = None
    adjusted: bool = field(init=False)

    def __post_init__(self) -> None:
        # Read for each row of each step.
        self.adjusted = self.request.params.adjusts_logits

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def output_length(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    def transition(self, to: State) -> None:
        """Changes the state. Raises IllegalTransition if TRANSITIONS does not allow it."""
        if to not in TRANSITIONS[self.state]:
            raise IllegalTransition(
                f"{self.request.request_id}/{self.choice}: {self.state} -> {to} is not allowed"
            )
        self.state = to


@dataclass(frozen=True, slots=True)
class SequenceView:
    """A snapshot of a sequence for readers outside the engine, and its JSON in `/debug/requests`.

    `computed` is its num_computed_tokens.
    """

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
            sequence.num_computed_tokens,
            len(sequence.block_table) + len(sequence.state_blocks),
        )
