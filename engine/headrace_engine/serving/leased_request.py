"""A request that this engine has leased: its output so far, its messages and its outcome.

Turns the engine's outputs into the queue's messages; no I/O.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic, time_ns

from headrace_common.errors import FailureCode
from headrace_common.observability.tracing import carried_trace_id
from headrace_common.protocol.base import Lease, Outcome, Progress
from headrace_common.protocol.ledger import AttemptUsage
from headrace_common.wire.messages import (
    ChoiceState,
    Failed,
    GenerateRequest,
    Logprobs,
    Resume,
    Sync,
    Tokens,
)
from headrace_common.wire.prompt_logprobs import pack_prompt_logprobs

from ..core.outputs import SequenceOutput, TokenLogprobs
from ..core.request import EngineRequest, FinishReason
from .usage_meter import UsageMeter


@dataclass(slots=True)
class LeasedChoice:
    """The output of one choice.

    The journal has the first `journaled` tokens. Log probabilities are known from token
    `logprobs_from` on.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_token: int | None = None
    embedding: bytes | None = None
    journaled: int = 0
    logprobs_from: int = 0

    def state(self, start: int = 0) -> ChoiceState:
        """The output from position `start` on."""
        return ChoiceState(
            token_ids=tuple(self.token_ids[start:]),
            finish_reason=self.finish_reason,
            stop_token=self.stop_token,
            logprobs=self.logprobs_after(start),
            embedding=self.embedding,
        )

    def logprobs_after(self, start: int) -> tuple[Logprobs, ...] | None:
        """The log probabilities from position `start` on; None if some are not known."""
        first = start - self.logprobs_from
        complete = self.logprobs_from + len(self.logprobs) == len(self.token_ids)
        return tuple(self.logprobs[first:]) if complete and first >= 0 and self.logprobs else None


@dataclass(slots=True)
class RequestTimes:
    """When a request was queued and taken, and when it had its first token.

    Times are Unix nanoseconds, steps are counted from the engine's start.
    """

    queued_ns: int
    taken_ns: int
    first_step: int
    first_token_ns: int | None = None
    first_token_step: int = 0


