"""One accepted request while it generates: its choices' text, stop strings and token counts.

Knows neither HTTP nor the form of answers.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from headrace_common.sampling.params import SamplingParams
from headrace_common.text.detokenizer import ChoiceText, TextPiece
from headrace_common.text.tokenizer import Tokenizer
from headrace_common.wire.messages import GenerateRequest, Logprobs
from headrace_common.wire.prompt_logprobs import unpack_prompt_logprobs

from .ports import Delta, Generation


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that is in the queue, with the sampling parameters that its reader needs."""

    request: GenerateRequest
    sampling: SamplingParams
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New output of one choice. `stop_reason` is the stop string or stop token id that ended it.

    `prompt_logprobs` come with the prompt's first piece, without those of the prompt's first token.
    """

    choice: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[Logprobs] | None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: Sequence[Logprobs] | None = None


@dataclass(slots=True)
class Usage:
    """Tokens of all prompts and choices of an HTTP request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, other: "Usage") -> None:
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.cached_tokens += other.cached_tokens

    @property
    def counts(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    @property
    def body(self) -> dict[str, object]:
        return {
            **self.counts,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Run:
    """Reads one generation to its end. `first_choice` is the answer's index of its first choice."""

    def __init__(self, accepted: Accepted, tokenizer: Tokenizer, first_choice: int = 0) -> None:
        prompt = accepted.request.prompt_token_ids
        self.accepted = accepted
        self._generation = accepted.generation
        self._first_choice = first_choice
        self._open = {
            choice: ChoiceText(tokenizer, prompt, accepted.sampling)
            for choice in range(accepted.sampling.n)
        }
        self._tokens: Counter[int] = Counter()  # by choice, where it may have a stop string
        self._stopped: list[tuple[int, int]] = []  # choices with a stop string, and their tokens
        self.usage = Usage(prompt_tokens=len(prompt))

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yields pieces until every choice has ended. Raises RequestFailed."""
        async for delta in self._generation:
            piece = self.read(delta)
            if self._stopped:
                await self.settle()
            if piece is not None:
                yield piece
            if not self._open:
                return

    def text(self, delta: Delta) -> str | None:
        """Returns the text of a delta that holds only tokens; else None, and `read` must read
        it."""
        if delta.finish_reason is not None or delta.prompt_logprobs is not None:
            return None
        choice = self._open.get(delta.choice)
        if choice is None or choice.has_stops:
            return None
        self._count(delta, len(delta.token_ids))
        return choice.push_plain(delta.token_ids)

    def read(self, delta: Delta) -> Piece | None:
        """Reads any delta; returns None for tokens that the engine made before it knew
        of a stop.

        The caller then calls `settle`.
        """
        choice = self._open.get(delta.choice)
        if choice is None:
            self.usage.cached_tokens = max(self.usage.cached_tokens, delta.cached_tokens)
            return None
        new = choice.push(
            delta.token_ids, finish_reason=delta.finish_reason, stop_token=delta.stop_token
        )
        self._count(delta, new.tokens)
        self._tokens[delta.choice] += new.tokens
        piece = self._piece(delta, new)
        if piece.finish_reason is not None:
            del self._open[delta.choice]
            if new.stop is not None:
                self._stopped.append((delta.choice, self._tokens[delta.choice]))
        return piece

    @property
    def unsettled(self) -> bool:
        return bool(self._stopped)

    async def settle(self) -> None:
        """Ends the choices in which a stop string was found."""
        while self._stopped:
            await self._generation.stop_choice(*self._stopped.pop())

    def _count(self, delta: Delta, tokens: int) -> None:
        self.usage.completion_tokens += tokens
        if delta.cached_tokens > self.usage.cached_tokens:
            self.usage.cached_tokens = delta.cached_tokens

    def _piece(self, delta: Delta, new: TextPiece) -> Piece:
        stopped = new.stop is not None
        return Piece(
            choice=self._first_choice + delta.choice,
            text=new.text,
            token_ids=delta.token_ids[: new.tokens],
            logprobs=delta.logprobs[: new.tokens] if delta.logprobs is not None else None,
            finish_reason="stop" if stopped else delta.finish_reason,
            stop_reason=new.stop if stopped else delta.stop_token,
            prompt_logprobs=(
                None
                if delta.prompt_logprobs is None
                else unpack_prompt_logprobs(delta.prompt_logprobs)
            ),
        )


async def cancel_all(accepted: Sequence[Accepted]) -> None:
    """Cancels all requests, even if the caller is cancelled in the meantime."""
    if accepted:
        await asyncio.shield(asyncio.gather(*(each.generation.cancel() for each in accepted)))
