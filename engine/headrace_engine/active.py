"""A request that this engine owns: its output so far and the messages that tell of it.

Pure bookkeeping between the engine's outputs and the queue's messages; no I/O.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

from headrace_common.messages import ChoiceState, GenerateRequest, Logprobs, Sync, Tokens
from headrace_common.prompt_logprobs import pack_prompt_logprobs
from headrace_common.protocol.base import Lease, Outcome, Progress

from .outputs import SequenceOutput, TokenLogprobs
from .request import EngineRequest, FinishReason


@dataclass(slots=True)
class ActiveChoice:
    """One choice's output. `journaled` counts the tokens that the journal is known to have,
    `logprobs_from` those before the first whose log probabilities are known.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_token: int | None = None
    embedding: bytes | None = None
    journaled: int = 0
    logprobs_from: int = 0

    def state(self, start: int = 0) -> ChoiceState:
        """The output behind position `start`."""
        return ChoiceState(
            token_ids=tuple(self.token_ids[start:]),
            finish_reason=self.finish_reason,
            stop_token=self.stop_token,
            logprobs=self.logprobs_behind(start),
            embedding=self.embedding,
        )

    def logprobs_behind(self, start: int) -> tuple[Logprobs, ...] | None:
        """Of all tokens behind `start`, or None where some are not known."""
        first = start - self.logprobs_from
        complete = self.logprobs_from + len(self.logprobs) == len(self.token_ids)
        return tuple(self.logprobs[first:]) if complete and first >= 0 and self.logprobs else None


class ActiveRequest:
    """Output, fence and gateway of one leased request."""

    __slots__ = (
        "arrived",
        "asked",
        "attempt",
        "cached_tokens",
        "choices",
        "deadline",
        "executing",
        "gateway_id",
        "moved",
        "prompt_logprobs",
        "recovered",
        "request",
        "runs",
    )

    def __init__(self, lease: Lease) -> None:
        self.request: GenerateRequest = lease.request
        self.attempt = lease.attempt
        self.gateway_id = lease.gateway_id
        self.recovered = lease.recovered
        self.executing = False
        now = monotonic()
        self.arrived, self.deadline = now - lease.waited, now + lease.left
        self.moved = now  # when it last gave output, or came
        self.asked = 0  # how often the gateway was asked what its client has
        self.runs = 0
        self.cached_tokens = 0
        self.prompt_logprobs: bytes | None = None
        self.choices = [ActiveChoice() for _ in range(lease.request.sampling.n)]

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def engine_key(self) -> str:
        """The id inside the engine's core: a later run never meets an earlier one's outputs."""
        return f"{self.request.request_id}#{self.attempt}.{self.runs}"

    @property
    def has_output(self) -> bool:
        return any(choice.token_ids for choice in self.choices)

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def restore(self, states: Sequence[ChoiceState]) -> None:
        """Sets the output to exactly what the client has, as the journal now does."""
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
        """A new run in the engine's core, under a new `engine_key`; times are monotonic."""
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
            cache_salt=request.cache_salt,
            resume=tuple(tuple(one.token_ids) for one in self.choices) if self.has_output else (),
            pooling=request.pooling,
            lora=request.lora,
        )

    def record(self, output: SequenceOutput) -> Tokens | None:
        """Adds one step's output; returns the message for the gateway.

        None where the choice is already complete (a stop string matched meanwhile).
        """
        choice = self.choices[output.choice]
        if choice.finish_reason is not None:
            return None
        assert output.index == len(choice.token_ids), "the engine skipped or repeated a token"
        logprobs = _wire_logprobs(output.logprobs)
        self.moved = monotonic()
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
            # Said at both ends: a reply of one token and nothing else is the shortest to read.
            cached_tokens=0 if output.index and not choice.finish_reason else self.cached_tokens,
            embedding=output.embedding,
            prompt_logprobs=self._prompt_logprobs_at(output.index),
        )

    def tokens_from(self, number: int, index: int) -> Tokens:
        """What choice `number` said from position `index` on, for a gateway that saw a gap."""
        choice = self.choices[number]
        index = min(index, len(choice.token_ids))
        return Tokens(
            request_id=self.request_id,
            attempt=self.attempt,
            choice=number,
            index=index,
            token_ids=tuple(choice.token_ids[index:]),
            logprobs=choice.logprobs_behind(index),
            finish_reason=choice.finish_reason,
            stop_token=choice.stop_token,
            cached_tokens=self.cached_tokens,
            embedding=choice.embedding,
            prompt_logprobs=self._prompt_logprobs_at(index),
        )

    def _prompt_logprobs_at(self, index: int) -> bytes | None:
        """They come with the first tokens of a choice, and again where those do."""
        return None if index else self.prompt_logprobs

    def stop(self, number: int) -> None:
        """Marks a choice as ended by a stop string that its gateway matched."""
        if self.choices[number].finish_reason is None:
            self.choices[number].finish_reason = "stop"

    def sync(self) -> Sync:
        return Sync(
            request_id=self.request_id,
            attempt=self.attempt,
            choices=tuple(choice.state() for choice in self.choices),
            cached_tokens=self.cached_tokens,
        )

    def progress(self) -> Progress:
        return Progress(
            request_id=self.request_id,
            attempt=self.attempt,
            journaled=tuple(choice.journaled for choice in self.choices),
            choices=tuple(choice.state(choice.journaled) for choice in self.choices),
            executing=self.executing,
        )

    def note_journal(self, journaled: Sequence[int]) -> None:
        """Takes note of how many tokens of each choice the journal holds."""
        for choice, count in zip(self.choices, journaled, strict=False):
            choice.journaled = min(count, len(choice.token_ids))

    def outcome(self) -> Outcome:
        return Outcome(
            choices=tuple(choice.state() for choice in self.choices),
            cached_tokens=self.cached_tokens,
        )


def _wire_reason(reason: FinishReason | None) -> str | None:
    """Output that the policy cut short is, for a client, one that reached a limit."""
    return FinishReason.LENGTH if reason is FinishReason.ABORT else reason


def _wire_logprobs(logprobs: tuple[TokenLogprobs, ...] | None) -> tuple[Logprobs, ...] | None:
    if logprobs is None:
        return None
    return tuple(Logprobs(item.logprob, item.rank, item.top) for item in logprobs)