class LeasedRequest:
    """One leased request: its output, attempt (the fencing token) and gateway.

    `times` belongs to the metrics. `tasks` are the request's background tasks: a takeover, the
    compilation of its grammar. `answer` is set while a takeover waits for the gateway's answer.
    """

    __slots__ = (
        "abandoned",
        "answer",
        "arrived",
        "attempt",
        "cached_tokens",
        "choices",
        "deadline",
        "executing",
        "foreign",
        "gateway_id",
        "last_output_at",
        "meter",
        "prompt_logprobs",
        "recovered",
        "request",
        "round",
        "runs",
        "suspect",
        "tasks",
        "times",
    )

    def __init__(self, lease: Lease, times: RequestTimes, kv_bytes_per_token: float = 0.0) -> None:
        self.request: GenerateRequest = lease.request
        self.attempt = lease.attempt
        self.gateway_id = lease.gateway_id
        self.recovered, self.suspect = lease.recovered, lease.suspect
        self.foreign, self.abandoned = lease.foreign, lease.abandoned
        self.times = times
        self.meter = UsageMeter(kv_bytes_per_token)
        self.executing = False
        now = monotonic()
        self.arrived, self.deadline = now - lease.waited, now + lease.left
        self.last_output_at = now
        self.tasks: set[asyncio.Task[None]] = set()
        self.answer: asyncio.Future[Resume] | None = None
        self.round = 0  # the round of the last Takeover; 0 before the first
        self.runs = 0
        self.cached_tokens = 0
        self.prompt_logprobs: bytes | None = None
        self.choices = [LeasedChoice() for _ in range(lease.request.sampling.n)]

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def engine_key(self) -> str:
        """The id in the engine's core; each run has another, so that outputs are never mixed up."""
        return f"{self.request.request_id}#{self.attempt}.{self.runs}"

    @property
    def has_output(self) -> bool:
        return any(choice.token_ids for choice in self.choices)

    @property
    def tokens(self) -> int:
        """Tokens of the prompt and of all choices."""
        output = sum(len(choice.token_ids) for choice in self.choices)
        return len(self.request.prompt_token_ids) + output

    def read_usage(self) -> AttemptUsage:
        """What this attempt has used so far."""
        return self.meter.read(self.tokens, self.cached_tokens)

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def states(self) -> tuple[ChoiceState, ...]:
        return tuple(choice.state() for choice in self.choices)

    @property
    def log_fields(self) -> dict[str, object]:
        fields: dict[str, object] = {"request_id": self.request_id, "attempt": self.attempt}
        trace_id = carried_trace_id(self.request.trace)
        return fields if trace_id is None else {**fields, "trace_id": trace_id}

    def restore(self, states: Sequence[ChoiceState]) -> None:
        """Sets the output to exactly what the client has; the journal has the same."""
        for choice, state in zip(self.choices, states, strict=False):
            choice.token_ids = list(state.token_ids)
            lost = self.request.pooling is not None and state.embedding is None
            choice.finish_reason = None if lost else state.finish_reason
            choice.stop_token = state.stop_token
            choice.embedding = state.embedding
            choice.logprobs = list(state.logprobs or ())
            choice.journaled = len(choice.token_ids)
            choice.logprobs_from = len(choice.token_ids) - len(choice.logprobs)

    def engine_request(self) -> EngineRequest:
        """Makes the request of a new run, with a new `engine_key`. Times are monotonic."""
        self.runs += 1
        request = self.request
        assert request.sampling.seed is not None, "gateways always set a seed"
        return EngineRequest(
            request_id=self.engine_key,
            prompt_token_ids=request.prompt_token_ids,
            params=request.sampling,
            seed=request.sampling.seed,
            arrival=self.arrived,
            priority=request.priority,
            deadline=self.deadline,
            tenant=request.tenant,
            tenant_weight=request.tenant_weight,
            cache_salt=request.cache_salt,
            resume=tuple(tuple(one.token_ids) for one in self.choices) if self.has_output else (),
            pooling=request.pooling,
            lora=request.adapter,
        )

    def failure_of(self, output: SequenceOutput) -> tuple[FailureCode, str] | None:
        """The code and message if the output fails the whole request, else None.

        A request that the policy ended fails only if it has no output yet.
        """
        if output.finish_reason is FinishReason.ERROR:
            if output.reason is None:
                return FailureCode.INTERNAL, "the model's output is not finite"
            return FailureCode.INVALID, output.reason
        if output.reason is not None and not self.has_output:
            return FailureCode.DEADLINE, output.reason
        return None

    def record(self, output: SequenceOutput) -> Tokens | None:
        """Adds one step's output and returns the message for the gateway.

        None if the choice is already complete (its gateway matched a stop string meanwhile).
        """
        choice = self.choices[output.choice]
        if choice.finish_reason is not None:
            return None
        assert output.index == len(choice.token_ids), "the engine skipped or repeated a token"
        logprobs = _wire_logprobs(output.logprobs)
        self.last_output_at = monotonic()
        choice.token_ids.extend(output.token_ids)
        if logprobs is not None:
            choice.logprobs.extend(logprobs)
        choice.finish_reason = _wire_reason(output.finish_reason)
        choice.stop_token = output.stop_token
        choice.embedding = output.embedding
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        scored = _wire_logprobs(output.prompt_logprobs)
        if scored is not None:
            self.prompt_logprobs = pack_prompt_logprobs(scored)
        return Tokens(
            request_id=self.request_id,
            attempt=self.attempt,
            choice=output.choice,
            index=output.index,
            token_ids=output.token_ids,
            logprobs=logprobs,
            finish_reason=choice.finish_reason,
            stop_token=output.stop_token,
            # Only the first and the last message have it: the others decode faster without it.
            cached_tokens=0 if output.index and not choice.finish_reason else self.cached_tokens,
            embedding=output.embedding,
            prompt_logprobs=self._prompt_logprobs_at(output.index),
            took_ms=None if output.index or output.choice else self._took_ms(),
            round=self.round,
        )

    def _took_ms(self) -> int:
        return max(0, time_ns() - self.times.taken_ns) // 1_000_000

    def tokens_from(self, number: int, index: int) -> Tokens:
        """The output of choice `number` from position `index` on, for a gateway that saw a gap."""
        choice = self.choices[number]
        index = min(index, len(choice.token_ids))
        return Tokens(
            request_id=self.request_id,
            attempt=self.attempt,
            choice=number,
            index=index,
            token_ids=tuple(choice.token_ids[index:]),
            logprobs=choice.logprobs_after(index),
            finish_reason=choice.finish_reason,
            stop_token=choice.stop_token,
            cached_tokens=self.cached_tokens,
            embedding=choice.embedding,
            prompt_logprobs=self._prompt_logprobs_at(index),
            round=self.round,
        )

    def _prompt_logprobs_at(self, index: int) -> bytes | None:
        """Prompt log probabilities come with the first tokens of a choice, also if these repeat."""
        return None if index else self.prompt_logprobs

    def stop(self, number: int) -> None:
        """Marks a choice as ended by a stop string that the gateway matched."""
        if self.choices[number].finish_reason is None:
            self.choices[number].finish_reason = "stop"

    def sync(self) -> Sync:
        return Sync(
            request_id=self.request_id,
            attempt=self.attempt,
            choices=self.states,
            cached_tokens=self.cached_tokens,
        )

    def progress(self) -> Progress:
        return Progress(
            request_id=self.request_id,
            attempt=self.attempt,
            journaled=tuple(choice.journaled for choice in self.choices),
            choices=tuple(choice.state(choice.journaled) for choice in self.choices),
            executing=self.executing,
            usage=self.read_usage(),
        )

    def note_journal(self, journaled: Sequence[int]) -> None:
        """Notes how many tokens of each choice the journal has."""
        for choice, count in zip(self.choices, journaled, strict=False):
            choice.journaled = min(count, len(choice.token_ids))

    def outcome(self) -> Outcome:
        return Outcome(choices=self.states, cached_tokens=self.cached_tokens)

    def failed(self, failure: FailureCode, message: str) -> Failed:
        return Failed(
            request_id=self.request_id, attempt=self.attempt, failure=failure, message=message
        )


def _wire_reason(reason: FinishReason | None) -> str | None:
    """The reason on the wire: clients see an output that the policy ended as "length"."""
    return FinishReason.LENGTH if reason is FinishReason.ABORT else reason


def _wire_logprobs(logprobs: tuple[TokenLogprobs, ...] | None) -> tuple[Logprobs, ...] | None:
    if logprobs is None:
        return None
    return tuple(Logprobs(item.logprob, item.rank, item.top) for item in logprobs)
